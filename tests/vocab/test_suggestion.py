"""Suggested tokens: what they save is what the edited tokenizer does, for every kind of tokenizer."""

import json

import pytest
from commands import run
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, tokenizer_of

import embedlayer as el
from embedlayer.vocab import AddedMerge, edit_tokenizer, last_receipt, suggest_removals, suggest_tokens

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
def test_what_is_saved_is_what_the_edited_tokenizer_saves_and_the_list_reads_back(kind, tmp_path) -> None:
    tokenizer = tokenizer_of(kind)
    suggestion = suggest_tokens(tokenizer, DOMAIN, count=25)
    assert 0 < len(suggestion.tokens) == len(suggestion.scores) <= 25
    edit = edit_tokenizer(tokenizer, add=suggestion.tokens)
    (tmp_path / "terms").write_text("".join(f"{line}\n" for line in suggestion.lines()))
    el.TokenEmbedding(el.tokenization.table_size(tokenizer), 1).save_pretrained(tmp_path / "old", tokenizer=tokenizer)
    assert run("vocab", "add", tmp_path / "old", "--terms", tmp_path / "terms", "--as-is", "-o", tmp_path / "new") == 0
    assert last_receipt(tmp_path / "new").tokenizer.to_str() == edit.tokenizer.to_str()
    lines = DOMAIN.splitlines(keepends=True)
    measured = suggest_tokens(tokenizer, DOMAIN, count=25, held_out=lines)
    edited = edit_tokenizer(tokenizer, add=measured.tokens).tokenizer
    assert measured.after.num_bytes == len(DOMAIN.encode())
    assert measured.after.num_tokens == sum(len(edited.encode(each, add_special_tokens=False)) for each in lines)
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
def test_only_leaves_are_removed_and_each_costs_about_what_it_says(kind, tmp_path) -> None:
    tokenizer = tokenizer_of(kind)
    suggestion = suggest_removals(tokenizer, DOMAIN, count=20, held_out=DOMAIN)
    edit = edit_tokenizer(tokenizer, remove=suggestion.tokens)
    assert {tokenizer.id_to_token(i) for i in edit.dropped} == set(suggestion.tokens)
    assert suggestion.after.num_tokens >= suggestion.before.num_tokens
    costs = sum(score.saved for score in suggestion.scores)  # other merges of its letters may save one again
    assert suggestion.after.num_tokens - suggestion.before.num_tokens == pytest.approx(costs, rel=0.01)
    assert suggestion.lines() == [*suggestion.tokens]


def test_the_held_out_tenth_is_not_trained_on_and_stays_bounded(monkeypatch) -> None:
    monkeypatch.setattr("embedlayer.vocab.suggestion._MOST_HELD_OUT", 1500)
    lines = [f"{number:04} " * 10 for number in range(1000)]
    suggestion = suggest_tokens(tokenizer_of("word"), lines, count=2000)
    held_out = sorted({line[:4] for line in lines} - {*suggestion.tokens})
    assert suggestion.before.num_bytes == 50 * len(held_out)
    assert 10 <= len(held_out) <= 30
    assert int(held_out[-1]) > 500  # from the whole text, not from its start
    assert suggestion.before.num_unknown == suggestion.after.num_unknown == suggestion.before.num_tokens


def test_fewer_tokens_than_requested_are_returned_if_the_text_yields_no_more() -> None:
    suggestion = suggest_tokens(tokenizer_of("byte-level BPE"), "xyzzy plugh " * 500, count=1000)
    assert 0 < len(suggestion.tokens) < suggestion.requested == 1000


@pytest.mark.parametrize(
    ("kind", "text", "count", "error"),
    [
        ("byte-level BPE", DOMAIN, 0, el.SizeError),
        ("byte-level BPE", "dogs", 5, el.TextError),  # too little to hold out a tenth
        ("byte-level BPE", "corpus.txt", 5, el.TextError),  # looks like a path
        ("byte-level BPE", " dogs" * 2000, 5, el.VocabularyError),  # yields no token
        ("word", ENGLISH, 5, el.VocabularyError),
    ],
)
def test_bad_input_is_refused(kind, text, count, error) -> None:
    with pytest.raises(error):
        suggest_tokens(tokenizer_of(kind), text, count=count)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "word", "bytes"])
def test_removals_of_a_tokenizer_without_merges_are_refused_by_name(kind) -> None:
    name = json.loads(tokenizer_of(kind).to_str())["model"]["type"]
    with pytest.raises(el.VocabularyError, match=f"{name} tokenizer has no merges"):
        suggest_removals(tokenizer_of(kind), DOMAIN)


@pytest.mark.parametrize(
    "pairs", [["xq z"], ["qq z", "q q"], ["q z", "q z"], ["t he"], ["q Ġ"], ["q 1"]], ids=lambda pairs: pairs[0]
)
def test_a_merge_that_no_text_reaches_is_refused(pairs) -> None:
    with pytest.raises(el.VocabularyError):
        edit_tokenizer(tokenizer_of("byte-level BPE"), add=[AddedMerge(*pair.split()) for pair in pairs])


def test_a_merge_of_a_tokenizer_without_merges_and_a_damaged_list_are_refused(tmp_path, capsys) -> None:
    with pytest.raises(el.VocabularyError, match="WordPiece"):
        edit_tokenizer(tokenizer_of("WordPiece"), add=[AddedMerge("q", "##z")])
    (tmp_path / "terms").write_text("#version: 0.2\na b\na b c\n")
    el.TokenEmbedding(257, 1).save_pretrained(tmp_path / "old", tokenizer=tokenizer_of("bytes"))
    assert run("vocab", "add", tmp_path / "old", "--terms", tmp_path / "terms", "-o", tmp_path / "new") == 2
    assert "'a b c' is no merge" in capsys.readouterr().err
