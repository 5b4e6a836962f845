"""Tokenizers with other vocabularies."""

import json
import re
from typing import Any

import pytest
from covering import some
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import tokenizer_of
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from embedlayer import TokenizerError, VocabularyError, load_tokenizer, train_tokenizer
from embedlayer.tokenization import table_size
from embedlayer.vocab import TokenizerEdit, edit_tokenizer, used_tokens, with_required_tokens

TEXT = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and naïve beginners begin again; 12 dogs in 2024.\n"
) * 5
KINDS = ("bpe", "byte", "unigram", "word", "wordpiece")
TRAINED = {kind: train_tokenizer(TEXT, kind, vocab_size=400) for kind in KINDS}
REAL = {
    "gpt2": "tokenizers/gpt2-encoder.json",
    "phi-3": "tokenizers/phi-3-mini.tokenizer.json",
    "t5": "tokenizers/t5-small.tokenizer.json",
    "bert": "tokenizers/bert-base-cased-vocab.txt",
    "llama2c": "models/tok512.bin",
}


WORDS = st.text(alphabet="adefghilnorstuvwy", min_size=5, max_size=9)
ADDED = ["zebra", " zebras", "<tool>", "New York"]


@pytest.fixture(scope="module")
def real(request, shared_data) -> Tokenizer:
    return load_tokenizer(shared_data / REAL[request.param])


def in_order(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def remapped(edit: TokenizerEdit, ids: list[int]) -> list[int]:
    new_id_of = {old: new for new, old in enumerate(edit.sources)}
    return [new_id_of[i] for i in ids]


# Adding


@pytest.mark.parametrize("kind", KINDS)
def test_adding_then_removing_gives_the_same_file_byte_for_byte(kind) -> None:
    added = edit_tokenizer(TRAINED[kind], add=ADDED, special=["<|call|>"])
    assert added.sources == (*range(table_size(TRAINED[kind])), *[None] * 5)
    assert added.dropped == ()
    assert added.merged == {}
    assert [name.replace("▁", " ") for name in in_order(added.tokenizer)[-5:]] == [*ADDED, "<|call|>"]
    back = edit_tokenizer(added.tokenizer, remove=[*ADDED, "<|call|>"])
    assert back.tokenizer.to_str() == TRAINED[kind].to_str()


@settings(max_examples=25)
@given(words=st.lists(WORDS, min_size=1, max_size=4, unique=True), kind=st.sampled_from(KINDS))
def test_new_words_are_single_tokens_in_a_text_and_all_other_tokens_are_as_before(words, kind) -> None:
    old = TRAINED[kind]
    new = [word for word in words if word not in old.get_vocab()]
    edit = edit_tokenizer(old, add=new)
    assert edit_tokenizer(edit.tokenizer, remove=new).tokenizer.to_str() == old.to_str()
    for word in new:
        text = f"dogs love <{word}> (they do)"
        tokens = edit.tokenizer.encode(text).tokens
        assert tokens.count(word) == 1
        before, after = tokens[: tokens.index(word)], tokens[tokens.index(word) + 1 :]
        assert before == old.encode("dogs love <").tokens
        assert after == old.encode("e> (they do)").tokens[-len(after) :]
        if kind in ("bpe", "byte"):
            assert edit.tokenizer.decode(edit.tokenizer.encode(text).ids) == text
    assert edit.tokenizer.encode("the small dog").ids == old.encode("the small dog").ids


@pytest.mark.parametrize("kind", ["wordpiece", "word"])
def test_where_entries_are_words_a_new_word_is_not_found_inside_another(kind) -> None:
    edit = edit_tokenizer(TRAINED[kind], add=["zeal", "New York"])
    assert edit.tokenizer.encode("zeal, New York").tokens == ["zeal", ",", "New York"]
    assert "zeal" not in edit.tokenizer.encode("azeal").tokens
    behind = Tokenizer.from_str(TRAINED[kind].to_str())
    behind.add_tokens(["<tool>"])  # stands behind the model's vocabulary, as the tokenizers library has it
    edit = edit_tokenizer(behind, add=["zeal"])
    assert edit.tokenizer.encode("zeal <tool>").tokens == ["zeal", "<tool>"]
    assert "zeal" not in edit.tokenizer.encode("azeal zealous").tokens
    assert edit_tokenizer(edit.tokenizer, remove=["zeal"]).tokenizer.to_str() == behind.to_str()


def test_wordpiece_continues_words_with_a_new_piece_and_from_a_new_word() -> None:
    edit = edit_tokenizer(TRAINED["wordpiece"], add=["zeal", "##zzz"])
    assert edit.tokenizer.encode("zeals dogzzz").tokens == ["zeal", "##s", "dog", "##zzz"]


def test_an_added_token_with_rules_keeps_them() -> None:
    token = AddedToken("zeal", lstrip=True, rstrip=True, single_word=True, normalized=False)
    edit = edit_tokenizer(TRAINED["bpe"], add=[token], special=["<|call|>"])
    *_, zeal, call = edit.tokenizer.get_added_tokens_decoder().values()
    found = {name for name in ("lstrip", "rstrip", "single_word", "normalized", "special") if getattr(zeal, name)}
    assert (found, call.special) == ({"lstrip", "rstrip", "single_word"}, True)
    assert edit.tokenizer.encode("zealous  zeal  dog").tokens[-3:] == ["  zeal  ", *TRAINED["bpe"].encode("dog").tokens]
    both = edit_tokenizer(TRAINED["bpe"], add=["<a>", "<b>"], special=["<a>"])
    assert [t.special for t in both.tokenizer.get_added_tokens_decoder().values()][-2:] == [True, False]


def test_a_lower_casing_tokenizer_finds_a_new_word_in_any_case() -> None:
    tokenizer = Tokenizer.from_str(TRAINED["wordpiece"].to_str())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    edit = edit_tokenizer(tokenizer, add=["zeal", "New York", "new delhi"])
    assert edit.tokenizer.encode("Zeal New York New Delhi").tokens == ["zeal", "New York", "new delhi"]


# Removing and keeping


@settings(max_examples=25)
@given(words=st.lists(st.sampled_from(TEXT.split()), min_size=1, max_size=12), kind=st.sampled_from(KINDS))
def test_a_text_keeps_its_tokens_when_the_vocabulary_is_trimmed_to_it(words, kind) -> None:
    text, old = " ".join(words), TRAINED[kind]
    edit = edit_tokenizer(old, keep=used_tokens(old, text))
    assert edit.tokenizer.encode(text).ids == remapped(edit, old.encode(text).ids)
    assert set(edit.dropped) == {*range(table_size(old))} - {*edit.sources}
    assert in_order(edit.tokenizer) == [i is not None and old.id_to_token(i) for i in edit.sources]


@pytest.mark.parametrize(
    "options",
    [
        {"end_of_word_suffix": "</w>"},  # CLIP
        {"continuing_subword_prefix": "##"},
        {"unk_token": "<unk>", "fuse_unk": True},
        {"ignore_merges": True},  # LLaMA-3
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_bpe_is_trimmed_to_a_text_and_reads_it_as_before(options) -> None:
    old = Tokenizer(models.BPE(**options))
    old.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {name: value for name, value in options.items() if name.endswith(("suffix", "prefix"))}
    old.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False, **marks))
    for text in ("small dogs love lovingly", "they began in the beginning", "why Ω nobody knows", TEXT):
        edit = edit_tokenizer(old, keep=used_tokens(old, text))
        assert edit.tokenizer.encode(text).ids == remapped(edit, old.encode(text).ids)
        assert len(edit.sources) < table_size(old) or text == TEXT
    added = edit_tokenizer(old, add=["zebra"]).tokenizer
    assert edit_tokenizer(added, remove=["zebra"]).tokenizer.to_str() == old.to_str()


def test_a_word_that_wordpiece_gives_up_on_stays_unknown() -> None:
    vocabulary = {name: i for i, name in enumerate(["[UNK]", "a", "ab", "##bx", "##c", "dog"])}
    old = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    old.pre_tokenizer = pre_tokenizers.Whitespace()
    assert old.encode("abx").tokens == ["[UNK]"]  # ab is taken first, and nothing continues it
    assert edit_tokenizer(old, keep=["[UNK]", "a", "##bx"]).tokenizer.encode("abx").tokens == ["a", "##bx"]
    kept = used_tokens(old, ["abx", "a", "dog"]) | {vocabulary["##bx"]}
    assert edit_tokenizer(old, keep=kept).tokenizer.encode("abx").tokens == ["[UNK]"]


@pytest.mark.parametrize("real", some(("bert", "llama2c"), REAL), indirect=True)
def test_real_tokenizers_are_trimmed_to_a_corpus_and_read_it_as_before(real, shared_data) -> None:
    text = (shared_data / "text/the-verdict.txt").read_text()
    used = used_tokens(real, text.splitlines(keepends=True))
    edit = edit_tokenizer(real, keep=used)
    assert len(edit.sources) < table_size(real)
    for line in text.splitlines(keepends=True):
        assert edit.tokenizer.encode(line).ids == remapped(edit, real.encode(line).ids)
    assert set(used) <= set(edit.sources)
    assert edit_tokenizer(edit.tokenizer, keep=range(len(edit.sources))).tokenizer.to_str() == edit.tokenizer.to_str()


@pytest.mark.parametrize("real", some(("phi-3", "llama2c"), REAL), indirect=True)
def test_real_tokenizers_are_the_same_after_adding_and_removing(real) -> None:
    added = edit_tokenizer(real, add=["photosynthesises", "<tool>"], special=["<|call|>"])
    text = "Dogs <tool>photosynthesises<|call|>"
    names = ["<tool>", "photosynthesises", "<|call|>"]
    assert [token for token in added.tokenizer.encode(text).tokens if token in names] == names
    back = edit_tokenizer(added.tokenizer, remove=names)
    assert back.tokenizer.to_str() == real.to_str()


def test_what_bpe_makes_from_a_removed_token_goes_too() -> None:
    old = TRAINED["bpe"]
    edit = edit_tokenizer(old, remove=["do"])
    names = {old.id_to_token(i) for i in edit.dropped}
    assert {"do", "dog"} <= names or "dog" not in old.get_vocab()
    for name in in_order(edit.tokenizer):
        if name != "<|endoftext|>":
            assert edit.tokenizer.model.tokenize(name)[0].value == name
    text = "dogs do not love dots"
    assert edit.tokenizer.decode(edit.tokenizer.encode(text).ids) == text


def test_rare_tokens_go_with_min_count_and_special_ones_on_request() -> None:
    old = TRAINED["word"]
    twice = used_tokens(old, "dogs love dogs", min_count=2)
    assert {old.id_to_token(i) for i in twice} == {"dogs", "<unk>", "<|endoftext|>"}
    bare = used_tokens(old, ["dogs love", "dogs"], keep_special=False)
    assert {old.id_to_token(i) for i in bare} == {"dogs", "love", "<unk>"}
    assert with_required_tokens(old, twice, keep_special=False) == twice


def test_bytes_stay_so_that_any_text_can_still_be_written() -> None:
    for kind in ("bpe", "byte"):
        edit = edit_tokenizer(TRAINED[kind], keep=used_tokens(TRAINED[kind], "dog"))
        assert edit.tokenizer.decode(edit.tokenizer.encode("Ω≈ç√∫ zebra").ids) == "Ω≈ç√∫ zebra"


# Order and merging


@settings(max_examples=25)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_the_order_given_is_the_order_got(data, kind) -> None:
    old = TRAINED[kind]
    names = [*in_order(old), "zebra", "<tool>"]
    head = data.draw(st.lists(st.sampled_from(names), max_size=20, unique=True))
    order = [*head, *(name for name in reversed(names) if name not in set(head))]
    edit = edit_tokenizer(old, add=["zebra"], special=["<tool>"], order=order)
    assert in_order(edit.tokenizer) == order
    assert edit.sources == tuple(old.token_to_id(name) for name in order)
    text = "The small dogs<tool> love Ω naïve beginners"
    there = [i for i in edit.tokenizer.encode(text).ids if edit.sources[i] is not None]
    first, second = text.split("<tool>")
    assert [edit.sources[i] for i in there] == [*old.encode(first).ids, *old.encode(second).ids]


def test_merged_tokens_are_stood_for_by_others() -> None:
    old = TRAINED["word"]
    edit = edit_tokenizer(old, merge={"dogs": "dog", "loved": "adore", "love": "adore"}, add=["adore"], remove=["ask"])
    ids = {name: edit.tokenizer.token_to_id(name) for name in ("dog", "adore")}
    merged = {old.token_to_id("dogs"): ids["dog"], old.token_to_id("loved"): ids["adore"]}
    assert edit.merged == {**merged, old.token_to_id("love"): ids["adore"]}
    assert edit.dropped == (old.token_to_id("ask"),)
    assert edit.tokenizer.encode("dogs").tokens == ["<unk>"]


# IDs that stand elsewhere in the file

TEMPLATE = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)])


@pytest.mark.parametrize(
    "processor",
    [
        processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3)),
        processors.RobertaProcessing(("[SEP]", 4), ("[CLS]", 3)),
        TEMPLATE,
        processors.Sequence([processors.ByteLevel(), TEMPLATE]),
    ],
    ids=lambda processor: type(processor).__name__,
)
def test_what_stands_around_a_text_gets_its_new_ids_and_cannot_be_removed(processor) -> None:
    names = ["x", "[UNK]", "a", "[CLS]", "[SEP]", "b", "[PAD]"]
    old = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    old.pre_tokenizer = pre_tokenizers.Whitespace()
    old.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    old.post_processor = processor
    old.enable_padding(pad_id=6, pad_token="[PAD]", length=6)
    old.enable_truncation(6)
    edit = edit_tokenizer(old, remove=["x", "b"])
    assert in_order(edit.tokenizer) == ["[UNK]", "a", "[CLS]", "[SEP]", "[PAD]"]
    assert edit.tokenizer.encode("a y").ids == [2, 1, 0, 3, 4, 4]
    assert edit.tokenizer.encode("a y").tokens == old.encode("a y").tokens
    kept = edit_tokenizer(old, keep=["a"])
    assert in_order(kept.tokenizer) == in_order(edit.tokenizer)
    for name in ("[CLS]", "[SEP]", "[PAD]", "[UNK]"):
        with pytest.raises(VocabularyError, match=re.escape(name)):
            edit_tokenizer(old, remove=["a", name])


def test_the_unknown_token_and_lowest_score_of_unigram_stay(shared_data) -> None:
    old = TRAINED["unigram"]
    edit = edit_tokenizer(old, keep=used_tokens(old, "dog"))
    scores = dict(json.loads(old.to_str())["model"]["vocab"])
    model = json.loads(edit.tokenizer.to_str())["model"]
    assert model["vocab"][model["unk_id"]][0] == "<unk>"
    assert min(score for _, score in model["vocab"]) == min(scores.values())
    assert all(scores[name] == score for name, score in model["vocab"])


# Bad input


REFUSED: list[dict[str, Any]] = [
    *({"add": ["dog"]}, {"special": ["dog"]}, {"add": ["zebra", "zebra"]}, {"add": [""]}, {"add": "zebra"}),
    *({"remove": "dog"}, {"remove": ["zebra"]}, {"remove": ["dog", "dog"]}, {"remove": [4000]}, {"remove": ["<unk>"]}),
    *({"merge": {"<unk>": "dog"}}, {"merge": {"dogs": "dogs"}}, {"merge": {"dogs": "dog", "dog": "love"}}),
    *({"merge": {"dogs": "dog"}, "remove": [name]} for name in ("dogs", "dog")),
    *({"remove": ["dog"], "keep": ["dogs"]}, {"order": ["dog", "dogs"]}, {"order": ["zebra"]}),
]


def test_what_cannot_be_done_is_an_error() -> None:
    before = TRAINED["word"].to_str()
    for options in REFUSED:
        with pytest.raises(VocabularyError):
            edit_tokenizer(TRAINED["word"], **options)
    assert TRAINED["word"].to_str() == before


def test_a_new_token_is_given_as_text_and_not_as_a_file_writes_it() -> None:
    for kind, new in (("bpe", ["Ġzebra"]), ("unigram", ["two▁words x"]), ("unigram", [" zebra", "▁zebra"])):
        with pytest.raises(VocabularyError):
            edit_tokenizer(TRAINED[kind], add=new)


def test_a_token_that_could_never_be_found_is_an_error() -> None:
    """A normalizer that puts a space before each text puts one into the pattern of a normalized token."""
    merged = edit_tokenizer(TRAINED["bpe"], special=["eb"]).tokenizer
    tokenizer = tokenizer_of("SentencePiece BPE with byte fallback")  # where it is found only where a text begins
    for old, token in ((merged, AddedToken("zebra", normalized=True)), (tokenizer, AddedToken(" zebra", rstrip=True))):
        with pytest.raises(VocabularyError, match="found"):
            edit_tokenizer(old, add=[token])
    edit = edit_tokenizer(tokenizer, add=[AddedToken(" zebra", rstrip=True, normalized=False)])
    assert len(edit.sources) - 1 in edit.tokenizer.encode("a zebra b").ids


def test_texts_with_none_of_the_tokens_are_an_error() -> None:
    for texts in ("", [], ["", "  "], "Ω Ψ"):
        with pytest.raises(VocabularyError):
            used_tokens(TRAINED["word"], texts)


def test_a_tokenizer_with_parts_written_in_python_is_refused() -> None:
    class Spaces:
        def pre_tokenize(self, text) -> None:
            text.split(lambda _, part: part.split(" "))

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Spaces())
    with pytest.raises(TokenizerError, match="cannot be written as a tokenizer.json"):
        edit_tokenizer(tokenizer, add=["a"])


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "word", "unigram"])
def test_new_tokens_that_are_the_same_after_normalization_are_refused(kind) -> None:
    tokenizer = Tokenizer.from_str(TRAINED[kind].to_str())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer = edit_tokenizer(tokenizer, add=[] if kind in ("wordpiece", "word") else ["dog"]).tokenizer
    for new in (["zebra", "Zebra"], ["cafe\u0301s", "cafés"], ["Dog"]):
        with pytest.raises(VocabularyError):
            edit_tokenizer(tokenizer, add=new)
        as_written = [AddedToken(text, normalized=False) for text in new[-1:]]
        edited = edit_tokenizer(tokenizer, add=as_written).tokenizer
        assert new[-1] in edited.encode(f"the {new[-1]}", add_special_tokens=False).tokens
