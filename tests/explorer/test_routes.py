"""What the page can ask for."""

from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from embedlayer import DecoderLM, EmbeddingLayer, TokenEmbedding, train_tokenizer
from embedlayer.checkpoints import write_vectors
from embedlayer.core.errors import FileError, SizeError, TokenizerError
from embedlayer.explorer import routes
from embedlayer.explorer.routes import answer, check_tokenizers, manifest, others, page_facts
from embedlayer.opening import OpenedModel, open_model
from embedlayer.saving import build
from embedlayer.tokenization.bytes import token_text


def test_a_source_is_asked_by_its_number(of_run):
    table = OpenedModel("four", TokenEmbedding(4, 2))
    assert answer([of_run, table], "tokens", {"source": "1"})["texts"] == ["#0", "#1", "#2", "#3"]
    assert [about["title"] for about in manifest([of_run, table])["sources"]] == [of_run.title, "four"]
    assert others([of_run, table], of_run) == ["before", "1"]
    assert others([of_run, table], table) == ["0"]


def test_what_a_source_lacks_is_said(of_run):
    table = OpenedModel("four", TokenEmbedding.from_pretrained(torch.randn(4, 2)))
    for name in ("metrics", "frequencies"):
        with pytest.raises(SizeError, match="four has no"):
            answer([table], name, {})


def test_a_run_is_opened_with_all_that_it_has(run, of_run):
    assert of_run.title == run.path.name
    assert isinstance(of_run.model, DecoderLM)
    manifest = page_facts(of_run)
    assert set(manifest["has"]) == {
        "vectors", "tokens", "tokenizer", "input", "position", "head", "metrics", "before", "frequency",
    }  # fmt: skip
    assert manifest["vocab_size"] == of_run.table.vocab_size
    assert manifest["position"]["kind"] == "RotaryEmbedding"
    assert manifest["scale"] == 4.0
    assert manifest["tied"]
    assert of_run.token_texts[40] == token_text(of_run.tokenizer, 40)


def test_before_training_is_the_table_that_resuming_would_start_from(run, of_run):
    torch.manual_seed(3)
    expected = build(run.read()["model"]).table
    state = torch.get_rng_state()
    before = of_run.before()
    assert torch.equal(before.rows, expected.rows(0, expected.vocab_size))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before.rows, open_model(run.path).model.table.rows(0, expected.vocab_size))
    assert of_run.before() is before


def test_files_of_vectors_and_saved_layers_are_opened(tmp_path):
    rows = torch.randn(3, 4)
    write_vectors(tmp_path / "three.txt", ["cat", "dog", "fish"], rows, format="word2vec")
    source = open_model(tmp_path / "three.txt")
    assert source.token_texts == ["cat", "dog", "fish"]
    assert torch.allclose(source.rows, rows, atol=1e-5)
    assert source.before() is None
    assert page_facts(source)["has"] == ["vectors", "tokens", "input"]

    EmbeddingLayer(TokenEmbedding(5, 4)).save_pretrained(tmp_path / "model")
    saved = open_model(tmp_path / "model")
    assert saved.title == f"{tmp_path.name}/model"
    assert saved.token_texts == ["#0", "#1", "#2", "#3", "#4"]
    assert "tokens" not in page_facts(saved)["has"]


def test_a_tokenizer_can_be_given_and_must_fit(tmp_path):
    tokenizer = train_tokenizer("cat dog", "word")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_vectors(tmp_path / "rows.npy", ["a", "b", "c", "d"], torch.randn(4, 2), format="npy")
    source = open_model(tmp_path / "rows.npy", tmp_path / "tokenizer.json")
    assert [text for text in source.token_texts if text] == [token_text(tokenizer, i) for i in range(len(source.token_texts)) if i < tokenizer.get_vocab_size()]  # fmt: skip  # noqa: E501
    with pytest.raises(TokenizerError, match="do not belong together"):
        check_tokenizers([OpenedModel("small", TokenEmbedding(2, 2), tokenizer=tokenizer)])
    with pytest.raises(SizeError, match="2 rows and 1 tokens"):
        OpenedModel("small", TokenEmbedding(2, 2), tokens=["a"])


def test_what_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileError, match="nowhere"):
        open_model(tmp_path / "nowhere")


def test_a_llama_type_model_brings_its_positions_and_its_tokenizer(shared_data):
    source = open_model(shared_data / "models")
    assert isinstance(source.model, DecoderLM)
    assert page_facts(source)["position"]["kind"] == "RotaryEmbedding"
    assert source.token_texts[1] == "<s>"
    assert source.table.vocab_size == 512


def test_what_is_asked_twice_is_computed_once():
    source, calls = OpenedModel("one", TokenEmbedding(2, 2)), []

    def counted(value):
        calls.append(1)
        return value

    assert source.once("key", lambda: counted(7)) == 7
    assert source.once("key", lambda: counted(8)) == 7
    assert calls == [1]


@pytest.mark.parametrize(
    ("urls", "address"),
    [
        (
            ["Homepage, https://e.org", "Documentation, https://e.org/docs/index.md"],
            "https://e.org/docs/course/index.md",
        ),
        ([], ""),
        (None, ""),
    ],
)
def test_the_course_is_beside_the_documentation_that_the_package_names(urls, address, monkeypatch) -> None:
    def metadata(name: str) -> Message:
        if urls is None:
            raise PackageNotFoundError(name)
        message = Message()
        for url in urls:
            message["Project-URL"] = url
        return message

    monkeypatch.setattr(routes, "metadata", metadata)
    assert routes.course_address() == address
    assert (Path(routes.__file__).parents[2] / "docs/course/index.md").is_file()
