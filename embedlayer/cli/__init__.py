"""The embedlayer command, one file a subcommand."""
