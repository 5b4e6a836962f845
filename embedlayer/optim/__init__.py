"""How rows learn."""
