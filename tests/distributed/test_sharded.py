"""A sharded table gives the results of the whole table."""

import copy
import tempfile
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import some
from kernel_paths import BRANCHES, on_branch
from launches import launched
from processes import on_ranks
from together import together
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from embedlayer import (
    EmbedLayerError,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    PeerError,
    QuantizedEmbedding,
    RowAdamW,
    RowSparseEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenTable,
    TransformerEmbedding,
    clip_grad_norm_,
)
from embedlayer.analysis.embedding_plan import EmbeddingPlan
from embedlayer.distributed.data_parallel import distributed_data_parallel
from embedlayer.distributed.sharded import ShardedTable, shard_table
from embedlayer.inputs.embedding import embed
from embedlayer.losses import chunk_size
from embedlayer.tables.stored.mapped import MappedEmbedding

V, D, T = 23, 6, 10
OPTIONS = {
    "plain": {},
    "all": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-2, "logit_scale": 0.7},
    "masked": {"mask_padding": True},
    "each": {"reduction": "none"},
    "weights": {"token_weights": torch.randn(2, T // 2, generator=torch.Generator().manual_seed(2)).bfloat16()},
}


def whole(kind: str):
    torch.manual_seed(0)
    if kind == "factorised":
        return FactorizedEmbedding(V, D, 3, padding_idx=2, init_std=0.5, dtype=torch.float64)
    return TokenEmbedding(V, D, padding_idx=2, scale=1.5, init_std=0.5, dtype=torch.float64)


def batches(ranks: int):
    """Return per rank IDs, targets (some ignored) and factors of the logits; for all ranks mixing and bias."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (ranks, 2, T // 2), generator=generator)
    ids[0] = 4  # the first rank asks one rank for one row
    targets = torch.randint(0, V, ids.shape, generator=generator)
    targets[:, 0, 1] = -100
    mixing = torch.randn(D, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    factors = torch.randn(*ids.shape, V, generator=generator, dtype=torch.float64)
    return ids, targets, factors, mixing, bias


CASES = [("dense", name) for name in OPTIONS] + [("factorised", "plain"), ("factorised", "all")]


def all_cases():
    return [losses_and_gradients(kind, OPTIONS[name]) for kind, name in CASES]


def losses_and_gradients(kind: str, options: dict):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids, targets, factors, mixing, bias = batches(ranks)
    table = shard_table(whole(kind), init_device_mesh("cpu", (ranks,)))
    bias, mixing = bias.requires_grad_(), mixing.requires_grad_()
    vectors = table(ids[rank])
    hidden = torch.tanh(vectors @ mixing)
    loss = OutputHead(table).loss(hidden, targets[rank], bias=bias, **options)
    logits = table.logits(hidden, bias=bias, softcap=options.get("softcap"))
    (loss.sum() + (logits * factors[rank]).sum()).backward()
    with torch.no_grad():
        assert torch.allclose(table.logits(hidden[0, 0], bias=bias, softcap=options.get("softcap")), logits[0, 0])
        sharded = table.sharded_logits(hidden).full_tensor()
    shared = [p.grad for name, p in table.local.named_parameters() if name not in dict(table.sharded_parameters())]
    for grad in (bias.grad, mixing.grad, *shared):  # what DistributedDataParallel does
        dist.all_reduce(grad)
        grad /= ranks
    own = next(p.grad for _, p in table.sharded_parameters())
    rows = table.rows(3, 9)
    return [vectors.detach(), loss.detach(), own, bias.grad, mixing.grad, logits.detach(), sharded, rows, *shared]


@pytest.mark.parametrize(
    ("branch", "ranks"), some([("cpu", 1), ("cpu", 3), ("cuda", 2)], product(["cpu", "cuda"], [1, 2, 3, 4]))
)
def test_values_and_gradients_are_those_of_the_whole_table(branch, ranks) -> None:
    results = on_ranks(ranks, on_branch, branch, all_cases)
    for number, (kind, name) in enumerate(CASES):
        check(ranks, kind, OPTIONS[name], [result[number] for result in results])


def check(ranks: int, kind: str, options: dict, results: list) -> None:
    ids, targets, factors, mixing, bias = batches(ranks)
    bias, mixing, table = bias.requires_grad_(), mixing.requires_grad_(), whole(kind)
    vectors = table(ids)
    hidden = torch.tanh(vectors @ mixing)
    head = OutputHead(table)
    each = [head.loss(hidden[r], targets[r], bias=bias, impl="plain", **options) for r in range(ranks)]
    logits = table.logits(hidden, bias=bias, softcap=options.get("softcap"))
    ((sum(loss.sum() for loss in each) + (logits * factors).sum()) / ranks).backward()
    weight = table.inner.weight if kind == "factorised" else table.weight
    others = [table.projection.weight.grad] if kind == "factorised" else []

    def same(ours, theirs) -> bool:
        return torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)

    assert same(torch.cat([result[2] for result in results]), weight.grad)
    for rank, (own_vectors, loss, _, bias_grad, mixing_grad, own_logits, all_logits, rows, *rest) in enumerate(results):
        assert same(own_vectors, vectors[rank])
        assert same(loss, each[rank])
        assert same(bias_grad, bias.grad)
        assert same(mixing_grad, mixing.grad)
        assert same(own_logits, logits[rank])
        assert same(all_logits, table.logits(hidden).flatten(0, -2))
        assert same(rows, table.rows(3, 9))
        assert all(same(a, b) for a, b in zip(rest, others, strict=True))


UNLIKE = (7, 0, 12)


@pytest.mark.parametrize("branch", some(["cpu", "cuda"], BRANCHES))
def test_a_loss_in_many_chunks_of_ranks_with_unlike_batches_is_that_of_the_whole_table(branch) -> None:
    """Compute twice with more, fewer and no tokens per rank, and another factor of the loss on each rank."""
    dtype = torch.float32 if branch == "triton" else torch.float64  # there are no Triton kernels for float64
    tolerance = 1e-5 if branch == "triton" else 1e-10
    call = (on_branch, branch, unlike_batches, UNLIKE, dtype)
    results = together(3, ON_THREE, call)
    head = whole("dense")
    hidden = [part.requires_grad_() for part in hidden_states(UNLIKE)]
    losses = [
        head.loss(part, torch.arange(len(part)), impl="plain", label_smoothing=0.1, softcap=2.0) for part in hidden
    ]
    sum(loss * (rank + 1) for rank, loss in enumerate(losses)).backward()
    for rank, (loss, grad, again) in enumerate(results):
        assert torch.allclose(loss.double(), losses[rank], rtol=tolerance)
        assert torch.allclose(grad.double(), hidden[rank].grad, rtol=tolerance, atol=tolerance / 100)
        assert torch.equal(grad, again)


def hidden_states(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, D, generator=generator, dtype=torch.float64) for size in sizes]


def unlike_batches(sizes: tuple[int, ...], dtype: torch.dtype):
    for device in ("cpu", "cuda"):  # of the 17 tokens for 8 rows a rank with 7 could take 19
        chunk_size.BUFFER_BYTES[device] = 17 * 8 * 8
    rank = dist.get_rank()
    table = shard_table(whole("dense").to(dtype), init_device_mesh("cpu", (len(sizes),)))
    hidden = hidden_states(sizes)[rank].to(dtype).requires_grad_()
    loss = table.loss(hidden, torch.arange(sizes[rank]), label_smoothing=0.1, softcap=2.0)
    (grad,) = torch.autograd.grad(loss * (rank + 1), hidden, retain_graph=True)
    (again,) = torch.autograd.grad(loss * (rank + 1), hidden, retain_graph=True)
    with pytest.raises(SizeError, match="create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    table.equal_loss_factors = True
    for factor in (5.0, rank + 1.0):  # one of all ranks, and one of each
        loss = copy.deepcopy(table).loss(hidden, torch.arange(sizes[rank]), label_smoothing=0.1, softcap=2.0)
        (scaled,) = torch.autograd.grad(loss * factor, hidden)
        expected = grad / (rank + 1) * 5 if factor == 5 else torch.full_like(grad, torch.nan)
        torch.testing.assert_close(scaled, expected, equal_nan=True)
    fixed = hidden.detach().requires_grad_(rank != 2)  # who needs no gradient makes those of the others
    table.loss(fixed, torch.arange(sizes[rank]), label_smoothing=0.1, softcap=2.0).backward()
    assert fixed.grad is None if rank == 2 else torch.allclose(fixed.grad * (rank + 1), grad)
    return loss.detach(), grad, again


class Small(nn.Module):
    def __init__(self, table: TokenTable) -> None:
        super().__init__()
        self.table, self.mixing = table, nn.Linear(D, D, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.table.loss(self.mixing(self.table(ids)), targets)


def trained(wrapper: str | None) -> list[torch.Tensor]:
    """Return norm, rows and projection after two steps of two ranks; `None` for one process with their mean loss."""
    ids, targets, *_ = batches(2)
    torch.manual_seed(3)
    model = Small(whole("dense"))
    loss = lambda: (model(ids[0], targets[0]) + model(ids[1], targets[1])) / 2  # noqa: E731
    if wrapper is not None:
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        model.table = shard_table(model.table, mesh)
        if wrapper == "ddp":
            parallel: Any = distributed_data_parallel(model)
        else:
            sharded = {parameter for parameter in model.parameters() if hasattr(parameter, "shard_group")}
            parallel = fully_shard(model, mesh=mesh, ignored_params=sharded)
        loss = lambda: parallel(ids[rank], targets[rank])  # noqa: E731
    optimizer = RowAdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    mixing = model.mixing.weight.detach()
    return [norm, model.table.rows(0, V).detach(), mixing.full_tensor() if isinstance(mixing, DTensor) else mixing]


def trained_by_torch() -> list[list[torch.Tensor]]:
    return [trained("ddp"), trained("fsdp")]


def sums_of_bags() -> list[torch.Tensor]:
    """Sums on one rank of many bags, which no kernel adds, and on the others of few."""
    table = shard_table(whole("dense"), init_device_mesh("cpu", (dist.get_world_size(),)))
    ids = torch.arange(20_000 if dist.get_rank() == 0 else 3) % V
    return [table.summed(ids, torch.tensor([0, 2, len(ids)])).detach(), table.summed(ids[:3]).detach()]


def test_ranks_sum_bags_of_unlike_sizes() -> None:
    table = whole("dense")
    for rank, results in enumerate(together(2, ON_TWO, (sums_of_bags,))):
        ids = torch.arange(20_000 if rank == 0 else 3) % V
        expected = [table.summed(ids, torch.tensor([0, 2, len(ids)])), table.summed(ids[:3])]
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach())


def test_a_model_with_a_sharded_table_trains_in_torchs_own_wrappers_as_in_one_process() -> None:
    expected = trained(None)
    for results in together(2, ON_TWO, (trained_by_torch,)):
        for found in results:
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)


def test_rows_that_were_replaced_are_refused_at_the_next_use() -> None:
    assert together(2, ON_TWO, (replaced,)) == [["weight of this sharded table was replaced"] * 3] * 2


def replaced() -> list[str]:
    mesh, ids = init_device_mesh("cpu", (2,)), torch.tensor([[1, 2]])
    again = nn.Sequential(shard_table(whole("dense"), mesh))
    fully_shard(again)
    assigned = shard_table(whole("dense"), mesh)
    assigned.load_state_dict({name: each.clone() for name, each in assigned.state_dict().items()}, assign=True)
    found = []
    for use in (lambda: again(ids), lambda: assigned(ids), lambda: assigned.loss(torch.ones(2, D).double(), ids[0])):
        with pytest.raises(ShapeError) as caught:
            use()
        found.append(str(caught.value)[4:45])
    return found


def test_a_table_that_cannot_be_sharded_is_refused() -> None:
    expected = ["A table is sharded along one", "1 rows in blocks of 1 leave ", "token id 23 at row 0, column"]
    assert together(2, ON_TWO, (refusals,)) == [[*expected, "weight: sharded over several"]] * 2


def refusals() -> list[str]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    for wrong in (
        lambda: shard_table(whole("dense"), init_device_mesh("cpu", (1, ranks))),
        lambda: shard_table(TokenEmbedding(1, D), mesh),
        lambda: shard_table(whole("dense"), mesh)(torch.tensor([V])),
        lambda: shard_table(whole("dense"), mesh).save_pretrained(tempfile.mkdtemp()),
    ):
        with pytest.raises(EmbedLayerError) as caught:
            wrong()
        found.append(str(caught.value)[:28])
    return found


def test_a_frozen_table_stays_frozen_and_learns_the_mean_once_it_may() -> None:
    for rank, (learns, grads) in enumerate(together(2, ON_TWO, (frozen,))):
        assert learns == [False, False, True]
        expected = torch.zeros(V, D, dtype=torch.float64)
        expected[[0, 1, 12]] = 1.5 / 2  # a rank that looks a row up is one of two
        for grad in grads:
            assert torch.equal(grad, expected[slice(0, 12) if rank == 0 else slice(12, V)])


def frozen():
    """Return which sharded tables train, and the gradients of an unfrozen table and of its copy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = shard_table(whole("dense").requires_grad_(False), mesh)
    factorised = whole("factorised")
    factorised.inner.weight.requires_grad_(False)
    part = shard_table(factorised, mesh).local
    learns = [table.weight.requires_grad, part.inner.weight.requires_grad, part.projection.weight.requires_grad]
    grads = []
    for each in (table.requires_grad_(True), copy.deepcopy(table)):
        each(torch.tensor([[0, 1], [12]][dist.get_rank()])).sum().backward()
        grads += [each.weight.grad]
    return learns, grads


def test_an_id_outside_that_a_gpu_clamps_gives_zeros_and_no_gradient() -> None:
    for rank, (vectors, grad, found, place) in enumerate(together(2, ON_TWO, (clamped,))):
        assert vectors.abs().sum(-1).ne(0).tolist() == [[True, False, True], [True, False, True]]
        counts = torch.tensor([BAD_IDS.eq(token).sum() for token in range(V)])
        own = slice(0, 12) if rank == 0 else slice(12, V)
        assert torch.equal(grad, 1.5 * counts[own, None].expand(-1, D).double())
        assert found == [1, V + 1, 3]
        assert place == "meta"


BAD_IDS = torch.tensor([[3, V + 1, 4], [V - 1, -1, 3]])


def clamped():
    """Look up a bad ID without waiting, as on a GPU; return the device of the record of a table elsewhere."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = shard_table(whole("dense"), mesh)
    table.index_check.forward = table.index_check.clamp_and_record  # type: ignore[assignment]
    vectors = table(BAD_IDS)
    vectors.sum().backward()
    elsewhere = ShardedTable(
        TokenEmbedding(table.partition.stop - table.partition.start, D, device="meta"), mesh, vocab_size=V
    )
    place = elsewhere.index_check.first_bad_index.device.type
    return vectors.detach(), table.weight.grad, table.index_check.first_bad_index.tolist(), place


def test_a_quantised_table_is_sharded_and_the_states_of_all_kinds_are_those_of_whole_tables() -> None:
    for quantised, states in together(3, ON_THREE, (quantised_and_states,)):
        table = QuantizedEmbedding.from_table(whole("dense").float(), 4)
        assert torch.equal(quantised[0], table(torch.arange(V)))
        for ours, theirs in zip(quantised[1:], loss_and_gradient(table), strict=True):
            torch.testing.assert_close(ours, theirs)
        for kind, state in zip(("dense", "factorised"), states, strict=True):
            expected = whole(kind).state_dict()
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], value) for name, value in expected.items())


def loss_and_gradient(table):
    hidden = torch.randn(V, D, generator=torch.Generator().manual_seed(4), requires_grad=True)
    loss = table.loss(hidden, torch.arange(V), z_loss=0.1)
    loss.backward()
    return loss.detach(), hidden.grad


def quantised_and_states():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = shard_table(QuantizedEmbedding.from_table(whole("dense").float(), 4), mesh)
    quantised = [table(torch.arange(V)), *loss_and_gradient(table)]
    states = []
    for kind in ("dense", "factorised"):
        sharded = shard_table(whole(kind), mesh)
        state = sharded.state_dict()
        other = shard_table(whole(kind), mesh)
        for _, parameter in other.named_parameters():
            parameter.detach().zero_()
        other.load_state_dict(state)
        fresh = shard_table(whole(kind), mesh)
        fresh.load_state_dict(whole(kind).state_dict())
        ids = torch.arange(V)
        assert torch.equal(other(ids), sharded(ids))
        assert torch.equal(fresh(ids), sharded(ids))
        states.append(full(state))
    return quantised, states


def full(state):
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}


FRESH = {
    "dense": lambda: TokenEmbedding(V, D, padding_idx=20, pad_to_multiple_of=16, scale="sqrt_dim", round_scale=True),
    "factorised": lambda: FactorizedEmbedding(V, D, 3, padding_idx=2, pad_to_multiple_of=16),
    "bfloat16": lambda: TokenEmbedding(V, D, dtype=torch.bfloat16),
}


def test_a_table_on_the_meta_device_is_drawn_by_its_ranks_as_one_process_would_draw_it() -> None:
    for results in together(3, ON_THREE, (drawn,)):
        for kind, (state, reset, vectors, after) in zip(FRESH, results, strict=True):
            torch.manual_seed(3)
            table = FRESH[kind]()
            for name, value in table.state_dict().items():
                assert torch.equal(state[name], value[:V])
                assert torch.equal(reset[name], value[:V])
            torch.testing.assert_close(vectors, table(torch.arange(V)))
            assert torch.equal(after, torch.rand(1))


def drawn():
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for make in FRESH.values():
        with torch.device("meta"):
            table = make()
        torch.manual_seed(3)
        table = shard_table(table, mesh)
        vectors, after, state = table(torch.arange(V)).detach(), torch.rand(1), full(table.state_dict())
        state = {name: value.clone() for name, value in state.items()}
        torch.manual_seed(3)
        reset_all(table)
        found.append((state, full(table.state_dict()), vectors, after))
    with torch.device("meta"):
        table = QuantizedEmbedding(V, D, 8)
    with pytest.raises(TypeError, match="cannot be drawn"):
        shard_table(table, mesh)
    return found


def reset_all(table: torch.nn.Module) -> None:
    for module in table.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def test_torch_shards_a_plain_table_by_rows_and_by_columns() -> None:
    for results in together(2, ON_TWO, (by_torch,)):
        for found in results:
            torch.testing.assert_close(found, divided()(torch.arange(24)))


def divided() -> TokenEmbedding:
    torch.manual_seed(0)
    return TokenEmbedding(24, D, scale=1.5)


def by_torch() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for plan in (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())):
        table = divided()
        parallelize_module(table, mesh, plan)
        found.append(table(torch.arange(24)).detach().clone())  # what is still on its way arrives
        layer = TransformerEmbedding(24, D, 24, position="sinusoidal", table=table).eval()
        with torch.no_grad():
            found.append((layer(torch.arange(24)) - layer.position.vectors(torch.arange(24))).clone())
        with pytest.raises(ShapeError, match="Divided weights"):
            table.logits(torch.zeros(2, D))
        row_sparse = RowSparseEmbedding(24, D)
        parallelize_module(row_sparse, mesh, plan)
        with pytest.raises(ShapeError, match="24 row-sparse rows are divided"):
            row_sparse(torch.arange(24))
    return found


@pytest.mark.parametrize(("trained", "rank"), [(False, None), (True, 2)])
def test_what_crosses_the_network_is_what_is_planned(trained, rank) -> None:
    tokens = 5 * V  # every token of the vocabulary, so that each rank owns its share of them
    sizes = {"rank": rank, "tokens": tokens, "distinct_tokens": V, "vocab_parallel_size": 3}
    plan = EmbeddingPlan(V, D, tied=False, optimizer="adamw" if trained else "none", **sizes)
    call = (bytes_sent, trained, rank)
    sent = together(3, ON_THREE, call)
    lookup, loss = (sum(parts) / 3 for parts in zip(*sent, strict=True))
    assert lookup == pytest.approx(plan.lookup_network_bytes, rel=0.05)
    assert loss == pytest.approx(plan.loss_network_bytes, rel=0.05)


@pytest.mark.parametrize("distinct", [12, 60])
def test_what_the_busiest_rank_sends_of_its_rows_is_the_documented_bound(distinct) -> None:
    most = (3 - 1) * min(60 // 3, distinct) * D * 4  # as the documentation of `lookup_network_bytes` says
    (rows_out, _), *others = together(3, ON_THREE, (bytes_sent_by_the_busiest, distinct))
    assert rows_out == pytest.approx(most, rel=0.05)
    assert sum(back for _, back in others) == pytest.approx(most, rel=0.05)


def bytes_sent_by_the_busiest(distinct: int) -> tuple[int, int]:
    """Return the bytes that this rank sends for a look-up and its gradient; all ranks look up the first tokens."""
    table = shard_table(TokenEmbedding(60, D), init_device_mesh("cpu", (3,)))
    sent = counted()
    vectors = table(torch.arange(min(distinct, 20)))  # of 60 rows the first rank has 20
    forward = sum(sent)
    vectors.sum().backward()
    return forward, sum(sent) - forward


class Ends(nn.Module):
    def __init__(self, table: TokenTable) -> None:
        super().__init__()
        self.table, self.position = table, LearnedPositionalEmbedding(V, D)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.loss(embed(ids, self.table, self.position), ids)


def test_what_crosses_the_network_in_a_step_and_for_replicas_is_what_is_planned() -> None:
    sizes = {"vocab_parallel_size": 2, "replicas": 2}
    plan = EmbeddingPlan(V, D, rank=3, positions=V, tokens=5 * V, distinct_tokens=V, **sizes)
    rows = EmbeddingPlan(400, D, tied=False, tokens=64, distinct_tokens=64, row_sparse=True, **sizes)
    replicated, all_bytes, of_rows = (sum(x) / 4 for x in zip(*together(4, ON_FOUR, (bytes_of_replicas,)), strict=True))
    assert replicated == pytest.approx(plan.replicated_network_bytes, rel=0.05)
    assert all_bytes == pytest.approx(plan.network_bytes, rel=0.05)
    assert of_rows == pytest.approx(rows.replicas_network_bytes, rel=0.05)


def bytes_of_replicas() -> tuple[float, float, float]:
    """Return the bytes that this rank sends for replicated gradients, in a whole step, and for replicas of rows."""
    with launched(vocab_parallel_size=2) as ranks:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "vocab_parallel"))["vocab_parallel"]
        table = shard_table(RowSparseEmbedding(400, D), mesh)
        rows = shard_table(TokenEmbedding(400, D), mesh)
        ids = torch.arange(64) * 6 + dist.get_rank()
        rows.loss(table(ids), ids).backward()
        sent, replicated = counted(), list[float]()
        ranks.average_replicas(nn.ModuleList([table, rows]))
        of_rows = sum(sent)
        sent.clear()
        model = Ends(shard_table(FactorizedEmbedding(V, D, 3), mesh))
        parallel = distributed_data_parallel(model)

        def counted_hook(group, bucket):
            joined = allreduce_hook(group, bucket)
            replicated.append(sent[-1])
            return joined

        parallel.register_comm_hook(None, counted_hook)
        sent.clear()
        parallel(torch.arange(V).repeat(5, 1)).backward()
        ranks.average_replicas(model)
        return sum(replicated), sum(sent), of_rows


def counted() -> list[int]:
    """Return a list to which all bytes are appended that this rank sends from now on."""
    sent, swap, reduce = [], dist.all_to_all_single, dist.all_reduce

    def counted_swap(out, rows, receives=None, sends=None, group=None):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = len(rows) // size if sends is None else sends[rank]
        sent.append((len(rows) - own) * rows[:1].numel() * rows.element_size())
        return swap(out, rows, receives, sends, group=group)

    def counted_reduce(numbers, *options, group=None, **others):
        size = dist.get_world_size(group)
        sent.append(2 * (size - 1) / size * numbers.nbytes)  # in a ring each of N sends (N - 1) / N of it twice
        return reduce(numbers, *options, group=group, **others)

    dist.all_to_all_single, dist.all_reduce = counted_swap, counted_reduce  # type: ignore[assignment]
    return sent


def bytes_sent(trained: bool, rank: int | None) -> tuple[int, int]:
    """Return the bytes that this rank sends in the look-up and in the loss."""
    mesh = init_device_mesh("cpu", (3,))
    kind = TokenEmbedding(V, D) if rank is None else FactorizedEmbedding(V, D, rank)
    table, rows = (shard_table(each, mesh) for each in (kind, TokenEmbedding(V, D)))
    ids, sent = torch.arange(V).repeat(5), counted()
    with torch.set_grad_enabled(trained):
        vectors = table(ids)
        lookup, hidden = sum(sent), vectors.detach().requires_grad_(trained)
        sent.clear()
        loss = rows.loss(hidden, ids)
        if trained:
            loss.backward()
        over_loss = sum(sent)
        sent.clear()
        if trained:
            vectors.backward(hidden.grad)
    return lookup + sum(sent), over_loss


def refusals_of_other_tables() -> list[str]:
    """Return the errors of a rank if the last rank has another vocabulary or another kind of table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "vocab_parallel"))
    found, last = [], dist.get_rank() == 3
    for table in (TokenEmbedding(1000 - last, 8), FactorizedEmbedding(1000, 8, 2) if last else TokenEmbedding(1000, 8)):
        try:
            shard_table(table, mesh["vocab_parallel"])
            found.append("")
        except PeerError as error:
            found.append(str(error))
    return found


def test_a_table_of_another_vocabulary_or_kind_is_refused_by_name_where_it_is_sharded() -> None:
    for rank, (vocabulary, kind) in enumerate(together(4, ON_FOUR, (refusals_of_other_tables,))):
        if rank < 2:  # another replica, whose ranks pass the same table
            assert vocabulary == kind == ""
        else:
            assert "Rank 3 differs from rank 2 in vocab_size: 999 there, 1000 on rank 2." in vocabulary
            assert "kind of table: FactorizedEmbedding there, TokenEmbedding on rank 2" in kind


def train_mapped_shards(folder: str) -> list[torch.Tensor]:
    """Train a table in a folder per rank and, with the same batches, a whole one in memory; return the rows of both."""
    torch.manual_seed(0)
    memory = RowSparseEmbedding(V, D, padding_idx=2, init_std=0.5)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    start, stop = (0, 12) if rank == 0 else (12, V)
    padding_idx = 2 if rank == 0 else None
    for steps in (range(2), range(2, 4)):
        if steps.start:
            local = MappedEmbedding.resume(f"{folder}/{rank}", 1)
        else:
            local = MappedEmbedding.create(f"{folder}/{rank}", stop - start, D, padding_idx=padding_idx)
            local.load_state_dict({"weight": memory.weight[start:stop]})
            whole_optimizer = RowAdamW(memory.parameters(), lr=0.1)
        table = ShardedTable(local, mesh, vocab_size=V, padding_idx=2)
        optimizer = RowAdamW(table.parameters(), lr=0.1)
        for step in steps:
            ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(step))
            for each, using, batch in ((table, optimizer, ids[rank]), (memory, whole_optimizer, ids)):
                using.zero_grad()
                each(batch).square().mean().backward()
                using.step()
        with pytest.raises(SizeError, match="only be looked up"):
            table.logits(torch.ones(1, D))
        with local.checkpoint():
            dist.barrier()
        rows = local.weight.detach().clone()
        local.close()
    return [rows, memory.weight.detach()[start:stop]]


def test_shards_in_folders_train_like_one_table_in_memory(tmp_path) -> None:
    for found, expected in on_ranks(2, train_mapped_shards, str(tmp_path)):
        torch.testing.assert_close(found, expected)


ON_TWO = ((sums_of_bags,), (trained_by_torch,), (replaced,), (refusals,), (frozen,), (by_torch,), (clamped,))
ON_THREE = (
    *((quantised_and_states,), (drawn,), (bytes_sent, False, None), (bytes_sent, True, 2)),
    *((bytes_sent_by_the_busiest, 12), (bytes_sent_by_the_busiest, 60)),
    *((on_branch, branch, unlike_batches, UNLIKE, torch.float64) for branch in ("cpu", "cuda")),
)
ON_FOUR = ((refusals_of_other_tables,), (bytes_of_replicas,))
"""What runs by default on so many ranks, which start once."""
