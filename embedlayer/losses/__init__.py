"""What a prediction costs: the loss of a vocabulary head."""
