"""Every output of every head of streams equals the plain formulation on all logits of each stream, with its gradients.

The oracle is `log_softmax` of `head(hidden)[k]` in float64. Chunks and blocks are made small, so that each stream has
several of both.
"""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cases import CODE_PATHS, STREAMS, UsesStreams, uses_streams
from covering import looped, some
from kinds import EMBED_DIM, STREAM_HEADS
from memory import Shapes
from small_blocks import small_blocks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embedlayer import CheckpointError, SizeError, TokenIdError
from embedlayer.heads import StreamHead
from embedlayer.losses import ForwardKL, divergence

ALWAYS = [name for name in STREAMS if name in STREAM_HEADS or f"loss of streams: {name}" in CODE_PATHS]
EACH_CODE_PATH = some(ALWAYS, STREAMS)
each_code_path = looped("name", EACH_CODE_PATH)
REDUCTIONS, IMPLS = ("mean", "sum", "none"), ("plain", "chunked")


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    with small_blocks(tokens=5, rows=7, table_rows=7):
        yield


def batch(head: StreamHead, tokens: int = 9, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states of one row, and targets of which some are ignored, all of them in no stream."""
    states = (1, tokens, head.num_streams, EMBED_DIM) if head.hidden_per_stream else (1, tokens, EMBED_DIM)
    targets = torch.stack([torch.randint(0, size, (1, tokens)) for size in head.sizes], -1)
    targets[0, 2, 0] = targets[0, :4, 1] = -100
    return torch.randn(states, dtype=dtype, requires_grad=True), targets


def leaves_of(module: UsesStreams, *others: Tensor) -> list[Tensor]:
    return [*others, *(parameter for parameter in module.parameters() if parameter.requires_grad)]


def assert_same(ours: Tensor, plain: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    grad_output = torch.randn_like(plain)
    torch.testing.assert_close(
        *(
            torch.autograd.grad(x, leaves, grad_output, retain_graph=True, materialize_grads=True)
            for x in (ours, plain)
        ),
        rtol=1e-10,
        atol=1e-10,
    )


def token_losses(head: StreamHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each target from all logits of its stream, `(1, T, K)`."""
    logits = [each.movedim(-1, 1) for each in head(hidden)]
    each = [F.cross_entropy(z, y, reduction="none") for z, y in zip(logits, targets.unbind(-1), strict=True)]
    return torch.stack(each, -1)


@looped(
    "name, impl, weighted, reduction", EACH_CODE_PATH, IMPLS, (False, True), REDUCTIONS, pairs=["weighted, reduction"]
)
def test_the_loss_is_the_weighted_sum_of_those_of_the_streams(name, impl, weighted, reduction) -> None:
    module = uses_streams(name).double()
    head = module.head
    hidden, targets = batch(head)
    weights = [0.5, 2.0, 0.0][: head.num_streams] if weighted else None
    of_tokens = torch.randn(targets.shape).masked_fill(targets == -100, torch.nan) if weighted else None
    found = head.loss(hidden, targets, weights, reduction=reduction, impl=impl, token_weights=of_tokens)
    losses, kept = token_losses(head, hidden, targets), targets != -100
    losses = losses if of_tokens is None else losses * of_tokens.double().nan_to_num(0.0)
    sums, counts = losses.sum((0, 1)), kept.sum((0, 1))
    each = {"mean": sums / counts, "sum": sums, "none": losses}[reduction]
    if weights is not None:
        expected = (each * torch.tensor(weights).double()).sum(-1)
        each = each * torch.tensor([weight != 0 for weight in weights])
    else:
        expected = losses.sum() / kept.sum() if reduction == "mean" else each.sum(-1)
    torch.testing.assert_close(found.losses, each.detach(), rtol=1e-10, atol=1e-10)
    assert_same(found.loss, expected, leaves_of(module, hidden))


@each_code_path
def test_partial_second_recomputed_and_differentiated_gradients_are_the_plain_ones(name) -> None:
    module = uses_streams(name).double()
    hidden, targets = batch(module.head)
    leaves = leaves_of(module, hidden)

    def loss(states: Tensor) -> Tensor:
        return module.head.loss(states, targets, impl="chunked").loss

    plain = module.head.loss(hidden, targets, impl="plain").loss
    expected = torch.autograd.grad(plain, leaves, create_graph=True, materialize_grads=True)
    ours = loss(hidden)
    again = checkpoint(loss, hidden, use_reentrant=False)
    for value, inputs in ((ours, leaves[1:]), (ours, leaves[:1]), (ours, leaves), (again, leaves)):
        if inputs:
            found = torch.autograd.grad(value, inputs, retain_graph=True, materialize_grads=True)
            wanted = [grad for leaf, grad in zip(leaves, expected, strict=True) if any(leaf is each for each in inputs)]
            torch.testing.assert_close(found, tuple(wanted), rtol=1e-10, atol=1e-10)
    differentiable = torch.autograd.grad(ours, leaves, create_graph=True, materialize_grads=True)
    second = [
        torch.autograd.grad(sum(grad.square().sum() for grad in each), leaves, materialize_grads=True)
        for each in (differentiable, expected)
    ]
    torch.testing.assert_close(*second, rtol=1e-10, atol=1e-10)


@each_code_path
def test_statistics_are_those_of_the_log_softmax_of_each_stream(name) -> None:
    module = uses_streams(name).double()
    hidden, tokens = batch(module.head)
    found = module.head.token_statistics(hidden, tokens, statistics=("log_probs", "entropy", "is_argmax"), top_k=4)
    logits, kept = module.head(hidden), tokens != -100
    assert_same(found.log_probs, -token_losses(module.head, hidden, tokens), leaves_of(module, hidden))
    entropies = torch.stack([-(F.log_softmax(z, -1) * F.softmax(z, -1)).sum(-1) for z in logits], -1)
    assert_same(found.entropy, entropies * kept, leaves_of(module, hidden))
    top = torch.stack([z.topk(4).indices for z in logits], -2).where(kept.unsqueeze(-1), -1)
    assert torch.equal(found.top_ids, top)
    assert torch.equal(found.is_argmax, (top[..., 0] == tokens) & kept)
    log_probs = module.head.token_log_probs(hidden, tokens, impl="chunked")
    torch.testing.assert_close(log_probs, found.log_probs, rtol=1e-10, atol=1e-10)


@each_code_path
def test_each_stream_has_uncomputed_logits_of_its_own(name) -> None:
    module = uses_streams(name).double()
    hidden, _ = batch(module.head)
    students = module.head.uncomputed_logits(hidden, impl="chunked")
    teachers = [torch.randn(1, 9, size).double() for size in module.head.sizes]
    ours = sum(divergence(*each, ForwardKL(), reduction="sum") for each in zip(students, teachers, strict=True))
    plain = sum(
        F.kl_div(F.log_softmax(z, -1), F.log_softmax(t, -1), reduction="sum", log_target=True)
        for z, t in zip(module.head(hidden), teachers, strict=True)
    )
    assert_same(ours, plain, leaves_of(module, hidden))
    with pytest.raises(SizeError):
        module.head(hidden, streams=[module.head.num_streams])
    last = module.head.num_streams - 1
    of_last = hidden[..., -1:, :] if module.head.hidden_per_stream else hidden
    [logits] = module.head(of_last, streams=[last])
    torch.testing.assert_close(logits, module.head(hidden)[last])


@looped("name, impl, value", EACH_CODE_PATH, IMPLS, (torch.nan, torch.inf), pairs=["impl, value"])
def test_hidden_states_that_do_not_count_have_no_effect(name, impl, value) -> None:
    module = uses_streams(name).double()
    hidden, targets = batch(module.head)
    targets[0, 6:] = -100
    dirty = hidden.detach().clone()
    dirty[0, 6:] = value

    def results(states: Tensor) -> list[Tensor]:
        leaves = leaves_of(module, states.detach().clone().requires_grad_())
        loss = module.head.loss(leaves[0], targets, impl=impl).loss
        return [loss, *torch.autograd.grad(loss, leaves, materialize_grads=True)]

    torch.testing.assert_close(results(dirty), results(hidden), rtol=1e-10, atol=1e-10)


@looped("name, impl", [name for name in STREAMS if name.startswith("streams of dense")], IMPLS)
def test_the_padding_row_of_a_tied_table_gets_no_gradient(name, impl) -> None:
    module = uses_streams(name)
    assert module.table is not None
    hidden, targets = batch(module.head, dtype=torch.float32)
    targets[0, :, 1] = 0
    module.head.loss(hidden, targets, impl=impl).loss.backward()
    has_padding = module.table.padding_idx == 0
    assert module.table.weight.grad[0].eq(0).all() == has_padding


@each_code_path
def test_when_nothing_counts_all_is_zero(name) -> None:
    module = uses_streams(name)
    for tokens in (0, 5):
        hidden, targets = batch(module.head, max(tokens, 4), torch.float32)
        hidden, targets = hidden[:, :tokens], torch.full_like(targets, -100)[:, :tokens]
        for weights in (None, [1.0] * module.head.num_streams, [0.0] * module.head.num_streams):
            found = module.head.loss(hidden, targets, weights, impl="chunked")
            assert found.loss == 0
            assert found.losses.eq(0).all()


@each_code_path
def test_no_output_stores_a_logit_of_each_token_and_each_row(name) -> None:
    module, tokens = uses_streams(name), 96
    hidden, targets = batch(module.head, tokens, torch.float32)
    with small_blocks(tokens=48, rows=12), Shapes() as shapes:
        module.head.loss(hidden, targets, impl="chunked").loss.backward()
        module.head.token_statistics(hidden, targets, impl="chunked").entropy.sum().backward()
    states = EMBED_DIM * module.head.num_streams if module.head.hidden_per_stream else 0  # and gradients of these
    assert not shapes.largest(tokens * max(sum(module.head.sizes), states + 1))


@looped("name, impl", EACH_CODE_PATH, IMPLS)
def test_a_target_beyond_its_own_stream_is_named_with_stream_row_and_column(name, impl) -> None:
    head = uses_streams(name).double().head
    hidden, targets = batch(head)
    last = head.num_streams - 1
    targets[0, 3, last] = head.sizes[last]
    message = f"token id {head.sizes[last]} at row 0, column 3, stream {last}, is outside this stream"
    for call in (head.loss, head.token_log_probs, head.token_statistics):
        with pytest.raises(TokenIdError, match=message):
            call(hidden, targets, impl=impl)


@each_code_path
def test_a_head_of_streams_is_copied_pickled_cast_and_saved(name, tmp_path) -> None:
    module = uses_streams(name)
    hidden = batch(module.head, dtype=torch.float32)[0].detach()
    expected = module.head(hidden)
    torch.testing.assert_close(copy.deepcopy(module).head(hidden), expected, rtol=0, atol=0)
    if name in STREAM_HEADS:
        torch.testing.assert_close(pickle.loads(pickle.dumps(module)).head(hidden), expected, rtol=0, atol=0)
        module.head.save_pretrained(tmp_path)
        torch.testing.assert_close(StreamHead.from_pretrained(tmp_path)(hidden), expected, rtol=0, atol=0)
    else:
        with pytest.raises(CheckpointError, match="tied head has no rows of its own"):
            module.head.save_pretrained(tmp_path)
    found = module.bfloat16().head(hidden.bfloat16())
    assert {each.dtype for each in found} == {torch.bfloat16}
