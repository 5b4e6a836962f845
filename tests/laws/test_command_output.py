"""What commands print: JSON for any reader, and one line for a fault of the tokenizers library, in workers as well."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import leaf_commands, run
from covering import looped
from tokenizers import Tokenizer, models

import embedlayer as el
from embedlayer.checkpoints.vector_files import write_vectors
from embedlayer.compress import compress_table
from embedlayer.compress.onnx_export import export_onnx

WITHOUT_JSON = {"explore", "report"}
"""Commands that write a page."""


def test_every_command_has_json() -> None:
    assert {name for name, command in leaf_commands() if "as_json" not in {each.name for each in command.params}} == (
        WITHOUT_JSON
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tables")
    write_vectors(folder / "one.txt", ["a", "b", "c", "d"], torch.tensor([[1.0], [2], [-3], [0]]), "word2vec")
    (folder / "nan.txt").write_text("2 2\na nan 1\nb 1 2\n")
    (folder / "zeros.txt").write_text("2 2\na 0 0\nb 0 0\n")
    (folder / "t.txt").write_text("a b b a")
    tokenizer = el.train_tokenizer((), "byte")
    table = el.TokenEmbedding(257, 32)
    with torch.no_grad():
        table.weight[98:101] = torch.tensor([torch.nan, torch.inf, 0.0])[:, None]
    el.DecoderLM(table, "rotary", num_layers=1, num_heads=2).save_pretrained(folder / "model", tokenizer=tokenizer)
    return folder


@looped(
    "line",
    [
        *(f"inspect {name}" for name in ("one.txt", "nan.txt", "zeros.txt", "model")),
        *(f"inspect {name} {name}" for name in ("one.txt", "nan.txt", "zeros.txt", "model")),
        "neighbors nan.txt b",
        "neighbors zeros.txt a",
        "embed model abc",
        "compress model --compare --text t.txt",
        "plan --checkpoint model",
        "vocab suggest model t.txt --count 1 --held-out t.txt",
    ],
)
@pytest.mark.filterwarnings("ignore::embedlayer.core.errors.EmbedLayerWarning")
def test_json_of_tables_that_are_not_finite_has_no_nan(line, folder, capsys) -> None:
    run(*(folder / word if (folder / word).exists() else word for word in line.split()), "--json")
    shown, said = capsys.readouterr()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    if shown:
        json.loads(shown, parse_constant=refuse)
    else:
        assert "Error: " in said


def test_ids_outside_of_an_onnx_table_give_what_its_documentation_says(tmp_path) -> None:
    onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    table = compress_table(el.TokenEmbedding(20, 32), "q8_0")
    export_onnx(table, tmp_path / "t.onnx", logits=False)
    said = onnx.load(tmp_path / "t.onnx").graph.doc_string
    assert "the vector of an ID from 20 on is zero, and a negative ID counts from the last row" in said
    session = onnxruntime.InferenceSession(tmp_path / "t.onnx", providers=["CPUExecutionProvider"])
    (vectors,) = session.run(None, {"input_ids": np.array([[20, 1000, -1, -2]])})
    rows = table.rows(0, 20).numpy()
    assert np.array_equal(vectors[0], [rows[0] * 0, rows[0] * 0, rows[19], rows[18]])


def test_a_token_can_be_named_by_its_id(folder, tmp_path, capsys) -> None:
    file = tmp_path / "t.txt"
    write_vectors(file, ["cat", "dog", "#1", "fish"], torch.eye(4), "word2vec")
    for token, token_id in (("#0", 0), ("dog", 1), ("#1", 1), ("#3", 3)):
        assert run("neighbors", file, token, "--json") == 0
        assert json.loads(capsys.readouterr().out)["ids"] == [token_id]
    assert run("neighbors", file, "cat", "--minus", "#3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["minus_ids"] == [3]
    assert run("neighbors", file, "#4") == 2
    assert "Token id 4 is outside this table of 4 rows" in capsys.readouterr().err
    assert run("neighbors", file, "bird") == 2
    assert "by text or ID (in a command such as '#0')." in capsys.readouterr().err


FAULTS = {
    "an exception": {},  # there is no unknown token
    "a panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}
READ_TEXT = (
    "embed {0}/saved dog",
    "generate {0}/saved dog",
    "inspect {0}/saved --text {0}/text.txt",
    "corpus build {0}/text.txt --tokenizer {0}/saved -o {0}/corpus --workers 2",
    "train {0}/text.txt -o {0}/run --tokenizer-from {0}/saved --steps 1 --dim 8",
)


@pytest.fixture(scope="module", params=FAULTS)
def faulty(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    el.DecoderLM(el.TokenEmbedding(3, 8), el.RotaryEmbedding(4), num_layers=1, num_heads=2).save_pretrained(
        folder / "saved"
    )
    sound = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="<unk>"))
    (folder / "saved" / "tokenizer.json").write_text(json.dumps(json.loads(sound.to_str()) | FAULTS[request.param]))
    (folder / "text.txt").write_text("the dog sat . " * 200)
    return folder


@looped("command", READ_TEXT)
def test_what_the_tokenizers_library_raises_is_one_line(faulty: Path, command: str, capsys) -> None:
    before = sorted(path.name for path in faulty.iterdir())
    code = run(*command.format(faulty).split())
    said = capsys.readouterr().err
    assert code == 2
    assert "TokenizerError: The tokenizer cannot " in said
    assert "Traceback" not in said
    left = {path.name for path in faulty.iterdir()} - {*before}
    assert left <= {"corpus"}  # whose plan is kept, and its shards are not
