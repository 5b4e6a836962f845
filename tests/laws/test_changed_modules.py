"""A call computes what its module says now: after a first call, no change of the module is missed.

Modules of torch, written as separate operations, go through the same changes; each of their calls asks everything anew.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

import embedlayer as el

V, D, T = 12, 6, 5
Call = Callable[[Tensor], Tensor]


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Added(nn.Module):
    """Look-up, positions and dropout, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position, self.dropout = Scaled(V, D), nn.Embedding(T, D), nn.Dropout(1.0)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
        return self.dropout(self.table(ids) + self.position(positions))


class Head(nn.Linear):
    """A head with rows of its own, or tied: its weight is that of the table, whatever computes it."""

    def __init__(self, *tables: nn.Embedding) -> None:
        super().__init__(D, V, bias=False, device="meta" if tables else None)
        if tables:
            self.weight = None  # type: ignore[assignment]
        self.tables = tables

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.tables[0].weight if self.tables else self.weight)


class Tied(nn.Module):
    def __init__(self, table: nn.Embedding, kind: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.table, self.head = table, kind(table)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


def layer() -> el.TransformerEmbedding:
    return el.TransformerEmbedding(V, D, T, dropout=1.0, scale=2.0).eval()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "table": (lambda: el.TokenEmbedding(V, D, scale=2.0), lambda: Scaled(V, D)),
    "input": (layer, Added),
    "head": (lambda: el.OutputHead(D, V), Head),
    "tied head": (
        lambda: Tied(el.TokenEmbedding(V, D, scale=2.0), el.OutputHead),
        lambda: Tied(nn.Embedding(V, D), Head),
    ),
}
"""What is called, and the same of torch's modules."""


def weighted(module: nn.Module) -> Any:
    """Return the part with the weight of V rows."""
    return module.table if isinstance(module, Added | Tied | el.TransformerEmbedding) else module


def new_rows(rows: int = V) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(rows))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def is_of_torch(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.Linear | nn.Dropout)


def triple(module: nn.Module, arguments: object, output: Any) -> Any:
    return 3 * output if is_of_torch(module) else None


def reverse(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    return tuple(each.flip(-1) for each in arguments) if is_of_torch(module) else None


def hooked(register: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    @contextmanager
    def change(module: nn.Module) -> Iterator[Call]:
        handle = register(module)
        yield module
        handle.remove()

    return change


@contextmanager
def instance_forward(module: nn.Module) -> Iterator[Call]:
    vars(weighted(module))["forward"] = lambda x, *_, **__: torch.ones(*x.shape[: 1 + (x.dim() < 3)], D)
    yield module
    del vars(weighted(module))["forward"]


@contextmanager
def subclass_forward(module: nn.Module) -> Iterator[Call]:
    kind: Any = type(module)
    module.__class__ = type("Changed", (kind,), {"forward": lambda self, x: kind.forward(self, x) + 1})
    yield module
    module.__class__ = kind


@contextmanager
def class_forward(module: nn.Module) -> Iterator[Call]:
    with pytest.MonkeyPatch.context() as patch:
        former: Any = type(module).forward
        patch.setattr(type(module), "forward", lambda self, x: former(self, x) + 1)
        yield module


@contextmanager
def data(module: nn.Module, rows: int = V) -> Iterator[Call]:
    weighted(module).weight.data = new_rows(rows)
    yield module


@contextmanager
def parameter(module: nn.Module) -> Iterator[Call]:
    weighted(module).weight = nn.Parameter(new_rows(V + 3))
    yield module


@contextmanager
def swapped(module: nn.Module) -> Iterator[Call]:
    torch.utils.swap_tensors(weighted(module).weight, nn.Parameter(new_rows()))
    yield module


@contextmanager
def functional(module: nn.Module) -> Iterator[Call]:
    name = next(name for name, each in module.named_parameters() if each is weighted(module).weight)
    yield lambda x: torch.func.functional_call(module, {name: new_rows(V + 1)}, (x,))


@contextmanager
def parametrized(module: nn.Module) -> Iterator[Call]:
    parametrize.register_parametrization(weighted(module), "weight", Doubled())
    yield module
    parametrize.remove_parametrizations(weighted(module), "weight", leave_parametrized=False)


@contextmanager
def compiled(module: nn.Module) -> Iterator[Call]:
    seen: list[int] = []

    def backend(graph: Any, _: object) -> Any:
        seen.append(1)
        return graph.forward

    module.compile(backend=backend)
    yield module
    assert seen


@contextmanager
def in_bfloat16(module: nn.Module) -> Iterator[Call]:
    module.to(torch.bfloat16)
    yield lambda x: module(x.bfloat16() if x.is_floating_point() else x)
    module.to(torch.float32)


@contextmanager
def autocast(module: nn.Module) -> Iterator[Call]:
    with torch.autocast("cpu", torch.bfloat16):
        yield module


@contextmanager
def emptied(module: nn.Module) -> Iterator[Call]:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.to("meta").to_empty(device="cpu")
    module.load_state_dict(state)
    yield module


@contextmanager
def training(module: nn.Module) -> Iterator[Call]:
    module.train()
    yield module
    module.eval()


@contextmanager
def frozen(module: nn.Module) -> Iterator[Call]:
    module.requires_grad_(requires_grad=False)
    yield module
    module.requires_grad_(requires_grad=True)


@contextmanager
def copied(module: nn.Module) -> Iterator[Call]:
    other = copy.deepcopy(module)
    weighted(other).weight.data = new_rows()
    other.register_forward_hook(lambda *_: 5 * _[-1])
    yield other


@contextmanager
def mapped(module: nn.Module) -> Iterator[Call]:
    yield lambda x: torch.func.vmap(module)(x)


@contextmanager
def accelerated(module: nn.Module) -> Iterator[Call]:
    hooks = pytest.importorskip("accelerate.hooks")

    class Tripled(hooks.ModelHook):  # type: ignore[name-defined]
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 3 * output

    hooks.add_hook_to_module(module, Tripled())
    yield module
    hooks.remove_hook_from_module(module)


@contextmanager
def sharded(module: nn.Module) -> Iterator[Call]:
    from torch.distributed.fsdp import fully_shard

    def whole(x: Tensor) -> Tensor:
        output: Any = module(x)
        return output

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(module)
        yield whole
    finally:
        dist.destroy_process_group()


@contextmanager
def part_hooked(module: nn.Module, name: str = "dropout") -> Iterator[Call]:
    handle = getattr(module, name).register_forward_hook(lambda *_: 7 * _[-1] + 1)
    yield module
    handle.remove()


@contextmanager
def part_replaced(module: Any) -> Iterator[Call]:
    is_ours = isinstance(module, el.TransformerEmbedding)
    module.position = el.LearnedPositionalEmbedding(T, D) if is_ours else nn.Embedding(T, D)
    module.position.weight.data = new_rows(T)
    yield module


CHANGES: dict[str, Callable[[Any], Any]] = {
    "forward hook": hooked(lambda module: module.register_forward_hook(lambda *_: 3 * _[-1])),
    "forward pre-hook": hooked(lambda module: module.register_forward_pre_hook(lambda _, x: x[0].flip(-1))),
    "global forward hook": hooked(lambda _: register_module_forward_hook(triple)),
    "global forward pre-hook": hooked(lambda _: register_module_forward_pre_hook(reverse)),
    "backward hook": hooked(lambda module: module.register_full_backward_pre_hook(lambda _, grad: (3 * grad[0],))),
    "forward of the instance": instance_forward,
    "forward of a subclass": subclass_forward,
    "forward of the class": class_forward,
    "weight.data": data,
    "weight.data with more rows": lambda module: data(module, V + 2),
    "another parameter": parameter,
    "swap_tensors": swapped,
    "functional_call": functional,
    "parametrization": parametrized,
    "module.compile": compiled,
    "to(bfloat16)": in_bfloat16,
    "autocast": autocast,
    "to_empty": emptied,
    "train": training,
    "requires_grad_": frozen,
    "deepcopy": copied,
    "vmap": mapped,
    "hooks of accelerate": accelerated,
    "fully_shard": sharded,
    "hook on dropout": part_hooked,
    "hook on the position": lambda module: part_hooked(module, "position"),
    "hook on the table": lambda module: part_hooked(module, "table"),
    "another position": part_replaced,
}
OF_PARTS = {"hook on dropout", "hook on the position", "hook on the table", "another position"}


def result(call: Call, module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Return the output of a call, and the gradients of its parameters."""
    output = call(x)
    grads: list[Tensor | None] = []
    if output.requires_grad:
        module.zero_grad()
        output.float().square().sum().backward()
        grads = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
    return [getattr(each, "full_tensor", lambda each=each: each)() for each in (output.detach(), *grads)]


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, each) for kind in KINDS for each in CHANGES if kind == "input" or each not in OF_PARTS]
)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_no_change_is_missed_after_a_first_call(kind: str, change: str) -> None:
    ours, theirs = (make() for make in KINDS[kind])
    weights = [torch.randn_like(each) for each in theirs.parameters()]
    x = torch.randint(V, (2, T)) if kind in ("table", "input") else torch.randn(2, T, D)
    found = []
    for module in (ours, theirs):
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.data = weight.clone()
        for _ in range(3):  # what is decided once is decided now
            before = result(module, module, x)
            with torch.no_grad():
                module(x)
        with CHANGES[change](module) as call:
            during = result(call, module, x)
            with torch.no_grad():
                during += [call(x).detach()]
        after = result(module, module, x) if change != "fully_shard" else []
        found.append((before, during, after))
    for moment, our, their in zip(("before", "during", "after"), *found, strict=True):
        torch.testing.assert_close(our, their, msg=lambda text, moment=moment: f"{moment} the change: {text}")
