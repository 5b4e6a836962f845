import inspect
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from covering import looped, some
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import Memory
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import embedlayer.analysis
from embedlayer import (
    DeltaEmbedding,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    Position,
    QuantizedEmbedding,
    RowAdagrad,
    RowAdamW,
    RowSparseEmbedding,
    TokenEmbedding,
    TokenTable,
)
from embedlayer.analysis import EmbeddingPlan, plan, plan_alternatives
from embedlayer.core.errors import SizeError
from embedlayer.distributed.sharded import shard_table
from embedlayer.formats import GGUFBlocks
from embedlayer.inputs.embedding import embed
from embedlayer.losses import rows as products
from embedlayer.optim import RowwiseSecondMoment

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def storage(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


PLAIN, HALF = {"plain_loss": True}, {"dtype": "bf16", "moment_dtype": "bf16"}
DELTA, TWO_RANKS = {"delta_rows": 40}, {"vocab_parallel_size": 2}
SPARSE: dict[str, Any] = {"tied": False, "row_sparse": True}
PLANS: dict[str, dict[str, Any]] = {
    "dense, tied": PLAIN,
    "dense, tied, chunked": {},
    "dense, untied head": {**PLAIN, "tied": False},
    "dense, untied head, chunked": {"tied": False},
    "bfloat16": {**PLAIN, **HALF},
    "bfloat16, chunked": HALF,
    "sgd": {**PLAIN, "optimizer": "sgd"},
    "factorised": {**PLAIN, "rank": 16},
    "factorised, chunked": {"rank": 16},
    "factorised, untied head": {**PLAIN, "rank": 16, "tied": False},
    "row-sparse": {**PLAIN, **SPARSE},
    "row-sparse, rowwise": {**PLAIN, **SPARSE, "row_state": "rowwise_bf16"},
    "row-sparse, Adagrad": {**PLAIN, **SPARSE, "optimizer": "adagrad"},
    "row-sparse, chunked": SPARSE,
    "rows beside": DELTA,
    "rows beside, few positions": {**DELTA, "positions": 64},
    "rows beside a factorised table": {**DELTA, "rank": 16},
    "rows beside, untied head": {**DELTA, "tied": False},
    "rows beside, bfloat16": {**DELTA, **HALF},
    "rows beside, bfloat16, untied head": {**PLAIN, **DELTA, **HALF, "tied": False},
    "factorised, bfloat16, chunked": {"rank": 16, **HALF},
    "untied head, bfloat16, chunked": {"tied": False, **HALF},
    "one of three ranks": {"vocab_parallel_size": 3},
    "one of two ranks, untied head": {**TWO_RANKS, "tied": False},
    "one of two ranks, factorised": {**TWO_RANKS, "rank": 16},
    "one of two ranks, row-sparse": {**TWO_RANKS, **SPARSE, "distinct_tokens": 617},  # of 640 that are drawn
    "one of two ranks, bfloat16": {**TWO_RANKS, **HALF},
    "looked up only": {"lookup_only": True},
    # few tokens: what the update allocates for each is not planned
    "looked up only, row-sparse": {"lookup_only": True, "row_sparse": True, "row_state": "rowwise_bf16", "tokens": 96},
    "looked up only, bfloat16, one of two ranks": {"lookup_only": True, **TWO_RANKS, **HALF},
    "inference": {"optimizer": "none"},
    "inference, looked up only": {"optimizer": "none", "lookup_only": True},
    "int8": {"dtype": "int8"},
    "int4 in groups": {"dtype": "int4", "group_size": 16},
    "rows beside int4": {"dtype": "int4", **DELTA},
}


def built(row: EmbeddingPlan) -> tuple[TokenTable, OutputHead | None, LearnedPositionalEmbedding | None]:
    """What a plan says, by the library; of divided rows, this rank's."""
    rows, dtype = row.vocab_size, TORCH_DTYPES[row.compute_dtype]
    table: TokenTable
    if row.rank is not None:
        table = FactorizedEmbedding(rows, row.embed_dim, row.rank, dtype=dtype)
    elif row.dtype.startswith("int"):
        table = QuantizedEmbedding(rows, row.embed_dim, int(row.dtype[3:]), group_size=row.group_size)
    else:
        table = (RowSparseEmbedding if row.row_sparse else TokenEmbedding)(rows, row.embed_dim, dtype=dtype)
    if row.delta_rows:
        table = DeltaEmbedding.last(table, row.delta_rows)
    head = None
    if not row.lookup_only:
        head = OutputHead(table) if row.tied else OutputHead(vocab_size=rows, embed_dim=row.embed_dim).to(dtype)
    if row.vocab_parallel_size > 1:
        mesh = init_device_mesh("cpu", (row.vocab_parallel_size,))
        table = shard_table(table, mesh)
        if head is not None:
            own = table if row.tied else shard_table(TokenEmbedding(rows, row.embed_dim, dtype=dtype), mesh)
            head = OutputHead(own)
    positions = LearnedPositionalEmbedding(row.positions, row.embed_dim).to(dtype) if row.positions else None
    if row.delta_rows or not row.trained:
        for part in [
            *([] if row.tied or head is None else [head]),
            *([positions] if positions else []),
            *([] if row.trained else [table]),
        ]:
            part.requires_grad_(False)
    return table, head, positions


@given(
    vocab_size=st.integers(1, 40),
    embed_dim=st.integers(4, 9),
    tied=st.booleans(),
    rank=st.none() | st.integers(1, 4),
    positions=st.integers(0, 5),
    dtype=st.sampled_from(list(TORCH_DTYPES)),
)
@settings(max_examples=40, deadline=None)
def test_parameters_and_bytes_are_those_of_the_modules(vocab_size, embed_dim, tied, rank, positions, dtype):
    row = EmbeddingPlan(vocab_size, embed_dim, tied=tied, rank=rank, positions=positions, dtype=dtype)
    parts = [part for part in built(row) if part is not None]
    ends = {id(each): each for part in parts for each in part.parameters()}.values()
    assert row.parameters == sum(each.numel() for each in ends)
    assert row.table_parameters == sum(each.numel() for each in parts[0].parameters())
    assert (row.weight_bytes, row.table_bytes) == (storage(ends), storage(parts[0].parameters()))


def step(row: EmbeddingPlan, *, instructions: bool = True) -> dict[str, int]:
    """Bytes of each part of one training step of a plan, measured; the blocks between the ends are left out.

    `instructions`: whether the CPU is taken to have some for products of 16-bit numbers, as a plan says.
    """
    memory, length = Memory(), 32
    with memory, mock.patch.object(products, "_cpu_multiplies_bfloat16", return_value=instructions):
        table, head, positions = built(row)
        parameters = list(dict.fromkeys([*table.parameters(), *([] if head is None else head.parameters())]))
        if row.vocab_parallel_size > 1 and not row.tied:
            parameters += head.own_table.parameters()
        parameters += [] if positions is None else list(positions.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        derived = table.token_tensor.nbytes if row.delta_rows else 0
        stored = [part for name, part in table.state_dict().items() if name.endswith(("packed", "row_scale"))]
        found: dict[str, Any] = {"weight_bytes": storage([*parameters, *stored]) + derived}
        optimizer = None
        if row.trained:
            adamw = RowAdamW if row.row_sparse else torch.optim.AdamW
            kind = {"adamw": adamw, "adagrad": RowAdagrad, "sgd": torch.optim.SGD}[row.optimizer]
            options = {"state": RowwiseSecondMoment(torch.bfloat16)} if row.row_state == "rowwise_bf16" else {}
            optimizer = kind(trained, lr=1e-3, **({"fused": True} if kind is torch.optim.AdamW else options))
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        ids = torch.randint(0, table.vocab_size, (row.tokens // length, length))
        for _ in range(2):  # the optimizer's state is there at the second
            start = memory.peak = settled(memory)
            x = embed(ids, table, positions or Position())
            found["vectors"] = settled(memory) - start
            if head is None:
                found["activation_bytes"] = found["vectors"] + row.trained * x.nbytes
                if optimizer is None:
                    return found | {"peak_bytes": memory.peak}
                x.backward(torch.ones_like(x))
                found["gradient_bytes"] = sum(size_of(part.grad) for part in trained)
                optimizer.step()
                optimizer.zero_grad()
                found["peak_bytes"] = memory.peak
                del x
                continue
            hidden = (x.detach() + 0).requires_grad_(row.trained)
            if optimizer is None:
                logits = head(hidden)
                found |= {"logits_bytes": logits.nbytes, "peak_bytes": memory.peak, "gradient_bytes": 0}
                found |= {"optimizer_bytes": 0, "activation_bytes": found["vectors"] + hidden.nbytes}
                return found
            before = memory.peak = settled(memory)
            loss = head.loss(hidden, ids, impl="plain" if row.plain_loss else "chunked")
            loss.backward()
            made = [part.grad for part in (hidden, *trained) if part.grad is not None]
            chunked = not row.plain_loss
            along = made if chunked and row.dtype == "fp32" else []  # gradients made while logits are there
            found["loss_bytes"] = memory.peak - before - sum(map(size_of, along))
            x.backward(hidden.grad)
            found["gradient_bytes"] = sum(size_of(part.grad) for part in trained)
            found["activation_bytes"] = found["vectors"] + hidden.nbytes + hidden.grad.nbytes
            del made, along, x, loss
            optimizer.step()
            optimizer.zero_grad()
            found["peak_bytes"] = memory.peak
            del hidden
        state = [part for values in optimizer.state.values() for part in values.values() if torch.is_tensor(part)]
        found["optimizer_bytes"] = storage(state)
        if row.row_sparse:
            steps = getattr(table, "local", table).pending_updates.steps
            found["optimizer_bytes"] += storage([steps.value_steps, steps.moment_steps])
    return found


def settled(memory: Memory) -> int:
    """What is in memory once gloo's threads, which answer before they let go, have let go of what they sent."""
    if torch.distributed.is_initialized():
        time.sleep(0.2)
    return memory.now


def size_of(gradient: torch.Tensor) -> int:
    if gradient.layout == torch.strided:
        return gradient.nbytes
    return gradient._values().nbytes + gradient._indices().nbytes


ALWAYS = (  # each option, tied and untied, one rank and several: in pairs
    "dense, tied",
    "dense, untied head, chunked",
    "bfloat16, chunked",
    "sgd",
    "factorised, chunked",
    "row-sparse, rowwise",
    "rows beside, bfloat16, untied head",
    "looked up only, bfloat16, one of two ranks",
    "inference",
    "int4 in groups",
)


@pytest.mark.parametrize("name", some(ALWAYS, PLANS))
def test_every_part_that_is_planned_is_measured_within_five_percent(name):
    row = EmbeddingPlan(9000, 48, **{"tokens": 640} | PLANS[name])
    found = step(row) if row.vocab_parallel_size == 1 else on_ranks(row.vocab_parallel_size, step, row)[0]
    found["loss_bytes"] = found.get("loss_bytes", row.loss_bytes) - row.gathered_bytes
    for part, measured in found.items():
        if part in row.as_dict():
            assert getattr(row, part) == pytest.approx(measured, rel=0.05, abs=2000), part


HAND_COUNTS = {  # tokens, table and head, forward; the head's products and the additions of look-up, backward
    "gpt2": (1024, 2 * 1024 * 768 * 50257, 1024 * 768, 0),
    "llama-3-8b": (4096, 2 * 4096 * 4096 * 128256, 0, 0),
    "qwen3-0.6b": (2048, 2 * 2048 * 1024 * 151936, 0, 0),
    "gemma-3-1b": (2048, 2 * 2048 * 1152 * 262144, 0, 0),
    "bert-base": (512, 2 * 512 * 768 * 30522, 512 * 768, 0),
    "albert-base": (512, 2 * 512 * (768 * 128 + 128 * 30000), 0, 2 * 512 * 128 * 768),
}
"""Tokens, and the operations of head, positions and projections, forward, as written down by hand."""


@looped("name", HAND_COUNTS)
def test_operations_are_those_counted_by_hand(name):
    tokens, head, positions, projections = HAND_COUNTS[name]
    row = plan(name, tokens=tokens)
    assert (row.head_flops, row.lookup_flops, row.projection_flops) == (head, positions, projections)
    assert row.forward_flops == head + positions + projections
    rows = tokens * (128 if name == "albert-base" else row.embed_dim)
    assert row.backward_flops == 2 * head + 2 * projections + rows + positions
    assert plan(name, tokens=tokens, optimizer="none").backward_flops == 0
    assert plan(name, tokens=tokens, vocab_parallel_size=1).forward_flops == row.forward_flops


COUNTED = [name for name in PLANS if "one of" not in name and "int" not in name]


@pytest.mark.parametrize("name", some(("dense, tied", "factorised, chunked", "rows beside", "looked up only"), COUNTED))
def test_products_are_those_that_torch_counts(name):
    row = EmbeddingPlan(900, 48, **{"tokens": 64} | PLANS[name])
    table, head, positions = built(row)
    ids = torch.randint(0, 900, (2, row.tokens // 2))
    forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward, torch.no_grad():
        x = embed(ids, table, positions or Position())
        _ = None if head is None else head(x)
    assert forward.get_total_flops() == row.projection_flops + row.head_flops
    if row.trained:
        with both:
            x = embed(ids, table, positions or Position())
            hidden = x.detach().requires_grad_()
            if head is not None:
                head.loss(hidden, ids, impl="plain").backward()  # torch does not see the products of the chunked loss
            if x.requires_grad:
                x.backward(torch.ones_like(x) if head is None else hidden.grad)
        planned = row.projection_backward_flops + row.head_backward_flops
        assert both.get_total_flops() - forward.get_total_flops() == planned


@pytest.mark.parametrize("name", [name for name in PLANS if "bfloat16, chunked" in name])
def test_a_cpu_without_16_bit_products_needs_no_more_for_the_loss(name):
    row = EmbeddingPlan(9000, 48, tokens=640, **PLANS[name])
    assert step(row, instructions=False)["loss_bytes"] <= row.loss_bytes


def test_moments_are_fp32_unless_asked_for_otherwise():
    halves = plan("gpt2", dtype="bf16")
    assert halves.optimizer_bytes == plan("gpt2").optimizer_bytes
    assert plan("gpt2", dtype="bf16", moment_dtype="bf16").optimizer_bytes == halves.optimizer_bytes // 2


@looped("bits, group_size, embed_dim", [8, 4], [None, 8, 32], [70, 33])
def test_quantised_rows_are_as_large_as_the_quantised_table(bits, group_size, embed_dim):
    table = QuantizedEmbedding(37, embed_dim, bits, group_size=group_size)
    row = EmbeddingPlan(37, embed_dim, dtype=f"int{bits}", group_size=group_size, tokens=5)
    assert row.weight_bytes == table.nbytes
    assert 0 < row.scale_bytes < row.weight_bytes
    blocks = EmbeddingPlan(37, embed_dim, dtype=f"q{bits}_0")
    assert blocks.weight_bytes == QuantizedEmbedding(37, embed_dim, bits, layout=GGUFBlocks()).nbytes
    assert row.gradient_bytes == row.optimizer_bytes == 0
    assert row.loss_bytes == row.logits_bytes == torch.zeros(5, 37).nbytes


def test_a_quantised_factorised_table_has_scales_for_both_factors():
    row = EmbeddingPlan(37, 8, rank=3, dtype="int8", tied=False)
    assert row.table_bytes == 37 * (3 + 8) + 3 * (8 + 8)
    assert row.scale_bytes == (37 + 3 + 37) * 8


def presets_named() -> list[str]:
    """Return the names that an unknown one is answered with."""
    with pytest.raises(SizeError) as error:
        plan("zzz")
    return re.findall(r"[a-z0-9.-]+", str(error.value).partition("Known: ")[2].partition(". Other")[0])


PRESETS = presets_named()


def test_presets_tie_as_the_models_do():
    tied = {name for name in PRESETS if plan(name).tied}
    assert {"gpt2", "gemma-2b", "gemma-7b", "gemma-3-1b", "llama-3.2-1b", "qwen2-0.5b", "bert-base"} <= tied
    assert not {"llama-7b", "llama-2-70b", "llama-3-8b", "mistral-7b", "qwen2-7b", "phi-3-mini"} & tied


@looped("name", PRESETS)
def test_every_preset_can_be_planned(name):
    row = plan(name)
    assert row.name == name
    assert row.peak_bytes == row.weight_bytes * 4


def test_sizes_given_beside_a_preset_replace_its_own():
    row = plan("gpt2", vocab_size=50304, tied=False, positions=0, rank=64)
    assert (row.vocab_size, row.embed_dim, row.tied, row.positions, row.rank) == (50304, 768, False, 0, 64)


def test_a_dictionary_holds_every_size():
    row = plan("albert-base", tokens=7)
    values = row.as_dict()
    assert EmbeddingPlan(**{field.name: values[field.name] for field in fields(EmbeddingPlan)}) == row
    assert (values["peak_bytes"], values["table_parameters"]) == (row.peak_bytes, 30000 * 128 + 128 * 768)


NOT_PLANNED: list[dict[str, Any]] = [
    {"preset": "zzz"},
    {"preset": None, "vocab_size": 5},
    {"vocab_size": 0},
    {"device": "tpu"},
    {"rank": 769},
    {"delta_rows": 60000},
    {"delta_rows": 5, "vocab_parallel_size": 2},
    {"row_sparse": True},
    {"lookup_only": True, "plain_loss": True},
    {"row_state": "rowwise"},
    {"group_size": 32},
    {"row_sizes": {"norm": None}},
]


@looped("options", NOT_PLANNED)
def test_what_cannot_be_planned_is_refused(options):
    with pytest.raises(SizeError):
        plan(**{"preset": "gpt2"} | options)
    with pytest.raises(SizeError, match="Did you mean gpt2"):
        plan("gpt-2")


def test_torch_is_not_needed():
    imports = "import sys, embedlayer.analysis.embedding_plan, embedlayer.analysis.plan_presets"
    code = f"{imports}; assert not {{'torch', 'numpy'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_each_option_is_stated_once_and_is_in_the_signature_and_the_documentation():
    options = {*inspect.signature(plan).parameters} - {"preset"}
    assert {*inspect.signature(EmbeddingPlan).parameters} == options | {"name", "row_sizes"}
    assert all(f"    {name}: " in inspect.getdoc(EmbeddingPlan) for name in [*options, "name"])
    assert embedlayer.analysis.options_table() in Path(__file__).parents[2].joinpath("docs", "planning.md").read_text()


@given(
    tied=st.booleans(),
    rank=st.none() | st.just(16),
    dtype=st.sampled_from(["fp32", "bf16", "int8"]),
    optimizer=st.sampled_from(["adamw", "adagrad", "sgd", "none"]),
    plain_loss=st.booleans(),
    delta_rows=st.sampled_from([0, 7]),
    used=st.none() | st.just(50),
)
@settings(max_examples=60)
def test_every_change_can_be_planned_and_the_best_comes_first(used, **options):
    now = EmbeddingPlan(1000, 64, tokens=256, **options)
    found = plan_alternatives(now, used=used)
    assert [change.saved_bytes for change in found] == sorted((change.saved_bytes for change in found), reverse=True)
    assert all(change.plan != now and change.plan.name == change.change for change in found)
    assert any(change.change.startswith("trim") for change in found) == (used is not None)


@pytest.mark.parametrize(
    "processes", [{"vocab_parallel_size": 4}, {"replicas": 2}, {"vocab_parallel_size": 2, "replicas": 2}]
)
def test_every_change_to_a_sharded_table_can_be_planned(processes):
    found = plan_alternatives(EmbeddingPlan(1000, 64, tied=False, tokens=256, **processes), used=50)
    assert not any(change.plan.delta_rows for change in found)
    assert {"row-sparse table", "trim to 50 tokens"} <= {change.change for change in found}
