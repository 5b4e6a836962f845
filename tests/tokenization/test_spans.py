"""The bytes of a text that each token encodes."""

from typing import Any

import pytest
import torch
from tokenizer_kinds import (
    ANY,
    BUILDERS,
    LOSSLESS,
    any_tokenizer,
    bytes_of,
    random_texts,
    real_tokenizers,
    tokenizer_of,
)
from tokenizers import Tokenizer

from embedlayer.core.errors import ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.spans import TokenSpans, token_spans

TEXTS = random_texts(100)
NO_CUT = -1


def tokens_of(spans: TokenSpans) -> list[tuple[str, bool]]:
    """The text of each token of a single text, and whether it is exact."""
    (text,) = spans.texts
    places = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
    return [
        (text[s:e].decode(errors="replace"), exact) for (s, e), exact in zip(places, spans.exact.tolist(), strict=True)
    ]


def check(tokenizer: Tokenizer, texts: list[str]) -> None:
    """What spans of any tokenizer satisfy."""
    tokens = bytes_of(tokenizer)
    spans = token_spans(tokens, texts)
    for row, text in enumerate(texts):
        content, encoding = text.encode(), tokens.tokenizer.encode(text, add_special_tokens=False)
        size = len(encoding.ids)
        assert spans.ids[row, :size].tolist() == encoding.ids
        assert spans.in_text[row].tolist() == [True] * size + [False] * (spans.ids.shape[1] - size)
        places = [0, *(len(text[:end].encode()) for end in range(1, len(text) + 1))]
        end, covered, by_offsets = 0, set[int](), set[int]()
        for token, place in enumerate(encoding.offsets):
            start, stop = int(spans.starts[row, token]), int(spans.ends[row, token])
            cut_end, exact = int(spans.cut_ends[row, token]), bool(spans.exact[row, token])
            assert start <= stop <= len(content)
            assert start >= end or (start, stop) == (int(spans.starts[row, token - 1]), end), "spans in order"
            readings = tokens.readings(encoding.ids[token])
            if exact:
                part = content[start:stop]
                assert part in readings or b" " + part in readings
                assert not tokens.by_id.special[encoding.ids[token]]
            following = int(spans.starts[row, token + 1]) if token + 1 < size else len(content)
            assert cut_end in (NO_CUT, following)
            assert cut_end == NO_CUT or start < stop
            assert cut_end == NO_CUT or start < following
            covered.update(range(start, stop))
            by_offsets.update(range(*(places[min(each, len(text))] for each in place)))
            end = stop
        assert by_offsets <= covered
        assert {content[byte] for byte in covered - by_offsets} <= {ord(" ")}
    texts_of_rows = tuple(text.encode() for text in texts)
    assert spans.texts == texts_of_rows
    assert spans.stops.tolist() == [len(text) for text in texts_of_rows]


@pytest.mark.parametrize("name", ANY)
def test_tokens_stand_in_order_and_encode_what_they_say(request, name) -> None:
    check(any_tokenizer(name, request), TEXTS if name in BUILDERS else TEXTS[:30])


def is_read_as_another(tokens: TokenBytes, text: str) -> bool:
    """Whether a text has a special or added token's text, or SentencePiece's mark of a space."""
    return "\u2581" in text or any(tokens.entries[token] in text for token in tokens.added)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_spans_of_lossless_tokenizers_tile_the_text_and_follow_from_the_ids(kind) -> None:
    tokens = TokenBytes(tokenizer_of(kind))
    seen = 0
    for text in TEXTS:
        if is_read_as_another(tokens, text):
            continue
        spans = token_spans(tokens, text)
        assert spans.exact.all()
        assert spans.starts.tolist() == [0, *spans.ends.tolist()][: len(spans.ids)]
        assert spans.ends[-1:].tolist() == [len(text.encode())][: len(spans.ids)]
        of_ids = token_spans(tokens, spans.ids)
        assert of_ids.texts == spans.texts
        for name in ("ids", "starts", "ends", "exact", "in_text", "cut_ends", "stops"):
            assert torch.equal(getattr(of_ids, name), getattr(spans, name)), name
        seen += 1
    assert seen > 70


def test_what_a_text_loses_is_in_no_exact_token(shared_data) -> None:
    real = real_tokenizers(shared_data)
    llama = [("a", True), ("\u2581z", False), ("</s>", False), ("b", True)]
    if "llama2" in real:
        assert tokens_of(token_spans(bytes_of(real["llama2"]), "a\u2581z</s>b")) == llama
    gpt2 = tokens_of(token_spans(bytes_of(real["gpt2"]), "a<|endoftext|>½"))
    assert gpt2 == [("a", True), ("<|endoftext|>", False), ("½", True)]
    phi_3 = tokens_of(token_spans(bytes_of(real["phi-3"]), "x</s>"))
    assert phi_3 == [("x", True), ("</s>", False)]  # no special token there
    assert tokens_of(token_spans(bytes_of(real["bert"]), "a dog.\nThe 🙂 .")) == [
        *(("a", True), (" dog", True), (".", True), ("The", True), ("🙂", False), (" .", True)),
    ]
    assert (
        tokens_of(token_spans(bytes_of(real["t5"]), "a  dog\nx½"))
        == [
            *(("", True), ("a", True), (" dog", True), ("x", False), ("x", False), *[("½", False)] * 3),
        ][: len(token_spans(bytes_of(real["t5"]), "a  dog\nx½").ids)]
    )
    if "minilm" in real:
        assert tokens_of(token_spans(bytes_of(real["minilm"]), "A dog")) == [("A", False), (" dog", True)]


def test_the_bytes_of_one_character_are_divided_among_its_tokens(shared_data) -> None:
    real = real_tokenizers(shared_data)
    spans = token_spans(bytes_of(real["tok512"]), "é½")
    assert spans.ends.tolist() == [0, 2, 3, 4]  # a space in front, é, and two byte tokens
    assert spans.cut_ends.tolist() == [NO_CUT, 2, 3, 4]
    group = token_spans(bytes_of(real["t5"]), "½")  # 1, a fraction slash that it does not know, and 2
    assert group.cut_ends.tolist() == [NO_CUT] * (len(group.ids) - 1) + [2]
    assert not group.exact.any()


@pytest.mark.parametrize("kind", ["byte-level BPE", "SentencePiece BPE with byte fallback", "Unigram", "WordPiece"])
def test_special_tokens_and_padding_have_no_bytes_and_truncation_keeps_the_first_tokens(kind) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of(kind).to_str())
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    ids = {name: tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")}
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[*ids.items()])
    tokens, texts = TokenBytes(tokenizer), ["small dogs", "", "the small dogs loved"]
    spans, plain = token_spans(tokens, texts, add_special_tokens=True), token_spans(tokens, texts, pad_id=7)
    for row in range(3):
        size = int(plain.in_text[row].sum())
        assert spans.ids[row, : size + 2].tolist() == [ids["[CLS]"], *plain.ids[row, :size].tolist(), ids["[SEP]"]]
        assert spans.in_text[row].nonzero().flatten().tolist() == [*range(1, size + 1)]
        for name in ("starts", "ends", "exact", "cut_ends"):
            assert torch.equal(getattr(spans, name)[row, 1 : size + 1], getattr(plain, name)[row, :size])
        assert (spans.starts == spans.ends)[row, [0, size + 1]].all()
        assert plain.ids[row, size:].eq(7).all()
    cut = token_spans(tokens, texts, max_tokens=3)
    for name in ("ids", "starts", "ends", "exact", "in_text", "cut_ends"):
        assert torch.equal(
            getattr(cut, name), getattr(plain, name)[:, :3].where(plain.in_text[:, :3], getattr(cut, name))
        )
    assert cut.stops[2] == plain.starts[2, 3]
    assert token_spans(tokens, texts, max_tokens=100).stops.tolist() == plain.stops.tolist()


def test_ids_around_texts_of_a_batch_have_no_bytes() -> None:
    tokens = TokenBytes(tokenizer_of("SentencePiece BPE with byte fallback"))
    start, end, padding = (tokens.vocabulary[name] for name in ("<s>", "</s>", "<unk>"))
    small, dogs = (tokens.tokenizer.encode(text, add_special_tokens=False).ids for text in ("small", "two dogs"))
    packed = [start, *small, end, start, *dogs, end]
    spans = token_spans(
        tokens,
        [packed + [padding] * 2, [-100, -100, *packed]],
        mask=torch.tensor([[1] * len(packed) + [0, 0], [0, 0] + [1] * len(packed)]),
    )
    assert spans.texts == (b"smalltwo dogs",) * 2
    assert torch.equal(spans.starts[0, :-2], spans.starts[1, 2:])
    assert torch.equal(spans.ids[1, 2:], spans.ids[0, :-2])
    unmasked = token_spans(tokens, packed + [padding] * 2)  # LLaMA has bytes for each text, so this one stands for none
    assert unmasked.texts == (b"smalltwo dogs",)


@pytest.mark.parametrize("kind", sorted({*BUILDERS} - {*LOSSLESS, "Unigram", "character BPE"}))
def test_ids_whose_bytes_are_not_known_are_refused_by_name(kind) -> None:
    tokens = TokenBytes(tokenizer_of(kind))
    ids = tokens.tokenizer.encode("small dogs", add_special_tokens=False).ids
    with pytest.raises(TokenizerError):
        token_spans(tokens, ids)
    assert token_spans(tokens, "small dogs").texts == (b"small dogs",)


def test_what_is_not_read_is_refused(unchecked) -> None:
    tokens = TokenBytes(tokenizer_of("Unigram"))
    unknown = tokens.vocabulary["<unk>"]
    refused: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (TokenizerError, [unknown], {}),
        (TokenIdError, [[5, 6], [4000, 5]], {}),
        (TokenIdError, [5, -1], {}),
        (ShapeError, [5, 6], {"mask": torch.ones(3)}),
        (ShapeError, [[5, 6], [5]], {}),
        (SizeError, "a", {"mask": torch.ones(1)}),
        (SizeError, [5], {"max_tokens": 1}),
        (SizeError, "a", {"max_tokens": -1}),
        (TokenizerError, "a\ud800", {}),
    ]
    for error, source, options in refused:
        with pytest.raises(error):
            token_spans(tokens, source, **options)


def test_spans_of_ids_take_what_models_take() -> None:
    tokens = TokenBytes(tokenizer_of("bytes"))
    ids = torch.tensor([[97, 98], [99, 100]], dtype=torch.int32)
    for source in (ids, ids.numpy(), ids.tolist()):
        assert token_spans(tokens, source).texts == (b"ab", b"cd")
    assert token_spans(tokens, torch.zeros(0, dtype=torch.int64)).texts == (b"",)
    assert token_spans(tokens, "").ids.shape == (0,)
    with pytest.raises(IndexError):
        token_spans(tokens, 5)
