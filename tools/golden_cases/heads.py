"""Every kind of head, loss and option: logits, losses, statistics, and the gradients of all of them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from kinds import EMBED_DIM, STREAM_HEADS, TABLES, TIED_HEADS, TIED_STREAM_HEADS, UNTIED_HEADS, VOCAB_SIZE, tied_streams
from torch import Tensor

import embedlayer as el
from embedlayer import losses

TARGETS = torch.tensor([[1, 7, -100, 7, 0], [0, 48, 3, -100, 1]])
LOGITS: dict[str, Mapping[str, Any]] = {
    "no options": {},
    "scale, soft cap, temperature": {"logit_scale": 0.5, "softcap": 4.0, "temperature": 0.7},
    "bias, masked padding": {"bias": torch.linspace(-1, 1, VOCAB_SIZE), "padding_idx": 3, "mask_padding": True},
    "float32": {"head_dtype": torch.float32},
    "batch-invariant": {"batch_invariant": True},
}
LOSSES: dict[str, Mapping[str, Any]] = {
    **LOGITS,
    "smoothing, z-loss": {"label_smoothing": 0.1, "z_loss": 0.01},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"token_weights": torch.linspace(-1, 2, TARGETS.numel()).reshape(TARGETS.shape)},
    "dropped": {"drop_ignored": True},
    "kept": {"drop_ignored": False},
    "spare rows": {"vocab_size": VOCAB_SIZE - 1},
    "small chunks": {"chunk_bytes": 1000},
    "unknown option": {"smoothing": 0.1},
    "negative temperature": {"temperature": -1.0},
    "wrong reduction": {"reduction": "average"},
}
DIVERGENCES = {
    "forward": losses.ForwardKL,
    "reverse": losses.ReverseKL,
    "Jensen-Shannon": losses.JensenShannon,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for impl in ("plain", "chunked", "auto"):
        for dtype in DTYPES:
            for name in LOSSES:
                yield f"loss, {name}, {impl}, {dtype}", partial(loss, impl, dtype, LOSSES[name])
    for dtype in DTYPES:
        for name in LOGITS:
            yield f"statistics, {name}, {dtype}", partial(statistics, dtype, LOGITS[name])
            yield f"logits, {name}, {dtype}", partial(finished, dtype, LOGITS[name])
        for name in DIVERGENCES:
            yield f"divergence, {name}, {dtype}", partial(divergence, dtype, name)
    for name in (*TIED_HEADS, *TIED_STREAM_HEADS, *UNTIED_HEADS, *STREAM_HEADS):
        for dtype in ("float32", "bfloat16"):
            yield f"head, {name}, {dtype}", partial(head, name, dtype)
    yield "multi-token loss", multi_token
    yield "loss of large numbers", partial(extreme, 1e4)
    yield "loss of NaN", partial(extreme, float("nan"))
    yield "loss of infinity", partial(extreme, float("inf"))
    yield "second derivatives", second_derivatives
    yield "target above", lambda: el.linear_cross_entropy(torch.randn(1, 3), torch.randn(4, 3), torch.tensor([4]))
    yield (
        "no targets",
        lambda: el.linear_cross_entropy(torch.randn(0, 3), torch.randn(4, 3), torch.zeros(0, dtype=torch.int64)),
    )


def inputs(dtype: str) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight that require gradients."""
    hidden, weight = torch.randn(2, 5, EMBED_DIM), torch.randn(VOCAB_SIZE, EMBED_DIM)
    return hidden.to(DTYPES[dtype]).requires_grad_(), weight.to(DTYPES[dtype]).requires_grad_()


def with_gradients(result: Tensor, *leaves: Tensor) -> object:
    """Return a result and the gradients of a fixed function of it."""
    factors = torch.linspace(0.5, 1, result.numel(), dtype=torch.float64).reshape(result.shape).to(result.dtype)
    return result, torch.autograd.grad((result.nan_to_num(0) * factors).sum(), leaves, allow_unused=True)


def loss(impl: str, dtype: str, options: Mapping[str, Any]) -> object:
    """Return a loss and its gradients."""
    hidden, weight = inputs(dtype)
    result = el.linear_cross_entropy(hidden, weight, TARGETS, impl=impl, **options)
    return with_gradients(result, hidden, weight)


def statistics(dtype: str, options: Mapping[str, Any]) -> object:
    """Return log-probabilities, statistics, the best tokens, and gradients."""
    hidden, weight = inputs(dtype)
    log_probs = el.token_log_probs(hidden, weight, TARGETS, **options)
    return {
        "log probs": with_gradients(log_probs, hidden, weight),
        "statistics": losses.token_statistics(hidden, weight, TARGETS, top_k=3, **options),
    }


def finished(dtype: str, options: Mapping[str, Any]) -> object:
    """Return finished logits of plain products."""
    hidden, weight = inputs(dtype)
    without = {key: value for key, value in options.items() if key not in ("head_dtype", "batch_invariant")}
    return with_gradients(losses.finish_logits(hidden @ weight.T, **without), hidden, weight)


def divergence(dtype: str, name: str) -> object:
    """Return the divergence of a student from a teacher, and gradients."""
    hidden, weight = inputs(dtype)
    teacher = losses.LinearLogits(*(each.detach() for each in inputs(dtype)))
    result = losses.divergence(losses.LinearLogits(hidden, weight), teacher, DIVERGENCES[name]())
    return with_gradients(result, hidden, weight)


def head(name: str, dtype: str) -> object:
    """Return logits, losses, log-probabilities and statistics of a head, and the gradients of its parameters."""
    if name in TIED_HEADS or name in TIED_STREAM_HEADS:
        table = TABLES[{**TIED_HEADS, **TIED_STREAM_HEADS}[name]]()
        table.to(DTYPES[dtype])
        module: Any = el.OutputHead(table) if name in TIED_HEADS else tied_streams(table)
    else:
        table = module = {**UNTIED_HEADS, **STREAM_HEADS}[name]()
        module.to(DTYPES[dtype])
    hidden = torch.randn(2, 5, EMBED_DIM).to(DTYPES[dtype])
    targets = TARGETS
    if isinstance(module, el.heads.StreamHead):
        streams = module.num_streams
        targets = TARGETS.clamp(max=9)[..., None].expand(2, 5, streams)
        if module.hidden_per_stream:
            hidden = torch.randn(2, 5, streams, EMBED_DIM).to(DTYPES[dtype])
    hidden.requires_grad_()
    parameters = dict.fromkeys([*module.parameters(), *table.parameters()])
    leaves = [hidden, *(each for each in parameters if each.requires_grad)]
    logits = module(hidden)
    results: dict[str, object] = {"logits": logits, "log probs": module.token_log_probs(hidden, targets)}
    for impl in ("plain", "chunked"):
        loss = module.loss(hidden, targets, impl=impl)
        results[impl] = with_gradients(getattr(loss, "loss", loss), *leaves)
    return {**results, "state": module.state_dict(), "repr": repr(module)}


def multi_token() -> object:
    """Return the loss of several future tokens of a tied head."""
    module = el.OutputHead(TABLES["dense"]())
    hidden = torch.randn(3, 2, 5, EMBED_DIM, requires_grad=True)
    return module.multi_token_loss([*hidden], TARGETS)


def extreme(number: float) -> object:
    """Return losses and gradients with a hidden state of unusual size."""
    results = []
    for impl in ("plain", "chunked"):
        hidden, weight = inputs("float32")
        with torch.no_grad():
            hidden[0, 0] *= number
        results.append(with_gradients(el.linear_cross_entropy(hidden, weight, TARGETS, impl=impl), hidden, weight))
    return results


def second_derivatives() -> object:
    """Return the gradients of the norm of a gradient."""
    results = []
    for impl in ("plain", "chunked"):
        hidden, weight = inputs("float64")
        loss = el.linear_cross_entropy(hidden, weight, TARGETS, impl=impl)
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), (hidden, weight)))
    return results
