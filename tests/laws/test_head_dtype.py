"""With `head_dtype` every head is as exact as over float32 rows of the same numbers, and copies no table for it.

The oracle is the same head in float64, over the same stored numbers. Chunks and blocks are made small, so that each
batch has several of both.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import UsesHead
from covering import cases, covering, looped, some
from gguf_models import blocks
from kernel_paths import bfloat16_instructions, cpu_taken_for_cuda, without_numba
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE, TableOfAUser
from small_blocks import small_blocks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import embedlayer as el
from embedlayer.losses import ForwardKL, JensenShannon, ReverseKL, divergence
from embedlayer.tables.gguf_rows import GGUFEmbedding

KINDS = (ForwardKL(), ReverseKL(), JensenShannon(0.3))
WIDE = torch.float32
NARROW = (torch.bfloat16, torch.float16)
DTYPES = (*NARROW, torch.float32)


class Adapted(nn.Module):
    """A table on which PEFT has put adapters, and a head that is tied to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = TABLES[name]()
        self.head = el.OutputHead(self.table, bias=True).follow(self)


def adapted(kind: str, **options: object) -> Adapted:
    import peft

    module = Adapted("dense")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT holds of models that are not transformers'
        with torch.no_grad():  # PEFT 0.18 keeps the graph of the rows that it copies, and such a module is not copied
            peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["table"], **options), module)
    return module


def gguf(block_type: str = "Q8_0") -> UsesHead:
    table = GGUFEmbedding(VOCAB_SIZE, 32, block_type, padding_idx=0)
    table.packed.copy_(torch.from_numpy(blocks(block_type, VOCAB_SIZE, 32)))
    return UsesHead(el.OutputHead(table), table)


def tied(name: str) -> UsesHead:
    table = TABLES[name]()
    return UsesHead(el.OutputHead(table, bias=name == "int8", logit_scale=0.7 if name == "dense" else 1.0), table)


def draft(module: Any) -> UsesHead:
    return UsesHead(el.heads.DraftHead(module.head, [7, 3, 48, 0, 21]), module)


def with_transform() -> UsesHead:
    table = TABLES["dense"]()
    dense = nn.Linear(EMBED_DIM, EMBED_DIM)
    return UsesHead(el.heads.PredictionHead(el.OutputHead(table), dense=dense, activation="gelu"), table)


HEADS: dict[str, Callable[[], Any]] = {
    **{name: lambda table=table: tied(table) for name, table in TIED_HEADS.items()},
    **{name: lambda make=make: UsesHead(make()) for name, make in UNTIED_HEADS.items()},
    "with a transform": with_transform,
    "GGUF": gguf,
    "LoRA": lambda: adapted("LoraConfig", r=3, init_lora_weights=False),
    "trained tokens": lambda: adapted("TrainableTokensConfig", token_indices=[3, 48]),
    "draft": lambda: draft(tied("dense")),
    "draft, untied": lambda: draft(UsesHead(UNTIED_HEADS["untied, bias, softcap"]())),
    "draft over int4": lambda: draft(tied("int4")),
    "draft over GGUF": lambda: draft(gguf()),
    "draft over factorised": lambda: draft(tied("factorised")),
    "draft over delta": lambda: draft(tied("delta")),
    "draft over LoRA": lambda: draft(adapted("LoraConfig", r=3, init_lora_weights=False)),
}
PATHS = ("kernels", "torch operators", "no instructions")
FEW = ["tied to dense, spare rows", "tied to factorised", "tied to int4, groups", "tied to stored, FP8"]
FEW += ["tied to delta over int8", "tied to of a user", "untied, bias, softcap", "with a transform", "GGUF"]
FEW += ["LoRA", "trained tokens", "draft", "draft over GGUF"]
"""One head for each way to its rows: `--all` adds those that differ from one of these in their numbers alone."""
every_head = looped("name", some(FEW, HEADS))


def over_heads(names: str, *axes: tuple[Any, ...], pairs: tuple[tuple[int, ...], ...] = ()) -> Callable[..., Any]:
    """Run a law over heads and other axes; without `--all` over the few heads, and a covering part."""
    return looped(names, some(covering(product(FEW, *axes), pairs), product(HEADS, *axes)))


@pytest.fixture
def kinds(pytestconfig: pytest.Config) -> Callable[[str], tuple[Any, ...]]:
    """One divergence for a head, in turn over the heads; all with `--all`."""
    return lambda name: KINDS if pytestconfig.getoption("--all") else (KINDS[list(HEADS).index(name) % len(KINDS)],)


MATRICES = ["tied to dense", "tied to dense, spare rows", "tied to factorised", *UNTIED_HEADS]
"""Heads whose rows are a matrix that is trained."""


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    sizes = {"tokens": 6, "rows": 20, "table_rows": 12, "numbers": 6 * EMBED_DIM}
    with small_blocks(converted_rows=12, **sizes), small_blocks(device="cuda", converted_rows=12):
        yield


@contextmanager
def computed_by(path: str) -> Iterator[None]:
    """Compute by compiled kernels, by torch operators alone, or by kernels on a CPU without bfloat16 instructions."""
    with ExitStack() as stack:
        if path == "torch operators":
            stack.enter_context(without_numba())
        stack.enter_context(bfloat16_instructions(path != "no instructions"))
        yield


def made(name: str, dtype: torch.dtype, head_dtype: torch.dtype | None = WIDE) -> Any:
    """A head whose rows have a dtype; a transform before it stays in float32."""
    module = HEADS[name]()
    for part in module.modules():
        if type(part) is not nn.Linear:
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for key, buffer in part.named_buffers(recurse=False):
                if buffer.is_floating_point() and key != "row_scale":
                    setattr(part, key, buffer.to(dtype))
    output(module).head_dtype = head_dtype
    return module


def output(module: Any) -> el.OutputHead:
    """The part of a head that has `head_dtype`."""
    head = module.head
    while not isinstance(head, el.OutputHead):
        head = head.head if isinstance(head, el.heads.DraftHead) else head.output
    return head


def converted(module: Any, dtype: torch.dtype) -> Any:
    """The same head over the same stored numbers in a dtype, without the option."""
    other = copy.deepcopy(module).to(dtype)
    output(other).head_dtype = None
    table = getattr(module, "table", None)
    if isinstance(table, TableOfAUser):  # its own code rounds the rows that it returns
        with torch.no_grad():
            other.table.weight[:VOCAB_SIZE] = table.rows(0, VOCAB_SIZE)
            other.table.shared.zero_()
    return other


def width_of(module: Any) -> int:
    head = output(module)
    return EMBED_DIM if isinstance(module.head, el.heads.PredictionHead) else head.in_features


def batch(module: Any, dtype: torch.dtype, tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of a student and a teacher with logits up to 50, or what a soft cap lets through, and targets."""
    exact = converted(module, torch.float64).head
    student = torch.randn(tokens, width_of(module))
    teacher = student + 0.1 * torch.randn_like(student)
    with torch.no_grad():
        largest = exact(student.double()).abs().amax().float()
    ids = torch.tensor(getattr(module.head, "token_ids", range(VOCAB_SIZE)))
    targets = ids[torch.randint(0, len(ids), (tokens,))]
    targets[2] = -100
    return ((student * 50 / largest).to(dtype), (teacher * 50 / largest).to(dtype), targets)


def outputs(
    head: Any, hidden: Tensor, teacher: Tensor, targets: Tensor, kinds: tuple[Any, ...] = KINDS
) -> dict[str, Tensor]:
    """Nats of each token, by the fused functions and by all logits."""
    found = head.token_statistics(hidden, targets, impl="chunked")
    student, other = head.uncomputed_logits(hidden, impl="chunked"), head.uncomputed_logits(teacher)
    kl = {f"divergence {kind}": divergence(student, other, kind, reduction="none") for kind in kinds}
    few = F.log_softmax(head(hidden).float(), dim=-1) if hidden.dtype != torch.float64 else head(hidden).log_softmax(-1)
    return {"log-probs": found.log_probs, "entropy": found.entropy, "logits": few, **kl}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: (value.double() - exact[name]).abs().amax().item() for name, value in found.items()}


@over_heads("name, hidden_dtype, dtype, path", DTYPES, DTYPES, PATHS, pairs=((1, 2), (2, 3)))
def test_outputs_are_as_exact_as_over_float32_rows(name, hidden_dtype, dtype, path, kinds) -> None:
    module = made(name, dtype)
    hidden_dtype = torch.float32 if name == "with a transform" else hidden_dtype
    hidden, teacher, targets = batch(module, hidden_dtype)
    with torch.no_grad(), computed_by(path):
        wide = converted(module, torch.float64)
        if name == "with a transform":  # it is computed in its own dtype, and compared from its result on
            hidden, teacher = (module.head.transform(each) for each in (hidden, teacher))
            module, wide = (UsesHead(output(each), each.table) for each in (module, wide))
        exact = outputs(wide.head, hidden.double(), teacher.double(), targets, kinds(name))
        found = errors(outputs(module.head, hidden, teacher, targets, kinds(name)), exact)
        over_float32 = outputs(converted(module, WIDE).head, hidden.float(), teacher.float(), targets, kinds(name))
        assert module.head(hidden).dtype == WIDE
    for key, error in found.items():
        bound = 1e-4 if key.startswith("divergence") else 2e-5
        assert error <= min(bound, 1.5 * errors(over_float32, exact)[key] + 6e-6), key


def half_steps(found: Tensor, exact: Tensor) -> float:
    """The largest error in units of what rounding to the dtype allows, besides a millionth of the largest number."""
    step = torch.finfo(found.dtype).eps / 2
    allowed = exact.abs().clamp(min=torch.finfo(found.dtype).smallest_normal) * step + 2e-6 * exact.abs().amax()
    return ((found.double() - exact).abs() / allowed).amax().item()


@looped("name, hidden_dtype, dtype, path, objective", MATRICES, DTYPES, DTYPES, PATHS, ("loss", "statistics", "logits"))
def test_gradients_are_rounded_once(name, hidden_dtype, dtype, path, objective) -> None:
    module = made(name, dtype)
    hidden, _, targets = batch(module, hidden_dtype)
    hidden = hidden / 5

    def gradients(module: Any, hidden: Tensor) -> list[Tensor]:
        hidden = hidden.clone().requires_grad_()
        if objective == "loss":
            value = module.head.loss(hidden, targets, impl="chunked")
        elif objective == "statistics":
            value = sum(part.mean() for part in module.head.token_statistics(hidden, targets, impl="chunked")[:2])
        else:
            value = module.head(hidden).logsumexp(-1).mean()
        leaves = [hidden, *(each for each in module.parameters() if each.requires_grad)]
        return list(torch.autograd.grad(value, leaves, allow_unused=True))

    with computed_by(path):
        found = gradients(module, hidden)
    exact = gradients(converted(module, torch.float64), hidden.double())
    for ours, theirs, leaf in zip(found, exact, [hidden, *module.parameters()], strict=True):
        assert ours.dtype == leaf.dtype
        assert half_steps(ours, theirs) <= 1.05


@every_head
def test_without_it_other_dtypes_are_one_error_and_it_may_be_named(unchecked: None, name) -> None:
    module = made(name, torch.bfloat16, None)
    hidden, _, targets = batch(module, torch.float32)
    head = module.head
    calls: list[Callable[..., Tensor]] = [
        lambda **options: head.loss(hidden, targets, **options),
        lambda **options: head.loss(hidden, targets, impl="chunked", **options),
        lambda **options: head.token_log_probs(hidden, targets, **options),
        lambda **options: head.token_statistics(hidden, targets, **options).log_probs,
        lambda **options: head.uncomputed_logits(hidden, **options),
    ]
    others = [lambda: head(hidden)]
    if not isinstance(head, el.heads.DraftHead):
        others += [lambda: head.multi_token_loss([hidden[None]], targets[None])]
    for call in (*calls, *others):
        with pytest.raises(el.ShapeError, match=r"float32 and the rows torch.bfloat16: pass head_dtype=torch.float32"):
            call()
    for call in calls:
        assert call(head_dtype=WIDE).dtype == call(head_dtype="float32").dtype == WIDE
    with pytest.raises(el.SizeError):
        head.loss(hidden, targets, head_dtype="float16")


@every_head
def test_autocast_has_no_effect(name, kinds) -> None:
    module = made(name, torch.bfloat16)
    hidden, teacher, targets = batch(module, torch.float32)
    if name == "with a transform":
        module = UsesHead(output(module), module.table)
    with torch.no_grad():
        expected = outputs(module.head, hidden, teacher, targets, kinds(name))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(
                outputs(module.head, hidden, teacher, targets, kinds(name)), expected, rtol=0, atol=0
            )


class Allocated(TorchDispatchMode):
    """Record the bytes of the storage that each operator allocates, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                size = x.untyped_storage().nbytes()
                self.largest[func.__name__] = max(size, self.largest.get(func.__name__, 0))
        return result


@over_heads("name, hidden_dtype, dtype", DTYPES, NARROW)
def test_no_table_is_copied(name, hidden_dtype, dtype, kinds) -> None:
    module = made(name, dtype)
    hidden_dtype = torch.float32 if name == "with a transform" else hidden_dtype
    hidden, teacher, targets = batch(module, hidden_dtype, tokens=4)
    hidden.requires_grad_()
    for each in module.parameters():
        each.requires_grad_(False)
    with Allocated() as allocated:
        outputs(module.head, hidden, teacher, targets, kinds(name))
        module.head.loss(hidden, targets, impl="chunked").backward()
        module.head(hidden).sum().backward()
    copied = VOCAB_SIZE * (8 if "factorised" in name else output(module).in_features) * 4
    assert {name: size for name, size in allocated.largest.items() if size >= copied} == {}


@over_heads("name, dtype", NARROW)
def test_without_it_kernels_change_last_bits_alone(name, dtype, kinds, pytestconfig) -> None:
    module = made(name, dtype, None)
    if name == "with a transform":
        module = UsesHead(output(module), module.table)
    hidden, teacher, targets = batch(module, dtype)
    with torch.no_grad():
        for path in PATHS if pytestconfig.getoption("--all") else PATHS[:2]:
            with computed_by(path):
                found = outputs(module.head, hidden, teacher, targets, kinds(name))
                found["loss"] = module.head.loss(hidden, targets, impl="chunked")
                del found["logits"]
            if path == PATHS[0]:
                expected = found
            if path != "no instructions":  # there the products of another library are rounded
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@cases("name, hidden_dtype, dtype, triton", ["tied to dense", *UNTIED_HEADS], DTYPES, DTYPES, (False, True))
def test_the_branch_for_cuda_is_as_exact(name, hidden_dtype, dtype, triton) -> None:
    if triton:
        pytest.importorskip("triton")
    module = made(name, dtype)
    hidden, teacher, targets = batch(module, hidden_dtype)
    wide = converted(module, torch.float64)

    def results(module: Any, hidden: Tensor, teacher: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        hidden = hidden.clone().requires_grad_()
        loss = module.head.loss(hidden, targets, impl="chunked", drop_ignored=False)
        gradients = torch.autograd.grad(loss, [hidden, output(module).weight])
        with torch.no_grad():
            return {"loss": loss, **outputs(module.head, hidden, teacher, targets)}, gradients

    exact, exact_gradients = results(wide, hidden.double(), teacher.double())
    with cpu_taken_for_cuda(triton=triton):
        found, gradients = results(module, hidden, teacher)
    assert max(errors(found, exact).values()) <= 3e-5
    for ours, theirs in zip(gradients, exact_gradients, strict=True):
        narrow = dtype == hidden_dtype != WIDE
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error <= (2 if narrow else 0.7) * torch.finfo(ours.dtype).eps + 2e-6


def test_gradients_have_the_dtype_that_the_rows_state() -> None:
    weight = nn.Parameter(torch.randn(VOCAB_SIZE, EMBED_DIM).bfloat16())
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("torch before 2.13 has no grad_dtype")
    weight.grad_dtype = WIDE
    hidden, targets = torch.randn(11, EMBED_DIM), torch.randint(0, VOCAB_SIZE, (11,))
    exact = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, targets).backward()
    el.linear_cross_entropy(hidden, weight, targets, head_dtype=WIDE, impl="chunked").backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_and_transforms_are_those_of_float32_rows(reduction) -> None:
    weight, hidden = torch.randn(VOCAB_SIZE, EMBED_DIM).bfloat16(), torch.randn(5, EMBED_DIM)
    targets = torch.randint(0, VOCAB_SIZE, (5,))

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return el.linear_cross_entropy(hidden, weight, targets, head_dtype=WIDE, reduction=reduction).sum()

    def derivatives(weight: Tensor) -> list[Tensor]:
        twice = torch.autograd.functional.hessian(lambda x: value(x, weight), hidden)
        return [twice, torch.func.grad(value)(hidden, weight), torch.func.hessian(value)(hidden, weight)]

    torch.testing.assert_close(derivatives(weight), derivatives(weight.float()), rtol=1e-4, atol=1e-6)


COMPILED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "loss": lambda head, x, targets: head.loss(x, targets, impl="chunked"),
    "log-probs": lambda head, x, targets: head.token_log_probs(x, targets, impl="chunked"),
    "logits": lambda head, x, targets: head(x),
}


@pytest.mark.parametrize(
    ("hidden_dtype", "name"),
    some([(torch.float32, "loss"), (torch.bfloat16, "logits")], product((torch.float32, torch.bfloat16), COMPILED)),
)
def test_compiled_graphs_convert_no_table(unchecked: None, hidden_dtype, name) -> None:
    module = made("tied to dense", torch.bfloat16)
    hidden, _, targets = batch(module, hidden_dtype)
    shapes: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def seen(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            shapes.extend(
                (x.dtype, tuple(x.shape)) for n in graph.graph.nodes if isinstance(x := n.meta.get("val"), Tensor)
            )
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=seen)(graph, inputs)

    def results(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        states = hidden.clone().requires_grad_()
        value = function(states)
        return [value.detach(), *torch.autograd.grad(value.sum(), [states, module.table.weight])]

    def function(x: Tensor) -> Tensor:
        return COMPILED[name](module.head, x, targets)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(results(compiled), results(function), rtol=1e-2, atol=1e-4)
    assert (torch.bfloat16, (VOCAB_SIZE, EMBED_DIM)) in shapes
    assert not [shape for shape in shapes if shape == (WIDE, (VOCAB_SIZE, EMBED_DIM))]
