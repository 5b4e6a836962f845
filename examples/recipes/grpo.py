"""A GRPO step of a patched model, as TRL's `loss_type="grpo"`: log-probabilities and entropies without logits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import embedlayer as el
from embedlayer.losses import token_statistics

beta, epsilon, entropy_coef, temperature, num_generations = 0.04, 0.2, 0.01, 0.9, 4


def score(model: PreTrainedModel, input_ids: Tensor, logits_to_keep: int) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each completion token, and the entropy at its place, `(B, T)` each."""
    logits = model(input_ids).logits[:, -logits_to_keep - 1 : -1]  # not computed
    found = token_statistics(logits, input_ids[:, -logits_to_keep:], temperature=temperature)
    return found.log_probs, found.entropy


def plain_score(model: PreTrainedModel, input_ids: Tensor, logits_to_keep: int) -> tuple[Tensor, Tensor]:
    logps = (model(input_ids).logits[:, -logits_to_keep - 1 : -1] / temperature).log_softmax(-1)
    return logps.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


def grpo_loss(score: Callable[..., tuple[Tensor, Tensor]], model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    mask, advantages = inputs["completion_mask"], inputs["advantages"].unsqueeze(1)
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    per_token_logps, entropies = score(model, input_ids, inputs["completion_ids"].size(1))
    coef_1 = torch.exp(per_token_logps - inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    ref_logratio = inputs["ref_per_token_logps"] - per_token_logps
    per_token_kl = torch.exp(ref_logratio) - ref_logratio - 1
    per_token_loss = beta * per_token_kl - torch.min(coef_1 * advantages, coef_2 * advantages)
    loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    return loss - entropy_coef * (entropies * mask).sum() / mask.sum().clamp(min=1.0)


def example(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, dict[str, list[Callable[[], Tensor]]]]:
    """Return the policy, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=2048, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    patch = partial(el.patch, head_dtype=None if dtype == torch.float64 else torch.float32)
    model, ref_model = (patch(GPT2LMHeadModel(config).eval().to(dtype)) for _ in range(2))
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=dtype), torch.randint(0, 2048, (num_generations, 24))
    ids[:, :6] = ids[0, :6]  # one prompt
    inputs = {"prompt_ids": ids[:, :6], "completion_ids": ids[:, 6:]}
    inputs["completion_mask"] = torch.arange(18) < torch.tensor([[18], [18], [12], [15]])
    inputs["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    with torch.no_grad():
        inputs["ref_per_token_logps"] = score(ref_model, ids, 18)[0]
        inputs["old_per_token_logps"] = score(model, ids, 18)[0] + 0.3 * torch.randn(num_generations, 18, dtype=dtype)
    return model, {"GRPO": [partial(grpo_loss, each, model, inputs) for each in (score, plain_score)]}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
