"""Analysis of a table: nearest neighbours, geometry, table health, under-trained tokens, and position schemes."""
