"""Statistics, divergences and losses of several depths over sharded rows are those of one process."""

from itertools import product
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from covering import covering, some
from kernel_paths import on_branch
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import (
    FactorizedEmbedding,
    OutputHead,
    QuantizedEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenTable,
)
from embedlayer.distributed.sharded import shard_table
from embedlayer.heads import DraftMap
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    NextByte,
    NextBytes,
    ReverseKL,
    TopKTargets,
    chunk_size,
    divergence,
)
from embedlayer.losses.statistics import Statistic

V, D, T = 23, 6, 5
STATISTICS = get_args(Statistic)
KINDS = (ForwardKL(), ReverseKL(), JensenShannon(0.3))
TABLES = ("dense", "factorised", "int8")
DEVICES = ("cpu", "cuda")
DIVERGENCES = list(product(DEVICES, range(len(TABLES)), KINDS, (0, 1), ("mean", "none")))
ALWAYS = [("cpu", 2, (0, 2)), ("cuda", 2, (1,))]
"""Branch, ranks and tables that run by default: each table on one branch."""
COVERING = set().union(
    *(
        covering([way for way in DIVERGENCES if (way[:2] in {("cpu", 0), ("cpu", 2), ("cuda", 1)}) == always], [(2, 3)])
        for always in (True, False)
    )
)
"""Branch, table, kind of divergence, teacher (whole or sharded) and reduction; on two ranks these, else all."""
EVENTS = NextBytes(torch.arange(V) % 5, 5)
SHARED = DraftMap(torch.arange(2, 12), torch.arange(V - 1, V - 11, -1), V, V, "", "")


def whole(kind: str):
    torch.manual_seed(0)
    if kind == "factorised":
        return FactorizedEmbedding(V, D, 3, padding_idx=2, init_std=0.5, dtype=torch.float64)
    table = TokenEmbedding(V, D, padding_idx=2, init_std=0.5, dtype=torch.float64)
    return table if kind == "dense" else QuantizedEmbedding.from_table(table, 8)


def batches(ranks: int, width: int = D) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and tokens of each rank; the batches have different sizes."""
    generator = torch.Generator().manual_seed(1 + width)
    found = []
    for rank in range(ranks):
        tokens = torch.randint(0, V, (2, T - rank), generator=generator)
        tokens[0, 1] = -100
        found.append((torch.randn(2, T - rank, width, generator=generator, dtype=torch.float64), tokens))
    return found


def outputs(
    table, hidden, tokens, teacher, teacher_hidden, ways: list, ignored: float | None = None
) -> list[torch.Tensor]:
    """Return every output of the head of a table, as tensors whose sums are differentiated one by one.

    `ways` are the divergences, and `ignored` replaces the hidden states of tokens that do not count.
    """
    head, states = OutputHead(table, softcap=3.0), hidden
    if ignored is not None:
        states, teacher_hidden = (
            x.masked_fill((tokens == -100).unsqueeze(-1), ignored) for x in (states, teacher_hidden)
        )
    statistics = head.token_statistics(states, tokens, statistics=STATISTICS, top_k=19, temperature=0.7)
    found = [value for value in statistics if value is not None]
    logits = head.uncomputed_logits(states)
    for _, _, kind, number, reduction in ways:
        other = teacher[number]
        other_logits = other.uncomputed_logits(teacher_hidden, temperature=1.5)
        found.append(divergence(logits, other_logits, kind, labels=tokens, reduction=reduction))
        pair = (states, head), (teacher_hidden, other)
        found.append(divergence(*pair, NextByte(EVENTS, EVENTS, kind), labels=tokens))
        counted = [(x[tokens != -100], each) for x, each in pair]
        found.append(SHARED.divergence(*counted, kind, reduction="sum" if reduction == "mean" else "none"))
    ids = torch.arange(4).expand(*tokens.shape, 4)
    found.append(divergence(logits, TopKTargets(ids, torch.zeros(ids.shape).double().log_softmax(-1)), labels=tokens))
    found.append(head.multi_token_loss([hidden, hidden.flip(0)], tokens, weights=[1.0, 0.5]).loss)
    return found


def divergences(branch: str, table: int, ranks: int) -> list[tuple]:
    return [way for way in DIVERGENCES if way[:2] == (branch, table) and (ranks != 2 or way in COVERING)]


def sharded_outputs(branch: str, tables: tuple[int, ...]):
    for device in DEVICES:
        chunk_size.MAX_CHUNK_TOKENS[device], chunk_size.ROWS_OF_A_BLOCK[device] = 8, 5
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    results = []
    for number in tables:
        kind = TABLES[number]
        table, teacher = shard_table(whole(kind), mesh), TokenEmbedding(V, 4, init_std=0.5, dtype=torch.float64)
        hidden, tokens = batches(ranks)[rank]
        hidden.requires_grad_()
        teachers = [teacher, shard_table(teacher, mesh)]
        ways = divergences(branch, number, ranks)
        found = outputs(table, hidden, tokens, teachers, batches(ranks, 4)[rank][0], ways, ignored=torch.nan)
        gradients = []
        for value in found:
            if value.requires_grad:
                weights = [part for _, part in table.sharded_parameters() if part.requires_grad]
                grads = torch.autograd.grad(value.sum(), [hidden, *weights], retain_graph=True)
                gradients.append(list(grads))
        results.append([[value.detach() for value in found], gradients])
        unsharded = LinearLogits(hidden, torch.randn(V, D, dtype=torch.float64))
        with pytest.raises(SizeError, match="shard both over the same ranks"):
            divergence(unsharded, table.uncomputed_logits(hidden))
    return results


@pytest.mark.parametrize(("branch", "ranks", "tables"), some(ALWAYS, product(DEVICES, [1, 2, 3], [(0, 2), (1,)])))
def test_they_equal_those_of_one_process_with_their_gradients(branch, ranks, tables) -> None:
    results = on_ranks(ranks, on_branch, branch, sharded_outputs, branch, tables)
    on_branch(branch, compare, branch, tables, results)


def compare(branch: str, tables: tuple[int, ...], results: list) -> None:
    ranks = len(results)
    for place_of_table, number in enumerate(tables):
        kind = TABLES[number]
        table, teacher = whole(kind), TokenEmbedding(V, 4, init_std=0.5, dtype=torch.float64)
        pairs = [(hidden.requires_grad_(), tokens) for hidden, tokens in batches(ranks)]
        others = [hidden for hidden, _ in batches(ranks, 4)]
        expected = [
            outputs(table, hidden, tokens, [teacher, teacher], other, divergences(branch, number, ranks))
            for (hidden, tokens), other in zip(pairs, others, strict=True)
        ]
        for rank in range(ranks):
            for ours, plain in zip(results[rank][place_of_table][0], expected[rank], strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
        differentiable = [place for place, value in enumerate(expected[0]) if value.requires_grad]
        weights = [part for part in (getattr(table, "inner", table)).parameters() if part.requires_grad]
        for index, place in enumerate(differentiable):
            total = sum(each[place].sum() for each in expected)
            grads = torch.autograd.grad(total, [*(hidden for hidden, _ in pairs), *weights], retain_graph=True)
            found = [results[rank][place_of_table][1][index] for rank in range(ranks)]
            for rank in range(ranks):
                torch.testing.assert_close(found[rank][0], grads[rank], rtol=1e-10, atol=1e-10)
            if weights:  # means over the ranks, as DistributedDataParallel computes them
                rows = torch.cat([each[1] for each in found])
                torch.testing.assert_close(rows * ranks, grads[-1][: len(rows)], rtol=1e-10, atol=1e-10)


def equal_logits():
    """Return the top tokens of integer rows, many of which are equal, so that products are exact."""
    chunk_size.MAX_CHUNK_TOKENS["cpu"], chunk_size.ROWS_OF_A_BLOCK["cpu"] = 8, 3
    hidden, rows = integers()
    table: TokenTable = TokenEmbedding.from_pretrained(rows)
    if dist.is_initialized():
        table = shard_table(table, init_device_mesh("cpu", (dist.get_world_size(),)))
    found = table.token_statistics(hidden, hidden[:, 0].abs().long(), statistics=("is_argmax",), top_k=13)
    return [found.top_logits, found.top_ids, found.is_argmax]


def integers() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, rows = (torch.randint(-1, 2, (size, 2), generator=generator).float() for size in (9, V))
    return hidden, rows


def test_of_equal_logits_on_several_ranks_the_lowest_id_comes_first() -> None:
    hidden, rows = integers()
    values, ids = (hidden @ rows.T).sort(dim=-1, descending=True, stable=True)
    for found in on_ranks(3, equal_logits):
        assert torch.equal(found[0], values[:, :13])
        assert torch.equal(found[1], ids[:, :13])
        assert torch.equal(found[2], ids[:, 0] == hidden[:, 0].abs().long())


def in_float32(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a sharded head in float32 over bfloat16 rows returns for this rank's tokens, and gradients."""
    table = shard_table(whole(kind).bfloat16(), init_device_mesh("cpu", (dist.get_world_size(),)))
    states, tokens = batches(dist.get_world_size())[dist.get_rank()]
    hidden = (8 * states).to(dtype).requires_grad_()
    head = OutputHead(table, head_dtype=torch.float32)
    statistics = head.token_statistics(hidden, tokens)
    assert statistics.log_probs is not None
    assert statistics.entropy is not None
    logits, sharded = head(hidden), table.sharded_logits(hidden, head_dtype=torch.float32).full_tensor()
    loss = head.loss(hidden, tokens)
    loss.backward()
    assert hidden.grad is not None
    own = head.loss(hidden.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16), tokens)  # other dtype
    with pytest.raises(SizeError, match="not possible over sharded rows"):
        head.loss(hidden, tokens, batch_invariant=True)
    for call in (table.logits, table.sharded_logits):
        with pytest.raises(SizeError, match="not possible over sharded rows"):
            call(hidden, batch_invariant=True)
    if dtype == torch.float32:
        for name in ("logits", "sharded_logits", "uncomputed_logits"):
            with pytest.raises(ShapeError, match="head_dtype=torch.float32"):
                getattr(table, name)(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = head(hidden)
    found = [statistics.log_probs, statistics.entropy, loss, own, logits, under_autocast, sharded, hidden.grad]
    return [each.detach() for each in found]


def all_in_float32() -> list[list[torch.Tensor]]:
    return [in_float32(kind, dtype) for kind in TABLES for dtype in (torch.bfloat16, torch.float32)]


def test_a_sharded_head_in_float32_is_that_of_one_process_in_float64() -> None:
    ranks = on_ranks(2, all_in_float32)
    for number, (kind, dtype) in enumerate(product(TABLES, (torch.bfloat16, torch.float32))):
        exact = whole(kind).bfloat16()
        # the scales of int8 rows are stored in float32, whatever dtype the vectors have
        rows = exact.rows_as(0, V, torch.float64) if kind == "int8" else exact.double().rows(0, V)
        everyones = []
        for (states, tokens), found in zip(batches(2), ranks, strict=True):
            log_probs, entropy, loss, own, logits, under_autocast, sharded, gradient = found[number]
            hidden = (8 * states).to(dtype).double().requires_grad_()
            z = hidden @ rows.T
            everyones.append(z.flatten(0, -2))
            kept = tokens != -100
            expected = z.log_softmax(-1).gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(kept, 0.0)
            torch.testing.assert_close(log_probs.double(), expected.detach(), rtol=0, atol=2e-5)
            entropies = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).where(kept, 0.0)
            torch.testing.assert_close(entropy.double(), entropies.detach(), rtol=0, atol=2e-5)
            exact_loss = -expected.sum() / kept.sum()
            torch.testing.assert_close(loss.double(), exact_loss.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(own.double(), exact_loss.detach(), rtol=2e-2, atol=2e-2)
            for each in (logits, under_autocast):
                assert each.dtype == torch.float32
                torch.testing.assert_close(each.double(), z.detach(), rtol=1e-5, atol=2e-5)
            (expected_gradient,) = torch.autograd.grad(exact_loss, hidden)
            assert gradient.dtype == dtype
            error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
            assert error <= (1e-6 if dtype == torch.float32 else 5e-3)
        torch.testing.assert_close(sharded.double(), torch.cat(everyones).detach(), rtol=1e-5, atol=2e-5)
