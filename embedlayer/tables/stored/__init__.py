"""Tables whose rows stay in files."""
