"""Compress a table into a smaller kind of table, and measure the cost."""
