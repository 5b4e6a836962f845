"""The monitor's numbers are those computed from all weights and all logits before and after a step."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import cases
from kinds import EMBED_DIM, LOOKUP_TABLES, TABLES, VOCAB_SIZE
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer import CheckpointError, ShapeError, SizeError, TokenIdError
from embedlayer.distributed import shard_table
from embedlayer.training import EmbeddingMonitor, MonitorReport

NEW = [7, 48, 49]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "RowAdamW": lambda parameters: el.RowAdamW(parameters, lr=0.01),
}


class Ends(nn.Module):
    """A table of any kind and a head: the smallest model with both ends."""

    def __init__(self, table: el.LookupTable, head: el.OutputHead) -> None:
        super().__init__()
        self.table, self.head, self.gain = table, head, nn.Parameter(torch.ones(EMBED_DIM))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss((self.gain * self.table(ids)).tanh(), targets)

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head((self.gain * self.table(ids)).tanh())


def ends(name: str) -> Ends:
    table = LOOKUP_TABLES[name]()
    tied = name in TABLES and name != "row-sparse"
    return Ends(table, el.OutputHead(table) if tied else el.OutputHead(EMBED_DIM, VOCAB_SIZE))


def batches(count: int, size=(2, 10)) -> list[tuple[Tensor, Tensor]]:
    """Batches in which small IDs are frequent, with ignored targets; some tokens occur as targets alone."""
    torch.manual_seed(3)
    ids = [(torch.rand(size).pow(2) * 40).long() for _ in range(count)]
    targets = [(torch.rand(size).pow(2) * VOCAB_SIZE).long() for _ in range(count)]
    for each in targets:
        each[:, ::5] = -100
    return list(zip(ids, targets, strict=True))


def by_group(ids: Tensor, values: Tensor, counts: Tensor) -> list[float | None]:
    """Means of values of tokens: of tokens without a count, of ten deciles, and of new tokens."""
    groups: list[list[float]] = [[] for _ in range(12)]
    seen = counts[counts > 0]
    for token, value in zip(ids.tolist(), values.tolist(), strict=True):
        decile = 0 if not counts[token] else 1 + 10 * int((seen < counts[token]).sum()) // len(seen)
        groups[decile].append(value)
        if token in NEW:
            groups[-1].append(value)
    return [sum(group) / len(group) if group else None for group in groups]


def by_definition(
    step: int, table: el.LookupTable, before: Tensor, after: Tensor, inputs: list[Tensor], last: list, logits: list
) -> dict[str, object]:
    """What a report says, from all rows before and after the step, and from all logits of its batches."""
    counts = torch.bincount(torch.cat([ids.flatten() for ids in inputs]), minlength=VOCAB_SIZE)
    rows = torch.cat([ids.flatten() for ids, _ in last]).unique()
    rows = rows[rows != (-1 if table.padding_idx is None else table.padding_idx)]
    norms, changes = before[rows].norm(dim=-1), (after - before)[rows].norm(dim=-1)
    z = torch.cat([each.double().flatten(0, -2) for each in logits])
    targets = torch.cat([each.flatten() for _, each in last])
    losses = F.cross_entropy(z, targets, reduction="none", ignore_index=-100)[targets != -100]
    z, targets = z[targets != -100], targets[targets != -100]
    of_norms, of_losses = by_group(rows, norms, counts), by_group(targets, losses, counts)
    of_ratios = by_group(rows, changes / norms, counts)
    return {
        "step": step,
        "never_seen": float((counts == 0).double().mean()),
        "norms": of_norms[1:-1],
        "update_ratios": of_ratios[1:-1],
        "losses": of_losses[1:-1],
        "loss_never_seen": of_losses[0],
        "new_norm": of_norms[-1],
        "new_update_ratio": of_ratios[-1],
        "new_loss": of_losses[-1],
        "rows_not_finite": 0,
        "log_z": float(z.logsumexp(-1).mean()),
        "largest_logit": float(z.max()),
    }


def require_close(report: MonitorReport | None, expected: dict[str, object]) -> None:
    assert report is not None
    for name, value in expected.items():
        found = getattr(report, name)
        for one, other in zip(*([each if isinstance(each, list) else [each] for each in (found, value)]), strict=True):
            assert (one is None) == (other is None), name
            assert one is None or one == pytest.approx(other, rel=1e-4, abs=1e-6), name


def all_rows(table: el.LookupTable) -> Tensor:
    with torch.no_grad():
        return table.rows(0, table.vocab_size).double().clone()


@cases("name, optimizer", LOOKUP_TABLES, OPTIMIZERS)
def test_a_report_has_the_numbers_of_all_weights_and_all_logits(name, optimizer) -> None:
    torch.manual_seed(1)
    model = ends(name)
    stepped = OPTIMIZERS[optimizer if name != "row-sparse" else "RowAdamW"](
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    monitor, inputs = EmbeddingMonitor(model, stepped, every=2, new_tokens=NEW), []
    for number, (ids, targets) in enumerate(batches(4), 1):
        before = all_rows(model.table)
        logits = model.logits(ids)
        with monitor.step(ids):
            model(ids, targets).backward()
            stepped.step()
            stepped.zero_grad()
        inputs.append(ids)
        if number % 2:
            assert monitor.report is None
        else:
            after = all_rows(model.table)
            expected = by_definition(number, model.table, before, after, inputs, [(ids, targets)], [logits])
            require_close(monitor.report, expected)
            has_rows = any(parameter.requires_grad for parameter in model.table.parameters()) and name != "of a user"
            assert monitor.report.gradients_not_finite == (0 if has_rows else None)


@pytest.mark.parametrize("name", ["dense", "row-sparse", "mapped, trained"])
def test_training_is_the_same_bits_with_a_monitor(name) -> None:
    results = []
    for every in (None, 1, 3):
        torch.manual_seed(1)
        model = ends(name)
        optimizer = el.RowAdamW(model.parameters(), lr=0.01)
        monitor = None if every is None else EmbeddingMonitor(model, optimizer, every=every)
        for ids, targets in batches(6):
            loss = model(ids, targets)
            loss.backward()
            if monitor is None:
                optimizer.step()
            else:
                with monitor.step(ids):
                    optimizer.step()
            optimizer.zero_grad()
        results.append([all_rows(model.table), model.head.weight.detach().clone()])
    assert all(torch.equal(one, other) for result in results[1:] for one, other in zip(results[0], result, strict=True))


def test_accumulated_batches_are_one_step() -> None:
    torch.manual_seed(1)
    model = ends("dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, parts = EmbeddingMonitor(model, optimizer, every=1, new_tokens=NEW), batches(2)
    before = all_rows(model.table)
    logits = [model.logits(ids) for ids, _ in parts]
    with monitor.step():
        for ids, targets in parts:
            monitor.count(ids)
            model(ids, targets).backward()
        optimizer.step()
    inputs = [ids for ids, _ in parts]
    require_close(monitor.report, by_definition(1, model.table, before, all_rows(model.table), inputs, parts, logits))


def test_a_row_that_is_not_finite_is_named_also_if_the_batch_lacks_it() -> None:
    tokenizer = el.train_tokenizer("the cat sat", "byte")
    model = Ends(table := el.TokenEmbedding(257, EMBED_DIM), el.OutputHead(table))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = EmbeddingMonitor(model, optimizer, every=1, tokenizer=tokenizer)
    with torch.no_grad():
        table.weight[ord("z")] = torch.nan
    ids = torch.tensor([[97, 98, 99]])
    with monitor.step(ids):
        model(ids, ids + 1).backward()
        optimizer.step()
    assert monitor.report.tokens_not_finite == [ord("z")]
    assert monitor.report.tokens_of_gradients == [97, 98, 99]
    assert math.isnan(monitor.report.log_z)
    scalars = monitor.scalars()
    assert scalars["embedding/rows_not_finite"] == 1
    assert scalars["embedding/rows_not_finite/tokens"] == "'z'"


@pytest.mark.parametrize("name", ["dense", "row-sparse", "factorised", "delta", "mapped, trained"])
def test_rows_whose_gradient_is_not_finite_are_named(name) -> None:
    model = ends(name)
    model.head = el.OutputHead(EMBED_DIM, VOCAB_SIZE)
    optimizer = el.RowAdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    monitor = EmbeddingMonitor(model, optimizer, every=1)
    ids = torch.tensor([[7, 3, 48]])
    with monitor.step(ids):
        vectors = model.table(ids)
        vectors.register_hook(lambda grad: grad.index_fill(1, torch.tensor([0]), torch.inf))
        model.head.loss(vectors, ids).backward()
    assert monitor.report.tokens_of_gradients == [7]
    assert monitor.report.update_ratios == [0.0 if each == 0 else None for each in monitor.report.update_ratios]


def test_at_most_eight_tokens_are_listed() -> None:
    model = ends("dense, plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = EmbeddingMonitor(model, optimizer, every=1)
    with torch.no_grad():
        model.table.weight.fill_(torch.inf)
    ids = torch.arange(20)
    with monitor.step(ids):
        model(ids, ids).backward()
    assert monitor.report.rows_not_finite == VOCAB_SIZE
    assert monitor.report.tokens_not_finite == list(range(8))


def test_a_step_that_the_optimizer_skips_is_reported_without_a_change() -> None:
    model = ends("dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = EmbeddingMonitor(model, optimizer, every=1)
    ids, targets = batches(1)[0]
    with monitor.step(ids):
        model(ids, targets).backward()
    assert {ratio for ratio in monitor.report.update_ratios if ratio is not None} == {0.0}
    assert monitor.report.log_z is not None


@pytest.mark.parametrize("is_zeroed_inside", [False, True])
def test_gradients_of_a_step_that_a_scaler_skips_are_reported_or_not_known(is_zeroed_inside) -> None:
    model = ends("dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, scaler = EmbeddingMonitor(model, optimizer, every=1), torch.amp.GradScaler("cpu")
    ids, targets = batches(1)[0]
    with monitor.step(ids):
        scaler.scale(model(ids, targets) * torch.inf).backward()
        scaler.step(optimizer)
        if is_zeroed_inside:
            optimizer.zero_grad()
    looked_up = ids[ids != model.table.padding_idx].unique().tolist()
    assert monitor.report.gradients_not_finite == (None if is_zeroed_inside else len(looked_up))
    assert monitor.report.tokens_of_gradients == ([] if is_zeroed_inside else looked_up[:8])


def test_steps_without_a_loss_of_ours_report_rows_alone() -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, 8)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    monitor = EmbeddingMonitor(table, optimizer, every=1)
    with monitor.step(ids := torch.arange(5)):
        table(ids).square().sum().backward()
        optimizer.step()
    assert monitor.report.log_z is monitor.report.largest_logit is monitor.report.logit_std is None
    assert monitor.report.losses == [None] * 10
    assert any(monitor.report.update_ratios)
    assert "log_z" not in monitor.report.fields()


def test_counts_and_new_tokens_follow_an_edit_of_the_vocabulary() -> None:
    tokenizer = el.train_tokenizer("the cat sat", "word")
    cat, sat = tokenizer.encode("cat sat").ids
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), EMBED_DIM)
    model, ids = Ends(table, el.OutputHead(table)), torch.tensor([cat, sat, sat])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = EmbeddingMonitor(model, optimizer, every=1, new_tokens=[cat, sat])
    with monitor.step(ids):
        pass
    receipt = el.vocab.edit_vocabulary(model, remove=["cat"], add=["dog"], tokenizer=tokenizer, optimizer=optimizer)
    monitor.move_counts(receipt.new_ids)
    assert receipt.tokenizer is not None
    dog, sat = receipt.tokenizer.encode("dog sat").ids
    assert monitor.counts()[[dog, sat]].tolist() == [0, 2]
    assert monitor.new_tokens.tolist() == [sat]


def test_ids_outside_the_table_do_not_count(unchecked) -> None:
    model = ends("dense")
    monitor = EmbeddingMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    with monitor.step(torch.tensor([1, -100, VOCAB_SIZE])):
        pass
    assert monitor.counts().nonzero().tolist() == [[1]]


def test_what_cannot_be_watched_is_refused(unchecked) -> None:
    model = ends("dense")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SizeError):
        EmbeddingMonitor(model, optimizer, every=0)
    with pytest.raises(SizeError):
        EmbeddingMonitor(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(TokenIdError):
        EmbeddingMonitor(model, optimizer, new_tokens=[50])
    with pytest.raises(SizeError):
        EmbeddingMonitor(nn.Linear(2, 2), optimizer)
    monitor = EmbeddingMonitor(model, optimizer, every=1)
    with pytest.raises(ShapeError), monitor.step(torch.rand(2)):
        pass
    with pytest.raises(CheckpointError):
        monitor.load_counts(torch.zeros(7, dtype=torch.int64), 3)
    DeepSpeedZeroOptimizer = type("DeepSpeedZeroOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(SizeError):
        EmbeddingMonitor(model, DeepSpeedZeroOptimizer(model.parameters(), lr=0.1))
    model.table = el.TokenEmbedding(VOCAB_SIZE + 1, EMBED_DIM)
    with pytest.raises(SizeError), monitor.step(torch.arange(3)):
        pass


def watched(kind: str, ranks: int) -> dict[str, object]:
    """The report of the second step of a rank, of a model whose table is sharded or replicated; and all counts."""
    torch.manual_seed(1)
    model = ends("dense, plain")
    parallel: nn.Module = model
    rank, mesh = (dist.get_rank(), init_device_mesh("cpu", (ranks,))) if ranks > 1 else (0, None)
    if kind == "sharded":
        model.table = shard_table(model.table, mesh)
        model.head = el.OutputHead(model.table)
        parallel = el.distributed.distributed_data_parallel(model)
    elif kind == "replicated":
        parallel = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = EmbeddingMonitor(model, optimizer, every=2, new_tokens=NEW)
    for ids, targets in batches(2, (4, 10)):
        of_rank = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        with monitor.step(ids[of_rank]):
            parallel(ids[of_rank], targets[of_rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.report is not None
    return {**vars(monitor.report), "counts": monitor.counts().tolist()}


@pytest.mark.parametrize("kind", ["sharded", "replicated", "fsdp"])
def test_ranks_report_what_one_process_does(kind) -> None:
    alone = watched("alone", 1)
    for report in on_ranks(2, watched, kind, 2):
        for name, value in report.items():
            if name == "logit_std":  # of 16 tokens of each rank
                continue
            values, expected = [x if isinstance(x, list) else [x] for x in (value, alone[name])]
            for one, other in zip(values, expected, strict=True):
                assert one == (None if other is None else pytest.approx(other, rel=1e-4, abs=1e-6)), name


def test_the_host_waits_for_the_device_in_steps_that_are_read_alone() -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM, device="meta")
    monitor = EmbeddingMonitor(table, torch.optim.SGD(table.parameters(), lr=0.1), every=2)
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    with OperatorCounter() as count:
        with monitor.step(ids):
            pass
        assert count.waits == []
        assert len(count.launches) <= 7, count.by_line()
        with monitor.step(ids):
            pass
        assert count.waits


def columns_are_refused() -> None:
    mesh, table = init_device_mesh("cpu", (2,)), el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    table.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(SizeError):
        EmbeddingMonitor(table, torch.optim.SGD(table.parameters(), lr=0.5))


def test_a_table_that_is_sharded_by_columns_is_refused() -> None:
    on_ranks(2, columns_are_refused)
