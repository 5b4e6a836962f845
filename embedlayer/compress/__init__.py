"""One table turned into another kind, and what was lost on the way."""
