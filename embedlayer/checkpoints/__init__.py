"""The front end of real checkpoints: table, positions, scale, norms and head, and nothing else of the model."""
