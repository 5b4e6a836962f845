"""The small decoder that the layer is trained inside."""
