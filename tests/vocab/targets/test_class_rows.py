"""The class in a folder's configuration names the tensors with rows of tokens, or nothing is known."""

import json
from pathlib import Path

import pytest
import torch
from stored_cases import compressed_case
from tiny_models import build, quiet

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.vocab.targets.class_rows import rows_of_class


def saved(folder: Path, model_type: str, kind: str) -> Checkpoint:
    with quiet():
        build(model_type, kind)[1].save_pretrained(folder)
    return Checkpoint.open(folder)


def test_tensors_have_the_names_and_ends_of_the_folder(tmp_path, unchecked) -> None:
    checkpoint = saved(tmp_path / "a", "ultrabert", "masked")
    found = rows_of_class(checkpoint)
    assert found is not None
    tensors, aliases = found
    assert {name: rows.end for name, rows in tensors.items()} == {
        "ultrabert.embed_tokens.weight": "table",
        "cls.weight": "head",
    }
    assert aliases == {name: name for name in tensors}
    assert torch.equal(tensors["cls.weight"].tensor, checkpoint.read("cls.weight"))


@pytest.mark.parametrize("damage", ["a tensor is missing", "another tensor has as many rows", "no class"])
def test_nothing_is_known_of_a_folder_that_is_not_as_its_class(damage, tmp_path, unchecked) -> None:
    saved(tmp_path, "ultrabert", "masked")
    tensors, metadata = load_tensors(tmp_path / "model.safetensors")
    if damage == "a tensor is missing":
        del tensors[next(name for name in tensors if "norm" in name)]
    elif damage == "another tensor has as many rows":
        tensors["other"] = torch.zeros(131)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    save_tensors(tmp_path / "model.safetensors", tensors, metadata)
    assert rows_of_class(Checkpoint.open(tmp_path)) is None


def test_a_table_that_is_written_as_two_tensors_is_not_known(tmp_path, unchecked) -> None:
    assert rows_of_class(saved(tmp_path, "molmo2_text", "text encoder")) is None


@pytest.mark.parametrize("with_blocks", [False, True])
def test_stored_rows_are_known_by_the_class_also_beside_quantised_blocks(tmp_path, with_blocks, unchecked) -> None:
    saved(tmp_path, "ultrabert", "masked")
    tensors, metadata = load_tensors(tmp_path / "model.safetensors")
    names = ["ultrabert.embed_tokens.weight", "cls.weight"]
    blocks = [name for name, tensor in tensors.items() if "layers" in name and tensor.dim() == 2]
    quantised = {}
    for name in names + (blocks if with_blocks else []):
        rows = tensors.pop(name)
        size = rows.shape[1]
        quantised[name] = compressed_case(rows, "pack-quantized", num_bits=8, strategy="group", group_size=size)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{rest}": tensor.clone() for rest, tensor in quantised[name].tensors.items()}
    save_tensors(tmp_path / "model.safetensors", tensors, metadata)
    found = rows_of_class(Checkpoint.open(tmp_path))
    assert found is not None
    assert {name: each.end for name, each in found[0].items()} == dict(zip(names, ("table", "head"), strict=True))
    for name, of_tokens in found[0].items():
        assert of_tokens.decode is not None
        assert torch.equal(of_tokens.decode(of_tokens.tensor), quantised[name].rows)
