"""What the page can ask for."""

import pytest
import torch
from covering import looped
from decoders import small
from explorer_requests import Refused

from embedlayer import DecoderLM, EmbeddingLayer, TokenEmbedding, train_tokenizer
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
