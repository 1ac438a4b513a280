"""An installed engine: found, edited whole or not at all, and put back."""
