"""Train a small language model on the bytes of the Python manual with Lightning."""

from pydoc_data.topics import topics

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import embedlayer as el

ids = torch.tensor(list("\n\n".join(topics.values()).encode()))
windows = ids[: len(ids) // 65 * 65].view(-1, 65)
losses = []


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size=256, dim=64):
        super().__init__()
        self.embed = el.RowSparseEmbedding(vocab_size, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True)
        self.head = el.OutputHead(dim, vocab_size, bias=True)

    def training_step(self, batch, batch_idx):
        hidden, _ = self.lstm(self.embed(batch[:, :-1]))
        loss = self.head.loss(hidden, batch[:, 1:])
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return el.RowAdamW(self.parameters(), lr=1e-2)


model = LanguageModel()
L.seed_everything(0)
for parameter in model.parameters():
    nn.init.uniform_(parameter, -0.1, 0.1)
trainer = L.Trainer(max_epochs=1, limit_train_batches=50, gradient_clip_val=1.0, default_root_dir="out/lightning")
trainer.fit(model, DataLoader(windows, batch_size=16, shuffle=True))
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
