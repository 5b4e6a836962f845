"""Looking inside: neighbours in a table, its geometry, and what a position scheme does, as numbers."""
