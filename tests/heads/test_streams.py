"""Heads of K streams beside those of transformers, their memory, and bad input."""

import copy
import math
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from memory import Memory
from releases import skip_before
from small_blocks import small_blocks
from stream_models import stream_model
from torch import Tensor, nn

from embedlayer import OutputHead, ShapeError, SizeError, TokenEmbedding
from embedlayer.heads import StackedRows, StreamHead
from embedlayer.tables import MappedEmbedding, StreamTable

D = 6


class Run(NamedTuple):
    """A head, and what a run of the model with its weights has: hidden states, targets, logits by stream and loss."""

    head: StreamHead
    hidden: Tensor
    targets: Tensor
    logits: list[Tensor]
    loss: Tensor | None = None
    stream_weights: list[float] | None = None


def _logits_of_streams(logits: Tensor, streams: int) -> list[Tensor]:
    """Logits `(B * K, T, V)`, as MusicGen and Dia return them, by stream."""
    return list(logits.unflatten(0, (-1, streams)).unbind(1))


def output_like(linear: nn.Linear) -> OutputHead:
    """A head with the weight of a module, not a copy of it."""
    head = OutputHead(linear.in_features, linear.out_features)
    head.weight = linear.weight
    return head


def trace(model: nn.Module, part: nn.Module, **inputs: Any) -> tuple[Tensor, Any]:
    """The first argument of a part in a run of a model, and what the model returns."""
    seen: list[Tensor] = []
    handle = part.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    outputs = model(**inputs)
    handle.remove()
    return seen[0].detach().requires_grad_(), outputs


def musicgen() -> Run:
    model = stream_model("musicgen")
    codes = torch.randint(0, 24, (2, 5, 4))
    labels = codes.masked_fill(torch.rand(codes.shape) < 0.2, -100)
    ids = codes.movedim(-1, 1).flatten(0, 1)
    hidden, found = trace(model, model.lm_heads[0], input_ids=ids, labels=labels)
    head = StreamHead([output_like(each) for each in model.lm_heads])
    return Run(head, hidden, labels, _logits_of_streams(found.logits, 4), found.loss, [0.25] * 4)


def dia() -> Run:
    model = stream_model("dia")
    codes = torch.randint(0, 20, (2, 5, 3))
    labels = codes.masked_fill(torch.rand(codes.shape) < 0.2, -100)
    flat = labels.movedim(-1, 1).flatten(0, 1)
    inputs = {"input_ids": torch.randint(1, 99, (2, 4)), "decoder_input_ids": codes}
    hidden, found = trace(model, model.logits_dense, labels=flat, **inputs)
    head = StreamHead(output_like(model.logits_dense), 3)
    return Run(head, hidden, labels, _logits_of_streams(found.logits, 3), found.loss)


def higgs() -> Run:
    skip_before("codebooks of Higgs Audio v2 other than 8")
    model = stream_model("higgs")
    codes = torch.randint(0, 20, (2, 5, 4))
    inputs = {"input_ids": torch.full((2, 5), 52), "audio_input_ids": codes}
    inputs["audio_input_ids_mask"] = torch.ones(2, 5, dtype=torch.bool)
    hidden, found = trace(model, model.audio_lm_head, **inputs, audio_labels=codes)
    labels = F.pad(codes[:, 1:], (0, 0, 0, 1), value=-100)  # the model shifts them
    head = StreamHead(output_like(model.audio_lm_head), 4)
    logits = list(found.logits.unflatten(-1, (4, -1)).unbind(-2))
    return Run(head, hidden, labels, logits, found.loss, [1.0] * 4)


def csm_depth() -> Run:
    model = stream_model("csm").depth_decoder
    codes = torch.randint(0, 20, (3, 4))
    inputs = {"input_ids": codes, "backbone_last_hidden_state": torch.randn(3, 32)}
    hidden, found = trace(model, model.codebooks_head, **inputs, labels=codes)
    stack = StackedRows(3, 21, hidden.shape[-1], transposed=True)
    stack.weight = cast(nn.Parameter, model.codebooks_head.weight)
    head = StreamHead(stack, hidden_per_stream=True)
    return Run(head, hidden, codes[:, 1:], list(found.logits.unbind(1)), found.loss)


def moshi_depth() -> Run:
    model = stream_model("moshi").depth_decoder
    ids, labels = torch.randint(0, 20, (3, 4)), torch.randint(0, 32, (3, 4))
    inputs = {"input_ids": ids, "last_hidden_state": torch.randn(3, 4, 32)}
    hidden, found = trace(model, model.lm_heads, **inputs, labels=labels)
    stack = StackedRows(4, 32, hidden.shape[-1])
    stack.weight = cast(nn.Parameter, model.lm_heads.weight)
    return Run(StreamHead(stack, hidden_per_stream=True), hidden, labels, list(found.logits.unbind(1)), found.loss)


def bark_fine() -> Run:
    model = stream_model("bark, fine")
    table = StreamTable.from_tables(list(model.input_embeds_layers))
    head = StreamHead.tied_to(table, streams=[1, 2, 3])
    codes = torch.randint(0, 30, (2, 5, 4))
    hidden, found = trace(model, model.lm_heads[1], codebook_idx=2, input_ids=codes)
    logits = [each(hidden) for each in model.lm_heads]
    torch.testing.assert_close(head(hidden, streams=[1]), [found.logits], rtol=1e-6, atol=1e-6)
    return Run(head, hidden, codes[..., 1:], logits)


MODELS = {each.__name__: each for each in (musicgen, dia, higgs, csm_depth, moshi_depth, bark_fine)}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_those_of_the_model_in_transformers(name) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    head, hidden, labels, theirs, loss, weights = MODELS[name]()
    for ours, of_model in zip(head(hidden), theirs, strict=True):
        torch.testing.assert_close(ours, of_model, rtol=1e-6, atol=1e-6)
    if loss is None:
        return
    found = head.loss(hidden, labels, weights, impl="chunked").loss
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(each, list(head.parameters())) for each in (found, loss)))


STACKS = {"joined": False, "transposed": True}


def test_tied_and_stacked_rows_are_no_copies() -> None:
    table = StreamTable(TokenEmbedding(12, D), [5, 4, 3])
    head = StreamHead.tied_to(table, streams=[1, 2])
    rows = [logits.weight for logits in head.uncomputed_logits(torch.randn(2, D))]
    assert [each.data_ptr() for each in rows] == [table.rows.weight[start].data_ptr() for start in (5, 9)]
    assert not list(head.parameters())
    for transposed in STACKS.values():
        stack = StackedRows(3, 7, D, transposed=transposed)
        parts = StreamHead(stack, hidden_per_stream=True).uncomputed_logits(torch.randn(2, 3, D))
        assert [each.weight.data_ptr() for each in parts] == [each.data_ptr() for each in stack.weight]


@pytest.mark.parametrize("transposed", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("weights", [None, [0.0, 2.0, 0.5]])
def test_the_passes_write_one_gradient(transposed, weights) -> None:
    head = StreamHead(StackedRows(3, 300, 64, transposed=transposed), hidden_per_stream=True)
    hidden, targets = torch.randn(16, 3, 64), torch.randint(0, 300, (16, 3))
    head.loss(hidden, targets, weights, impl="chunked").loss.backward()
    head.output.weight.grad = None
    with Memory() as memory:
        head.loss(hidden, targets, weights, impl="chunked").loss.backward()
    assert memory.peak < 1.5 * head.output.weight.nbytes


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_stream_of_weight_0_is_not_computed_and_has_a_gradient_of_0(streams, reduction) -> None:
    head = StreamHead(OutputHead(D, 7 * streams), streams)
    hidden = torch.full((4, D), torch.nan, requires_grad=True)
    found = head.loss(hidden, torch.randint(0, 7, (4, streams)), [0.0] * streams, reduction=reduction)
    found.loss.sum().backward()
    assert not found.loss.any()
    assert not found.losses.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_the_passes_add_into_one_gradient_of_shared_hidden_states() -> None:
    """At Dia's size K gradients of the hidden states are more numbers than all logits."""
    head, tokens = StreamHead(OutputHead(2048, 9 * 1028), 9), 512
    hidden, targets = torch.randn(tokens, 2048, requires_grad=True), torch.randint(0, 1028, (tokens, 9))
    with Memory() as memory:
        head.loss(hidden, targets, impl="chunked").loss.backward()
    gradients, logits = sum(x.nbytes for x in (hidden, *head.parameters())), 4 * tokens * sum(head.sizes)
    assert memory.peak < gradients + logits < gradients + 8 * hidden.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", STACKS.values(), ids=STACKS)
def test_narrow_rows_have_the_gradient_of_wide_ones(transposed, dtype) -> None:
    torch.manual_seed(0)
    wide = StreamHead(StackedRows(3, 70, D, transposed=transposed, init_std=1.0), hidden_per_stream=True).to(dtype)
    hidden, targets = torch.randn(64, 3, D).to(dtype), torch.randint(0, 70, (64, 3))
    narrow = copy.deepcopy(wide)
    with small_blocks(tokens=16):
        narrow.loss(hidden, targets, impl="chunked").loss.backward()
        wide.float().loss(hidden.float(), targets, impl="chunked").loss.backward()
    torch.testing.assert_close(narrow.output.weight.grad.float(), wide.output.weight.grad, rtol=0.02, atol=1e-4)


WRONG_CALLS: list[tuple[Callable[[StreamHead, Tensor, Tensor], object], type[Exception]]] = [
    (lambda head, x, y: head.loss(x, y[..., :2]), ShapeError),
    (lambda head, x, y: head.token_log_probs(x, y[:, :4]), ShapeError),
    (lambda head, x, y: head.loss(x, y.float()), ShapeError),
    (lambda head, x, y: head.loss(x, y, [1.0, 1.0]), SizeError),
    (lambda head, x, y: head.loss(x, y, [1.0, math.nan, 1.0]), SizeError),
    (lambda head, x, y: StreamHead(OutputHead(D, 12), 3, hidden_per_stream=True).loss(x, y), ShapeError),
    (lambda head, x, y: StreamHead(OutputHead(D, 12), 3, hidden_per_stream=True)(x), ShapeError),
    (lambda head, x, y: head.loss(x, y, vocab_size=5), SizeError),
    (lambda head, x, y: head.loss(x, y, token_weights=torch.ones(2, 5)), ShapeError),
    (lambda head, x, y: head.loss(x, y, **cast(Any, {"stream": 1})), SizeError),
]
WRONG_STREAMS: list[Callable[[], object]] = [
    lambda: StreamHead(OutputHead(D, 12), 5),
    lambda: StreamHead(OutputHead(D, 12), [5, 6]),
    lambda: StreamHead(OutputHead(D, 12), [5, 6], first_rows=[0, 8]),
    lambda: StreamHead(OutputHead(D, 12), [5, 6], first_rows=[4, 0]),
    lambda: StreamHead(OutputHead(D, 12), [5, 6], first_rows=[4]),
    *(lambda sizes=sizes: StreamHead(OutputHead(D, 12), sizes) for sizes in (None, [], [0, 12], 0)),
    lambda: StreamHead([]),
    lambda: StreamHead(StackedRows(2, 3, D), 2),
    lambda: StackedRows(0, 3, D),
    lambda: StreamHead.tied_to(StreamTable(MappedEmbedding.create(tempfile.mkdtemp() + "/rows", 12, D), [6, 6])),
]


def test_bad_input_is_refused(unchecked: None) -> None:
    head, hidden, targets = StreamHead(OutputHead(D, 12), 3), torch.randn(2, 5, D), torch.zeros(2, 5, 3).long()
    for call, error in WRONG_CALLS:
        with pytest.raises(error):
            call(head, hidden, targets)
    for build in WRONG_STREAMS:
        with pytest.raises(SizeError):
            build()
