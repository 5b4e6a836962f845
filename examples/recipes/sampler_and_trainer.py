"""A policy gradient step on texts that `generate` has sampled: from equal hidden states the ratio to the sampler is 1.

The head computes in float32, and its results for a token do not depend on the batch. So from the same hidden state both
get the same log-probability to the bit. `examples/log_ratios.py` shows what the hidden states of a cache add.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import embedlayer as el

vocab_size, width, new_tokens, temperature, epsilon = 2048, 32, 18, 0.9, 0.2


def build(dtype: torch.dtype) -> el.DecoderLM:
    table = el.TokenEmbedding(vocab_size, width, init_std=0.3)
    options = {} if dtype == torch.float64 else {"head_dtype": torch.float32, "batch_invariant": True}
    head = el.OutputHead(table, **options)
    return el.DecoderLM(table, "rotary", head, num_layers=2, num_heads=2).to(dtype)


def score(model: el.DecoderLM, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each sampled token, at the temperature of the sampler, `(B, N)`."""
    return model.head.token_log_probs(hidden, tokens, temperature=temperature)


def plain_score(model: el.DecoderLM, hidden: Tensor, tokens: Tensor) -> Tensor:
    return (model.head(hidden) / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def loss(
    score: Callable[..., Tensor], model: el.DecoderLM, sampled: el.models.GeneratedTokens, gains: Tensor
) -> Tensor:
    hidden = model.hidden(sampled.ids)[:, -new_tokens - 1 : -1]
    ratio = (score(model, hidden, sampled.ids[:, -new_tokens:]) - sampled.log_probs).exp()
    clipped = torch.minimum(ratio * gains, ratio.clamp(1 - epsilon, 1 + epsilon) * gains)
    return -(clipped * sampled.mask).sum() / sampled.mask.sum()


def example(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, list[Callable[[], Tensor]]]]:
    """Return a model, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    model, prompts = build(dtype), torch.randint(0, vocab_size, (4, 6))
    options = {"max_new_tokens": new_tokens, "temperature": temperature, "logprobs_mode": "processed_logprobs"}
    sampled = el.generate(model, prompts, return_log_probs=True, **options)
    gains = torch.tensor([[1.0], [-0.5], [0.5], [-0.25]], dtype=dtype)
    return model, {"policy gradient": [partial(loss, each, model, sampled, gains) for each in (score, plain_score)]}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
