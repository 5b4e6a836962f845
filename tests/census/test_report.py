"""The report of a folder names what an edit moves there: the same tensors, files and refusals, and nothing else."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import embedlayer as el
from embedlayer.census.report import CensusReport
from embedlayer.core.command_name import command_line
from embedlayer.io.files import read_json, write_json
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.vocab.targets.folder import folder_census

V, D = 280, 8
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENIZER = el.train_tokenizer("the small dog loved other small dogs. " * 30, vocab_size=V)


def layer(folder: Path) -> None:
    el.EmbeddingLayer(el.TokenEmbedding(V, D, padding_idx=3)).save_pretrained(folder, tokenizer=TOKENIZER)


def decoder(folder: Path) -> None:
    head = el.OutputHead(vocab_size=V, embed_dim=D, bias=True)
    table = el.TokenEmbedding(V, D, pad_to_multiple_of=64)
    model = el.DecoderLM(table, "learned", head, num_layers=1, num_heads=1, max_seq_len=V)
    model.save_pretrained(folder, tokenizer=TOKENIZER)


def checkpoint(folder: Path) -> None:
    folder.mkdir()
    weights = {TABLE: torch.randn(V, D), HEAD: torch.randn(V, D), "model.norm.weight": torch.ones(D)}
    save_tensors(folder / "model.safetensors", weights)
    save_tensors(folder / "model.fp16.safetensors", {name: each.half() for name, each in weights.items()})
    sizes = {"hidden_size": D, "num_attention_heads": 2, "vocab_size": V}
    write_json(folder / "config.json", {"model_type": "llama", **sizes, "eos_token_id": 270})
    write_json(folder / "generation_config.json", {"eos_token_id": [270, 271], "suppress_tokens": [275], "top_k": 270})
    save_tokenizer(TOKENIZER, folder / "tokenizer.json")
    (folder / "vocab.txt").write_text("an older form")
    (folder / "notes.txt").write_text("kept")


FOLDERS: dict[str, Callable[[Path], None]] = {"layer": layer, "decoder": decoder, "checkpoint": checkpoint}


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        start = "" if file.name == "model.safetensors" else f"{file.name}/"
        with safe_open(file, framework="pt") as weights:
            found |= {f"{start}{name}": tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return found


def entries(content: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {name: content}
    return {key: value for own, each in content.items() for key, value in entries(each, f"{name}.{own}").items()}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_report_names_what_an_edit_changes(kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "old", tmp_path / "new"
    FOLDERS[kind](folder)
    for name in ("optimizer.pt", "scheduler.pt", "model.onnx"):
        (folder / name).write_bytes(b"of the old vocabulary")
    report = folder_census(folder)
    assert (report.refused, report.notes) == ("", ())
    with pytest.warns(el.EmbedLayerWarning, match="Left out"):
        receipt = el.vocab.remove_tokens(folder, ["Ġdog"], out=out, pad_to_multiple_of=1)
    before, after = shapes_in(folder), shapes_in(out)
    assert report.tensors == {name: shape for name, shape in before.items() if after[name] != shape}
    assert tuple(report.left_out) == receipt.left_out == ("model.onnx", "optimizer.pt")
    files = {file.name for file in folder.iterdir() if file.suffix != ".safetensors"} - report.left_out.keys()
    same = {
        name for name in files if (out / name).exists() and (out / name).read_bytes() == (folder / name).read_bytes()
    }
    assert files - same <= {*report.files}
    if kind == "checkpoint":
        moved = set()
        for name in ("config.json", "generation_config.json"):
            old, new = (entries(read_json(each / name)) for each in (folder, out))
            moved |= {f"{name}: {key[1:]}" for key in old if old[key] != new[key] and key != ".vocab_size"}
        assert {*report.token_ids} == moved
    else:
        assert [*report.token_ids.values()] == [3] * len(report.token_ids)
        assert bool(report.token_ids) == (kind == "layer")


REFUSED: dict[str, dict[str, torch.Tensor]] = {
    "extra.safetensors": {"unknown.weight": torch.zeros(V, 2)},
    "adapter_model.safetensors": {"base_model.model.lm_head.lora_embedding_A": torch.zeros(2, V)},
}


@pytest.mark.parametrize("file", REFUSED)
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_report_says_why_an_edit_is_refused(kind: str, file: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path / "old")
    save_tensors(tmp_path / "old" / file, REFUSED[file])
    with pytest.raises(el.CheckpointError) as caught:
        el.vocab.remove_tokens(tmp_path / "old", ["Ġdog"], out=tmp_path / "new")
    assert folder_census(tmp_path / "old").refused == str(caught.value)


def test_an_unknown_key_is_a_refusal_and_a_tensor_that_may_belong_to_tokens_a_note(tmp_path: Path) -> None:
    checkpoint(tmp_path / "old")
    save_tensors(tmp_path / "old" / "model.safetensors", {TABLE: torch.randn(V, D), "prior.weight": torch.randn(V)})
    (tmp_path / "old" / "model.fp16.safetensors").unlink()
    report = folder_census(tmp_path / "old")
    assert report.refused == ""
    assert "prior.weight has 280 rows" in report.notes[0]
    write_json(tmp_path / "old" / "generation_config.json", {"call_id": 7})
    assert "generation_config.json has call_id = 7" in folder_census(tmp_path / "old").refused


def test_plan_prints_the_report(tmp_path: Path, capsys) -> None:
    checkpoint(tmp_path / "old")
    (tmp_path / "old" / "optimizer.pt").write_bytes(b"of the old vocabulary")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", el.EmbedLayerWarning)  # the checkpoint has no blocks
        assert run("plan", "--checkpoint", tmp_path / "old") == 0
        text = capsys.readouterr().out
        assert run("plan", "--checkpoint", tmp_path / "old", "--json") == 0
    vocabulary = json.loads(capsys.readouterr().out)[0]["vocabulary"]
    assert f"tensors    {TABLE} (280 x 8), {HEAD} (280 x 8), " in text
    assert "token IDs  config.json: eos_token_id = 270\n" in text
    assert "\n           generation_config.json: eos_token_id = [270, 271], suppress_tokens =" in text
    assert "left out   optimizer.pt (state of an optimizer)" in text
    assert vocabulary == json.loads(json.dumps(folder_census(tmp_path / "old").as_dict()))
    assert vocabulary["tensors"][TABLE] == [V, D]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_tokenizer_that_an_edit_refuses_is_a_refusal(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path / "old")
    file = tmp_path / "old" / "tokenizer.json"
    other = Tokenizer(WordLevel({f"word{number}": number for number in range(V + 50)}, unk_token="word0"))
    for write in (lambda: save_tokenizer(other, file), lambda: file.write_text('{"model": {"type": "Unknown"}}')):
        write()
        with pytest.raises((el.TokenizerError, el.VocabularyError)) as caught:
            el.vocab.remove_tokens(tmp_path / "old", ["Ġdog"], out=tmp_path / "new")
        assert folder_census(tmp_path / "old").refused == str(caught.value)


@pytest.mark.parametrize("kind", FOLDERS)
def test_added_tokens_without_rows_are_a_note(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path / "old")
    longer = Tokenizer.from_str(TOKENIZER.to_str())
    longer.add_tokens([f"<{number}>" for number in range(longer.get_vocab_size(), V + 2)])
    save_tokenizer(longer, tmp_path / "old" / "tokenizer.json")
    report = folder_census(tmp_path / "old")
    assert report.refused == ""
    (note,) = report.notes
    assert "2 tokens have none" in note
    assert command_line("vocab", "add", tmp_path / "old", "-o", "...") in note


def test_all_token_ids_are_shown_by_file_in_80_columns() -> None:
    ids = {f"{file}.json: key{number}_id": number for file in ("config", "generation_config") for number in range(12)}
    report = CensusReport({TABLE: (V, D)}, {**ids, "table.padding_idx": 3})
    lines = str(report).splitlines()
    assert all(f"{name.partition(': ')[2] or name} = {value}" in str(report) for name, value in ids.items())
    assert [line[:11].strip() for line in lines if line[:11].strip()] == ["tensors", "token IDs"]
    assert sum("config.json: " in line for line in lines) == 2
    assert lines[-1] == "           table.padding_idx = 3"
    assert max(map(len, lines)) <= 80
