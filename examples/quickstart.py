"""Text to IDs, IDs to vectors, and hidden states back to a loss through the same table."""

import torch

import embedlayer as el

text = "I love dogs. I love cats. Dogs and cats love naps. " * 20
tokenizer = el.train_tokenizer(text, kind="word")
inputs, targets = next(iter(el.create_dataloader(text, tokenizer, batch_size=8, max_length=16, stride=4)))

layer = el.TransformerEmbedding(tokenizer.get_vocab_size(), embed_dim=64, max_seq_len=16)
head = el.OutputHead(layer.table)  # tied: the same rows, no parameters of its own

hidden = layer(inputs)  # a decoder's blocks stand here
loss = head.loss(hidden, targets)
loss.backward()
print(f"{tuple(inputs.shape)} -> {tuple(hidden.shape)} -> loss {loss.item():.2f}")
print("rows with a gradient:", int(layer.table.weight.grad.abs().sum(1).count_nonzero()))
assert torch.equal(head.weight, layer.table.weight)
