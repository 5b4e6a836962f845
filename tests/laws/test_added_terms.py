"""Text around added terms is decoded as it was before they were added, or a warning says that it is not."""

import warnings

import pytest
from covering import looped, some
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, WRITE_ANY_TEXT, tokenizer_of

import embedlayer as el
from embedlayer.tokenization.read import load_tokenizer

TERMS = ["吾輩", "猫", " zyzzyva", "x|y\\"]
TEXTS = [
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
    changed = [text for text in TEXTS if decoded(old, text) == text != decoded(new, text)]
    if kind in WRITE_ANY_TEXT and kind != "byte-level BPE with </w>":
        assert not changed
        assert not warned
    elif changed:
        assert "decoded differently than before" in warned[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = [term for term in TERMS if term not in old.get_vocab()]
        assert el.vocab.edit_tokenizer(new, remove=added).tokenizer.to_str() == old.to_str()


SMALL = "SentencePiece BPE with byte fallback"


@pytest.mark.parametrize("name", some([SMALL], [SMALL, "llama2-tokenizer.model", "phi-3-mini.tokenizer.json"]))
def test_llama_2_writes_japanese_terms_without_a_space_behind(name, request) -> None:
    if name == SMALL:
        old = tokenizer_of(SMALL)
    else:
        pytest.importorskip("sentencepiece")
        old = load_tokenizer(request.getfixturevalue("shared_data") / "tokenizers" / name)
    edit = el.vocab.edit_tokenizer(old, add=TERMS)
    for text in TEXTS:
        assert decoded(edit.tokenizer, text) == decoded(old, text) == text
    token = edit.tokenizer.token_to_id("吾輩")
    assert token is not None
    assert edit.tokenizer.decode([token]) == "吾輩"
    fewer = el.vocab.edit_tokenizer(edit.tokenizer, remove=["吾輩"], add=["無い"]).tokenizer
    assert all(decoded(fewer, text) == text for text in TEXTS)
    assert el.vocab.edit_tokenizer(edit.tokenizer, remove=TERMS).tokenizer.to_str() == old.to_str()


def test_the_command_passes_the_warning_on(tmp_path, capsys) -> None:
    from commands import run

    tokenizer = tokenizer_of("Unigram")
    el.TokenEmbedding(tokenizer.get_vocab_size(), 4).save_pretrained(tmp_path / "old", tokenizer=tokenizer)
    assert run("vocab", "add", tmp_path / "old", "dog love", "--as-is", "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "decoded differently than before" in said.err.replace("\n", " ")
