"""Finds an installed engine, edits it completely or not at all, and restores it."""
