"""How the rows of new tokens are initialised, from the old rows or from auxiliary vectors."""
