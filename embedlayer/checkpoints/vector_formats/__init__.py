"""The file formats of word vectors: how a table and its tokens are written in each."""
