"""Whichever path computes an output of a head, the result is that of the definition.

What does not count has no effect, even if it is NaN, the implementation that `auto` chooses changes last bits alone on
either side of each of its thresholds, and no product of float16 numbers overflows.
"""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from covering import looped, some
from kernel_paths import cpu_taken_for_cuda
from small_blocks import small_blocks
from torch import Tensor

import embedlayer as el
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    TopKTargets,
    divergence,
    token_statistics,
)
from embedlayer.losses.statistics import Statistic

N, V, D = 12, 40, 6
STATISTICS = get_args(Statistic)
KINDS = {"forward": ForwardKL(), "reverse": ReverseKL(), "Jensen-Shannon": JensenShannon(0.3)}
Function = Callable[..., list[Tensor]]


def loss(hidden, weight, bias, targets, teacher, **options) -> list[Tensor]:
    return [el.linear_cross_entropy(hidden, weight, targets, bias=bias, **options)]


def weighted(hidden, weight, bias, targets, teacher, value=torch.nan, **options) -> list[Tensor]:
    weights = (targets % 7 - 3).to(hidden.dtype).div(4).masked_fill(targets == -100, value)  # exact in every dtype
    return [el.linear_cross_entropy(hidden, weight, targets, bias=bias, token_weights=weights, **options)]


def log_probs(hidden, weight, bias, targets, teacher, **options) -> list[Tensor]:
    return [el.token_log_probs(hidden, weight, targets, bias=bias, **options)]


def statistics(hidden, weight, bias, targets, teacher, **options) -> list[Tensor]:
    found = token_statistics(hidden, weight, targets, statistics=STATISTICS, top_k=5, bias=bias, **options)
    return [each for each in found if each is not None]


def of_teacher(hidden, weight, bias, targets, teacher, kind, reduction, drop_ignored=True, **options) -> list[Tensor]:
    student = LinearLogits(hidden, weight, bias=bias, **options)
    other = LinearLogits(teacher, weight.detach().roll(1, 0))
    result = divergence(student, other, KINDS[kind], labels=targets, reduction=reduction, drop_ignored=drop_ignored)
    return [result]


def of_largest(hidden, weight, bias, targets, teacher, drop_ignored=True, **options) -> list[Tensor]:
    student = LinearLogits(hidden, weight, bias=bias, **options)
    known = (teacher.double() @ weight.detach().double().T).log_softmax(-1).topk(3)
    return [divergence(student, TopKTargets(known.indices, known.values), labels=targets, drop_ignored=drop_ignored)]


def of_function(hidden, weight, bias, targets, teacher, impl, drop_ignored=True, **options) -> list[Tensor]:
    logits = BlockLogits(hidden, lambda x, *rows: (x @ weight.T)[:, slice(*rows)], V, V, bias=bias, **options)
    found = token_statistics(logits, targets, statistics=STATISTICS, top_k=5, drop_ignored=drop_ignored)
    return [each for each in found if each is not None]


def of_real_logits(hidden, weight, bias, targets, teacher, impl, drop_ignored=True, **options) -> list[Tensor]:
    kept = (targets != -100).unsqueeze(-1)
    logits = (torch.where(kept, hidden, 0.0) @ weight.T + bias).masked_fill(~kept, torch.nan)
    return [el.token_log_probs(logits, targets, drop_ignored=drop_ignored)]


def with_options(function: Function, **options: Any) -> Function:
    return lambda *inputs, **others: function(*inputs, **{**options, **others})


OUTPUTS: dict[str, Function] = {
    **{f"loss, {reduction}": with_options(loss, reduction=reduction) for reduction in ("mean", "sum", "none")},
    **{f"loss, weights, {reduction}": with_options(weighted, reduction=reduction) for reduction in ("mean", "none")},
    "loss, weights, smoothing": with_options(weighted, value=torch.inf, label_smoothing=0.2, z_loss=0.1, softcap=4.0),
    "loss, z-loss, smoothing": with_options(loss, z_loss=0.1, label_smoothing=0.2),
    "log-probabilities": log_probs,
    "statistics": statistics,
    **{
        f"{kind}, {reduction}": with_options(of_teacher, kind=kind, reduction=reduction)
        for kind in KINDS
        for reduction in ("mean", "none")
    },
    "teacher of K tokens": of_largest,
}
ALL_OUTPUTS: dict[str, Function] = {**OUTPUTS, "logits of a function": of_function, "real logits": of_real_logits}


def batch(dtype: torch.dtype = torch.float64, tokens: int = N, rows: int = V) -> tuple[Tensor, ...]:
    """Hidden states, rows, bias, targets of which three are ignored, and hidden states of a teacher."""
    hidden, teacher, weight = (torch.randn(size, D).to(dtype) for size in (tokens, tokens, rows))
    targets = torch.randint(0, rows, (tokens,))
    targets[[1, 4, tokens - 1]] = -100
    return hidden, weight, torch.randn(rows).to(dtype), targets, teacher


def results(
    function: Function,
    inputs: tuple[Tensor, ...],
    path: str = "plain",
    places: Tensor | None = None,
    grad_output: float = 1.0,
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a function, and their gradients by hidden states, rows and bias.

    `places`: number of each token, on which the gradients by results of single tokens depend. `grad_output`: a factor
    of all gradients by results.
    """
    if "CUDA" in path:
        without = {"drop_ignored": False} if "not dropped" in path else {}
        with cpu_taken_for_cuda():
            inner = "compiled" if "compiled" in path else "chunked"
            return results(with_options(function, **without), inputs, inner, places, grad_output)
    *leaves, targets, teacher = inputs
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    places = torch.arange(len(targets)) if places is None else places
    impl = path if path in ("plain", "chunked", "auto", "triton") else "chunked"

    def outputs(*leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = function(*leaves, targets, teacher, impl=impl)
        smooth = [each for each in found if each.is_floating_point()]
        return smooth, [each for each in found if not each.is_floating_point()]

    def grad_of(value: Tensor) -> Tensor:
        weights = (1 + places.to(value.dtype)).cos()
        weights = torch.ones_like(value) if not value.dim() else weights if value.dim() == 1 else weights.unsqueeze(-1)
        return weights.expand_as(value) * grad_output

    if path == "torch.func":
        smooth, backward, others = torch.func.vjp(outputs, *leaves, has_aux=True)
        return [*smooth, *others], list(backward([grad_of(each.detach()) for each in smooth]))
    run = torch.compile(outputs, backend="aot_eager", fullgraph=True) if path == "compiled" else outputs
    smooth, others = run(*leaves)
    grads = torch.autograd.grad(
        smooth, leaves, [grad_of(each.detach()) for each in smooth], create_graph=path == "create_graph"
    )
    return [each.detach() for each in (*smooth, *others)], [each.detach() for each in grads]


PATHS = ("plain", "auto", "chunked", "torch.func", "create_graph", "CUDA", "CUDA, not dropped")
COMPILED = [
    ("logits of a function", torch.nan),
    ("loss, mean", torch.inf),
    ("loss, none", torch.nan),
    ("loss, weights, mean", torch.nan),
    ("loss, weights, none", torch.inf),
    ("statistics", torch.inf),
    ("forward, mean", torch.nan),
]


def without(kept: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The batch without the tokens that do not count."""
    hidden, weight, bias, targets, teacher = inputs
    return hidden[kept], weight, bias, targets[kept], teacher[kept]


def in_float64(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in inputs)


def assert_they_have_no_effect(name: str, path: str, value: float) -> None:
    hidden, weight, bias, targets, teacher = batch()
    kept = targets != -100
    dirty = [each.masked_fill(~kept.unsqueeze(-1), value) for each in (hidden, teacher)]
    outputs, grads = results(ALL_OUTPUTS[name], (dirty[0], weight, bias, targets, dirty[1]), path)
    places = kept.nonzero().squeeze(1)
    clean = without(kept, (hidden, weight, bias, targets, teacher))
    expected, expected_grads = results(ALL_OUTPUTS[name], clean, "plain", places)
    for ours, plain in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours[kept] if ours.dim() else ours, plain, rtol=1e-10, atol=1e-10)
        assert not ours.dim() or bool(((ours[~kept] == 0) | (ours[~kept] == -1)).all())
    assert bool((grads[0][~kept] == 0).all())
    torch.testing.assert_close([grads[0][kept], *grads[1:]], expected_grads, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("both_paths")
@looped("name, path, value", ALL_OUTPUTS, PATHS, (torch.nan, torch.inf), pairs=["path, value"])
def test_what_does_not_count_has_no_effect(name, path, value) -> None:
    assert_they_have_no_effect(name, path, value)


def assert_a_window_has_no_gradient(name: str, path: str, grad_output: float) -> None:
    """Losses of windows without targets are divided by their number: the gradient by the loss is infinite or NaN."""
    hidden, weight, bias, targets, teacher = batch()
    inputs = hidden, weight, bias, torch.full_like(targets, -100), teacher
    outputs, grads = results(ALL_OUTPUTS[name], inputs, path, grad_output=grad_output)
    assert all(bool(((each == 0) | (each == -1)).all()) for each in outputs)
    assert all(bool((each == 0).all()) for each in grads)


@pytest.mark.usefixtures("both_paths")
@looped("name, path, grad_output", ALL_OUTPUTS, PATHS, (torch.nan, torch.inf), pairs=["path, grad_output"])
def test_a_window_of_ignored_targets_has_no_gradient_whatever_its_loss_is_divided_by(name, path, grad_output) -> None:
    assert_a_window_has_no_gradient(name, path, grad_output)


@pytest.mark.parametrize(("name", "value"), some([COMPILED[1]], COMPILED))
@pytest.mark.parametrize("path", ["compiled", "compiled, CUDA"])
def test_neither_has_an_effect_in_a_compiled_graph(unchecked: None, name, value, path) -> None:
    assert_they_have_no_effect(name, path, value)
    assert_a_window_has_no_gradient(name, path, value)


THRESHOLDS: dict[str, Callable[[int], dict[str, int]]] = {
    "few logits": lambda side: {"few_logits": N * V + side},
    "tokens of a chunk": lambda side: {"tokens": N + side},
    "bytes of a chunk": lambda side: {"buffer_bytes": 8 * V * (N + side)},
    "rows of a block": lambda side: {"rows": V + side},
}


@pytest.mark.usefixtures("both_paths")
@looped("name, threshold, side", OUTPUTS, THRESHOLDS, (-1, 0, 1), pairs=["threshold, side"])
def test_no_threshold_of_auto_changes_a_result(name, threshold, side) -> None:
    inputs = batch()
    expected = results(OUTPUTS[name], inputs, "plain")
    with small_blocks(**{"few_logits": 0, **THRESHOLDS[threshold](side)}):
        found = results(OUTPUTS[name], inputs, "auto")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def banned(*, all_tokens: bool = False) -> tuple[Tensor, ...]:
    """A batch in which the logit of two targets is -inf, or that of every token."""
    hidden, weight, bias, targets, teacher = batch()
    bias = torch.full_like(bias, -torch.inf) if all_tokens else bias.index_fill(0, targets[[0, 6]], -torch.inf)
    return hidden, weight, bias, targets, teacher


def of_two_dtypes() -> tuple[Tensor, ...]:
    hidden, weight, bias, targets, teacher = batch(torch.float32)
    return hidden, weight, bias.double(), targets, teacher


INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "banned targets": banned,
    "no token allowed": lambda: banned(all_tokens=True),
    "a bias of float64": of_two_dtypes,
}


@pytest.mark.usefixtures("both_paths")
@looped("name, path, inputs", OUTPUTS, PATHS, INPUTS, pairs=["path, inputs"])
def test_results_at_the_edge_of_numbers_are_those_of_the_definition_on_every_path(name, path, inputs) -> None:
    of_edge = INPUTS[inputs]()
    found, grads = results(OUTPUTS[name], of_edge, path)
    expected, expected_grads = results(OUTPUTS[name], of_edge, "plain")
    close = 1e-5 if inputs == "a bias of float64" else 1e-10
    torch.testing.assert_close(found, expected, rtol=close, atol=close, equal_nan=True)
    torch.testing.assert_close(grads, expected_grads, rtol=close, atol=close, equal_nan=True)


@pytest.mark.parametrize("inputs", ["banned targets", "no token allowed"])
@looped("smoothing", [0.0, 0.2])
def test_the_definition_has_the_numbers_of_torch_at_their_edge(inputs, smoothing) -> None:
    hidden, weight, bias, targets, teacher = INPUTS[inputs]()
    ours = results(with_options(loss, label_smoothing=smoothing), (hidden, weight, bias, targets, teacher))
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T + bias, targets, label_smoothing=smoothing)
    expected_grads = torch.autograd.grad(expected, leaves)
    kept = targets != -100
    torch.testing.assert_close(ours[0], [expected.detach()], equal_nan=True)
    torch.testing.assert_close(ours[1][0][kept], expected_grads[0][kept], equal_nan=True)
    torch.testing.assert_close(ours[1][1:], list(expected_grads[1:]), equal_nan=True)


@looped("name, impl", ALL_OUTPUTS, ("plain", "auto", "chunked"))
def test_on_the_meta_device_results_and_gradients_have_the_shapes_of_those_on_a_cpu(name, impl) -> None:
    inputs = batch(torch.float32)
    expected, _ = results(ALL_OUTPUTS[name], inputs, impl)
    hidden, weight, bias, targets, teacher = (each.to("meta") for each in inputs)
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    found = ALL_OUTPUTS[name](*leaves, targets, teacher, impl=impl)
    assert sorted((each.shape, str(each.dtype)) for each in found) == sorted((x.shape, str(x.dtype)) for x in expected)
    assert all(each.is_meta for each in found)
    grads = torch.autograd.grad(sum(each.sum() for each in found if each.is_floating_point()), leaves)
    assert [each.shape for each in grads] == [each.shape for each in leaves]


OPTIONS: dict[str, dict[str, float]] = {
    "scale": {"logit_scale": 1e-4},
    "temperature": {"temperature": 1e4},
    "soft cap": {"softcap": 10.0, "logit_scale": 2e-5},
    "scale above 1": {"logit_scale": 300.0, "temperature": 3e6},
}


@pytest.mark.usefixtures("both_paths")
@looped("name, path, options", OUTPUTS, PATHS, OPTIONS, pairs=["path, options"])
def test_products_of_float16_do_not_overflow(name, path, options) -> None:
    hidden, weight, bias, targets, teacher = batch(torch.float16)
    hidden, weight, teacher = hidden * 200, weight * 200, teacher / 100
    assert (hidden @ weight.T).isinf().any()
    inputs = (hidden, weight, bias, targets, teacher)
    function = with_options(OUTPUTS[name], **OPTIONS[options])
    outputs, grads = results(function, inputs, path)
    expected, exact_grads = results(function, in_float64(inputs))
    for ours, exact in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=1e-4, atol=1e-4)
    for ours, exact in zip(grads, exact_grads, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=1e-7 + 2e-3 * exact.abs().max().item())


@looped("path, options", ("plain", "chunked"), OPTIONS)
def test_products_of_float16_under_autocast_do_not_overflow(path, options) -> None:
    hidden, weight, bias, targets, teacher = batch(torch.float32)
    rounded = [(each * 200).half().float() for each in (hidden, weight)]
    expected = results(with_options(loss, **OPTIONS[options]), (*rounded, bias, targets, teacher))

    def under_autocast(*inputs: Tensor, **others: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.float16):
            return loss(*inputs, **OPTIONS[options], **others)

    found = results(under_autocast, (*rounded, bias, targets, teacher), path)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


def test_large_logits_of_float16_have_one_loss_on_every_path() -> None:
    inputs = batch(torch.float16)
    inputs = (inputs[0] * 200, inputs[1] * 200, *inputs[2:])
    exact = results(loss, in_float64(inputs))[0][0]
    assert exact > 65_504
    for path in PATHS:
        torch.testing.assert_close(results(loss, inputs, path)[0][0].double(), exact, rtol=1e-5, atol=0)
