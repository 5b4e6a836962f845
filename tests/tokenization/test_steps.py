"""How a tokenizer splits a text: the traced tokens are the library's, over all kinds, and the steps lead to them."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
from covering import some
from gguf_models import TOKENIZERS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BUILDERS, REAL, random_texts, real_tokenizers, tokenizer_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.model_steps import (
    UNKNOWN_PENALTY,
    BpeModel,
    BpeTrace,
    ModelTrace,
    UnigramModel,
    UnigramTrace,
    WholeTrace,
    WordPieceTrace,
    traced_model,
)
from embedlayer.tokenization.spans import token_spans
from embedlayer.tokenization.steps import TokenTrace, TokenTracer, trace_tokens
from embedlayer.tokenization.tokenizer_calls import encode
from embedlayer.tokenization.train import train_tokenizer

EMOJI = ("👩‍💻", "🏳️‍🌈", "👨‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301\u0323", "한", "\u1112\u1161\u11ab")
LONG_TEXTS = ("a" * 300, " " * 40, "ab" * 90 + "</s>" + "the " * 60, "")
TEXTS = (*random_texts(100), *EMOJI, " ".join(EMOJI), *LONG_TEXTS)


@cache
def with_added_tokens() -> Tokenizer:
    """A tokenizer whose added tokens have each option, with a normalizer and a template."""
    built = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    built.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    built.add_tokens([AddedToken("loved", single_word=True), AddedToken("DOG", normalized=True), AddedToken("the dog")])
    built.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<sep>", rstrip=True), "[CLS]", "ask"])
    ids = [(name, built.token_to_id(name)) for name in ("[CLS]", "<sep>")]
    built.post_processor = processors.TemplateProcessing(single="[CLS] $A <sep> <sep>", special_tokens=ids)
    return built


KINDS = {
    **{kind: (lambda kind=kind: tokenizer_of(kind)) for kind in BUILDERS},
    **{f"GGUF, {kind}": build for kind, build in TOKENIZERS.items()},
    "added tokens": with_added_tokens,
}


def replay(trace: BpeTrace, model: BpeModel) -> list[str]:
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
    ids = {pair: (model.vocabulary[pair[0]], model.vocabulary[pair[1]]) for pair in seen}
    assert trace.pairs == {pair: model.merges[of_ids][0] for pair, of_ids in ids.items() if of_ids in model.merges}
    return symbols


def check_steps(trace: ModelTrace, piece: str, model: Any) -> None:
    """The steps of a piece lead to its tokens."""
    if isinstance(trace, BpeTrace):
        assert [model.vocabulary[symbol] for symbol in replay(trace, model)] == [*trace.ids]
    elif isinstance(trace, WordPieceTrace):
        fits = [each for each in trace.tries if each.id is not None]
        is_split = fits != [] and fits[-1].stop == len(piece)
        assert [*trace.ids] == ([each.id for each in fits] if is_split or not piece else [*model.unknown])
        assert all(each.start == before.stop for before, each in pairwise(fits))
    elif isinstance(trace, UnigramTrace):
        assert [*trace.ids] == [i for path in trace.paths[:1] for part in path.parts for i in part.ids]
        assert all("".join(part.text for part in path.parts) == piece for path in trace.paths)
        assert all(a.score >= b.score and a.parts != b.parts for a, b in pairwise(trace.paths))
        for path in trace.paths:
            assert path.score == pytest.approx(sum(part.score for part in path.parts), rel=1e-12)
    else:
        assert isinstance(trace, WholeTrace)


def check(tracer: TokenTracer, text: str, *, special: bool) -> TokenTrace:
    """All laws of one text."""
    tokenizer = tracer.tokens.tokenizer
    trace = trace_tokens(tracer, text, add_special_tokens=special)
    assert [*trace.ids] == encode(tokenizer, text, add_special_tokens=special).ids
    spans = token_spans(tracer.tokens, text, add_special_tokens=special)
    assert ([*trace.starts], [*trace.ends]) == (spans.starts.tolist(), spans.ends.tolist())
    covered = [token for piece in trace.pieces for token in range(piece.first, piece.behind)]
    assert covered == [token for token, is_in in enumerate(spans.in_text.tolist()) if is_in]
    assert all(0 <= piece.start <= piece.stop <= len(text.encode()) for piece in trace.pieces)
    for before, piece in pairwise(trace.pieces):  # those of one character overlap
        assert piece.start >= before.stop or (before.start <= piece.start and before.stop <= piece.stop)
    for piece in trace.pieces:
        ids = trace.ids[piece.first : piece.behind]
        if piece.trace is None:
            assert len(ids) == 1
            assert ids[0] in tracer.tokens.added
        else:
            assert piece.trace.ids == ids == tuple(token.id for token in tokenizer.model.tokenize(piece.text))
            check_steps(piece.trace, piece.text, tracer.model)
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_the_traced_tokens_are_the_tokenizers_for_every_kind(kind) -> None:
    tracer = TokenTracer(KINDS[kind]())
    for text in TEXTS:
        for special in (False, True):
            check(tracer, text, special=special)


@pytest.fixture(scope="module")
def tracer_of(shared_data):
    return cache(lambda name: TokenTracer(real_tokenizers(shared_data)[name]))


@pytest.mark.parametrize("name", [*REAL, "minilm"])
@pytest.mark.parametrize("count", some([100], [100, 10_000]))
def test_so_are_those_of_real_tokenizers(shared_data, tracer_of, name, count) -> None:
    if name not in real_tokenizers(shared_data):
        pytest.skip(f"the package with the tokenizer of {name} is not installed")
    for text in TEXTS if count == 100 else random_texts(count):
        check(tracer_of(name), text, special=True)


@settings(max_examples=60)
@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_any_text(kind, text) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    check(tracer_for(kind), text, special=True)


tracer_for = cache(lambda kind: TokenTracer(KINDS[kind]()))
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


@settings(max_examples=600)
@given(model=bpe_models() | wordpiece_models() | unigram_models(), piece=PIECES)
def test_a_model_with_any_options_splits_as_the_library_does(model, piece) -> None:
    own = traced_model(Tokenizer(model))
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
    own = traced_model(Tokenizer(model))
    assert isinstance(own, UnigramModel)
    lowest = min(score for _, score in json.loads(model.__getstate__())["vocab"])
    scores = {**dict.fromkeys(piece, lowest - UNKNOWN_PENALTY), **own.scores}
    sums = (sum(scores[part] for part in parts) for parts in segmentations(piece) if scores.keys() >= {*parts})
    best = sorted(sums, reverse=True)[:2]
    assert [path.score for path in own.trace(piece).paths] == pytest.approx(best, rel=1e-12)


def test_what_depends_on_chance_is_refused_by_name_and_the_advice_works() -> None:
    bpe = Tokenizer(models.BPE({"a": 0}, [], dropout=0.1))
    unigram = Tokenizer(models.Unigram([("a", -1.0)], unk_id=0, byte_fallback=False))
    unigram.model.alpha = 0.5
    for tokenizer, message in (
        (bpe, r"leaves out merges by chance \(dropout 0.1\).*Set tokenizer.model.dropout to None"),
        (unigram, r"draws a segmentation by chance \(alpha 0.5\).*Set tokenizer.model.alpha to None"),
    ):
        with pytest.raises(TokenizerError, match=message):
            trace_tokens(tokenizer, "a")
    bpe.model.dropout = unigram.model.alpha = None
    assert trace_tokens(bpe, "a").ids == trace_tokens(unigram, "a").ids == (0,)


def test_what_is_no_tokenizer_or_no_text_is_refused() -> None:
    with pytest.raises(TokenizerError, match="str is not a tokenizer"):
        trace_tokens("gpt2", "a")
    with pytest.raises(TokenizerError, match="cannot encode"):
        trace_tokens(tokenizer_of("Unigram"), "a\ud800")
    with pytest.raises(TokenizerError, match="cannot encode"):
        trace_tokens(Tokenizer(models.WordLevel({"a": 0}, "<unk>")), "b")
    twice = Tokenizer(models.BPE({"a": 0, "b": 0, "ab": 1, "aa": 2}, [("a", "b")]))
    with pytest.raises(TokenizerError, match="has no entry|cannot be traced"):
        trace_tokens(twice, "ab")


def test_the_steps_of_a_word_and_of_an_emoji() -> None:
    """The pairs that could merge, and the bytes of a character, which no merge joins."""
    tokenizer = train_tokenizer("love love", vocab_size=260)
    love, family = (trace_tokens(tokenizer, text).pieces[0].trace for text in ("love", "👩‍💻"))
    assert isinstance(love, BpeTrace)
    assert isinstance(family, BpeTrace)
    assert [merge.result for merge in love.merges] == ["lo", "ve", "love"]
    assert love.pairs == {("l", "o"): 0, ("v", "e"): 1, ("lo", "ve"): 2}
    assert len(family.symbols) == len(family.ids) == len("👩‍💻".encode()) == 11
    assert family.merges == ()


def test_texts_are_traced_at_the_same_time() -> None:
    tracer = TokenTracer(tokenizer_of("byte-level BPE"))
    texts = TEXTS * 3
    expected = [tracer.trace(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(tracer.trace, texts)] == expected
