"""The two ends put together."""
