"""`embedlayer inspect`."""

import re

import pytest
import torch
from commands import answer, printed, run

from embedlayer import (
    EmbeddingLayer,
    TokenEmbedding,
    open_model,
    train_tokenizer,
)
from embedlayer.checkpoints import write_vectors
from embedlayer.inputs import PerLayerInputs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps; its text has some of the bytes only, and one of them once."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("Q" + "the cat sat on the mat and the dog sat on the log. " * 200)
    code = run(
        *("train", text, "-o", folder / "run", "--tokenizer", "byte", "--dim", 16, "--layers", 1, "--heads", 2),
        *("--steps", 3, "--length", 16, "--untied", "--row-sparse", "--json"),
    )
    assert code == 0
    return folder / "run"


def test_a_run_is_inspected_with_its_text_and_its_beginning(trained) -> None:
    content = answer("inspect", trained)
    assert content["kind"] == "trained run"
    assert content["under_trained_by"] == "head"  # it is free
    assert (content["vocab_size"], content["embed_dim"], content["dtype"]) == (257, 16, "float32")
    unread = 257 - len(set("Qthe cat sat on the mat and the dog sat on the log. "))
    assert content["health"]["never_touched"]["rows"] == unread + 1  # no window of three steps has the only Q
    assert content["norms_by_frequency"][0]["rows"] == unread
    assert 1 < content["geometry"]["effective_rank"] <= 16
    assert len(content["geometry"]["explained_variance_ratio"]) == 16
    assert content["word_pairs"] is None


def test_every_line_fits_its_terminal(trained, monkeypatch) -> None:
    for width in (60, 80, 120):
        monkeypatch.setattr("embedlayer.cli.printing.WIDTH_IN_FILES", width)
        shown = printed("inspect", trained)
        assert max(map(len, shown.splitlines())) <= width
        assert width > 60 or "…" in shown
        assert re.search(r"^ *byte +128 ", shown, flags=re.M), "a line for each kind of token"
        for part in ("effective rank", "Norms by frequency", "never touched", "not learned", "never seen"):
            assert part in shown


def test_words_are_compared_with_people(tmp_path) -> None:
    tokenizer = train_tokenizer("cat dog king queen man woman", "word")
    TokenEmbedding(tokenizer.get_vocab_size(), 8).save_pretrained(tmp_path, tokenizer=tokenizer)
    (tmp_path / "pairs").write_text("cat\tdog\t7\nking\tqueen\t8\nman\tzebra\t1\n")
    (tmp_path / "questions").write_text(": family\nking queen man woman\nking queen man zebra\n")
    arguments = ("--word-pairs", tmp_path / "pairs", "--analogies", tmp_path / "questions")
    content = answer("inspect", tmp_path, *arguments)
    assert (content["word_pairs"]["used"], content["word_pairs"]["total"]) == (2, 3)
    assert (content["analogies"]["used"], content["analogies"]["total"]) == (1, 2)
    assert content["word_pairs"]["spearman"] is None
    shown = printed("inspect", tmp_path, *arguments)
    assert "2 of 3 pairs are two tokens; fewer than 20 give no correlation" in shown
    assert "1 of 2 questions are four tokens" in shown


def test_two_tables_are_compared_by_their_tokens(tmp_path) -> None:
    tokenizer = train_tokenizer("the cat sat on the mat with a dog and a log", "word")
    count = tokenizer.get_vocab_size()
    table = TokenEmbedding(count, 6)
    write_vectors(tmp_path / "before.vec", [tokenizer.id_to_token(row) for row in range(count)], table)
    turn = torch.linalg.qr(torch.randn(6, 6)).Q
    with torch.no_grad():
        table.weight.copy_(table.weight @ turn)
        table.weight[tokenizer.token_to_id("cat")] *= -1
    table.save_pretrained(tmp_path / "after", tokenizer=tokenizer)
    content = answer("inspect", tmp_path / "before.vec", tmp_path / "after", "-n", "2")
    assert content["most"][0]["token"] == "cat"
    assert content["aligned"]["median_cosine"] > 0.9 > content["median_cosine_unaligned"]
    assert answer("inspect", tmp_path / "before.vec", tmp_path / "after", "--no-align")["aligned"] is None
    shown = printed("inspect", tmp_path / "before.vec", tmp_path / "after")
    assert shown.index(f"{count - 1} rows did not move by more than rounding.") < shown.index("Moved most")


def test_tokens_that_moved_are_divided_by_whether_they_occur(trained, tmp_path) -> None:
    rows = open_model(trained).table.rows(0, 257).detach().clone()
    once, often, never = b"Qtz"
    rows[[once, often, never]] *= -1
    TokenEmbedding.from_pretrained(rows).save_pretrained(tmp_path / "other")
    content = answer("inspect", tmp_path / "other", trained)
    assert {row["after"] for row in content["most"]} == {once, often}
    assert [row["after"] for row in content["never"]] == [never]


def test_tokens_that_never_occur_in_a_text_are_counted_for_any_table(tmp_path) -> None:
    write_vectors(tmp_path / "words.vec", ["dog", "cat", "naps", "<unk>"], torch.randn(4, 8))
    (tmp_path / "text.txt").write_text("dog naps dog\n")
    command = ("inspect", tmp_path / "words.vec", "--text", tmp_path / "text.txt")
    assert answer(*command)["not_in_the_text"] == {"rows": 2, "ids": [1, 3]}
    assert "not in --text 2" in " ".join(printed(*command).split())


def test_a_table_with_new_rows_is_compared_with_its_base_and_its_new_rows_are_named(tmp_path) -> None:
    words = [f"w{row}" for row in range(60)]
    rows = torch.randn(63, 8)
    write_vectors(tmp_path / "base.vec", words, rows[:60])
    write_vectors(tmp_path / "edited.vec", [*words, "otter", "naps", "dogs"], rows)
    shown = " ".join(printed("inspect", tmp_path / "base.vec", tmp_path / "edited.vec").split())
    assert "All 60 common rows are equal. 3 rows only in B." in shown
    assert "only in B 3 rows otter naps dogs" in shown
    assert "No row moved by more than rounding." in shown
    rows[7] *= -1
    write_vectors(tmp_path / "edited.vec", [*words[:59], "otter"], rows[:60])
    content = answer("inspect", tmp_path / "base.vec", tmp_path / "edited.vec")
    assert [row["token"] for row in content["most"]] == ["w7"]
    assert [content[name]["only_here"] for name in ("before", "after")] == [
        {"rows": 1, "tokens": ["w59"]},
        {"rows": 1, "tokens": ["otter"]},
    ]


def test_rows_that_moved_are_listed_where_two_tables_are_related(tmp_path) -> None:
    rows = torch.randn(700, 16)
    spoiled = rows.clone()
    spoiled[300] *= -1
    spoiled[500], spoiled[600] = 0.0, torch.nan
    noise, other = rows + 0.1 * torch.randn(700, 16), torch.randn(700, 16)
    others = {"equal": rows, "spoiled": spoiled, "noise": noise, "other": other}
    lists = ("Moved most", "Moved least", "No row moved by more than rounding.")
    shown = {}
    for name, table in others.items():
        TokenEmbedding.from_pretrained(table).save_pretrained(tmp_path / name)
        said = printed("inspect", tmp_path / "equal", tmp_path / name)
        shown[name] = [each for each in lists if each in said]
    assert shown == {"equal": [lists[2]], "spoiled": [lists[0]], "noise": [*lists[:2]], "other": []}


def test_a_per_layer_table_is_listed_and_planned(tmp_path) -> None:
    inputs = PerLayerInputs(TokenEmbedding(20, 12), 8, 3)
    EmbeddingLayer(TokenEmbedding(30, 8), per_layer=inputs).save_pretrained(tmp_path / "layer")
    assert "per-layer table of 20 rows, 3 blocks x 4" in " ".join(printed("inspect", tmp_path / "layer").split())
    assert answer("inspect", tmp_path / "layer")["per_layer"] == {"rows": 20, "layers": 3, "width": 4}
    row = answer("plan", "--checkpoint", tmp_path / "layer")[0]
    assert row["per_layer_parameters"] == (20 + 8) * 12
    assert row["weight_bytes"] == 4 * (30 * 8 + (20 + 8) * 12)
