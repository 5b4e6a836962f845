"""A training step of a masked diffusion language model (LLaDA): masked tokens are predicted, each with the weight 1/p.

Each text gets a rate p, and each of its tokens is masked with this probability. In the mean over p, the sum of the
weighted losses over the number of all tokens is an upper bound of the negative log-likelihood of a token.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer import OutputHead, TokenEmbedding, TransformerEmbedding

vocab_size, width, mask_token = 2048, 32, 2047


class Denoiser(nn.Module):
    """Hidden states of blocks that see the whole text, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        table = TokenEmbedding(vocab_size, width)
        self.embedding = TransformerEmbedding(vocab_size, width, 24, dropout=0.0, table=table)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = OutputHead(table)

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.embedding(ids))


def loss(model: Denoiser, noisy: Tensor, labels: Tensor, rates: Tensor) -> Tensor:
    weights = (1 / rates).expand(labels.shape)
    return model.head.loss(model(noisy), labels, token_weights=weights, reduction="sum") / labels.numel()


def plain_loss(model: Denoiser, noisy: Tensor, labels: Tensor, rates: Tensor) -> Tensor:
    losses = F.cross_entropy(model.head(model(noisy)).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses.view(labels.shape) / rates).sum() / labels.numel()


def example(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, list[Callable[[], Tensor]]]]:
    """Return a model, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    model, ids = Denoiser().to(dtype), torch.randint(0, mask_token, (4, 24))
    rates = 0.001 + 0.999 * torch.rand(4, 1, dtype=dtype)
    is_masked = torch.rand(4, 24, dtype=dtype) < rates
    inputs = ids.masked_fill(is_masked, mask_token), ids.masked_fill(~is_masked, -100), rates
    return model, {"masked diffusion": [partial(each, model, *inputs) for each in (loss, plain_loss)]}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
