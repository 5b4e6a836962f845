"""Two tokenizers beside each other: what both have, and how both split a text."""

from itertools import combinations

import pytest
from covering import some
from tokenizer_kinds import BUILDERS, ENGLISH, random_texts, tokenizer_of

from embedlayer.core.errors import TextError
from embedlayer.data import read_text_chunks
from embedlayer.tokenization.alignment import align_tokens
from embedlayer.tokenization.comparison import ComparedTokenizer, compare_tokenizers, match_tokenizers
from embedlayer.tokenization.spans import token_spans

PAIRS = list(combinations(BUILDERS, 2))
CHUNKED = [("byte-level BPE", "SentencePiece BPE with byte fallback"), ("character BPE", "WordPiece")]
TEXT = ENGLISH[:400] + " ½ naïve\n\ndogs"


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_comparison_counts_what_matches_and_aligns(kind) -> None:
    tokenizers = tokenizer_of("byte-level BPE"), tokenizer_of(kind)
    comparison = compare_tokenizers(*tokenizers, TEXT)
    spans = [token_spans(tokenizer, TEXT) for tokenizer in tokenizers]
    alignment = align_tokens(*spans)
    assert comparison.num_bytes == len(TEXT.encode())
    assert comparison.num_chunks == alignment.num_chunks
    assert comparison.one_to_one == pytest.approx(sum(alignment.single.tolist()) / comparison.num_chunks)
    in_exact = sum(n for n, e in zip(alignment.num_bytes.tolist(), alignment.exact.tolist(), strict=True) if e)
    assert comparison.inexact == pytest.approx(1 - in_exact / comparison.num_bytes)
    sides = (comparison.a, comparison.b)
    for side, own, other, span in zip(sides, tokenizers, tokenizers[::-1], spans, strict=True):
        matches = match_tokenizers(other, own)
        ids = span.ids.tolist()
        assert side == ComparedTokenizer(
            num_tokens=own.get_vocab_size(),
            shared=pytest.approx(sum(match is not None for match in matches) / own.get_vocab_size()),
            text_tokens=len(ids),
            bytes_per_token=pytest.approx(comparison.num_bytes / len(ids)),
            coverage=pytest.approx(sum(matches[token] is not None for token in ids) / len(ids)),
        )
    alone = compare_tokenizers(*tokenizers)
    assert [(each.num_tokens, each.shared) for each in (alone.a, alone.b)] == [(s.num_tokens, s.shared) for s in sides]
    assert (alone.num_bytes, alone.num_chunks, alone.one_to_one, alone.inexact, alone.a.coverage) == (None,) * 5


@pytest.mark.parametrize(("one", "other"), some(CHUNKED, PAIRS))
def test_chunks_of_a_text_are_compared_as_the_whole(one, other, tmp_path) -> None:
    text = "".join(random_texts(300)).replace("\0", "") + "\n\n" + ENGLISH[:3000]
    path, tokenizers = tmp_path / "text.txt", (tokenizer_of(one), tokenizer_of(other))
    path.write_bytes(text.encode())
    chunks = list(read_text_chunks(path, tokenizer=tokenizers))
    assert len(chunks) > 10
    assert compare_tokenizers(*tokenizers, chunks) == compare_tokenizers(*tokenizers, "".join(chunks))


def test_a_tokenizer_beside_itself_and_one_that_drops_the_text() -> None:
    words, letters = tokenizer_of("WordPiece"), tokenizer_of("bytes")
    same = compare_tokenizers(letters, letters, TEXT)
    assert (same.a, same.a.shared, same.a.coverage, same.one_to_one, same.inexact) == (same.b, 1, 1, 1, 0)
    dropped = compare_tokenizers(words, letters, "\n\n")
    assert (dropped.num_chunks, dropped.one_to_one, dropped.inexact) == (0, None, 1)
    assert (dropped.a.text_tokens, dropped.a.bytes_per_token, dropped.b.bytes_per_token) == (0, None, 1)


def test_an_empty_text_cannot_be_compared() -> None:
    with pytest.raises(TextError):
        compare_tokenizers(tokenizer_of("bytes"), tokenizer_of("word"), "")
