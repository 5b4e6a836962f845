"""The explorer: a web page about tables, positions and runs, its local server, and its export to one file."""
