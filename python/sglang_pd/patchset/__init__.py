"""The patch set as data: how it changes an engine, for each release."""
