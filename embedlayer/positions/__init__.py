"""Where a token is: every scheme is a Position with three hooks."""
