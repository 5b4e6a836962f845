"""Read the embedding layer of a checkpoint by the record of its model family.

`model` joins the record, the checked `configuration` and the `tensors` that are read. From them `table`, `positions`,
`inputs` and `head` each build one part of the layer, and `layer` calls them in order.
"""
