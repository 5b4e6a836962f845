"""Encoding depends on the text alone, rules that multiply text are refused, and a tokenizer fails with our errors."""

import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

import embedlayer
from embedlayer import TokenCorpus, load_tokenizer, train_tokenizer
from embedlayer.core.errors import TokenizerError
from embedlayer.data import encode_chunks, read_text_chunks
from embedlayer.tokenization import TokenBytes, compressed_tokens, save_tokenizer, token_spans, trace_tokens
from embedlayer.vocab.tokenizer_edit import edit_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 40
PADDING = {"strategy": {"Fixed": 600}, "direction": "Right", "pad_to_multiple_of": None}
IMPURE: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"dropout": 0.5}},
    "truncation": {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
    "padding": {"padding": PADDING | {"pad_id": 5, "pad_type_id": 0, "pad_token": "a"}},
}


def changed(tokenizer: Tokenizer, parts: dict[str, Any]) -> str:
    content = json.loads(tokenizer.to_str())
    for name, value in parts.items():
        content[name] = content[name] | value if name == "model" else value
    return json.dumps(content)


def fingerprint(tokenizer: Tokenizer) -> str:
    return TokenCorpus.from_text("a text", tokenizer).tokenizer_fingerprint


@pytest.fixture(scope="module")
def pure() -> Tokenizer:
    return train_tokenizer(TEXT, vocab_size=290)


@pytest.mark.parametrize("option", IMPURE)
def test_options_that_make_encoding_impure_are_ignored_and_kept_in_files(option: str, pure, tmp_path: Path) -> None:
    impure = Tokenizer.from_str(changed(pure, IMPURE[option]))
    ids = pure.encode(TEXT).ids
    assert any(impure.encode(TEXT).ids != ids for _ in range(3))
    assert token_spans(impure, TEXT).ids.tolist() == ids
    assert token_spans(impure, [TEXT, "a"]).ids[1, 0] == pure.encode("a").ids[0]
    assert TokenBytes(impure).encode(b" the") == tuple(pure.encode(" the").ids)
    assert [i for _, part in encode_chunks([TEXT], impure) for i in part] == ids
    assert fingerprint(impure) == fingerprint(pure) != fingerprint(train_tokenizer(TEXT, vocab_size=260))

    (tmp_path / "text.txt").write_text(TEXT)
    corpora = [TokenCorpus.build([tmp_path / "text.txt"], impure, tmp_path / name) for name in ("one", "two")]
    assert corpora[0].ids[:].tolist() == corpora[1].ids[:].tolist() == ids

    def options(written: str) -> list[Any]:
        content = json.loads(written)
        return [content["truncation"], content["padding"], content["model"]["dropout"]]

    save_tokenizer(impure, tmp_path / "saved.json")
    for written in (tmp_path / "saved.json", tmp_path / "one" / "tokenizer.json"):
        assert options(written.read_text()) == options(changed(pure, IMPURE[option])), written.name
    assert options(edit_tokenizer(impure, add=["zebra"]).tokenizer.to_str()) == options(changed(pure, IMPURE[option]))


def test_segmentations_that_unigram_draws_by_chance_are_ignored() -> None:
    entries = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.9)]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=False))
    if not hasattr(tokenizer.model, "alpha"):
        pytest.skip("this release of tokenizers draws no segmentations")
    tokenizer.model.alpha = 0.5
    assert len({tuple(tokenizer.encode("abab").ids) for _ in range(50)}) > 1
    assert token_spans(tokenizer, "abab").ids.tolist() == [3, 3]
    assert tokenizer.model.alpha == 0.5


WORDS = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
BROKEN = {
    "no unknown token": WORDS.to_str(),
    "a width of 0": changed(WORDS, {"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
    "a decoder that reads too far": changed(
        WORDS, {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}}
    ),
    "an endless search": changed(
        WORDS, {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"}}
    ),
}
LONG = "a" * 40 + "b"
CALLS: tuple[Callable[[Tokenizer], object], ...] = (
    lambda tokenizer: token_spans(tokenizer, LONG),
    lambda tokenizer: token_spans(tokenizer, [LONG, LONG]),
    lambda tokenizer: trace_tokens(tokenizer, LONG),
    lambda tokenizer: TokenBytes(tokenizer).encode(LONG.encode()),
    lambda tokenizer: list(encode_chunks([LONG], tokenizer)),
    lambda tokenizer: edit_tokenizer(tokenizer, add=[LONG]),
    compressed_tokens,
)


@pytest.mark.parametrize("fault", BROKEN)
def test_what_a_tokenizer_raises_is_an_error_of_ours(fault: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BROKEN[fault])
    tokenizer, said = load_tokenizer(tmp_path), list[str]()
    for call in CALLS:
        try:
            call(tokenizer)
        except TokenizerError as error:
            said.append(str(error))
    assert any(text.startswith("The tokenizer cannot ") for text in said), said


def test_a_file_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    damaged = changed(WORDS, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})
    (tmp_path / "tokenizer.json").write_text(damaged)
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


A = {"Sequence": {"id": "A", "type_id": 0}}
B = {"Sequence": {"id": "B", "type_id": 0}}
CLS = {"SpecialToken": {"id": "a", "type_id": 0}}
PAIR = [A, B]


def template(single: list[Any], ids: list[int]) -> dict[str, Any]:
    tokens = {"a": {"id": "a", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": PAIR, "special_tokens": tokens}


DOUBLE = replace({"String": "a"}, "aa")
GROWING: dict[str, dict[str, Any]] = {
    "a long content": {"normalizer": replace({"String": "a"}, "a" * 10**6)},
    "a content": {"normalizer": replace({"String": "a"}, "a" * 150)},
    "a pattern of any character": {"normalizer": replace({"Regex": "."}, "a" * 150)},
    "an empty pattern": {"normalizer": replace({"String": ""}, "a" * 150)},
    "40 doublings": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
    "doublings of another letter": {
        "normalizer": {"type": "Sequence", "normalizers": [replace({"Regex": r"\d"}, "a"), *[DOUBLE] * 40]}
    },
    "growth over copies": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [replace({"String": "b"}, "a"), *[replace({"String": "a" * 50}, "a" * 999)] * 4],
        }
    },
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
    "a prefix of parts": {"model": {"continuing_subword_prefix": "a" * 10**6}},
    "a decoder": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
    "a text 200 times": {"post_processor": template([A] * 200, [0])},
    "a token of 10,000 IDs": {"post_processor": template([CLS, A], [0] * 10_000)},
    "a sequence of templates": {
        "post_processor": {"type": "Sequence", "processors": [template([A, A], [0]) for _ in range(20)]}
    },
}


def test_rules_that_multiply_text_are_refused_by_size(pure, tmp_path: Path) -> None:
    for rule, parts in GROWING.items():
        (tmp_path / "tokenizer.json").write_text(changed(pure, parts))
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(tmp_path)
        assert len(str(caught.value)) < 600, rule


def test_rules_of_ordinary_tokenizers_are_read(pure, tmp_path: Path) -> None:
    steps = [replace({"String": " "}, "▁"), replace({"String": "\n"}, "<|newline|>"), {"type": "NFKC"}]
    steps += [replace({"String": letter}, "..") for letter in "…‥⋯"] + [{"type": "Prepend", "prepend": "▁"}]
    steps += [replace({"String": "<|image|>"}, "<|patch|>" * 16)]
    parts = {"normalizer": {"type": "Sequence", "normalizers": steps}, "post_processor": template([CLS, A, CLS], [0])}
    (tmp_path / "tokenizer.json").write_text(changed(pure, parts))
    assert load_tokenizer(tmp_path).encode("a").ids[1:-1]


def test_only_these_functions_call_a_tokenizer_on_text() -> None:
    """So that no text is encoded with dropout, truncated, or a raw error."""
    names = "encode_batch|encode_batch_fast|decode_batch|normalize_str|pre_tokenize_str|tokenize"
    foreign = re.compile(rf"\w\.({names})\(|\.encode\([^()]*add_special_tokens=(True|False|special)")
    package = Path(embedlayer.__file__).parent
    found = {file.relative_to(package).as_posix() for file in package.rglob("*.py") if foreign.search(file.read_text())}
    own_rules = {
        f"tokenization/{name}.py" for name in ("train", "sentencepiece_files", "token_compression")
    }  # of no file
    assert found - own_rules == {"tokenization/tokenizer_calls.py"}


def test_a_text_read_from_a_file_is_encoded_whole(pure, tmp_path: Path) -> None:
    impure = Tokenizer.from_str(changed(pure, IMPURE["dropout"] | IMPURE["truncation"]))
    (tmp_path / "text.txt").write_text(TEXT)
    chunks = read_text_chunks(tmp_path / "text.txt", tokenizer=impure)
    assert [i for _, part in encode_chunks(chunks, impure) for i in part] == pure.encode(TEXT).ids


def test_a_fast_tokenizer_of_transformers_is_unwrapped() -> None:
    tokenizer = train_tokenizer((), "byte")
    for name in ("backend_tokenizer", "_tokenizer"):
        wrapped = types.SimpleNamespace(**{name: tokenizer})
        assert TokenBytes(wrapped).tokenizer.to_str() == tokenizer.to_str()
    not_one: Any = "gpt2"
    for call in (TokenBytes, *CALLS[:3], *CALLS[4:6]):
        with pytest.raises(TokenizerError):
            call(not_one)
