"""Distillation with TRL's `generalized_jsd_loss`, without logits: over the whole vocabulary or the teacher's top K."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer import DecoderLM, TokenEmbedding
from embedlayer.losses import ForwardKL, JensenShannon, ReverseKL, TopKTargets, UncomputedLogits, divergence

KINDS = {0.0: ForwardKL(), 0.5: JensenShannon(beta=0.5), 1.0: ReverseKL()}  # by TRL's beta
temperature = 2.0


@torch.no_grad()
def teacher_targets(teacher: DecoderLM, input_ids: Tensor, top_k: int) -> UncomputedLogits | TopKTargets:
    hidden, head = teacher.hidden(input_ids)[:, :-1], teacher.head
    if top_k == 0:
        return head.uncomputed_logits(hidden, temperature=temperature)
    found = head.token_statistics(hidden, statistics=("logsumexp",), top_k=top_k, temperature=temperature)
    return TopKTargets(found.top_ids, found.top_logits - found.logsumexp.unsqueeze(-1))


def loss(student: DecoderLM, teacher: DecoderLM, input_ids: Tensor, labels: Tensor, beta: float, top_k: int) -> Tensor:
    logits = student.head.uncomputed_logits(student.hidden(input_ids)[:, :-1], temperature=temperature)
    return divergence(logits, teacher_targets(teacher, input_ids, top_k), KINDS[beta], labels=labels[:, 1:])


def plain_loss(
    student: DecoderLM, teacher: DecoderLM, input_ids: Tensor, labels: Tensor, beta: float, top_k: int
) -> Tensor:
    models, is_target = (student, teacher), labels[:, 1:] != -100
    log_q, log_p = ((model(input_ids)[:, :-1][is_target] / temperature).log_softmax(-1) for model in models)
    if top_k:
        log_p, ids = log_p.topk(top_k)
        log_q = log_q.gather(-1, ids)
    kl = partial(F.kl_div, reduction="batchmean", log_target=True)  # kl(log_q, log_p) is KL(p || q)
    if beta in (0, 1):
        return kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(1 - beta), log_p + math.log(beta))
    return beta * kl(log_m, log_p) + (1 - beta) * kl(log_m, log_q)


def example(dtype: torch.dtype = torch.float32) -> tuple[DecoderLM, dict[str, list[Callable[[], Tensor]]]]:
    """Return the student, and by name the loss without logits and with all logits."""
    torch.manual_seed(0)
    tables = TokenEmbedding(2048, 32), TokenEmbedding(2048, 64)
    student, teacher = (DecoderLM(each, "rotary", num_layers=1, num_heads=2).to(dtype) for each in tables)
    ids = torch.randint(0, 2048, (4, 24))
    batch = student, teacher.requires_grad_(False), ids, ids.masked_fill(torch.arange(24) < 6, -100)  # the prompt
    settings = {"forward KL": (0.0, 0), "JSD": (0.5, 0), "reverse KL": (1.0, 0), "forward KL, top 20": (0.0, 20)}
    return student, {name: [partial(f, *batch, *each) for f in (loss, plain_loss)] for name, each in settings.items()}


if __name__ == "__main__":
    for name, (step, plain_step) in example()[1].items():
        print(f"{name}: {step().item():.6f} without logits, {plain_step().item():.6f} with all logits")
