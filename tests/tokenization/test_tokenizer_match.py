"""Which entries of two tokenizers are the same."""

import json
from itertools import product

import pytest
from covering import LONG
from tokenizer_kinds import BUILDERS, TokenizersOfFiles, real_tokenizers, tokenizer_of, tokenizer_of_file
from tokenizers import Tokenizer

from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.comparison import match_tokenizers
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.train import train_tokenizer
from embedlayer.vocab.tokenizer_edit import edit_tokenizer

TEXT = "I love small dogs, I love cats.\nDogs love naps; naïve cats don't: they love small things. " * 10
TRAINED = {
    kind: train_tokenizer(TEXT, kind, vocab_size=400) for kind in ("bpe", "wordpiece", "unigram", "word", "byte")
}


@pytest.fixture(scope="module")
def real(shared_data) -> TokenizersOfFiles:
    return real_tokenizers(shared_data)


def pairs(old: Tokenizer, new: Tokenizer) -> dict[str | None, str | None]:
    sources = match_tokenizers(old, new)
    assert len(sources) == table_size(new)
    return {new.id_to_token(i): old.id_to_token(j) for i, j in enumerate(sources) if j is not None}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_tokenizer_matches_itself_and_what_an_edit_made_of_it(kind) -> None:
    old = TRAINED[kind]
    assert match_tokenizers(old, old) == tuple(range(table_size(old)))
    names = sorted(old.get_vocab(), key=str.casefold)
    edit = edit_tokenizer(old, add=["zebra"], special=["<tool>"], order=[*names, "zebra", "<tool>"])
    assert match_tokenizers(old, edit.tokenizer) == edit.sources


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_a_special_token_matches_an_ordinary_entry_of_its_name(kind) -> None:
    plain = TRAINED[kind]
    special = edit_tokenizer(plain, special=["<start_of_turn>"]).tokenizer
    contents = json.loads(plain.to_str())
    entry, new_id = "<start_of_turn>", table_size(plain)
    if kind == "unigram":
        contents["model"]["vocab"].append([entry, -20.0])
    else:
        contents["model"]["vocab"][entry] = new_id
    ordinary = Tokenizer.from_str(json.dumps(contents))
    assert ordinary.get_vocab() == special.get_vocab()
    for old, new in ((ordinary, special), (special, ordinary)):
        assert match_tokenizers(old, new) == tuple(range(new_id + 1))


def test_a_special_token_matches_by_name_across_conventions() -> None:
    old = edit_tokenizer(TRAINED["bpe"], special=["<start_of_turn>"]).tokenizer
    contents = json.loads(TRAINED["wordpiece"].to_str())
    contents["model"]["vocab"]["<start_of_turn>"] = table_size(TRAINED["wordpiece"])
    new = Tokenizer.from_str(json.dumps(contents))
    assert pairs(old, new)["<start_of_turn>"] == "<start_of_turn>"
    assert pairs(new, old)["<start_of_turn>"] == "<start_of_turn>"


def test_what_matches_stands_for_the_same_bytes() -> None:
    tokens = {kind: TokenBytes(tokenizer) for kind, tokenizer in TRAINED.items()}
    for old, new in product(TRAINED, TRAINED):
        for token_id, source in enumerate(match_tokenizers(TRAINED[old], TRAINED[new])):
            if source is not None and token_id not in tokens[new].special:
                assert {*tokens[new].readings(token_id)} & {*tokens[old].readings(source)}, (old, new)


KINDS = [*BUILDERS, "WordPiece with fewer continuations"]


def of_kind(kind: str) -> Tokenizer:
    if kind in BUILDERS:
        return tokenizer_of(kind)
    full = tokenizer_of("WordPiece")
    continuations = [entry for entry in full.get_vocab() if len(entry) == 3 and entry[0] == "#"]
    return edit_tokenizer(full, remove=continuations).tokenizer


def word_place(tokenizer: Tokenizer, entry: str) -> str | None:
    """Where in a word an entry stands, by the marks of its convention alone."""
    if type(tokenizer.model).__name__ == "WordPiece":
        return "inside" if entry.startswith("##") else "start"
    spaced = entry.startswith(("Ġ", "▁")) or type(tokenizer.model).__name__ == "WordLevel"
    letters = entry.lstrip("Ġ▁").removesuffix("</w>")
    if not letters.isascii() or not letters[:1].isalnum():
        return None
    if getattr(tokenizer.model, "end_of_word_suffix", None):
        return "end" if entry.endswith("</w>") else None
    return "start" if spaced else "inside"


def test_a_continuation_is_no_start_of_a_word() -> None:
    tokenizers = [of_kind(kind) for kind in KINDS]
    for theirs, ours in product(tokenizers, tokenizers):
        added = ours.get_added_tokens_decoder()
        for token_id, source in enumerate(match_tokenizers(theirs, ours)):
            if source is not None and token_id not in added:
                tokens = theirs.id_to_token(source) or "", ours.id_to_token(token_id) or ""
                places = {word_place(theirs, tokens[0]), word_place(ours, tokens[1])}
                assert len(places - {None}) <= 1, tokens


def test_conventions_meet() -> None:
    words = pairs(TRAINED["word"], TRAINED["bpe"])
    assert (words["Ġlove"], words[","], words["<|endoftext|>"]) == ("love", ",", "<|endoftext|>")
    pieces = pairs(TRAINED["bpe"], TRAINED["wordpiece"])
    assert (pieces["love"], pieces["##s"], pieces["."]) == ("Ġlove", "s", ".")
    unigram = pairs(TRAINED["wordpiece"], TRAINED["unigram"])
    assert (unigram["▁love"], unigram["<unk>"]) == ("love", "[UNK]")


@pytest.mark.long
def test_phi_3_has_the_entries_of_llama_2_and_eleven_more(shared_data, real) -> None:
    pytest.importorskip("sentencepiece", reason="the spm extra is not installed")
    llama = tokenizer_of_file(shared_data / "tokenizers/llama2-tokenizer.model")
    sources = match_tokenizers(llama, real["phi-3"])
    assert sources == (*range(32000), *[None] * 11)
    assert match_tokenizers(real["phi-3"], llama) == tuple(range(32000))


@pytest.mark.parametrize(
    ("old", "new", "share", "some"),
    [
        pytest.param(
            *("gpt2", "phi-3", 0.57),
            {"▁the": "Ġthe", "<0x0A>": "Ċ", "<0x41>": "A", "<|endoftext|>": "<|endoftext|>"},
            marks=LONG,
        ),
        ("bert", "gpt2", 0.43, {"Ġthe": "the", "ing": "##ing", ".": ".", "<|endoftext|>": "[SEP]"}),
        pytest.param(
            *("gpt2", "bert", 0.76), {"the": "Ġthe", "##ing": "ing", ",": ",", "[SEP]": "<|endoftext|>"}, marks=LONG
        ),
        ("t5", "tok512", 0.54, {" the": "▁the", "</s>": "</s>", "<unk>": "<unk>"}),
        pytest.param("phi-3", "tok512", 0.99, {" the": "▁the", "<0x0A>": "<0x0A>", "<s>": "<s>"}, marks=LONG),
    ],
)
def test_real_pairs_share_what_they_share(real, old, new, share, some) -> None:
    found = pairs(real[old], real[new])
    assert share < len(found) / table_size(real[new]) < share + 0.02
    assert {name: found[name] for name in some} == some


def test_a_role_is_taken_by_a_token_without_a_namesake_only(real) -> None:
    both = edit_tokenizer(real["tok512"], special=["<bos>"]).tokenizer
    assert "<bos>" not in pairs(real["tok512"], both)
    renamed = edit_tokenizer(TRAINED["word"], remove=["<|endoftext|>"], special=["</s>"]).tokenizer
    assert pairs(TRAINED["word"], renamed)["</s>"] == "<|endoftext|>"
