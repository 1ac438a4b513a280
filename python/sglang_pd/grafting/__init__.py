"""Python sources: read, compared by fingerprint, and grafted onto one another."""
