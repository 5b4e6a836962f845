"""Train a small GPT on the bytes of the Python manual with a loop as in nanoGPT."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

vocab_size, block_size, n_embd, batch_size, max_iters, grad_accum_steps = 256, 64, 64, 8, 20, 2
data = torch.tensor(list("\n\n".join(topics.values()).encode()))  # or from np.memmap("train.bin", np.uint16)


def get_batch():
    rows = torch.stack([data[i : i + block_size + 1] for i in torch.randint(len(data) - block_size, (batch_size,))])
    return rows[:, :-1], rows[:, 1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        block = nn.TransformerEncoderLayer(n_embd, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True, bias=False)
        self.h = nn.TransformerEncoder(block, 2, nn.LayerNorm(n_embd, bias=False), enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        x = self.h(x, nn.Transformer.generate_square_subsequent_mask(idx.size(1)), is_causal=True)
        return F.cross_entropy(self.lm_head(x).view(-1, vocab_size), targets.reshape(-1))


model = GPT()
torch.manual_seed(1337)
matrices, gains = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
for matrix in matrices:
    nn.init.normal_(matrix, std=0.02)
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
losses = []
for _ in range(max_iters):
    for _ in range(grad_accum_steps):
        loss = model(*get_batch())
        (loss / grad_accum_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
