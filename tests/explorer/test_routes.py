"""What the page can ask for: sources, lines of a run and numbers of the map, beside the library's."""

import json
import math

import pytest
import torch
from covering import looped
from decoders import small
from explorer_requests import Refused, numbers

from embedlayer import DecoderLM, EmbeddingLayer, RunDirectory, TokenEmbedding, train_tokenizer
from embedlayer.analysis import TokenVectors, principal_components
from embedlayer.checkpoints import write_vectors
from embedlayer.opening import OpenedModel, open_model


def test_a_source_is_asked_by_its_number_and_says_what_it_lacks(ask, of_run):
    table = OpenedModel("four", TokenEmbedding.from_pretrained(torch.randn(4, 2)))
    assert ask([of_run, table], "tokens", source=1)["texts"] == ["#0", "#1", "#2", "#3"]
    assert [about["title"] for about in ask([of_run, table], "manifest")["sources"]] == [of_run.title, "four"]
    for name in ("metrics", "frequencies"):
        with pytest.raises(Refused, match="four has no"):
            ask(table, name)


def test_what_a_source_has_is_in_the_manifest(ask, run, of_run, tmp_path):
    def facts(source):
        return ask(source, "manifest")["sources"][0]

    of_all = facts(of_run)
    assert of_all["title"] == run.path.name
    assert isinstance(of_run.model, DecoderLM)
    assert set(of_all["has"]) == {
        "vectors", "tokens", "tokenizer", "input", "position", "head", "metrics", "before", "frequency",
    }  # fmt: skip
    assert (of_all["vocab_size"], of_all["scale"], of_all["tied"]) == (of_run.table.vocab_size, 4.0, True)
    assert of_all["position"]["kind"] == "RotaryEmbedding"
    write_vectors(tmp_path / "three.txt", ["cat", "dog", "fish"], torch.randn(3, 4), format="word2vec")
    vectors = open_model(tmp_path / "three.txt")
    assert ask(vectors, "tokens")["texts"] == ["cat", "dog", "fish"]
    assert facts(vectors)["has"] == ["vectors", "tokens", "input"]
    EmbeddingLayer(TokenEmbedding(5, 4)).save_pretrained(tmp_path / "model")
    saved = open_model(tmp_path / "model")
    assert (facts(saved)["title"], "tokens" in facts(saved)["has"]) == (f"{tmp_path.name}/model", False)


def test_before_training_is_the_table_that_resuming_would_start_from(run, of_run):
    torch.manual_seed(3)
    expected = TokenEmbedding(of_run.table.vocab_size, 16, scale="sqrt_dim", pad_to_multiple_of=64).rows(0, 8)
    state = torch.get_rng_state()
    before = open_model(run.path).before()
    assert torch.equal(before.rows[:8], expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(of_run.rows[:8], expected)


def test_a_llama_type_model_brings_its_positions_and_its_tokenizer(ask, shared_data):
    source = open_model(shared_data / "models")
    assert ask(source, "manifest")["sources"][0]["position"]["kind"] == "RotaryEmbedding"
    texts = ask(source, "tokens")["texts"]
    assert (texts[1], len(texts)) == ("<s>", 512)


TABLE, MODEL = OpenedModel("table", TokenEmbedding(9, 4)), small("learned")
BYTES = OpenedModel("bytes", TokenEmbedding(257, 4), tokenizer=train_tokenizer((), "byte"))
DECODER = OpenedModel("decoder", MODEL.table, model=MODEL)
OTHER = OpenedModel("other", TokenEmbedding(2, 2), tokens=["x", "y"])
REFUSED = [
    (TABLE, "neighbors", {"plus": 1, "topn": 0}, "1 to 500"),
    (TABLE, "neighbors", {"plus": 1, "topn": 100_000}, "1 to 500"),
    (TABLE, "neighbors", {"plus": ",".join(["1"] * 101)}, "at most 100"),
    *(
        (TABLE, name, {"id": token}, "ID|outside")
        for name in ("card", "card-places")
        for token in ("9", "x", "", "1,2")
    ),
    ([TABLE, OTHER], "compare", {"other": 1}, "0 tokens in common"),
    (BYTES, "tokenization", {"text": "a", "tokenizer": "gpt2"}, "no tokenizer 'gpt2'; the page has small, bytes"),
    (BYTES, "tokenization", {}, "no tokens"),
    (BYTES, "tokenization", {"text": " ", "layer": "tiny"}, "no words"),
    (BYTES, "pipeline", {"text": ""}, "no tokens"),
    (TABLE, "pipeline", {"text": "dogs"}, "no tokenizer"),
    (TABLE, "pipeline", {"text": "#9"}, "no row"),
    (TABLE, "logit-lens", {"ids": 1}, "no transformer blocks"),
    *((DECODER, "logit-lens", {"ids": ids}, "1 to 16 tokens") for ids in ("", ",".join(["1"] * 17))),
    (DECODER, "logit-lens", {"ids": 50}, "outside"),
]


@looped("source, name, params, said", REFUSED)
def test_what_cannot_be_answered_is_refused(ask, source, name, params, said):
    with pytest.raises(Refused, match=said):
        ask(source, name, **params)


# The lines of a run


def test_lines_are_the_runs_own_with_its_options(ask, run, of_run):
    found = ask(of_run, "metrics")
    assert found["lines"] == run.read_metrics()
    assert [line["rows_touched"] > 0 for line in found["lines"]] == [False, True, True, True]
    assert found["uniform_loss"] == pytest.approx(math.log(of_run.table.vocab_size))
    assert found["options"]["steps"] == 6
    assert found["made_of"]["head"] == "tied to the table"
    assert found["neighbors_before"][0]["id"] == 40


def test_long_runs_are_thinned_to_end_with_the_last_line_without_numbers_that_json_lacks(ask, tmp_path, of_run):
    directory = RunDirectory(tmp_path)
    lines = [{"step": step, "loss": 1.0} for step in range(1, 5001)]
    directory.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    directory.add_metrics({"step": 5001, "loss": math.nan, "validation_losses": [1.0, math.nan, math.inf]})
    assert directory.read_metrics()[-1]["validation_losses"][0] == 1.0  # a diverged run is read
    found = ask(OpenedModel("long", of_run.table, run=directory), "metrics")["lines"]
    assert (len(found), found[-2]) == (1667, {"step": 4998, "loss": 1.0})
    assert found[-1] == {"step": 5001, "validation_losses": [1.0, None, None]}


# The map's numbers


def test_neighbours_and_directions_are_those_of_token_vectors(ask, of_run):
    vectors, size = TokenVectors(of_run.table, of_run.tokenizer), of_run.table.vocab_size
    for plus, minus in (([40], []), ([270, 271], [272]), ([], [30])):
        terms = {"plus": ",".join(map(str, plus)), "minus": ",".join(map(str, minus))}
        found, expected = ask(of_run, "neighbors", topn=7, **terms), vectors.most_similar(plus, minus, topn=7)
        assert [of_run.token_texts[token] for token, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=2e-5)
        cosines = numbers(ask(of_run, "along", **terms))
        units = torch.nn.functional.normalize(of_run.rows)
        query = units[plus].sum(0) - units[minus].sum(0)
        assert torch.allclose(cosines, units @ query / query.norm(), atol=1e-5)
    content = ask(of_run, "nearest")
    ids = numbers(content[: 40 * size], size, 10, dtype=torch.int32)
    scores = numbers(content[40 * size :], size, 10)
    for token in (0, 41, 280):
        expected = ask(of_run, "neighbors", plus=token, topn=10)
        assert scores[token].tolist() == pytest.approx([score for _, score in expected], abs=2e-5)
        assert {*ids[token].tolist()} == {other for other, _ in expected}


def test_places_are_the_exact_principal_components_and_norms_those_of_the_rows(ask, of_run):
    found, size = principal_components(of_run.rows, 6), of_run.table.vocab_size
    for count in (6, 2):
        places = numbers(ask(of_run, "coordinates", count=count), count, size)
        assert torch.equal(places, found.coordinates[:, :count].T.float())
    assert ask(of_run, "coordinates") == ask(of_run, "coordinates", count=6)
    assert ask(of_run, "axes")["explained"] == found.explained_variance_ratio.tolist()
    assert torch.allclose(numbers(ask(of_run, "norms")), of_run.rows.norm(dim=1))


def test_exported_vectors_are_the_rows_to_a_127th_of_their_largest_number(ask, of_run):
    size, width = of_run.rows.shape
    content = ask(of_run, "vectors")
    largest, rows = numbers(content[: 4 * size], size, 1), numbers(content[4 * size :], size, width, dtype=torch.int8)
    assert torch.equal(largest, of_run.rows.abs().amax(1, keepdim=True))
    assert ((rows * largest / 127 - of_run.rows).abs() <= largest / 250).all()


def test_frequencies_are_counted_over_the_whole_text(ask, run, of_run):
    counts = numbers(ask(of_run, "frequencies")).tolist()
    ids = of_run.tokenizer.encode((run.path / "text.txt").read_text(), add_special_tokens=False).ids
    assert counts == [ids.count(token) for token in range(of_run.table.vocab_size)]


def test_broken_zero_and_nameless_rows_do_no_harm(ask):
    rows = torch.randn(8, 3)
    rows[1], rows[2, 0] = 0.0, torch.inf
    source = OpenedModel("eight", TokenEmbedding.from_pretrained(rows), tokens=["a", "b", "c", "d", "e", "f", "g", ""])
    places = numbers(ask(source, "coordinates", count=3), 3, 8)
    assert places.isnan().all(0).nonzero()[:, 0].tolist() == places.isnan().any(0).nonzero()[:, 0].tolist() == [2]
    assert sorted(token for token, _ in ask(source, "neighbors", plus=0)) == [1, 3, 4, 5, 6]
    ask(source, "nearest")
