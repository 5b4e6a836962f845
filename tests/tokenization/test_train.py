"""Tokenizers that are trained: equal for equal texts, exact or natural when decoded, and refused with a reason."""

import random
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers

from embedlayer.core.errors import SizeError, TextError, TokenizerError
from embedlayer.tokenization import table_size, train_tokenizer

KINDS = ("bpe", "wordpiece", "unigram", "word", "byte")
END_OF_TEXT = "<|endoftext|>"
LONGEST = 10_000
"""Longest pre-token in training, in characters."""
TEXT = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and naïve beginners begin again; 12 dogs in 2024.\n"
) * 5
HASH = """
import hashlib, sys
from embedlayer.tokenization.train import train_tokenizer
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
    modules = "embedlayer.tokenization.read, embedlayer.tokenization.bytes, embedlayer.data.corpus"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
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
    assert END_OF_TEXT in tokenizer.get_vocab()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word"])
def test_a_vocabulary_has_at_most_the_size_asked_for_and_no_gaps(kind):
    tokenizer = train_tokenizer(TEXT.splitlines(), kind, vocab_size=290)
    assert tokenizer.get_vocab_size() <= 290
    assert table_size(tokenizer) == tokenizer.get_vocab_size()


REFUSED: list[tuple[type[Exception], Any, dict[str, Any]]] = [
    (TextError, "", {}),
    (TextError, [" \n", ""], {"kind": "unigram"}),
    (TextError, [], {"kind": "word"}),
    (SizeError, TEXT, {"vocab_size": 256}),
    (TokenizerError, TEXT, {"kind": "unigram", "min_frequency": 2}),
    (KeyError, TEXT, {"kind": "bpee"}),
]


def test_what_cannot_be_trained_is_refused(unchecked):
    for error, texts, options in REFUSED:
        with pytest.raises(error):
            train_tokenizer(texts, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_where_text_belongs_is_refused(kind, tmp_path, unchecked) -> None:
    (tmp_path / "no suffix").write_text("dogs love")
    paths = ("/not/there/at/all", "./here", "~/texts", "data/notes.txt", "notes.md", f"/{'a' * 4095}")
    for path in (str(tmp_path / "no suffix"), *paths):
        for texts in (path, [path, "more"]):
            with pytest.raises(TextError):
                train_tokenizer(texts, kind)
    train_tokenizer(f"/{'a' * 4096}", kind)  # longer than any path
    for wrong in (tmp_path / "no suffix", [tmp_path / "no suffix"], b"bytes", [b"bytes"], 7):
        with pytest.raises((TextError, TypeError)):
            train_tokenizer(wrong, kind)


@pytest.mark.parametrize("text", ["and/or cats", "a/b", "1/2", "/", "I love dogs.", "see notes.txt", "/usr/bin\n"])
def test_text_that_holds_a_slash_is_text(text) -> None:
    assert train_tokenizer([text, "more text"], "bpe").encode(text).ids


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_text_without_spaces_is_cut_in_training_only(kind):
    letters = random.Random(0)
    dna = "".join(letters.choices("ACGT", k=25_000))
    parts = [dna[start : start + LONGEST] for start in range(0, len(dna), LONGEST)]
    whole, cut = (train_tokenizer(texts, kind, vocab_size=290) for texts in (f"a {dna} b", ["a ", *parts, " b"]))
    assert whole.to_str() == cut.to_str()
    if kind == "bpe":
        assert whole.encode(dna).ids != [i for part in parts for i in whole.encode(part).ids]
        assert whole.decode(whole.encode(dna).ids) == dna


# Unigram, by SentencePiece


def test_unigram_spends_fewer_tokens_on_its_text_than_the_trainer_of_the_tokenizers_library():
    text = "\n".join(topics[name] for name in sorted(topics))[:40_000]
    ours = train_tokenizer(text, "unigram", vocab_size=600)
    theirs = Tokenizer(models.Unigram())
    theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT, "<unk>"], unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator([text], trainer)
    assert len(ours.encode(text).ids) <= 1.01 * len(theirs.encode(text).ids)


def test_every_character_of_the_text_keeps_a_piece_of_its_own():
    tokenizer = train_tokenizer("abc abd naïve " * 50, "unigram", vocab_size=30)
    assert {"a", "b", "c", "d", "ï"} <= tokenizer.get_vocab().keys()
    assert tokenizer.get_vocab()["<unk>"] not in tokenizer.encode("abc naïve dab").ids


@given(st.text("ab 0▁\0▅\t\n<>?é犬🙂", min_size=1).filter(str.strip), st.integers(3, 40))
@settings(max_examples=100, deadline=None)
def test_any_text_and_size_train_and_equal_text_gives_equal_tokenizers(text, size):
    text += "."
    trained = train_tokenizer(text, "unigram", vocab_size=size)
    assert trained.get_vocab_size() <= size
    assert trained.to_str() == train_tokenizer([text], "unigram", vocab_size=size).to_str()


def test_where_letters_are_more_than_the_vocabulary_the_frequent_ones_stay():
    trained = train_tokenizer("aaa bbb c d e f g h", "unigram", vocab_size=5)
    assert set(trained.get_vocab()) == {END_OF_TEXT, "<unk>", "▁", "a", "b"}
