"""What a token is: every way to store one row per token."""
