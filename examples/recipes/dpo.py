"""A DPO step of a patched transformers model: chosen and rejected completions are scored without logits.

The loss is that of TRL's `DPOTrainer` with `loss_type="sigmoid"`. `plain_per_token_logps` reads all logits instead.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import embedlayer as el

Inputs = dict[str, Tensor]


def per_token_logps(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Return the log-probability of each completion token, and 0 for prompt and padding, `(2B, T - 1)`."""
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits  # not computed
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return el.token_log_probs(logits[:, :-1], labels[:, 1:])


def plain_per_token_logps(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    return logps * inputs["completion_mask"][:, 1:]


def dpo_loss(
    score: Callable[..., Tensor], model: PreTrainedModel, ref_model: PreTrainedModel, inputs: Inputs, beta: float = 0.1
) -> Tensor:
    chosen_logps, rejected_logps = score(model, inputs).sum(1).chunk(2)  # the batch is [chosen, rejected]
    with torch.no_grad():
        ref_chosen_logps, ref_rejected_logps = score(ref_model, inputs).sum(1).chunk(2)
    chosen_logratios, rejected_logratios = chosen_logps - ref_chosen_logps, rejected_logps - ref_rejected_logps
    return -F.logsigmoid(beta * (chosen_logratios - rejected_logratios)).mean()


def example(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, dict[str, list[Callable[[], Tensor]]]]:
    """Return the policy, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=2048, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model, ref_model = (el.patch(GPT2LMHeadModel(config).eval().to(dtype)) for _ in range(2))
    inputs = {name: torch.ones(4, 24, dtype=torch.int64) for name in ("attention_mask", "completion_mask")}
    inputs["input_ids"] = torch.randint(0, 2048, (4, 24))
    inputs["completion_mask"][:, :6] = 0  # the prompt
    inputs["completion_mask"][1, 20:] = inputs["attention_mask"][1, 20:] = 0  # padding
    scores = per_token_logps, plain_per_token_logps
    return model, {"DPO": [partial(dpo_loss, score, model, ref_model, inputs) for score in scores]}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
