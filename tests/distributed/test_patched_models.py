"""Patched models of transformers under DDP and FSDP2: the gradients of one process, without logits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import LONG
from processes import PRELOADED, on_ranks
from sharded_tensors import full
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from embedlayer import OutputHead, patch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

PRELOADED += ["transformers.models.gemma2.modeling_gemma2", "transformers.models.llama.modeling_llama"]

V, B, T, RANKS = 61, 4, 6, 2
SIZES = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gemma2":  # with a soft cap
        config = transformers.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=4)
        return transformers.Gemma2ForCausalLM(config).double()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")).double()


def batch(rank: int | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 2] = -100
    here = slice(None) if rank is None else slice(rank * B // RANKS, (rank + 1) * B // RANKS)
    return {"input_ids": ids[here], "labels": labels[here]}


def ddp(**options: Any) -> Any:
    return lambda model: DistributedDataParallel(model, **options)


def fsdp(*, head: bool = False, **options: Any) -> Any:
    def shard(model: nn.Module) -> Any:
        for block in model.model.layers:
            fully_shard(block, **options)
        if head:
            fully_shard(model.lm_head, **options)
        return fully_shard(model, **options)

    return shard


CASES = {
    "DDP": ("tied", ddp()),
    "DDP, unused parameters": ("untied", ddp(find_unused_parameters=True)),
    "DDP, static graph": ("tied", ddp(static_graph=True)),
    "FSDP2": ("tied", fsdp()),
    "FSDP2, soft cap": ("gemma2", fsdp()),
    "FSDP2, the head alone": ("untied", fsdp(head=True)),
    "FSDP2, the head alone, kept": ("untied", fsdp(head=True, reshard_after_forward=False)),
    "FSDP2, mixed precision": ("untied", fsdp(head=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "FSDP2, float32 head": ("tied", fsdp()),
    "FSDP2, mixed precision, float32 head": (
        "untied",
        fsdp(head=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    ),
}
ALWAYS = (
    *("DDP, unused parameters", "DDP, static graph", "FSDP2", "FSDP2, the head alone"),
    "FSDP2, mixed precision, float32 head",
)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name.removeprefix("module.")] = None if parameter.grad is None else full(parameter.grad)
    return found


def trained(names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        kind, wrap = CASES[name]
        head_dtype = torch.float32 if "float32 head" in name else None
        model = patch(built(kind), head_dtype=head_dtype)
        reports = [module.logits_report for module in model.modules() if isinstance(module, OutputHead)]
        assert reports
        model = wrap(model)
        losses = []
        for _ in range(2):  # a static graph differs from its second step on
            model.zero_grad()
            outputs = model(**batch(dist.get_rank()), use_cache=False)
            outputs.loss.backward()
            losses.append(outputs.loss.detach())
        assert type(outputs.logits) is not torch.Tensor
        assert head_dtype in (None, outputs.logits.dtype)
        assert not any(report.is_done for report in reports)
        found = gradients(model)
        with torch.no_grad():
            evaluated = model.eval()(**batch(dist.get_rank()), use_cache=False)
            assert not any(report.is_done for report in reports)
            losses.append(evaluated.loss)
            logits = evaluated.logits + 0 if "alone" in name or "DDP" in name else None
        results[name] = (losses, found, logits)
    return results


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in CASES if name in ALWAYS], id="one of each"),
        pytest.param([name for name in CASES if name not in ALWAYS], id="the others", marks=LONG),
    ],
)
def test_every_rank_gets_the_gradients_of_one_process_without_logits(names) -> None:
    ranks = on_ranks(RANKS, trained, names)
    for name in names:
        plain = built(CASES[name][0])
        plain(**batch(None)).loss.backward()
        expected = {each: parameter.grad for each, parameter in plain.named_parameters()}
        tolerance = 2e-2 if "precision" in name else 1e-6  # the plain model rounds its logits to float32
        for rank, found in enumerate(ranks):
            losses, gradients, logits = found[name]
            assert gradients.keys() == expected.keys()
            for each in expected:
                torch.testing.assert_close(gradients[each].double(), expected[each], rtol=tolerance, atol=tolerance)
            with torch.no_grad():
                here = plain(**batch(rank))
            for loss in losses:
                torch.testing.assert_close(loss.double(), here.loss.double(), rtol=tolerance, atol=tolerance)
            if logits is not None:
                torch.testing.assert_close(logits.double(), here.logits, rtol=tolerance, atol=max(tolerance, 1e-9))
