"""How a tokenizer splits a text: the traced tokens are the library's, over all kinds, and the steps lead to them."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
from covering import some
from gguf_models import TOKENIZERS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BUILDERS, REAL, SOME_REAL, any_tokenizer, random_texts, tokenizer_of, tracer_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.spans import token_spans
from embedlayer.tokenization.steps import TokenTrace, TokenTracer, trace_tokens

EMOJI = ("👩‍💻", "🏳️‍🌈", "👨‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301\u0323", "한", "\u1112\u1161\u11ab")
LONG_TEXTS = ("a" * 300, " " * 40, "ab" * 90 + "</s>" + "the " * 60, "")
TEXTS = (*random_texts(20), *EMOJI, " ".join(EMOJI), *LONG_TEXTS)


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


def check(tracer: TokenTracer, text: str, *, special: bool) -> TokenTrace:
    """All laws of one text."""
    tokenizer = tracer.tokens.tokenizer
    trace = trace_tokens(tracer, text, add_special_tokens=special)
    assert [*trace.ids] == tokenizer.encode(text, add_special_tokens=special).ids
    spans = token_spans(tracer.tokens, text, add_special_tokens=special)
    assert ([*trace.starts], [*trace.ends]) == (spans.starts.tolist(), spans.ends.tolist())
    covered = [token for piece in trace.pre_tokens for token in range(piece.first, piece.behind)]
    assert covered == [token for token, is_in in enumerate(spans.in_text.tolist()) if is_in]
    assert all(0 <= piece.start <= piece.stop <= len(text.encode()) for piece in trace.pre_tokens)
    for before, piece in pairwise(trace.pre_tokens):  # those of one character overlap
        assert piece.start >= before.stop or (before.start <= piece.start and before.stop <= piece.stop)
    for piece in trace.pre_tokens:
        ids = trace.ids[piece.first : piece.behind]
        if piece.trace is None:
            assert len(ids) == 1
            assert ids[0] in tracer.tokens.added
        else:
            assert piece.trace.ids == ids == tuple(token.id for token in tokenizer.model.tokenize(piece.text))
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_the_traced_tokens_are_the_tokenizers_for_every_kind(kind) -> None:
    tracer = tracer_for(kind)
    for text in TEXTS:
        for special in (False, True):
            check(tracer, text, special=special)


@pytest.mark.parametrize("name", some(SOME_REAL, [*REAL, "minilm"]))
@pytest.mark.parametrize("count", some([100], [100, 10_000]))
def test_so_are_those_of_real_tokenizers(request, name, count) -> None:
    tracer = tracer_of(any_tokenizer(name, request))
    for text in TEXTS if count == 100 else random_texts(count):
        check(tracer, text, special=True)


@settings(max_examples=25)
@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_any_text(kind, text) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    check(tracer_for(kind), text, special=True)


tracer_for = cache(lambda kind: tracer_of(KINDS[kind]()))


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TokenizerError):
        trace_tokens(tokenizer_of("Unigram"), "a\ud800")
    with pytest.raises(TokenizerError):
        trace_tokens(Tokenizer(models.WordLevel({"a": 0}, "<unk>")), "b")


def test_texts_are_traced_at_the_same_time() -> None:
    tracer = TokenTracer(tokenizer_of("byte-level BPE"))
    texts = TEXTS * 3
    expected = [tracer.trace(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(tracer.trace, texts)] == expected
