"""The distribution of the next byte: the sum of the probabilities of all tokens that begin with it."""

import pytest
import torch
from covering import cases
from tokenizer_kinds import WRITE_ANY_TEXT, tokenizer_of
from torch import Tensor

import embedlayer as el
from embedlayer.core import ShapeError, SizeError, TokenizerError
from embedlayer.heads import DraftHead
from embedlayer.kernels import kernels_disabled
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    NextByte,
    NextBytes,
    ReverseKL,
    divergence,
    token_statistics,
)
from embedlayer.tokenization import table_size
from embedlayer.tokenization.bytes import TokenBytes

V, D = 300, 16


def events_of(vocab_size: int) -> NextBytes:
    """Events of random tokens, all of which have a token."""
    return NextBytes(torch.cat([torch.arange(257), torch.randint(0, 257, (vocab_size - 257,))]), 257)


def by_definition(logits: Tensor, events: NextBytes) -> Tensor:
    """Return the log-probabilities from all logits: one logsumexp for each event."""
    log_probs = logits.log_softmax(-1)
    each = [log_probs[..., events.events == event].logsumexp(-1) for event in range(events.num_events)]
    return torch.stack(each, dim=-1)


@cases(
    "others, is_compiled, options",
    [{}, {"statistics": ("entropy", "sum_squared_probs"), "top_k": 2}],
    [True, False],
    [{}, {"temperature": 0.7, "softcap": 5.0}, {"chunk_bytes": 20_000}],
    pairs=["others, is_compiled"],
)
def test_the_statistic_is_that_of_all_logits_and_sums_to_1(is_compiled, options, others) -> None:
    hidden = torch.randn(2, 40, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    bias, events = torch.randn(V, dtype=torch.float64, requires_grad=True), events_of(V)
    kinds = {name: value for name, value in options.items() if name != "chunk_bytes"}
    expected = by_definition(el.losses.finish_logits(hidden @ weight.T, bias=bias, **kinds), events)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * direction).sum(), (hidden, weight, bias))
    with kernels_disabled() if not is_compiled else torch.enable_grad():
        found = token_statistics(
            hidden, weight, bias=bias, next_bytes=events, **{"statistics": (), **others, **options}
        )
        assert found.next_bytes is not None
        grads = torch.autograd.grad((found.next_bytes * direction).sum(), (hidden, weight, bias))
    torch.testing.assert_close(found.next_bytes, expected, rtol=0, atol=1e-11)
    assert (found.next_bytes.exp().sum(-1) - 1).abs().max() < 1e-12
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-10)


def test_far_apart_logits_keep_their_probabilities() -> None:
    logits = torch.zeros(1, 257)
    logits[0, 7], logits[0, 9] = -300.0, 200.0
    events = NextBytes(torch.arange(257), 257)
    found = token_statistics(logits, statistics=(), next_bytes=events).next_bytes
    torch.testing.assert_close(found, logits.log_softmax(-1))


def test_ignored_tokens_have_zeros_and_events_without_a_token_minus_infinity() -> None:
    logits, tokens = torch.randn(3, 20), torch.tensor([4, -100, 5])
    events = NextBytes(torch.arange(20), 257)
    found = token_statistics(logits, tokens, next_bytes=events).next_bytes
    assert found is not None
    assert (found[1] == 0).all()
    assert (found[0, 20:] == -torch.inf).all()


@pytest.mark.parametrize("kind", WRITE_ANY_TEXT)
def test_events_are_first_bytes(kind) -> None:
    tokenizer = tokenizer_of(kind)
    tokens, size = TokenBytes(tokenizer), table_size(tokenizer)
    events = NextBytes.of(tokenizer, vocab_size=size + 3)
    for token in range(size + 3):
        is_text = token in tokens.entries and token not in tokens.special
        assert events.events[token] == (tokens.readings(token)[0][0] if is_text else 256)
    assert {*events.events.tolist()} >= {*range(256)}
    if (end := tokenizer.token_to_id("<|endoftext|>")) is not None:
        assert NextBytes.of(tokenizer, end_of_text=True).events[end] == 257


@pytest.mark.parametrize("kind", [ForwardKL(), ReverseKL(), JensenShannon(0.3)], ids=repr)
def test_a_teacher_of_another_vocabulary_teaches_by_the_next_byte(kind) -> None:
    events = events_of(V), events_of(V + 50)
    hidden, teacher_hidden = torch.randn(6, D, dtype=torch.float64), torch.randn(6, 2 * D, dtype=torch.float64)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(V + 50, 2 * D, dtype=torch.float64)
    labels = torch.tensor([1, 1, -100, 1, 1, 1])
    own, other = (
        by_definition(a @ b.T, e) for a, b, e in zip((hidden, teacher_hidden), (weight, teacher), events, strict=True)
    )
    expected = kind.of_log_probs(own, other)[labels >= 0].mean()
    found = divergence((hidden, weight), (teacher_hidden, teacher), NextByte(*events, kind), labels=labels)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(each, weight)[0] for each in (found, expected))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_a_draft_head_has_the_events_of_its_tokens() -> None:
    head, ids, events = el.OutputHead(8, V), [299, 4, 5, 280], events_of(V)
    hidden = torch.randn(3, 8)
    found = DraftHead(head, ids).token_statistics(hidden, statistics=(), next_bytes=events).next_bytes
    expected = by_definition(head(hidden)[:, ids], NextBytes(events.events[ids], 257))
    torch.testing.assert_close(found, expected)


def test_bad_input_is_refused(unchecked) -> None:
    logits = LinearLogits(torch.randn(2, 8), torch.randn(300, 8))
    with pytest.raises(ShapeError, match=r"next_bytes has 257 tokens and the head 300: .*vocab_size=300"):
        token_statistics(logits, statistics=(), next_bytes=NextBytes(torch.arange(257), 257))
    with pytest.raises(ShapeError, match="the head 300"):
        divergence(logits, logits, NextByte(*[NextBytes(torch.arange(257), 257)] * 2))
    with pytest.raises(SizeError, match=r"has the events \[256\]"):
        NextByte(NextBytes(torch.arange(257), 257), NextBytes(torch.arange(256), 257))
    with pytest.raises(TokenizerError, match="change bytes of a text"):
        NextBytes.of(tokenizer_of("WordPiece"))
    with pytest.raises(SizeError, match="vocab_size is 10"):
        NextBytes.of(tokenizer_of("bytes"), vocab_size=10)
    for events, error in ((torch.arange(3.0), ShapeError), (torch.tensor([257]), SizeError)):
        with pytest.raises(error):
            NextBytes(events, 257)
