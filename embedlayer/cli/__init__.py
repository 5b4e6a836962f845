"""The `embedlayer` command: one module per subcommand."""
