"""Two tokenizers on one text: laws of chunks over all pairs of kinds, and of real tokenizers."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering, some
from tokenizer_kinds import BUILDERS, LOSSLESS, REAL, SOME_REAL, bytes_of, random_texts, real_tokenizers, tokenizer_of
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.core.errors import ShapeError, TextError
from embedlayer.losses import chunk_log_probs
from embedlayer.tokenization.alignment import TokenAlignment, align_tokens
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.spans import TokenSpans, token_spans
from embedlayer.tokenization.train import train_tokenizer

KINDS = list(combinations(BUILDERS, 2))
OF_REAL = list(combinations([*REAL, "minilm"], 2))
NO_CUT = -1
FIELDS = ("num_chunks", "starts", "ends", "exact", "remainder")


class Texts:
    """Texts with their spans under several tokenizers, each computed once."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer], count: int) -> None:
        self.texts = random_texts(count)
        self.tokens = lambda name: bytes_of(tokenizers[name])
        self.of = cache(lambda name: token_spans(self.tokens(name), self.texts))
        self.truncated = cache(lambda name: token_spans(self.tokens(name), self.texts, max_tokens=4))


@pytest.fixture(scope="module")
def of_kinds() -> Texts:
    return Texts({kind: tokenizer_of(kind) for kind in BUILDERS}, 60)


def alone(spans: TokenSpans, row: int) -> TokenSpans:
    """One row of a batch, without padding."""
    size = int(spans.in_text[row].sum())
    names = ("ids", "starts", "ends", "exact", "in_text", "cut_ends")
    cut = {name: getattr(spans, name)[row, :size] for name in names}
    return TokenSpans(**cut, stops=spans.stops[row], texts=spans.texts[row : row + 1])


def check(texts: Texts, one: str, other: str) -> None:
    """All laws of one pair of tokenizers."""
    a, b = texts.of(one), texts.of(other)
    alignment = align_tokens(a, b)
    are_exact = ((a.exact == a.in_text).all(-1) & (b.exact == b.in_text).all(-1)).tolist()
    for row, text in enumerate(texts.texts):
        check_row(alignment, (a, b), row)
        if are_exact[row] and {one, other} <= {*LOSSLESS, "gpt2", "llama2", "phi-3", "tok512"}:
            check_lossless(alignment, row, text)
    mirrored = align_tokens(b, a)
    for name in FIELDS:
        assert torch.equal(getattr(mirrored, name), getattr(alignment, name)), name
    for side, mirror in ((mirrored.a, alignment.b), (mirrored.b, alignment.a)):
        assert all(map(torch.equal, side, mirror))
    check_prefix(align_tokens(texts.truncated(one), b, truncated=True), alignment)
    check_prefix(align_tokens(a, texts.truncated(other), truncated=True), alignment)
    for row in range(0, len(texts.texts), 20):
        check_batch(alignment, align_tokens(alone(a, row), alone(b, row)), row)


def check_row(alignment: TokenAlignment, spans: tuple[TokenSpans, TokenSpans], row: int) -> None:
    """Each token is in one chunk, or behind the last one; no chunk can be split; and what exact says."""
    count = int(alignment.num_chunks[row])
    starts, ends, exact = (getattr(alignment, name)[row, :count].tolist() for name in ("starts", "ends", "exact"))
    lasts, sides, covered = [], [], []
    for side, span in zip((alignment.a, alignment.b), spans, strict=True):
        size = int(span.in_text[row].sum())
        num_tokens, firsts = side.num_tokens[row, :count].tolist(), side.first_tokens[row, :count].tolist()
        chunks = [chunk for chunk, number in enumerate(num_tokens) for _ in range(number)]
        assert side.chunk_of[row].tolist() == chunks + [-1] * (side.chunk_of.shape[1] - len(chunks))
        assert firsts == [sum(num_tokens[:chunk]) for chunk in range(count)]
        assert side.tokens_before[row, :count].tolist() == [first - 1 for first in firsts]
        assert all(num_tokens)
        lasts.append([first + number - 1 for first, number in zip(firsts, num_tokens, strict=True)])
        low, high, flags = (each[row, :size].numpy() for each in (span.ends, span.cut_ends, span.exact))
        begins = span.starts[row, :size].numpy()
        sides.append((low, high))
        covered.append({byte for s, e in zip(begins, low, strict=True) for byte in range(s, e)})
        for chunk, (first, last) in enumerate(zip(firsts, lasts[-1], strict=True)):
            assert starts[chunk] <= begins[first] <= low[last] <= ends[chunk]
            bytes_of_tokens = {byte for t in range(first, last + 1) for byte in range(begins[t], low[t])}
            if exact[chunk]:
                assert flags[first : last + 1].all()
                assert bytes_of_tokens == {*range(starts[chunk], ends[chunk])}
    assert starts == sorted(starts)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    (a_low, a_high), (b_low, b_high) = sides
    meet = (a_low[:, None] <= b_high) & (b_low <= a_high[:, None]) & (a_high[:, None] != NO_CUT) & (b_high != NO_CUT)
    expected = np.zeros_like(meet)
    expected[tuple(lasts)] = True
    assert meet[expected].all()
    corners = [(-1, -1), *zip(*lasts, strict=True), meet.shape]
    for (a_before, b_before), (a_last, b_last) in pairwise(corners):
        assert not meet[a_before + 1 : a_last, b_before + 1 : b_last].any()
    if meet.size < 400:
        assert count == most_pairs(meet)
    rest = len(spans[0].texts[row]) - int(alignment.remainder[row])
    in_chunks = {byte for s, e in zip(starts, ends, strict=True) for byte in range(s, e)}
    assert not {byte for byte in range(rest) if byte not in in_chunks} & (covered[0] | covered[1])


def most_pairs(meet: np.ndarray) -> int:
    """The largest number of pairs that meet, each after the one before on both sides: by all ways."""
    best = np.zeros((meet.shape[0] + 1, meet.shape[1] + 1), dtype=int)
    for i, j in np.ndindex(meet.shape):
        best[i + 1, j + 1] = max(best[i, j + 1], best[i + 1, j], best[i, j] + meet[i, j])
    return int(best[-1, -1])


def check_lossless(alignment: TokenAlignment, row: int, text: str) -> None:
    """Chunks tile a text that both sides encode exactly, and all are exact."""
    count, size = int(alignment.num_chunks[row]), len(text.encode())
    assert alignment.exact[row, :count].all()
    assert [0, *alignment.ends[row, :count].tolist()] == [*alignment.starts[row, :count].tolist(), size]
    assert alignment.remainder[row] == 0


def check_prefix(part: TokenAlignment, whole: TokenAlignment) -> None:
    """The chunks of a truncated sequence are the first ones of the whole."""
    assert (part.num_chunks <= whole.num_chunks).all()
    for row, count in enumerate(part.num_chunks.tolist()):
        for name in ("starts", "ends", "exact", "single"):
            assert torch.equal(getattr(part, name)[row, :count], getattr(whole, name)[row, :count])
        for side, other in ((part.a, whole.a), (part.b, whole.b)):
            is_chunked = side.chunk_of[row] >= 0
            assert torch.equal(side.chunk_of[row][is_chunked], other.chunk_of[row, : len(is_chunked)][is_chunked])


def check_batch(batch: TokenAlignment, single: TokenAlignment, row: int) -> None:
    """A text alone is aligned as in a batch."""
    count = int(single.num_chunks)
    assert count == batch.num_chunks[row]
    assert single.remainder == batch.remainder[row]
    for name in ("starts", "ends", "exact", "num_bytes", "single"):
        assert torch.equal(getattr(single, name), getattr(batch, name)[row, :count])
    for side, other in ((single.a, batch.a), (single.b, batch.b)):
        assert torch.equal(side.chunk_of, other.chunk_of[row, : len(side.chunk_of)])
        assert torch.equal(side.first_tokens, other.first_tokens[row, :count])


@pytest.mark.parametrize(("one", "other"), some(covering(KINDS) | {*combinations(LOSSLESS, 2)}, KINDS))
def test_chunks_of_every_pair_of_kinds(of_kinds, one, other) -> None:
    check(of_kinds, one, other)


@pytest.fixture(scope="module")
def of_real(shared_data) -> Callable[[int], Texts]:
    return cache(lambda count: Texts(real_tokenizers(shared_data), count))


@pytest.mark.parametrize(("one", "other"), some(covering(combinations(SOME_REAL, 2)), OF_REAL))
@pytest.mark.parametrize("count", some([60], [60, 10_000]))
def test_chunks_of_every_pair_of_real_tokenizers(shared_data, of_real, count, one, other) -> None:
    if missing := {one, other} - {*real_tokenizers(shared_data)}:
        pytest.skip(f"the package with the tokenizer of {', '.join(missing)} is not installed")
    check(of_real(count), one, other)


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_sequence_aligned_with_itself_is_single_tokens_where_it_can_be_cut(of_kinds, kind) -> None:
    spans = of_kinds.of(kind)
    alignment = align_tokens(spans, spans)
    assert torch.equal(alignment.num_chunks, (spans.cut_ends != NO_CUT).sum(-1))
    assert torch.equal(alignment.a.num_tokens, alignment.b.num_tokens)
    assert torch.equal(alignment.single, alignment.a.num_tokens == 1)
    cuts = (spans.cut_ends != NO_CUT) | ~spans.in_text
    assert torch.equal(
        alignment.a.chunk_of[cuts.all(-1)],
        torch.where(spans.in_text, spans.cut_ends.new_tensor(range(spans.ids.shape[1])), -1)[cuts.all(-1)],
    )


@pytest.mark.parametrize(("one", "other"), list(combinations(LOSSLESS, 2)))
def test_ids_alone_are_aligned_as_the_text_is(of_kinds, one, other) -> None:
    """But for the texts of special and added tokens, and U+2581, which SentencePiece reads as a space."""
    tokens = [of_kinds.tokens(kind) for kind in (one, other)]
    read_as_others = {each.entries[token] for each in tokens for token in each.added} | {"\u2581"}
    texts = [text for text in of_kinds.texts if not any(each in text for each in read_as_others)]
    assert len(texts) > 50
    spans = [token_spans(each, texts) for each in tokens]
    of_ids = [token_spans(each, span.ids, mask=span.in_text) for each, span in zip(tokens, spans, strict=True)]
    expected = align_tokens(*spans)
    for alignment in (align_tokens(*of_ids), align_tokens(of_ids[0], spans[1])):
        assert all(torch.equal(getattr(alignment, name), getattr(expected, name)) for name in FIELDS)
        assert all(map(torch.equal, alignment.a + alignment.b, expected.a + expected.b))


def test_chunks_have_the_log_probability_of_their_tokens_and_one_unit() -> None:
    text = "The small dog loved other small dogs, and they loved it back! " * 3
    words, letters = train_tokenizer(text, vocab_size=320), train_tokenizer((), "byte")
    spans = [token_spans(tokenizer, [text, text[:50]]) for tokenizer in (words, letters)]
    alignment = align_tokens(*spans)
    for side, span in zip("ab", spans, strict=True):
        log_probs = -torch.rand(span.ids.shape, dtype=torch.float64).requires_grad_()
        chunks = alignment.sum(log_probs, side)
        assert chunks.shape == alignment.starts.shape
        is_of_chunk = getattr(alignment, side).chunk_of[..., None] == torch.arange(chunks.shape[1])
        expected = torch.where(is_of_chunk, log_probs[..., None], 0).sum(1)
        torch.testing.assert_close(chunks, expected, rtol=0, atol=1e-12)
        total = torch.where(span.in_text, log_probs, 0).sum()
        torch.testing.assert_close(chunks.sum(), total, rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(chunks.sum(), log_probs)
        assert torch.equal(gradient, span.in_text.double())
        bits = -total / math.log(2) / (len(text) + 50)
        torch.testing.assert_close(alignment.bits_per_byte(log_probs, side), bits, rtol=0, atol=1e-12)


def test_two_models_predict_the_same_text_with_one_pass_each(unchecked) -> None:
    """Chunk sums and what is in none are the log-probability of the text, float64, for lossy tokenizers too."""
    text = "The small dog loved Other small dogs,\n\nand they loved it 🙂 back! " * 3
    kinds = ("byte-level BPE", "WordPiece")
    tokenizers = [tokenizer_of(kind) for kind in kinds]
    spans = [token_spans(tokenizer, text) for tokenizer in tokenizers]
    alignment = align_tokens(*spans)
    assert not alignment.exact.all()
    sides: tuple[Any, Any] = ("a", "b")
    for side, span, tokenizer in zip(sides, spans, tokenizers, strict=True):
        table = el.TokenEmbedding(tokenizer.get_vocab_size(), 16)
        model = el.DecoderLM(table, el.RotaryEmbedding(8), num_layers=1, num_heads=2).double()
        hidden = model.hidden(span.ids[None, :-1])
        log_probs = torch.cat([torch.zeros(1).double(), el.token_log_probs(hidden, table, span.ids[None, 1:])[0]])
        of_chunks = chunk_log_probs((model.hidden(span.ids[None])[0], table), span.ids, alignment, side=side)
        torch.testing.assert_close(of_chunks, alignment.sum(log_probs, side), rtol=0, atol=1e-12 * 200)
        logits = model(span.ids[None, :-1])[0].log_softmax(-1)
        expected = logits[torch.arange(len(span.ids) - 1), span.ids[1:]].sum()
        rest = log_probs[getattr(alignment, side).chunk_of < 0].sum()
        torch.testing.assert_close(alignment.sum(log_probs, side).sum() + rest, expected, rtol=0, atol=1e-12 * 200)


def test_a_text_of_nothing_and_a_text_that_one_side_drops() -> None:
    letters, words = tokenizer_of("bytes"), tokenizer_of("WordPiece")
    empty = align_tokens(token_spans(letters, ["", ""]), token_spans(words, ["", ""]))
    assert empty.num_chunks.tolist() == empty.remainder.tolist() == [0, 0]
    assert empty.sum(torch.zeros(2, 0), "a").shape == (2, 0)
    assert empty.bits_per_byte(torch.zeros(2, 0), "a").isnan()
    dropped = align_tokens(token_spans(letters, [" \n", "dogs\n"]), token_spans(words, [" \n", "dogs\n"]))
    assert dropped.remainder.tolist() == [2, 1]
    assert dropped.a.chunk_of.tolist() == [[-1] * 5, [0] * 4 + [-1]]
    assert dropped.exact.tolist() == [[False], [True]]


def test_what_does_not_belong_together_is_refused(unchecked) -> None:
    letters, words = TokenBytes(tokenizer_of("bytes")), TokenBytes(tokenizer_of("byte-level BPE"))
    one, two = token_spans(letters, "small dogs"), token_spans(words, ["small dogs", "a"])
    with pytest.raises(ShapeError):
        align_tokens(one, two)
    with pytest.raises(ShapeError):
        align_tokens(token_spans(letters, ["small dogs"]), two)
    with pytest.raises(TextError):
        align_tokens(one, token_spans(words, "small cats"))
    cut = token_spans(words, ["a", "small dogs"], max_tokens=1)
    whole = token_spans(letters, ["a", "small dogs"])
    with pytest.raises(TextError, match="row 1 ends at byte 4 of 10"):
        align_tokens(cut, whole)
    assert align_tokens(cut, whole, truncated=True).remainder.tolist() == [0, 6]
    with pytest.raises(TextError):
        align_tokens(one, token_spans(letters, one.ids[:3]))
    assert align_tokens(one, token_spans(letters, one.ids[:3]), truncated=True).single.tolist() == [True] * 3
    with pytest.raises(TextError):
        align_tokens(one, token_spans(letters, [97]), truncated=True)
    alignment = align_tokens(one, token_spans(words, "small dogs"))
    with pytest.raises(ShapeError):
        alignment.sum(torch.zeros(9), "a")
