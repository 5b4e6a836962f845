"""Multi-token prediction as in DeepSeek-V3: each extra depth has a block of its own, all share one table and head.

Depth k joins the state of depth k - 1 with the vector of the token k places ahead, and predicts the token after it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer import DecoderLM, OutputHead, TokenEmbedding


class Depth(nn.Module):
    """Compute `block(projection([norm(state of depth k - 1); norm(vector of the token k ahead)]))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state_norm, self.vector_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, state: Tensor, vectors: Tensor) -> Tensor:
        joined = self.projection(torch.cat([self.state_norm(state), self.vector_norm(vectors)], dim=-1))
        mask = nn.Transformer.generate_square_subsequent_mask(state.size(1), dtype=state.dtype)
        return self.block(joined, src_mask=mask, is_causal=True)


def hidden_states(model: DecoderLM, depths: nn.ModuleList, input_ids: Tensor) -> list[Tensor]:
    """Return `(B, T, D)` for each depth, the model's own first; at place t, depth k predicts token `t + 1 + k`."""
    states, vectors = [model.hidden(input_ids)], model.table(input_ids)
    for k, depth in enumerate(depths, start=1):
        states.append(depth(states[-1], F.pad(vectors[:, k:], (0, 0, 0, k))))  # the last places have no target
    return states


def plain_loss(head: OutputHead, states: list[Tensor], labels: Tensor, weights: list[float]) -> Tensor:
    shifted = [(head(state[:, : -1 - k]), labels[:, 1 + k :]) for k, state in enumerate(states)]
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits, targets in shifted]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


def example(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, list[Callable[[], Tensor]]]]:
    """Return a model, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    model = DecoderLM(TokenEmbedding(2048, 32), "rotary", num_layers=1, num_heads=2).to(dtype)
    depths, ids = nn.ModuleList(Depth(32) for _ in range(2)).to(dtype), torch.randint(0, 2048, (4, 24))
    labels = ids.masked_fill(torch.arange(24) < 6, -100)  # no loss in the prompt
    head, weights = model.head, [1.0, 0.15, 0.15]  # an extra depth weighs 0.3 / 2, as in the paper
    step = lambda: head.multi_token_loss(hidden_states(model, depths, ids), labels, weights).loss  # noqa: E731
    plain_step = lambda: plain_loss(head, hidden_states(model, depths, ids), labels, weights)  # noqa: E731
    return nn.ModuleList([model, depths]), {"multi-token prediction": [step, plain_step]}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
