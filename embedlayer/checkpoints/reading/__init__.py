"""Read the embedding layer of a checkpoint by the record of its model family.

`model` joins the record, the checked `configuration` and the `tensors` that are read. From them `table`, `positions`,
`inputs` and `head` each build one part of the layer, and `layer` calls them in order.

Each reader puts the tensors of its modules into `model.tensors`, under their keys in the layer's `state_dict`, and
raises `CheckpointError` if a tensor or a key of the configuration is missing or does not fit.
"""
