"""Tokenizers: trained, read from every form that models come with, and shown to people."""

import json
import random
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from embedlayer.data import tokenizer as tokenizer_module
from embedlayer.data.tokenizer import (
    END_OF_TEXT,
    TokenizerKind,
    as_tokenizer,
    end_of_text_id,
    fingerprint,
    load_tokenizer,
    require_rows,
    save_tokenizer,
    table_size,
    token_text,
    train_tokenizer,
)
from embedlayer.data.tokenizer_calls import LONGEST_TRAINED, cut_pre_tokens, pure_tokenizer
from embedlayer.errors import (
    EmbedLayerError,
    FileError,
    SizeError,
    TextError,
    TokenIdError,
    TokenizerError,
)

KINDS = get_args(TokenizerKind)
TEXT = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and naïve beginners begin again; 12 dogs in 2024.\n"
) * 5
HASH = """
import hashlib, sys
from embedlayer.data.tokenizer import train_tokenizer
text = sys.stdin.read()
for kind in sys.argv[1:]:
    print(hashlib.sha256(train_tokenizer(text, kind, vocab_size=400).to_str().encode()).hexdigest())
"""


def in_another_process(code: str, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout


def test_same_texts_give_the_same_tokenizer_json_in_every_process():
    import hashlib

    here = [hashlib.sha256(train_tokenizer(TEXT, kind, vocab_size=400).to_str().encode()).hexdigest() for kind in KINDS]
    assert in_another_process(HASH, *KINDS, given=TEXT).split() == here


def test_importing_the_tokenizers_does_not_import_torch():
    code = "import sys, embedlayer.data.tokenizer, embedlayer.data.corpus; print('torch' in sys.modules)"
    assert in_another_process(code).strip() == "False"


BYTE_EXACT = {kind: train_tokenizer(TEXT, kind, vocab_size=400) for kind in ("bpe", "byte")}


@given(text=st.text(st.characters(exclude_categories=["Cs"])), kind=st.sampled_from(["bpe", "byte"]))
@settings(max_examples=60, deadline=None)
def test_byte_based_kinds_give_back_every_text_exactly(text, kind):
    tokenizer = BYTE_EXACT[kind]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_byte_token_is_numbered_by_its_value():
    tokenizer = train_tokenizer((), "byte")
    assert tokenizer.encode("Hé\n").ids == list("Hé\n".encode())
    assert tokenizer.token_to_id(END_OF_TEXT) == 256


@pytest.mark.parametrize("kind", ["unigram", "word", "wordpiece"])
def test_decoding_reads_naturally(kind):
    tokenizer = train_tokenizer(TEXT, kind, vocab_size=400)
    sentence = "The small dog loved it, and they begin again!"
    assert tokenizer.decode(tokenizer.encode(sentence, add_special_tokens=False).ids) == sentence


def test_words_are_whole_and_unknown_ones_are_told_apart():
    tokenizer = train_tokenizer("I love dogs. I don't (really)!", "word")
    assert tokenizer.encode("I love dogs").tokens == ["I", "love", "dogs"]
    assert tokenizer.encode("I don't love cats!").tokens == ["I", "don't", "love", "<unk>", "!"]
    assert tokenizer.decode(tokenizer.encode("I love (really) dogs.").ids) == "I love (really) dogs."


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_kept_whole(kind):
    tokenizer = train_tokenizer(TEXT, kind, vocab_size=400, special_tokens=["<|a|>", END_OF_TEXT])
    assert tokenizer.token_to_id("<|a|>") in tokenizer.encode("dogs<|a|>dogs").ids
    assert end_of_text_id(tokenizer) == tokenizer.token_to_id(END_OF_TEXT)
    assert token_text(tokenizer, tokenizer.get_vocab()["<|a|>"]) == "<|a|>"


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word"])
def test_a_vocabulary_has_at_most_the_size_asked_for_and_no_gaps(kind):
    tokenizer = train_tokenizer(TEXT.splitlines(), kind, vocab_size=290)
    assert tokenizer.get_vocab_size() <= 290
    assert table_size(tokenizer) == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: train_tokenizer(""), TextError, "no text to train"),
        (lambda: train_tokenizer([" \n", ""], "unigram"), TextError, "no text to train"),
        (lambda: train_tokenizer([], "word"), TextError, "no text to train"),
        (lambda: train_tokenizer(TEXT, vocab_size=256), SizeError, "256 is too small .* needs 257"),
        (lambda: train_tokenizer(TEXT, "unigram", min_frequency=2), TokenizerError, "no min_frequency"),
        (lambda: as_tokenizer("gpt2"), TokenizerError, "A str is not a tokenizer"),
    ],
)
def test_what_cannot_be_trained_says_why(call: Callable[[], object], error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_kind_is_named_with_the_known_ones():
    with pytest.raises(TokenizerError, match=r"'bpee'\. Choose one of bpe, wordpiece, unigram, word, byte"):
        train_tokenizer(TEXT, "bpee")


@pytest.mark.long
def test_gpt2_is_read_from_its_two_files_however_they_are_named(shared_data, tmp_path):
    original = shared_data / "tokenizers"
    tokenizer = load_tokenizer(original / "gpt2-encoder.json")
    assert tokenizer.encode("Hello world<|endoftext|>").ids == [15496, 995, 50256]
    assert tokenizer.decode(tokenizer.encode(" ünï\n\n x").ids) == " ünï\n\n x"
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / vocabulary
        folder.mkdir()
        (folder / vocabulary).symlink_to(original / "gpt2-encoder.json")
        (folder / merges).symlink_to(original / "gpt2-vocab.bpe")
        for path in (folder, folder / merges):
            assert fingerprint(load_tokenizer(path)) == fingerprint(tokenizer)


def test_bert_vocabulary_is_cased_if_it_holds_capitals_or_its_config_says_so(shared_data, tmp_path):
    cased = load_tokenizer(shared_data / "tokenizers" / "bert-base-cased-vocab.txt")
    assert cased.encode("Hello dogs").tokens == ["[CLS]", "Hello", "dogs", "[SEP]"]
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nhello\ndog\n##s\n")
    assert load_tokenizer(tmp_path).encode("Hello dogs").tokens[1:-1] == ["hello", "dog", "##s"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(tmp_path).encode("Hello dogs").tokens[1:-1] == ["[UNK]", "dog", "##s"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_read_back_the_same(tmp_path, kind):
    tokenizer = train_tokenizer(TEXT, kind, vocab_size=300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    assert again.to_str() == tokenizer.to_str()
    assert fingerprint(again) == fingerprint(tokenizer)


def broken_files(folder: Path) -> list[tuple[Path, type[EmbedLayerError], str]]:
    contents = {
        "a/tokenizer.json": b"{",
        "b/tokenizer.json": b"[]",
        "c/tokenizer.json": b'{"model": {"type": "BPE"}, "added_tokens": 3}',
        "d/vocab.json": b'{"a": 0}',
        "e/vocab.json": b'{"a": 0, "b": 1}',
        "e/merges.txt": b"#version: 0.2\na b\n",
        "f/vocab.txt": b"hello\nworld\n",
        "g/m.model": b"not a model",
        "h/vocab.txt": b"\xff\xfe",
        "i/tokenizer.dat": b"",
        "j/readme.md": b"",
        "k/a-vocab.txt": b"[UNK]",
        "k/b-vocab.txt": b"[UNK]",
        "l/words.json": b'{"a": 0}',
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return [
        (folder / "a", TokenizerError, "not JSON"),
        (folder / "b", TokenizerError, "JSON list"),
        (folder / "c", TokenizerError, "is not a valid tokenizer"),
        (folder / "d", FileError, "merges.txt: No such file"),
        (folder / "e", TokenizerError, "Use two files of the same model"),
        (folder / "f", TokenizerError, r"no \[UNK\]"),
        (folder / "g", TokenizerError, "not a whole SentencePiece model"),
        (folder / "h", TokenizerError, "not UTF-8"),
        (folder / "i" / "tokenizer.dat", TokenizerError, "no known tokenizer form"),
        (folder / "j", TokenizerError, "has no tokenizer"),
        (folder / "k", TokenizerError, "several tokenizers"),
        (folder / "l" / "words.json", TokenizerError, "without its merges"),
        (folder / "none.json", FileError, "No such file"),
    ]


def test_broken_and_missing_files_are_refused_with_a_reason(tmp_path):
    for path, error, words in broken_files(tmp_path):
        with pytest.raises(error, match=words):
            load_tokenizer(path)


def test_a_fast_tokenizer_of_transformers_is_unwrapped():
    tokenizer = train_tokenizer((), "byte")
    assert as_tokenizer(tokenizer) is tokenizer
    assert as_tokenizer(types.SimpleNamespace(backend_tokenizer=tokenizer)) is tokenizer
    assert as_tokenizer(types.SimpleNamespace(_tokenizer=tokenizer)) is tokenizer


@pytest.mark.parametrize(
    ("file", "token", "shown"),
    [
        ("gpt2-encoder.json", "Ġthe", " the"),
        ("gpt2-encoder.json", "Ċ", "\n"),
        ("gpt2-encoder.json", "æĹ", "<0xE6><0x97>"),
        ("gpt2-encoder.json", "Ã©", "é"),
        ("gpt2-encoder.json", "<|endoftext|>", "<|endoftext|>"),
        ("phi-3-mini.tokenizer.json", "▁the", " the"),
        ("phi-3-mini.tokenizer.json", "<0x0A>", "\n"),
        ("phi-3-mini.tokenizer.json", "<0xE2>", "<0xE2>"),
        ("phi-3-mini.tokenizer.json", "<|assistant|>", "<|assistant|>"),
        ("t5-small.tokenizer.json", "▁the", " the"),
        ("bert-base-cased-vocab.txt", "##ing", "##ing"),
    ],
)
def test_pieces_are_readable(shared_data, file, token, shown):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / file)
    assert token_text(tokenizer, tokenizer.get_vocab()[token]) == shown


@pytest.mark.parametrize("token_id", [-1, 257])
def test_the_text_of_an_id_that_does_not_exist_is_refused(token_id):
    with pytest.raises(TokenIdError, match=rf"no token {token_id}: its IDs are 0\.\.256"):
        token_text(train_tokenizer((), "byte"), token_id)


@pytest.mark.parametrize(
    ("file", "token"),
    [("gpt2-encoder.json", END_OF_TEXT), ("t5-small.tokenizer.json", "</s>"), ("bert-base-cased-vocab.txt", "[SEP]")],
)
def test_the_end_of_a_text_is_found(shared_data, file, token):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / file)
    assert end_of_text_id(tokenizer) == tokenizer.token_to_id(token)


def test_a_tokenizer_may_have_no_end_of_text():
    assert end_of_text_id(train_tokenizer((), "byte", special_tokens=())) is None


def test_limits_do_not_change_the_fingerprint_and_are_taken_off_a_copy():
    tokenizer = train_tokenizer((), "byte")
    limited = Tokenizer.from_str(tokenizer.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=9)
    assert fingerprint(limited) == fingerprint(tokenizer) != fingerprint(train_tokenizer((), "byte", special_tokens=()))
    assert pure_tokenizer(limited).encode("Hello").ids == list(b"Hello")
    assert limited.truncation is not None


def test_the_size_of_a_table_counts_gaps(tmp_path):
    content = json.loads(train_tokenizer((), "byte").to_str())
    content["model"]["vocab"]["Zz"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert table_size(load_tokenizer(tmp_path)) == 1000


def test_a_tokenizer_needs_as_many_rows_as_its_highest_id_says() -> None:
    tokenizer = train_tokenizer((), kind="byte")
    require_rows(tokenizer, 257, "run")
    with pytest.raises(
        TokenizerError, match="tokenizer of run gives IDs up to 256 and the table has 256 rows: 1 tokens have none"
    ):
        require_rows(tokenizer, 256, "run")


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_a_path_where_text_belongs_is_refused(kind, tmp_path, unchecked) -> None:
    (tmp_path / "no suffix").write_text("dogs love")
    for path in (str(tmp_path / "no suffix"), "/not/there/at/all", "./here", "~/texts", "data/notes.txt", "notes.md"):
        for texts in (path, [path, "more"]):
            with pytest.raises(TextError, match=r"names a file|looks like a path"):
                train_tokenizer(texts, kind)
    for wrong in (tmp_path / "no suffix", [tmp_path / "no suffix"], b"bytes", [b"bytes"], 7):
        with pytest.raises(TextError, match="read_text_chunks"):
            train_tokenizer(wrong, kind)


@pytest.mark.parametrize("text", ["and/or cats", "a/b", "1/2", "/", "I love dogs.", "see notes.txt", "/usr/bin\n"])
def test_text_that_holds_a_slash_is_text(text) -> None:
    assert train_tokenizer([text, "more text"], "bpe").encode(text).ids


def test_added_tokens_beside_a_vocabulary_are_read(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "added_tokens.json").write_text('{"<call>": 8, "<end>": 7}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("dogs<call> dog<end>", add_special_tokens=False).ids == [5, 6, 8, 5, 7]
    (tmp_path / "added_tokens.json").write_text('{"<call>": 9}')
    with pytest.raises(TokenizerError, match="gives '<call>' the ID 9, but after the tokens of vocab.txt its ID is 7"):
        load_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<call>": "9"}')
    with pytest.raises(TokenizerError, match="not a list of added tokens"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_text_without_spaces_is_cut_in_training_only(kind):
    letters = random.Random(0)
    dna = "".join(letters.choices("ACGT", k=25_000))
    parts = [dna[start : start + LONGEST_TRAINED] for start in range(0, len(dna), LONGEST_TRAINED)]
    whole, cut = (train_tokenizer(texts, kind, vocab_size=290) for texts in (f"a {dna} b", ["a ", *parts, " b"]))
    assert whole.to_str() == cut.to_str()
    if kind == "bpe":
        assert whole.encode(dna).ids != [i for part in parts for i in whole.encode(part).ids]
        assert whole.decode(whole.encode(dna).ids) == dna


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_tokenizer_of_ordinary_text_is_trained_as_without_the_cut(kind, monkeypatch):
    letters = random.Random(0)
    word, spaces = "".join(letters.choices("ACGT", k=LONGEST_TRAINED - 1)), " " * (LONGEST_TRAINED - 1)
    texts = ["I love dogs, and dogs love me. " * 700, f"x {word} {spaces}y é" + "ü " * 9000]
    trained = train_tokenizer(texts, kind, vocab_size=300).to_str()
    monkeypatch.setattr(tokenizer_module, "cut_pre_tokens", lambda texts, _: texts)
    assert train_tokenizer(texts, kind, vocab_size=300).to_str() == trained


@pytest.mark.parametrize("text", ["é" * 30_000 + " x", "a" * 25_000 + " " * 25_000 + "b", "ab" * 12_000 + "cd " * 9000])
def test_pre_tokens_are_cut_every_10000_characters(text):
    steps = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = list(cut_pre_tokens([text], steps))
    assert "".join(parts) == text
    spans = [stop - start for part in parts for _, (start, stop) in steps.pre_tokenize_str(part)]
    assert max(spans) == LONGEST_TRAINED
