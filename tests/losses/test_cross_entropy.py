"""The cross entropy of an LM head is that of torch on all logits, on every path; its refusals and compiled graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import cases, some
from kernel_paths import cpu_taken_for_cuda, running_on, without_numba
from small_blocks import small_blocks
from torch import Tensor

from embedlayer import ShapeError, SizeError, TokenIdError, linear_cross_entropy

V, D = 23, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"bias": True},
    "scale and softcap": {"logit_scale": 0.5, "softcap": 2.0},
    "smoothing and z": {"label_smoothing": 0.1, "z_loss": 0.1},
    "padding": {"padding_idx": 4},
    "padding masked": {"padding_idx": 4, "mask_padding": True},
    "spare rows": {"vocab_size": 20},
    "all": {
        "bias": True,
        "softcap": 5.0,
        "logit_scale": 1.5,
        "temperature": 0.7,
        "label_smoothing": 0.2,
        "z_loss": 0.05,
        "padding_idx": 0,
        "vocab_size": 20,
    },
}
PATHS: dict[str, dict[str, Any]] = {
    "plain": {"impl": "plain"},
    "kernels": {"impl": "chunked", "chunk_bytes": 3 * V * 8},
    "torch operators": {"impl": "chunked", "chunk_bytes": 3 * V * 8},
    "CUDA": {"impl": "chunked", "chunk_bytes": 1 << 12},
    "CUDA, not dropped": {"impl": "chunked", "chunk_bytes": 1 << 12, "drop_ignored": False},
}
"""What computes, and the options with which small inputs have several chunks."""


@contextmanager
def computed_by(path: str) -> Iterator[dict[str, Any]]:
    """Compute on a path, in several blocks of rows; yield its options."""
    ways = {"plain": nullcontext, "kernels": lambda: running_on("numba"), "torch operators": without_numba}
    with small_blocks(rows=6), ways.get(path, cpu_taken_for_cuda)():
        yield PATHS[path]


def make(options: dict[str, Any], dtype: torch.dtype = torch.float64, tokens: tuple[int, ...] = (2, 4)) -> Any:
    """Hidden states, rows and perhaps a bias; targets of which one is ignored and none is a padding; options."""
    options = dict(options)
    hidden = torch.randn(*tokens, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    size = options.get("vocab_size", V)
    leaves = [hidden, weight]
    if "bias" in options:
        options["bias"] = torch.randn(size, dtype=dtype, requires_grad=True)
        leaves.append(options["bias"])
    targets = torch.randint(1, size, tokens)
    targets[targets == 4] = 5
    targets.view(-1)[1] = -100
    return leaves, targets, options


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str, **options: Any) -> Tensor:
    """The definition: cross entropy of all logits. A padding row has no gradient."""
    weight = weight[: options.get("vocab_size")]
    if (padding := options.get("padding_idx")) is not None:
        weight = torch.where((torch.arange(len(weight)) == padding).unsqueeze(1), weight.detach(), weight)
    logits = options.get("logit_scale", 1.0) * (hidden @ weight.T)
    logits = logits + options["bias"] if "bias" in options else logits
    if (cap := options.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = (logits / options.get("temperature", 1.0)).flatten(0, -2)
    if "mask_padding" in options:
        logits = logits.index_fill(-1, torch.tensor(padding), -torch.inf)
    flat, smoothing = targets.flatten(), options.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits, flat, reduction="none", label_smoothing=smoothing)
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (flat != -100)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / ((flat != -100).sum() if reduction == "mean" else 1)


@cases("name, reduction, path", OPTIONS, ["mean", "sum", "none"], PATHS, pairs=["name, path"])
def test_values_and_gradients_are_those_of_torch(name, reduction, path) -> None:
    leaves, targets, options = make(OPTIONS[name], tokens=(3, 19) if "CUDA" in path else (2, 4))
    expected = by_torch(*leaves[:2], targets, reduction=reduction, **options)
    grad_output = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, leaves, grad_output)
    with computed_by(path) as of_path:
        ours = linear_cross_entropy(*leaves[:2], targets, reduction=reduction, **options, **of_path)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        for _ in range(2):  # a graph that is kept gives its gradients again
            found = torch.autograd.grad(ours, leaves, grad_output, retain_graph=True)
            torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("both_paths")
@cases("name, reduction", ["nothing", "all"], ["mean", "none"])
def test_gradients_and_their_gradients_are_right_in_float64(name, reduction) -> None:
    leaves, targets, options = make(OPTIONS[name], tokens=(4,))
    fixed, padding = leaves[1].detach().clone(), options.get("padding_idx", 0)

    def loss(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        if "padding_idx" in options:  # the loss has no gradient by this row
            weight = torch.cat([weight[:padding], fixed[padding : padding + 1], weight[padding + 1 :]])
        own = {**options, **({"bias": bias[0]} if bias else {}), **PATHS["kernels"]}
        return linear_cross_entropy(hidden, weight, targets, reduction=reduction, **own)

    with small_blocks(rows=6):
        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@cases("impl, reduction", ["plain", "chunked"], ["mean", "none"])
def test_gradients_with_create_graph_are_right_if_the_hidden_states_follow_from_the_rows(impl, reduction) -> None:
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, 7, (2, 7))

    def loss(weight: Tensor) -> Tensor:
        return linear_cross_entropy(weight[ids].sin(), weight, targets, impl=impl, reduction=reduction).cos().sum()

    plain = F.cross_entropy(weight[ids].sin() @ weight.T, targets, reduction=reduction).cos().sum()
    (first,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(plain, weight)[0])
    assert torch.autograd.gradgradcheck(loss, weight, nondet_tol=1e-12)


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_an_empty_batch_has_loss_and_gradients_of_zero(impl) -> None:
    for reduction in ("mean", "sum", "none"):
        hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
        targets = torch.zeros(0, dtype=torch.long)
        loss = linear_cross_entropy(hidden, weight, targets, impl=impl, reduction=reduction)
        loss.sum().backward()
        assert loss.shape == ((0,) if reduction == "none" else ())
        assert loss.eq(0).all()
        assert weight.grad.eq(0).all()


def test_triton_is_another_name_of_chunked() -> None:
    leaves, targets, _ = make({})
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": "none", "softcap": 3.0}
    found = [linear_cross_entropy(*leaves, targets, impl=impl, **options) for impl in ("triton", "chunked")]
    assert torch.equal(*found)
    grads = [torch.autograd.grad(each.sum(), leaves) for each in found]
    assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("backend", "reduction"), some([("aot_eager", "none")], product(["aot_eager", "inductor"], ["none", "mean"]))
)
def test_it_compiles_to_one_graph(unchecked: None, backend, reduction) -> None:
    leaves, targets, options = make({"bias": True, "softcap": 3.0}, torch.float32, (9,))

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = {**options, "bias": bias, "reduction": reduction, "impl": "chunked"}
        return (linear_cross_entropy(torch.tanh(hidden), weight, targets, **own) * 2).sum()

    result, expected = torch.compile(loss, fullgraph=True, backend=backend)(*leaves), loss(*leaves)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.usefixtures("both_paths")
@cases("dtype, reduction, weighted", [torch.float32, torch.bfloat16], ["mean", "none"], [False, True])
def test_its_operator_in_graphs_keeps_torchs_rules(unchecked: None, dtype, reduction, weighted) -> None:
    leaves, targets, _ = make({}, dtype, (4,))
    weights = torch.rand(4) if weighted else None
    operator, calls = torch.ops.embedlayer.chunked_cross_entropy, []

    class Recorded(torch.fx.Interpreter):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if target in (operator, operator.default):
                calls.append(args)
            return super().call_function(target, args, kwargs)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return Recorded(graph).run

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"token_weights": weights, "reduction": reduction, "impl": "chunked"}
        return linear_cross_entropy(hidden, weight, targets, **options)

    torch.compile(loss, fullgraph=True, backend=backend)(*leaves)
    [arguments] = calls
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator, arguments, test_utils=rules)


@pytest.mark.parametrize("bad", [V, -1, 2**40])
def test_a_target_outside_the_vocabulary_is_named(unchecked: None, bad) -> None:
    leaves, targets, _ = make({})
    for impl, is_compiled in product(("plain", "chunked"), (False, True)):

        def loss(targets: Tensor, impl: str = impl) -> Tensor:
            return linear_cross_entropy(*leaves, targets, impl=impl)

        call = torch.compile(loss, fullgraph=True, backend="eager") if is_compiled else loss
        call(targets)
        with pytest.raises(TokenIdError, match=rf"token id {bad} at row 1, column 2 is outside this table of {V} rows"):
            call(targets.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(bad)))


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"hidden": torch.zeros(2, 4, 6, dtype=torch.float64)}, ShapeError),
    ({"targets": torch.zeros(8, dtype=torch.long)}, ShapeError),
    ({"targets": torch.zeros(2, 4)}, ShapeError),
    ({"hidden": torch.zeros(2, 4, D, dtype=torch.float16)}, ShapeError),
    ({"label_smoothing": 0.1, "mask_padding": True, "padding_idx": 0}, SizeError),
]


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_what_does_not_fit_raises_an_error(unchecked: None, impl) -> None:
    leaves, targets, _ = make({})
    inputs = {"hidden": leaves[0], "weight": leaves[1], "targets": targets}
    for change, error in REFUSED:
        with pytest.raises(error):
            linear_cross_entropy(**{**inputs, "impl": impl, **change})
