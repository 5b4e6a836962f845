"""Census of a model: what in it depends on the vocabulary, found by records of families and by building the model."""
