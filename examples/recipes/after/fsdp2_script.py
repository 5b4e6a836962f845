"""Train a small transformer on the bytes of the Python manual with FSDP2, as torchtitan does."""

import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import embedlayer as el


class Transformer(nn.Module):
    def __init__(self, vocab_size=256, dim=64, n_layers=2):
        super().__init__()
        self.tok_embeddings = el.TokenEmbedding(vocab_size, dim)
        block = nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0, batch_first=True, norm_first=True, bias=False)
        self.layers = nn.TransformerEncoder(block, n_layers, enable_nested_tensor=False).layers
        self.norm = nn.RMSNorm(dim)
        self.output = el.OutputHead(dim, vocab_size)

    def forward(self, tokens, labels):
        h, mask = self.tok_embeddings(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        for layer in self.layers:
            h = layer(h, mask.to(h.device), is_causal=True)
        return self.output.loss(self.norm(h), labels)


mesh = dist.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (int(os.environ["WORLD_SIZE"]),))
model = Transformer()
torch.manual_seed(0)
for parameter in model.parameters():
    nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
for module in (*model.layers, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = torch.tensor(list("\n\n".join(topics.values()).encode()[: 80 * 8 * 65])).view(80, 8, 65).to(mesh.device_type)
losses = []
for batch in batches[dist.get_rank() :: dist.get_world_size()]:
    loss = model(batch[:, :-1], batch[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"rank {dist.get_rank()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
dist.destroy_process_group()
