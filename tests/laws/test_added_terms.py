"""Text around added terms is decoded as it was before they were added, or a warning says that it is not."""

import warnings

from covering import looped
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, WRITE_ANY_TEXT, tokenizer_of

import embedlayer as el

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


def test_the_command_passes_the_warning_on(tmp_path, capsys) -> None:
    from commands import run

    tokenizer = tokenizer_of("Unigram")
    el.TokenEmbedding(tokenizer.get_vocab_size(), 4).save_pretrained(tmp_path / "old", tokenizer=tokenizer)
    assert run("vocab", "add", tmp_path / "old", "dog love", "--as-is", "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "decoded differently than before" in said.err.replace("\n", " ")
