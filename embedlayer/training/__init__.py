"""Train, checkpoint, resume, measure."""
