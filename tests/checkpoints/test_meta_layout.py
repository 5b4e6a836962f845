"""Checkpoints in Meta's layout: their configuration comes from the file's metadata or from params.json."""

import json
from pathlib import Path

import pytest
import torch

import embedlayer as el
from embedlayer.checkpoints.meta_layout import has_meta_layout, meta_config
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.io.safetensors_files import save_tensors

PARAMS = {"dim": 8, "n_heads": 2, "n_layers": 1, "norm_eps": 1e-5, "vocab_size": -1}


def write(folder: Path, params: dict | None = None, metadata: dict[str, str] | None = None) -> Path:
    tensors = {
        "tok_embeddings.weight": torch.randn(9, 8),
        "layers.0.attention.wq.weight": torch.randn(8, 8),
        "output.weight": torch.randn(9, 8),
    }
    save_tensors(folder / "model.safetensors", tensors, metadata)
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize("place", ["params.json", "metadata"])
def test_the_layer_is_loaded_with_metas_rotary_layout(tmp_path, place) -> None:
    metadata = {key: str(value) for key, value in PARAMS.items()}
    folder = write(tmp_path, PARAMS) if place == "params.json" else write(tmp_path, metadata=metadata)
    layer = el.load(folder)
    assert (layer.family, layer.position.interleaved, layer.position.head_dim) == ("llama_meta", True, 4)
    assert not layer.head.tied
    assert layer.tensor_names["head.weight"] == ("output.weight",)


def test_without_sizes_only_the_table_is_read(tmp_path) -> None:
    folder = write(tmp_path)
    checkpoint = Checkpoint.open(folder)
    assert has_meta_layout(checkpoint)
    with pytest.raises(el.CheckpointError, match=r"no n_heads, and no params\.json"):
        meta_config(checkpoint)
    with pytest.raises(el.CheckpointError, match=r"no n_heads, and no params\.json"):
        el.load(folder)
    assert el.load(folder, table_only=True).table.vocab_size == 9


@pytest.mark.parametrize("params", [{"n_heads": 0}, {"n_heads": 2, "use_scaled_rope": True}, {}])
def test_params_that_do_not_fit_are_refused(tmp_path, params) -> None:
    with pytest.raises(el.CheckpointError):
        el.load(write(tmp_path, params))
