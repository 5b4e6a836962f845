"""What the page can ask for."""

import pytest
import torch
from explorer_requests import Refused

from embedlayer import DecoderLM, EmbeddingLayer, TokenEmbedding
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
