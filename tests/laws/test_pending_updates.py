"""Whoever reads, copies, saves or writes a row-sparse table finds the rows of the dense run at every step."""

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import covering, looped, some
from torch import Tensor, nn

import embedlayer as el
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.optim import RowwiseSecondMoment
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables import DenseTable

V, D = 40, 4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Dense(torch.optim.Optimizer):
    """The rules with one second moment a row in plain torch, for all rows at every step."""

    def __init__(self, params, *, moments: int, lr: float, weight_decay: float, eps: float = 1e-8) -> None:
        betas = {0: (0.0, 1.0), 1: (0.0, 0.999), 2: (0.9, 0.999)}[moments]
        self.names = {0: ["sum"], 1: ["exp_avg_sq"], 2: ["exp_avg", "exp_avg_sq"]}[moments]
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        (p,), (beta1, beta2), state = group["params"], group["betas"], self.state[group["params"][0]]
        first = 0.0 if len(self.names) == 1 else beta1
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros(V, D if name == "exp_avg" else 1, dtype=p.dtype) for name in self.names}
        state["step"] += 1
        t, v, g = int(state["step"]), state[self.names[-1]], p.grad
        squares = g.square().mean(1, keepdim=True)
        m = g if first == 0 else state["exp_avg"].mul_(first).add_(g, alpha=1 - first)
        v.add_(squares) if self.names == ["sum"] else v.mul_(beta2).add_(squares, alpha=1 - beta2)
        root = v.sqrt() if self.names == ["sum"] else (v / (1 - beta2**t)).sqrt()
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * m / (1 - first**t) / (root + group["eps"]))

    def __getstate__(self):
        return {**super().__getstate__(), "names": self.names}


def rowwise(first: Callable[[torch.dtype], torch.dtype | None]) -> Callable[..., el.RowAdamW]:
    def build(params, **options) -> el.RowAdamW:
        (weight,) = params
        return el.RowAdamW([weight], state=RowwiseSecondMoment(first(weight.dtype)), **options)

    return build


def dense(moments: int) -> Callable[..., Dense]:
    return lambda params, **options: Dense(params, moments=moments, **options)


RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "AdamW": (el.RowAdamW, torch.optim.AdamW),
    "a second moment a row": (rowwise(lambda dtype: dtype), dense(2)),
    "a second moment a row, bfloat16": (rowwise(lambda _: torch.bfloat16), dense(2)),
    "a second moment a row, no first": (rowwise(lambda _: None), dense(1)),
    "Adagrad": (lambda params, **options: el.RowAdagrad(params, eps=1e-8, **options), dense(0)),
}
BFLOAT16 = 2e-3  # of values that move by up to 0.2


class Run:
    """A table with its optimizer; both runs get the same steps, reads and writes."""

    def __init__(self, *, row_sparse: bool, dtype: torch.dtype, rule: str = "AdamW", **options: int) -> None:
        kind = el.RowSparseEmbedding if row_sparse else el.TokenEmbedding
        self.model = nn.Sequential(kind(V, D, padding_idx=0, dtype=dtype))
        with torch.no_grad():
            start = torch.randn(V, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.02
            self.table.weight.copy_(start)
            self.table.weight[0] = 0
        self.rule, self.kind = rule, RULES[rule][0 if row_sparse else 1]
        self.optimizer = self.kind(self.model.parameters(), **OPTIONS, **(options if row_sparse else {}))

    @property
    def table(self) -> DenseTable:
        table = self.model[0]
        assert isinstance(table, DenseTable)
        return table

    def step(self, ids: Tensor, upstream: Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(ids).backward(upstream.to(self.table.weight.dtype))
        self.optimizer.step()


def numbers(function: Callable[[Run], Any]) -> Callable[[Run], Tensor]:
    return lambda run: function(run).detach().clone()


def by_scattered_look_ups(run: Run) -> Tensor:
    order = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return torch.cat([run.model(part) for part in order.split(7)])[order.argsort()]


def in_inference_mode(run: Run) -> Tensor:
    with torch.inference_mode():
        looked_up, weight = run.model(torch.arange(V)), run.table.weight.clone()
    return torch.stack([looked_up, weight]).clone()


def swapped_in(run: Run) -> Tensor:
    """A look-up with another weight in place reads that weight and leaves the table's own alone."""
    other = torch.zeros(V, D, dtype=run.table.weight.dtype)
    looked_up = torch.func.functional_call(run.model, {"0.weight": other}, (torch.arange(1, V),))
    assert not looked_up.any()
    return run.table.weight


READS: dict[str, Callable[[Run], Tensor]] = {
    "weight": numbers(lambda run: run.table.weight),
    "weight.data": numbers(lambda run: run.table.weight.data),
    "weight[...]": numbers(lambda run: torch.stack([run.table.weight[i] for i in range(V)])),
    "parameters()": numbers(lambda run: next(run.model.parameters())),
    "get_parameter": numbers(lambda run: run.model.get_parameter("0.weight")),
    "_parameters": numbers(lambda run: run.table._parameters["weight"]),
    "param_groups": numbers(lambda run: run.optimizer.param_groups[0]["params"][0]),
    "parameters_to_vector": lambda run: nn.utils.parameters_to_vector(run.model.parameters()).detach().view(V, D),
    "state_dict": numbers(lambda run: run.model.state_dict()["0.weight"]),
    "state_dict(keep_vars=True)": numbers(lambda run: run.model.state_dict(keep_vars=True)["0.weight"]),
    "forward": numbers(lambda run: run.model(torch.arange(V))),
    "forward, part by part": by_scattered_look_ups,
    "forward in inference mode": in_inference_mode,
    "functional_call": numbers(
        lambda run: torch.func.functional_call(run.model, dict(run.model.named_parameters()), (torch.arange(V),))
    ),
    "functional_call, another weight": numbers(swapped_in),
    "rows": numbers(lambda run: torch.cat([run.table.rows(i, i + 9) for i in range(0, V, 9)])),
    "logits": numbers(lambda run: run.table.logits(torch.eye(D, dtype=run.table.weight.dtype)).T),
    "deepcopy": numbers(lambda run: copy.deepcopy(run.model)[0].weight),
    "copy": numbers(lambda run: copy.copy(run.table).weight),
    "pickle": numbers(lambda run: pickle.loads(pickle.dumps(run.model))[0].weight),
    "deepcopy of the optimizer": numbers(lambda run: copy.deepcopy(run.optimizer).param_groups[0]["params"][0]),
    "moments": lambda run: list(run.optimizer.state_dict()["state"][0].values())[1].clone(),
}


def same_parameters(run: Run) -> list[nn.Parameter]:
    return list(run.model.parameters())


@torch.no_grad()
def clamp(run: Run) -> None:
    run.table.weight.clamp_(-0.02, 0.03)


@torch.no_grad()
def fill_rows(run: Run) -> None:
    run.table.weight[5:9].fill_(0.01)


@torch.no_grad()
def assign_rows(run: Run) -> None:
    run.table.weight[[3, 11]] = 0.02


@torch.no_grad()
def shrink(run: Run) -> None:
    torch._foreach_mul_(same_parameters(run), 0.9)


def write_data(run: Run) -> None:
    run.table.weight.data.mul_(1.1)


def write_through_an_alias(run: Run) -> None:
    with el.row_sparse.pending_updates_applied(run.model):
        raw_weight(run.table.weight).mul_(0.95)


def initialise(run: Run) -> None:
    nn.init.constant_(run.table.weight, 0.01)
    with torch.no_grad():
        run.table.weight[0] = 0


@torch.no_grad()
def copy_vector(run: Run) -> None:
    vector = nn.utils.parameters_to_vector(run.model.parameters()) * 0.9
    nn.utils.vector_to_parameters(vector, run.model.parameters())


def reload(run: Run) -> None:
    run.model.load_state_dict({name: value * 0.9 for name, value in run.model.state_dict().items()})
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def go_on_as_a_deepcopy(run: Run) -> None:
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


def go_on_from_saved_state(run: Run) -> None:
    state, moments = run.model.state_dict(), run.optimizer.state_dict()
    fresh = Run(row_sparse=run.table.row_sparse, dtype=run.table.weight.dtype, rule=run.rule)
    fresh.model.load_state_dict(state)
    fresh.optimizer.load_state_dict(moments)
    run.model, run.optimizer = fresh.model, fresh.optimizer


def change_options(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = group["lr"] * 0.7 + 1e-3, 0.05
    if run.rule != "Adagrad":
        group["betas"] = (0.8, 0.99) if group["betas"][1] == 0.999 else (0.9, 0.999)


def replace(run: Run) -> None:
    """A weight under the same name, and an optimizer for it: what resizing or re-initialising code does."""
    run.table.weight = nn.Parameter(run.table.weight.detach() * 0.5)
    run.optimizer = run.kind(run.model.parameters(), **OPTIONS)


WRITES = {
    write.__name__: write
    for write in (
        *(clamp, fill_rows, assign_rows, shrink, write_data, write_through_an_alias, initialise, copy_vector),
        *(reload, go_on_as_a_deepcopy, go_on_from_saved_state, change_options, replace),
    )
}


SEQUENCES = [
    (rule, seed, dtype) for dtype in TOLERANCES for rule in RULES for seed in range(12 if rule == "AdamW" else 2)
]


@pytest.mark.parametrize(
    ("rule", "seed", "dtype"), some([case for case in covering(SEQUENCES, [(0, 1)]) if case[1] < 4], SEQUENCES)
)
def test_after_any_sequence_of_steps_reads_and_writes_the_table_is_the_dense_one(
    rule, seed, dtype, unchecked: None
) -> None:
    with kernels_disabled() if seed % 2 and rule != "AdamW" else nullcontext():
        compare(rule, seed, dtype)


def compare(rule: str, seed: int, dtype: torch.dtype) -> None:
    """Make the same random steps, reads and writes with a row-sparse table and with a dense one in float64."""
    if "bfloat16" in rule:
        dtype = torch.float32
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    reference = dtype if rule == "AdamW" else torch.float64
    runs = [Run(row_sparse=True, dtype=dtype, rule=rule), Run(row_sparse=False, dtype=reference, rule=rule)]
    tolerance = BFLOAT16 if "bfloat16" in rule else TOLERANCES[dtype]
    done: list[str] = []
    for _ in range(60):
        kind = choose.choices(("step", "read", "write"), (6, 3, 1))[0]
        if kind == "step":
            ids = torch.randint(0, V if choose.random() < 0.3 else 4, (6,), generator=generator)
            upstream = torch.randn(6, D, generator=generator, dtype=torch.float64)
            lr, weight_decay = (choose.choice((0.5, 1.0, 2.0)) * OPTIONS[key] for key in ("lr", "weight_decay"))
            for run in runs:
                if rule != "AdamW":
                    run.optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
                run.step(ids, upstream)
            done.append("step")
            continue
        names = READS if kind == "read" else WRITES
        name = choose.choice([name for name in names if name != "moments" or runs[1].optimizer.state])
        done.append(name)
        if kind == "write":
            for run in runs:
                WRITES[name](run)
            continue
        ours, dense = (READS[name](run).double() for run in runs)
        relative = 4 * torch.finfo(torch.bfloat16).eps if tolerance == BFLOAT16 else tolerance
        assert torch.allclose(ours, dense, atol=tolerance, rtol=relative if name == "moments" else 0.0), done
    ours, dense = (run.table.weight.detach() for run in runs)
    assert (ours - dense).abs().max() <= tolerance, done


def pending(**options: int) -> tuple[Run, Run]:
    """A row-sparse and a dense run after steps that left most rows of the first pending."""
    sparse, dense = (Run(row_sparse=row_sparse, dtype=torch.float64, **options) for row_sparse in (True, False))
    for run in (sparse, dense):
        run.step(torch.arange(V), torch.ones(V, D))
        for _ in range(5):
            run.step(torch.tensor([1, 2]), torch.ones(2, D))
    return sparse, dense


@looped("name", READS)
def test_each_way_of_reading_finds_current_rows(name) -> None:
    ours, dense = pending()
    assert ours.table.pending_updates.has_pending
    assert (raw_weight(ours.table.weight) - dense.table.weight).abs().max() > 1e-3
    assert (READS[name](ours) - READS[name](dense)).abs().max() <= 1e-12


@looped("name", WRITES)
def test_each_way_of_writing_acts_on_current_rows(name) -> None:
    runs = pending()
    for run in runs:
        WRITES[name](run)
        for _ in range(3):
            run.step(torch.tensor([2, 7]), torch.ones(2, D))
    ours, dense = runs
    assert (ours.table.weight - dense.table.weight).abs().max() <= 1e-12


COMPILED: dict[str, Callable[[el.TokenEmbedding, Tensor], Tensor]] = {
    "look-up": lambda table, x: table(torch.arange(V)),
    "rows": lambda table, x: table.rows(2, 19) * 1,
    "logits": lambda table, x: table.logits(x),
    "loss": lambda table, x: table.loss(x, torch.arange(D)),
}


@pytest.mark.parametrize("name", some(["look-up", "loss"], COMPILED))
def test_compiled_readers_of_a_table_find_current_rows(name, unchecked: None) -> None:
    runs = pending()
    read = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            hidden = torch.eye(D, dtype=torch.float64)
            ours, dense = read(runs[0].table, hidden), COMPILED[name](runs[1].table, hidden)
        assert torch.allclose(ours, dense, atol=1e-12, rtol=0)
        for run in runs:
            run.step(torch.tensor([3]), torch.ones(1, D))


def test_a_compiled_reader_of_all_rows_with_gradients_on_is_refused(unchecked: None) -> None:
    ours, _ = pending()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="gradients reads all rows"):
        torch.compile(ours.table.logits, fullgraph=True, backend="aot_eager")(torch.eye(D, dtype=torch.float64))


def test_looking_up_rows_applies_no_updates_of_others() -> None:
    ours, _ = pending()
    before = raw_weight(ours.table.weight).clone()
    with torch.no_grad():
        ours.model(torch.tensor([5]))
    assert (raw_weight(ours.table.weight) != before).any(1).nonzero().flatten().tolist() == [5]


def test_inside_the_block_steps_leave_nothing_pending_and_after_it_they_do_again() -> None:
    ours, dense = pending()
    alias = raw_weight(ours.table.weight)
    with el.row_sparse.pending_updates_applied(ours.model), el.row_sparse.pending_updates_applied(ours.table):
        assert torch.allclose(alias, dense.table.weight, atol=1e-12, rtol=0)
        for run in (ours, dense):
            run.step(torch.tensor([3]), torch.ones(1, D))
        assert torch.allclose(alias, dense.table.weight, atol=1e-12, rtol=0)
    for run in (ours, dense):
        run.step(torch.tensor([3]), torch.ones(1, D))
    assert not torch.allclose(alias, dense.table.weight, atol=1e-12, rtol=0)
    assert torch.allclose(ours.table.weight, dense.table.weight, atol=1e-12, rtol=0)


@pytest.mark.parametrize("every", [1, 3])
def test_apply_pending_every_leaves_memory_as_dense_adamw_does(every) -> None:
    ours, dense = pending(apply_pending_every=every)
    alias = raw_weight(ours.table.weight)
    for step in range(7, 13):
        for run in (ours, dense):
            run.step(torch.tensor([3]), torch.ones(1, D))
        current = torch.allclose(alias, dense.table.weight, atol=1e-12, rtol=0)
        assert current == (step % every == 0)
    assert copy.deepcopy(ours.optimizer).apply_pending_every == every


def test_a_write_through_an_older_tensor_while_rows_are_pending_is_refused_and_then_taken_as_it_is() -> None:
    for read in (lambda run: run.table.weight.sum(), lambda run: run.step(torch.tensor([1]), torch.ones(1, D))):
        ours, _ = pending()
        older = raw_weight(ours.table.weight)
        older.fill_(0.25)
        with pytest.raises(el.StaleRowsError, match=r"38 rows had pending updates"):
            read(ours)
        assert ours.table.weight.eq(0.25).all()


def test_a_write_through_an_older_tensor_when_nothing_is_pending_is_taken() -> None:
    runs = pending()
    for run in runs:
        older = raw_weight(run.table.weight)
        run.table.weight.sum()
        older.fill_(0.25)
        run.step(torch.tensor([2]), torch.ones(1, D))
        run.step(torch.tensor([3]), torch.ones(1, D))
    assert torch.allclose(runs[0].table.weight, runs[1].table.weight, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("rule", RULES)
def test_decay_that_outruns_the_momentum_gives_the_dense_rows(rule: str) -> None:
    runs = [Run(row_sparse=row_sparse, dtype=torch.float32, rule=rule) for row_sparse in (True, False)]
    for run in runs:
        run.optimizer.param_groups[0]["weight_decay"] = (1 - 1e-5) / OPTIONS["lr"]  # factors of 1e-300 after 60 steps
        run.step(torch.arange(V), torch.ones(V, D))
        for _ in range(60):
            run.step(torch.tensor([1, 2]), torch.ones(2, D))
    ours, dense = (run.table.weight.detach() for run in runs)
    assert (ours - dense).abs().max() <= (BFLOAT16 if "bfloat16" in rule else 1e-6)
