"""The models of tokenizers: with any options they split as the library does, and their steps lead to the tokens."""

import json
import math
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import ANY, any_tokenizer, random_texts, tracer_of
from tokenizers import Tokenizer, models

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.steps import TokenTracer, trace_tokens
from embedlayer.tokenization.train import train_tokenizer

TEXTS = (*random_texts(20), "👩‍💻", "a" * 120, "")


def replay(trace: Any, model: Any) -> list[str]:
    """Apply the merges of a trace to its symbols, and check at each moment that it is the merge of lowest rank."""
    symbols = list(trace.symbols)
    seen: set[tuple[str, str]] = set()
    for merge in (*trace.merges, None):
        ranks = [trace.pairs.get(pair, math.inf) for pair in pairwise(symbols)]
        seen |= {*pairwise(symbols)}
        assert min(ranks, default=math.inf) == (math.inf if merge is None else merge.rank)
        if merge is not None:
            assert ranks.index(merge.rank) == merge.index
            right = symbols[merge.index + 1].encode()[len(model.prefix.encode()) :].decode()
            assert merge.result == symbols[merge.index] + right
            symbols[merge.index : merge.index + 2] = [merge.result]
    assert trace.pairs == {pair: model.ranks[pair] for pair in seen if pair in model.ranks}
    return symbols


def check_steps(trace: Any, piece: str, model: Any) -> None:
    """The steps of a piece lead to its tokens."""
    if hasattr(trace, "merges"):
        assert [model.vocabulary[symbol] for symbol in replay(trace, model)] == [*trace.ids]
    elif hasattr(trace, "tries"):
        fits = [each for each in trace.tries if each.id is not None]
        is_split = fits != [] and fits[-1].stop == len(piece)
        assert [*trace.ids] == ([each.id for each in fits] if is_split or not piece else [*model.unknown])
        assert all(each.start == before.stop for before, each in pairwise(fits))
    elif hasattr(trace, "paths"):
        assert [*trace.ids] == [i for path in trace.paths[:1] for part in path.parts for i in part.ids]
        assert all("".join(part.text for part in path.parts) == piece for path in trace.paths)
        assert all(a.score >= b.score and a.parts != b.parts for a, b in pairwise(trace.paths))
        for path in trace.paths:
            assert path.score == pytest.approx(sum(part.score for part in path.parts), rel=1e-12)


@pytest.mark.parametrize("name", ANY)
def test_the_steps_of_every_tokenizer_lead_to_its_tokens(request, name) -> None:
    tracer = tracer_of(any_tokenizer(name, request))
    for text in TEXTS:
        for piece in tracer.trace(text).pre_tokens:
            if piece.trace is not None:
                check_steps(piece.trace, piece.text, tracer.model)


LETTERS = "abcé🙂"


@st.composite
def bpe_models(draw: st.DrawFn) -> models.BPE:
    """A BPE over few letters with any options."""
    prefix, suffix = draw(st.sampled_from(["", "##", "é"])), draw(st.sampled_from(["", "</w>"]))
    names = [a + letter + z for letter in LETTERS for a in {"", prefix} for z in {"", suffix}]
    known = draw(st.lists(st.sampled_from(sorted(names)), unique=True, max_size=len(names)))
    bytes_of = sorted({f"<0x{byte:02X}>" for byte in (LETTERS + prefix + suffix).encode()})
    entries = ["<unk>", *known, *draw(st.sampled_from([[], bytes_of, bytes_of[::2]]))]
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(0, 14))):
        left, right = draw(st.sampled_from(entries)), draw(st.sampled_from(entries))
        try:
            result = left + right.encode()[len(prefix.encode()) :].decode()
        except UnicodeDecodeError:
            continue
        if len(right.encode()) > len(prefix.encode()):
            merges.append((left, right))
            entries += [] if result in entries else [result]
    options: dict[str, Any] = {"continuing_subword_prefix": prefix} if prefix else {}
    options |= {"end_of_word_suffix": suffix} if suffix else {}
    options |= {"unk_token": "<unk>"} if draw(st.booleans()) else {}
    flags = {name: draw(st.booleans()) for name in ("fuse_unk", "byte_fallback", "ignore_merges")}
    ids = draw(st.permutations(range(2 * len(entries))))
    return models.BPE(dict(zip(entries, ids, strict=False)), merges, **options, **flags)


@st.composite
def wordpiece_models(draw: st.DrawFn) -> models.WordPiece:
    """A WordPiece of few letters with any options."""
    prefix = draw(st.sampled_from(["##", "", "a"]))
    parts = draw(st.lists(st.text(LETTERS, min_size=1, max_size=3), unique=True, max_size=12))
    entries = dict.fromkeys(["[UNK]", *(draw(st.sampled_from(["", prefix])) + part for part in parts)])
    vocabulary = {entry: token_id for token_id, entry in enumerate(entries)}
    limit = draw(st.sampled_from([3, 8, 100]))
    return models.WordPiece(
        vocabulary, unk_token="[UNK]", continuing_subword_prefix=prefix, max_input_chars_per_word=limit
    )


SCORES = (-60.0, -30.0, -1.0, -1.5, -2.0, -3.25, -0.1, 0.0, 4.0)


@st.composite
def unigram_models(draw: st.DrawFn) -> models.Unigram:
    """A Unigram model of few letters, with equal and positive scores, and with or without byte fallback."""
    parts = draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=12))
    byte_entries = draw(st.sampled_from([[], [f"<0x{byte:02X}>" for byte in sorted(set(LETTERS.encode()))]]))
    entries = [(entry, draw(st.sampled_from(SCORES))) for entry in ["<unk>", *parts, *byte_entries]]
    return models.Unigram(entries, unk_id=0, byte_fallback=draw(st.booleans()))


PIECES = st.lists(st.sampled_from([*LETTERS, "x", "<unk>", "##"]), max_size=9).map("".join)


@settings(max_examples=250)
@given(model=bpe_models() | wordpiece_models() | unigram_models(), piece=PIECES)
def test_a_model_with_any_options_splits_as_the_library_does(model, piece) -> None:
    own = TokenTracer(Tokenizer(model)).model
    trace = own.trace(piece)
    assert [*trace.ids] == [token.id for token in model.tokenize(piece)]
    check_steps(trace, piece, own)


def segmentations(piece: str) -> Iterator[list[str]]:
    """Every way to cut a piece."""
    for count in range(len(piece)):
        for cuts in combinations(range(1, len(piece)), count):
            bounds = [0, *cuts, len(piece)]
            yield [piece[start:stop] for start, stop in pairwise(bounds)]


@settings(max_examples=200)
@given(model=unigram_models(), piece=st.text(LETTERS + "x", min_size=1, max_size=8))
def test_the_second_path_of_unigram_is_the_best_of_all_others(model, piece) -> None:
    own = TokenTracer(Tokenizer(model)).model
    lowest = min(score for _, score in json.loads(model.__getstate__())["vocab"])
    scores = {**dict.fromkeys(piece, lowest - 10.0), **own.scores}
    sums = (sum(scores[part] for part in parts) for parts in segmentations(piece) if scores.keys() >= {*parts})
    best = sorted(sums, reverse=True)[:2]
    assert [path.score for path in own.trace(piece).paths] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("option", ["dropout", "alpha"])
def test_what_is_left_to_chance_is_refused_and_the_advice_works(option) -> None:
    model = models.BPE({"a": 0}, []) if option == "dropout" else models.Unigram([("a", -1.0)], 0, False)
    tokenizer = Tokenizer(model)
    if not hasattr(tokenizer.model, option):
        pytest.skip("this release of tokenizers draws no segmentations")
    setattr(tokenizer.model, option, 0.5)
    with pytest.raises(TokenizerError):
        trace_tokens(tokenizer, "a")
    setattr(tokenizer.model, option, None)
    assert trace_tokens(tokenizer, "a").ids == (0,)


def test_the_steps_of_a_word_and_of_an_emoji() -> None:
    """The pairs that could merge, and the bytes of a character, which no merge joins."""
    tokenizer = train_tokenizer("love love", vocab_size=260)
    love, family = tuple[Any, Any](trace_tokens(tokenizer, text).pre_tokens[0].trace for text in ("love", "👩‍💻"))
    assert [merge.result for merge in love.merges] == ["lo", "ve", "love"]
    assert love.pairs == {("l", "o"): 0, ("v", "e"): 1, ("lo", "ve"): 2}
    assert len(family.symbols) == len(family.ids) == len("👩‍💻".encode()) == 11
    assert family.merges == ()


def test_a_merge_without_an_entry_is_refused() -> None:
    """Of two names of one ID, the library writes one alone, so its merge is of other names."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 0, "ab": 1}, [("a", "b")]))
    with pytest.raises(TokenizerError):
        trace_tokens(tokenizer, "ab")
