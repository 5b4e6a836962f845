"""The bytes of a token are those of a text between its offsets: in events of the next byte, draft maps and spans."""

import json
import warnings

import pytest
from commands import run
from covering import looped
from tokenizer_kinds import (
    BUILDERS,
    BYTE_FALLBACK,
    ENGLISH,
    LANGUAGES,
    SOME_REAL,
    WRITE_ANY_TEXT,
    bytes_of,
    random_texts,
    real_tokenizers,
    tokenizer_of,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import embedlayer as el
from embedlayer.core.errors import TokenizerError
from embedlayer.heads import DraftMap
from embedlayer.losses import NextBytes
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.spans import token_spans


def sentencepiece(scheme: str) -> Tokenizer:
    """SentencePiece by letters, with a space in front of a text by LLaMA's old rules or by a scheme of Metaspace."""
    vocabulary = {entry: place for place, entry in enumerate(["<unk>", "<s>", *BYTE_FALLBACK, *"▁abx<>"])}
    built = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    strip = [] if scheme in ("never", "Replace") else [decoders.Strip(" ", 1, 0)]
    if scheme == "Prepend":
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "Replace":
        built.normalizer = normalizers.Replace(" ", "▁")
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    built.add_special_tokens(["<s>"])
    return built


def byte_level() -> Tokenizer:
    """Bytes alone."""
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(letters | {"<unk>": 256, "<s>": 257}, [], unk_token="<unk>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens(["<s>"])
    return built


MADE = {
    **{name: lambda name=name: sentencepiece(name) for name in ("Prepend", "Replace", "first", "always", "never")},
    "byte-level": byte_level,
}
RULES = {
    "normalized": AddedToken("<x>"),
    "as written": AddedToken("<x>", normalized=False),
    "lstrip": AddedToken("<x>", lstrip=True),
    "rstrip": AddedToken("<x>", rstrip=True),
    "single word": AddedToken("<x>", single_word=True),
    "lstrip, as written": AddedToken("<x>", lstrip=True, normalized=False),
}
TEXTS = ("", "a <x> b", "<x> b", "a<x>b", "a  <x>  b", "<x><x>a", "a <x><x> <x>", "<s>a <s> a<s><x>", "<unk> <x>")


def check(tokenizer: Tokenizer, texts: list[str] | tuple[str, ...]) -> None:
    """Check the readings of each token, and its event, where its span is exact and that of the tokenizer's offsets.

    A tokenizer may put a space in front of a text or after an added token, which the text does not have there.
    """
    tokens = TokenBytes(tokenizer)
    events = NextBytes.of(tokenizer).events if len(tokens.single_bytes) == 256 else None
    for text in texts:
        encoding, spans = tokenizer.encode(text, add_special_tokens=False), token_spans(tokens, text)
        for place, (token, (start, stop)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            opens = place == 0 or encoding.ids[place - 1] in tokens.added
            span = tuple(len(text[:end].encode()) for end in (start, stop))
            if token in tokens.special:
                assert not spans.exact[place]
                assert events is None or events[token] == 256
            elif spans.exact[place] and start < stop and (spans.starts[place], spans.ends[place]) == span:
                part, reading = text[start:stop].encode(), tokens.readings(token)
                assert part in reading or (opens and reading[0] == b" " + part), (text, token)
                if events is not None and not (opens and reading[0] == b" " + part):
                    assert events[token] == part[0]


@pytest.mark.parametrize("rules", RULES)
@looped("kind", MADE)
def test_an_added_token_has_the_bytes_between_its_offsets(kind, rules) -> None:
    tokenizer = MADE[kind]()
    tokenizer.add_tokens([RULES[rules]])
    check(tokenizer, TEXTS)
    tokens, added = TokenBytes(tokenizer), tokenizer.token_to_id("<x>")
    # in normalised text of SentencePiece there is no white space to take
    takes_spaces = "strip" in rules and (kind not in ("Prepend", "Replace") or "as written" in rules)
    inside, found = "a a <x> a", set()
    for text in (inside, inside.replace(" <", "<")):
        encoding, spans = tokenizer.encode(text, add_special_tokens=False), token_spans(tokens, text)
        for place, (start, stop) in enumerate(encoding.offsets):
            if encoding.ids[place] == added and not takes_spaces:
                found.add(text[start:stop])
                assert spans.exact[place]
                assert (spans.starts[place], spans.ends[place]) == (start, stop)
    if not takes_spaces and not (kind == "Prepend" and rules == "single word"):  # which is found at the start alone
        assert found == {tokens.readings(added)[0].decode()}
    if kind in ("first", "never", "byte-level") and not takes_spaces:
        ids = tokenizer.encode(inside, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == inside
        assert token_spans(tokens, ids).texts == (inside.encode(),)
    other = byte_level()
    other.add_tokens([AddedToken(text, normalized=False) for text in ("<x>", " <x>")])
    shared = DraftMap.between(tokenizer, other)
    pair = other.id_to_token(int(shared.target_ids[shared.draft_ids == added]))
    assert pair.encode() == tokens.readings(added)[0]


@looped("kind", BUILDERS)
def test_so_have_all_tokens(kind) -> None:
    check(tokenizer_of(kind), random_texts(40))


@pytest.mark.parametrize("name", SOME_REAL)
def test_so_have_those_of_real_tokenizers(shared_data, name) -> None:
    check(real_tokenizers(shared_data)[name], random_texts(20))


def named(kind: str, where: str) -> Tokenizer:
    """Return a tokenizer whose file names the unknown token in the model, among the added tokens, or in both."""
    data = json.loads(MADE[kind]().to_str())
    if where == "added tokens":
        data["model"]["unk_token"] = None
    built = Tokenizer.from_str(json.dumps(data))
    if where != "model":
        built.add_tokens([AddedToken("<unk>", normalized=False, special=where == "both, special")])
    return built


@pytest.mark.parametrize("where", ["model", "added tokens", "both", "both, special"])
@looped("kind", ["Prepend", "always", "byte-level"])
def test_the_unknown_token_is_no_text(kind, where) -> None:
    tokenizer, other = named(kind, where), byte_level()
    tokens, unknown = TokenBytes(tokenizer), tokenizer.token_to_id("<unk>")
    other.add_tokens([AddedToken("<unk>", normalized=False)])
    assert NextBytes.of(tokenizer).events[unknown] == 256
    assert unknown not in tokens.by_bytes.values()
    assert token_spans(tokens, [unknown]).texts == (b"",)
    assert unknown not in DraftMap.between(tokenizer, other).draft_ids
    assert unknown not in DraftMap.between(other, tokenizer).target_ids
    check(tokenizer, ("<unk>a", "a <unk>"))


@looped("kind", [kind for kind in BUILDERS if len(bytes_of(tokenizer_of(kind)).single_bytes) < 256])
def test_neither_is_that_of_a_tokenizer_without_bytes(kind) -> None:
    tokens = bytes_of(tokenizer_of(kind))
    assert tokens.unknown is None or tokens.unknown in tokens.special
    with pytest.raises(TokenizerError):
        NextBytes.of(tokenizer_of(kind))


@pytest.mark.parametrize(
    ("where", "form"),
    [("tokenizer_config.json", dict), ("tokenizer_config.json", str), ("special_tokens_map.json", str)],
)
def test_a_folder_of_transformers_names_it(tmp_path, where, form) -> None:
    from transformers import PreTrainedTokenizerFast

    data = json.loads(MADE["always"]().to_str())
    data["model"]["unk_token"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    rules = {"__type": "AddedToken", "content": "<unk>", "normalized": False, "special": True}
    (tmp_path / where).write_text(json.dumps({"unk_token": rules if form is dict else "<unk>"}))
    opened = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert NextBytes.of(opened).events[opened.unk_token_id] == 256


# Text around added terms

TERMS = ["吾輩", "猫", " zyzzyva", "x|y\\"]
AROUND_TERMS = [
    "吾輩は猫である。名前はまだ無い。",
    "私は吾輩と 吾輩吾輩 猫 です",
    " zyzzyva zyzzyva zyzzyvas, x|y\\ x|y\\z",
    "  zyzzyva in front\nand 吾輩\t猫 behind ",
    *LANGUAGES,
    ENGLISH[:120],
]


def decoded(tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)


def added_to(tokenizer):
    """The tokenizer with the terms, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        edit = el.vocab.edit_tokenizer(tokenizer, add=[term for term in TERMS if term not in tokenizer.get_vocab()])
    return edit.tokenizer, [str(warning.message) for warning in caught]


@looped("kind", BUILDERS)
def test_text_around_new_terms_is_decoded_as_before_or_a_warning_names_them(kind) -> None:
    old = tokenizer_of(kind)
    new, warned = added_to(old)
    changed = [text for text in AROUND_TERMS if decoded(old, text) == text != decoded(new, text)]
    if kind in WRITE_ANY_TEXT and kind != "byte-level BPE with </w>":
        assert not changed
        assert not warned
    elif changed:
        assert "decoded differently than before" in warned[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = [term for term in TERMS if term not in old.get_vocab()]
        assert el.vocab.edit_tokenizer(new, remove=added).tokenizer.to_str() == old.to_str()


def test_the_command_passes_the_warning_on(tmp_path, capsys) -> None:
    tokenizer = tokenizer_of("Unigram")
    el.TokenEmbedding(tokenizer.get_vocab_size(), 4).save_pretrained(tmp_path / "old", tokenizer=tokenizer)
    assert run("vocab", "add", tmp_path / "old", "dog love", "--as-is", "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "decoded differently than before" in said.err.replace("\n", " ")
