"""Suggested tokens: what they save is what the edited tokenizer does, for every kind of tokenizer."""

import json

import pytest
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, tokenizer_of

import embedlayer as el
from embedlayer.vocab import AddedMerge, edit_tokenizer, suggest_removals, suggest_tokens
from embedlayer.vocab import suggestion as module
from embedlayer.vocab.suggestion import read_terms

DOMAIN = ENGLISH + "".join(
    f"async def handle_{name}(transport):\n    await transport.drain()  # {name}, naïve 吾輩は猫\n"
    for name in ("otter", "lynx", "quokka") * 60
)
BPE = [kind for kind in BUILDERS if "BPE" in kind or kind == "bytes"]


def expanded(edit, ids: list[int], merges) -> list[int]:
    """The old IDs of a text from its new ones, with each new token replaced by the two that it is merged from."""
    names = {merge.name(): (merge.left, merge.right) for merge in merges}

    def old(name: str) -> list[str]:
        return [part for each in names[name] for part in old(each)] if name in names else [name]

    return [part for i in ids for part in old(edit.tokenizer.id_to_token(i))]


@pytest.mark.parametrize("kind", BUILDERS)
def test_what_is_saved_is_what_the_edited_tokenizer_saves_and_the_list_reads_back(kind) -> None:
    tokenizer = tokenizer_of(kind)
    suggestion = suggest_tokens(tokenizer, DOMAIN, count=25)
    assert 0 < len(suggestion.tokens) == len(suggestion.scores) <= 25
    file = "".join(f"{line}\n" for line in suggestion.lines())
    assert read_terms(file.splitlines()) == list(suggestion.tokens)
    edit = edit_tokenizer(tokenizer, add=suggestion.tokens)
    measured = suggest_tokens(tokenizer, DOMAIN, count=25, held_out=DOMAIN)
    edited = edit_tokenizer(tokenizer, add=measured.tokens).tokenizer
    assert measured.after.num_bytes == len(DOMAIN.encode())
    chunks = list(module.text_chunks(DOMAIN, tokenizer))
    assert measured.after.num_tokens == sum(len(edited.encode(each, add_special_tokens=False)) for each in chunks)
    if kind != "word":
        assert suggestion.after.bytes_per_token > suggestion.before.bytes_per_token
    else:
        assert suggestion.after.num_unknown < suggestion.before.num_unknown
    if kind in BPE:
        assert sum(score.saved for score in suggestion.scores) == (
            suggestion.before.num_tokens - suggestion.after.num_tokens
        )
        for text in (*LANGUAGES, DOMAIN[:300], DOMAIN[-300:], " two  spaces\n\n and"):
            before, after = (t.encode(text, add_special_tokens=False) for t in (tokenizer, edit.tokenizer))
            assert expanded(edit, after.ids, suggestion.tokens) == before.tokens, text
            assert edit.tokenizer.decode(after.ids) == tokenizer.decode(before.ids)
        back = edit_tokenizer(edit.tokenizer, remove=[merge.name() for merge in suggestion.tokens])
        same = back.tokenizer.to_str() == tokenizer.to_str()
        assert same or (kind == "bytes" and back.tokenizer.get_vocab() == tokenizer.get_vocab())  # an entry more


@pytest.mark.parametrize("kind", [kind for kind in BPE if kind != "bytes"])
def test_only_leaves_are_removed_and_each_costs_about_what_it_says(kind) -> None:
    tokenizer = tokenizer_of(kind)
    suggestion = suggest_removals(tokenizer, DOMAIN, count=20, held_out=DOMAIN)
    edit = edit_tokenizer(tokenizer, remove=suggestion.tokens)
    assert {tokenizer.id_to_token(i) for i in edit.dropped} == set(suggestion.tokens)
    assert suggestion.after.num_tokens >= suggestion.before.num_tokens
    costs = sum(score.saved for score in suggestion.scores)  # other merges of its letters may save one again
    assert suggestion.after.num_tokens - suggestion.before.num_tokens == pytest.approx(costs, rel=0.01)
    assert read_terms(suggestion.lines()) == list(suggestion.tokens)


def test_the_held_out_tenth_is_not_trained_on_and_stays_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_HELD_OUT", 300)
    parts = module._Parts(0.1)
    chunks = [f"{i:010}" for i in range(1000)]
    training = list(parts.training(chunks))
    assert sorted(training + parts.held_out) == chunks
    assert 10 <= len(parts.held_out) <= 30
    assert int(parts.held_out[-1]) > 500  # from the whole text, not from its start


def test_fewer_tokens_than_requested_are_returned_if_the_text_yields_no_more() -> None:
    suggestion = suggest_tokens(tokenizer_of("byte-level BPE"), "xyzzy plugh " * 500, count=1000)
    assert 0 < len(suggestion.tokens) < suggestion.requested == 1000


@pytest.mark.parametrize(
    ("kind", "text", "count", "error", "message"),
    [
        ("byte-level BPE", DOMAIN, 0, el.SizeError, "count is 0; it must be 1 or more"),
        ("byte-level BPE", "dogs", 5, el.TextError, "has 4 bytes, which is too little to hold out a tenth"),
        ("byte-level BPE", "", 5, el.TextError, "has 0 bytes"),
        ("byte-level BPE", "corpus.txt", 5, el.TextError, "looks like a path"),
        ("byte-level BPE", " dogs" * 2000, 5, el.VocabularyError, "yields no token to add"),
        ("word", ENGLISH, 5, el.VocabularyError, "yields no token to add"),
    ],
)
def test_bad_input_is_refused(kind, text, count, error, message) -> None:
    with pytest.raises(error, match=message):
        suggest_tokens(tokenizer_of(kind), text, count=count)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "word", "bytes"])
def test_removals_of_a_tokenizer_without_merges_are_refused_by_name(kind) -> None:
    name = json.loads(tokenizer_of(kind).to_str())["model"]["type"]
    with pytest.raises(el.VocabularyError, match=f"{name} tokenizer has no merges"):
        suggest_removals(tokenizer_of(kind), DOMAIN)


BAD_MERGES = [
    ([AddedMerge("xq", "z")], "'xqz' cannot be merged from 'xq' and 'z': 'xq' is no token before it"),
    ([AddedMerge("qq", "z"), AddedMerge("q", "q")], "'qq' is no token before it"),
    ([AddedMerge("q", "z"), AddedMerge("q", "z")], "add names 'qz' twice"),
    ([AddedMerge("t", "he")], "'the' cannot be added: it is token"),
    ([AddedMerge("q", "Ġ")], "'qĠ' cannot be added as a merge: no text is encoded with it"),
    ([AddedMerge("q", "1")], "'q1' cannot be added as a merge"),
]


@pytest.mark.parametrize(("merges", "message"), BAD_MERGES)
def test_a_merge_that_no_text_reaches_is_refused(merges, message) -> None:
    with pytest.raises(el.VocabularyError, match=message):
        edit_tokenizer(tokenizer_of("byte-level BPE"), add=merges)


def test_a_merge_of_a_tokenizer_without_merges_and_a_damaged_list_are_refused() -> None:
    with pytest.raises(el.VocabularyError, match="'qz' cannot be added as a merge: a WordPiece tokenizer has none"):
        edit_tokenizer(tokenizer_of("WordPiece"), add=[AddedMerge("q", "##z")])
    with pytest.raises(el.VocabularyError, match="'a b c' is no merge"):
        read_terms(["#version: 0.2", "a b", "a b c"])
