"""`embedlayer export`."""

import pytest
import torch
from commands import answer, leaf_commands, printed, refused, run

from embedlayer import DecoderLM, OutputHead, RotaryEmbedding, TokenEmbedding, train_tokenizer
from embedlayer.checkpoints import read_vectors

(FORMAT,) = [param for param in dict(leaf_commands())["export"].params if param.name == "format"]
VECTOR_FORMATS = [name for name in FORMAT.type.choices if name not in ("parquet", "onnx", "gguf")]


@pytest.mark.parametrize("format", VECTOR_FORMATS)
def test_a_runs_table_is_written_with_its_tokens(tmp_path, format) -> None:
    tokenizer = train_tokenizer("the cat sat on the mat", "word", special_tokens=["a b"])
    table = TokenEmbedding(20, 8)  # more rows than tokens
    DecoderLM(table, RotaryEmbedding(4), num_layers=1, num_heads=2).save_pretrained(tmp_path, tokenizer=tokenizer)
    file = tmp_path / "table"
    count = tokenizer.get_vocab_size()
    facts = {"file": str(file), "format": format, "rows": count, "columns": 8, "left_out": 20 - count}
    assert answer("export", tmp_path, "--format", format, "-o", file) == facts
    said = printed("export", tmp_path, "--format", format, "-o", tmp_path / "again")
    assert f"{20 - count} of 20 rows are left out: the tokenizer has no token for them" in said
    tokens, rows = read_vectors(file, format)
    assert torch.equal(rows, table.weight[:count])
    assert tokens[0] == ("a b" if format in ("npy", "projector") else "a▁b")
    assert tokens[1:] == [tokenizer.id_to_token(token) for token in range(1, count)]


def test_parquet_goes_by_its_name(tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tokenizer = train_tokenizer("the cat sat on the mat", "word")
    TokenEmbedding(20, 8).save_pretrained(tmp_path / "table", tokenizer=tokenizer)
    file = tmp_path / "table.parquet"
    count = tokenizer.get_vocab_size()
    facts = {"file": str(file), "format": "parquet", "rows": count, "columns": 8, "left_out": 20 - count}
    assert answer("export", tmp_path / "table", "-o", file, "--neighbors", "3") == facts
    assert len(parquet.read_table(file)["neighbors"][0]["ids"].as_py()) == 3


def test_onnx_goes_by_its_name_and_has_logits_of_a_tied_head_alone(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    table, position = TokenEmbedding(20, 32), RotaryEmbedding(16)
    for name, head in (("tied", None), ("untied", OutputHead(vocab_size=20, embed_dim=32))):
        DecoderLM(table, position, head, num_layers=1, num_heads=2).save_pretrained(tmp_path / name)
        assert run("compress", tmp_path / name, "--to", "q4_0", "-o", tmp_path / f"{name}4") == 0
        said = printed("export", tmp_path / f"{name}4", "-o", tmp_path / f"{name}.onnx")
        assert "Wrote 20 rows of 32 numbers as onnx" in said
        outputs = [each.name for each in onnx.load(tmp_path / f"{name}.onnx").graph.output]
        assert outputs == (["vectors", "logits"] if name == "tied" else ["vectors"])
    assert "--to q4_0 -o NEW" in refused("export", tmp_path / "tied", "-o", tmp_path / "dense.onnx")


def test_the_projectors_folder_is_one_that_tensorboard_finds(tmp_path) -> None:
    TokenEmbedding(257, 4).save_pretrained(tmp_path / "table", tokenizer=train_tokenizer((), "byte"))
    assert run("export", tmp_path / "table", "-o", tmp_path / "logs", "--format", "projector") == 0
    config = (tmp_path / "logs" / "projector_config.pbtxt").read_text()
    assert config.startswith("embeddings {")
    for name in ("tensors.tsv", "metadata.tsv"):
        assert f'_path: "{name}"' in config
        assert (tmp_path / "logs" / name).exists()
