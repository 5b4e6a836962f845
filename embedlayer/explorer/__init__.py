"""A page to look at tables, positions and runs: a small server, an export to one file, and the page itself."""
