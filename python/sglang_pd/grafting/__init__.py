"""Reads Python sources, compares them by fingerprint, and grafts one onto another."""
