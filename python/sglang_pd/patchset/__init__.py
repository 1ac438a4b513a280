"""The patch set as data: what it makes of an engine, for each release."""
