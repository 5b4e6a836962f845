"""`embedlayer compress`, as a person meets it."""

import json
from pathlib import Path

import pytest
import torch
from commands import answer, printed, refused, run
from covering import some
from safetensors.torch import load_file, save_file

import embedlayer as el


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("run")
    table = el.TokenEmbedding(257, 16, init_std=1.0, scale="sqrt_dim")
    model = el.DecoderLM(table, el.RotaryEmbedding(8), num_layers=1, num_heads=2)
    model.save_pretrained(folder, tokenizer=el.train_tokenizer((), "byte"))
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("once upon a time there was a little table. " * 20)
    return file


def losses_of_evaluate(source: Path, other: Path, text: Path) -> list[float]:
    """The losses that `embedlayer evaluate` gives two models."""
    result = answer("evaluate", source, other, "--text", text)
    return [result[each]["loss"] for each in ("model", "other")]


@pytest.mark.parametrize(("to", "kind"), [("int4-g8", el.QuantizedEmbedding), ("rank=8", el.FactorizedEmbedding)])
def test_a_run_stays_a_run_without_a_dense_copy_of_its_table(folder, text, tmp_path, to, kind) -> None:
    out = tmp_path / "deeper" / "out"
    result = answer("compress", folder, "--to", to, "-o", out, "--text", text)
    own, made = result["rows"]
    assert losses_of_evaluate(folder, out, text) == pytest.approx([own["loss"], made["loss"]], rel=1e-6)
    model = el.open_model(out).model
    assert isinstance(model.table, kind)
    assert model.head.own_table is model.table
    assert made["loss_change"] == pytest.approx(made["loss"] - own["loss"])
    assert made["bytes"] == sum(tensor.nbytes for tensor in model.table.state_dict().values())
    stored = load_file(out / "model.safetensors")
    assert not any(tensor.is_floating_point() and tensor.shape == (257, 16) for tensor in stored.values())
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert name == "table.weight" or torch.equal(stored[name], tensor)
    for command in (["embed", out, "once"], ["neighbors", out, "o", "-n", 3], ["generate", out, "once", "--tokens", 5]):
        assert run(*command) == 0
    assert run("export", out, "-o", tmp_path / "rows.vec") == 0
    assert printed("compress", out, "--compare").count("int4") == 1


def test_a_run_of_this_program_is_measured_on_its_windows_and_weighted_by_its_corpus(tmp_path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat and the dog sat on the cat. " * 60)
    train = ["train", book, "-o", tmp_path / "run", "--tokenizer", "byte", "--steps", 2, "--dim", 16, "--heads", 2]
    assert run(*train, "--layers", 1, "--length", 16, "--batch-size", 2, "--json") == 0
    assert run("compress", tmp_path / "run", "--to", "rank=4", "-o", tmp_path / "out", "--json") == 0
    table = el.open_model(tmp_path / "run").model.table
    corpus = el.TokenCorpus.open(tmp_path / "run" / "corpus").ids
    counts = torch.bincount(torch.from_numpy(corpus.astype("int64")), minlength=table.vocab_size)
    expected = el.FactorizedEmbedding.from_table(table, 4, counts)
    found = el.open_model(tmp_path / "out").model.table
    assert torch.equal(found.rows(0, 257), expected.rows(0, 257))


def test_a_llama_type_checkpoint_becomes_a_run_that_says_the_same(shared_data, tmp_path) -> None:
    models = shared_data / "models"
    own = [models / "stories260K.safetensors", "--tokenizer", models / "tok512.bin"]
    assert run("compress", *own, "--to", "int8", "-o", tmp_path / "out") == 0
    options = ["--tokens", 60, "--greedy"]
    one, other = (
        answer("generate", source[0], "", *options, *source[1:])["ids"] for source in (own, [tmp_path / "out"])
    )
    assert one == other
    assert one[0] == 1


def test_of_another_checkpoint_the_embedding_layer_is_kept(tmp_path, text) -> None:
    source = tmp_path / "gpt2"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 257, "n_embd": 16, "n_positions": 8}')
    save_file({"wte.weight": torch.randn(257, 16), "wpe.weight": torch.randn(8, 16)}, source / "model.safetensors")
    tokenizer = tmp_path / "tokenizer.json"
    el.train_tokenizer((), "byte").save(str(tokenizer))
    arguments = ["--to", "int8", "-o", tmp_path / "out", "--text", text]
    assert "Name one with --tokenizer" in refused("compress", source, *arguments)
    assert run("compress", source, *arguments, "--tokenizer", tokenizer) == 0
    whole, small = el.load(source), el.load(tmp_path / "out")
    ids = torch.tensor([[1, 2, 3]])
    assert (small.input(ids) - whole.input(ids)).norm() < 0.02 * whole.input(ids).norm()
    assert small.head.tied
    assert "wte" not in str(list(load_file(tmp_path / "out" / "model.safetensors")))
    assert small.tokenizer.get_vocab_size() == 257
    again = tmp_path / "again"
    assert run("compress", tmp_path / "out", "--to", "int4", "-o", again) == 0
    assert el.load(again).table.row_format.bits == 4


@pytest.mark.parametrize(
    ("model_type", "kind"), some([("qwen3", "causal")], [("qwen3", "causal"), ("bert", "masked"), ("t5", "seq2seq")])
)
def test_the_blocks_of_a_checkpoint_are_kept_and_its_loss_measured(
    model_type, kind, tmp_path, text, capsys, unchecked
) -> None:
    from tiny_models import build

    tokenizer, source, out = el.train_tokenizer((), "byte"), tmp_path / "source", tmp_path / "out"
    model = build(model_type, kind, {"vocab_size": 257})[1]
    model.save_pretrained(source)
    tokenizer.save(str(source / "tokenizer.json"))
    assert run("compress", source, "--to", "int8", "-o", out, "--text", text, "--json") == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["rows"]
    if kind == "causal":
        assert losses_of_evaluate(source, out, text) == pytest.approx([row["loss"] for row in rows], rel=1e-6)
        assert rows[1]["loss_change"] == pytest.approx(rows[1]["loss"] - rows[0]["loss"])
    else:
        assert rows[0]["loss"] is None
        assert "is not measured" in shown.err
    again, ids = el.compress.load_model(out), torch.tensor([[5, 70, 90, 7]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "seq2seq" else {})}
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits + 0, model(**inputs).logits + 0, rtol=0.05, atol=0.05)
    assert isinstance(again.get_input_embeddings(), el.QuantizedEmbedding)
    said = printed("compress", out, "--to", "int4", "-o", tmp_path / "again")
    assert "The whole model: embedlayer.compress.load_model" in said
    assert el.compress.load_model(tmp_path / "again").get_input_embeddings().row_format.bits == 4
    assert "load it with embedlayer.compress.load_model" in refused("generate", out, "a")
    said = refused("vocab", "add", out, "otter", "-o", tmp_path / "edited")
    assert "Edit the checkpoint that it was compressed from" in said
    said = printed("compress", next(source.glob("*.safetensors")), "--to", "int8", "-o", tmp_path / "single")
    assert "Only the embedding layer is written, without the model's blocks" in said


def test_a_file_of_vectors_becomes_a_layer_with_its_words(tmp_path) -> None:
    rows = torch.randn(3, 16)
    el.checkpoints.write_vectors(tmp_path / "cats.vec", ["cat", "dog", "naïve"], rows)
    assert run("compress", tmp_path / "cats.vec", "--to", "int8", "-o", tmp_path / "out") == 0
    layer = el.load(tmp_path / "out")
    assert layer.tokenizer.encode("naïve cat").ids == [2, 0]
    assert torch.allclose(layer.table.rows(0, 3), rows, atol=0.02)
