"""Checkpoints in Meta's layout: their configuration comes from the file's metadata or from params.json."""

import json
from pathlib import Path

import pytest
import torch
from stored_folders import save_tensors

import embedlayer as el

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
    with pytest.raises(el.CheckpointError, match=r"no n_heads in its metadata and no params\.json"):
        el.load(folder)
    assert el.load(folder, table_only=True).table.vocab_size == 9


@pytest.mark.parametrize("params", [{"n_heads": 0}, {"n_heads": 2, "use_scaled_rope": True}, {}])
def test_params_that_do_not_fit_are_refused(tmp_path, params) -> None:
    with pytest.raises(el.CheckpointError):
        el.load(write(tmp_path, params))


YARN = {"original_max_position_embeddings": 64, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1}
QUERIES = {"original_max_position_embeddings": 64, "beta": 0.1}
MISTRAL = {"dim": 8, "n_layers": 1, "head_dim": 4, "hidden_dim": 12, "n_heads": 2, "n_kv_heads": 2, "norm_eps": 1e-5}
MISTRAL |= {"vocab_size": 9, "rope_theta": 1e6, "tied_embeddings": False}


def test_the_scaling_of_mistral_equals_transformers(tmp_path) -> None:
    """The keys of transformers' Ministral3Config are those of its converter for params.json."""
    modeling = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    layer = el.load(write(tmp_path, MISTRAL | {"yarn": YARN, "llama_4_scaling": QUERIES, "max_seq_len": 1024}))
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
    parameters |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = modeling.Ministral3Config(hidden_size=8, num_attention_heads=2, head_dim=4, rope_parameters=parameters)
    theirs = modeling.Ministral3RotaryEmbedding(config)
    ours = layer.position.phase_increments.double() / 2**53 * 2 * torch.pi
    torch.testing.assert_close(ours, theirs.inv_freq.double(), rtol=5e-7, atol=1e-12)
    assert layer.position.attention_scaling == theirs.attention_scaling == 1
    positions = torch.tensor([[0, 63, 64, 1000]])
    factors = layer.position.query_scaling.factors(positions)
    torch.testing.assert_close(factors, modeling.get_llama_4_attn_scale(positions, 0.1, 64)[:, 0, :, 0])


def test_the_window_of_mistral_is_read_and_a_whole_decoder_is_refused(tmp_path) -> None:
    layer = el.load(write(tmp_path, MISTRAL | {"sliding_window": 3}))
    assert layer.window_of_block(0) == 3
    with pytest.raises(el.CheckpointError, match="sliding_window 3 is not what DecoderLM has"):
        el.load_llama(tmp_path)


@pytest.mark.parametrize(("window", "base"), [(None, 1e6), (4096, 1e4)])
def test_a_base_that_mistral_does_not_state_is_that_of_its_code(tmp_path, window, base) -> None:
    layer = el.load(write(tmp_path, MISTRAL | {"rope_theta": None, "sliding_window": window}))
    assert layer.position.base == base


def test_experts_change_no_embedding_layer_but_a_whole_decoder_is_refused(tmp_path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    assert el.load(write(tmp_path, MISTRAL | {"moe": experts})).head is not None
    with pytest.raises(el.CheckpointError, match="moe {'num_experts': 8, 'num_experts_per_tok': 2} is not what"):
        el.load_llama(tmp_path)


REFUSED_PARAMS = {
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "rope_scaling_factor": 32,
    "model_type": "mamba",
    "activation": "gelu",
    "causal": False,
    "multimodal": {"whisper_model_args": {}},
    "q_lora_rank": 4,
    "yarn": YARN | {"apply_scale": True},
    "yarn without a key": {"factor": 16},
    "yarn with one more": YARN | {"mscale": 2.0},
    "llama_4_scaling": QUERIES,
    "sliding_window": [4096, None],
}


def test_a_key_that_changes_the_model_is_refused_by_name(tmp_path) -> None:
    for name, value in REFUSED_PARAMS.items():
        key = name.partition(" ")[0]
        folder = write(tmp_path, MISTRAL | {key: value})
        with pytest.raises(el.CheckpointError, match=f"{key}.*table_only=True"):
            el.load(folder)
        assert el.load(folder, table_only=True).table.vocab_size == 9


BLOCKS = ("hidden_dim", "multiple_of", "ffn_dim_multiplier", "moe", "max_seq_len", "max_batch_size", "vision_encoder")


def test_keys_without_a_value_and_keys_of_blocks_change_nothing(tmp_path) -> None:
    plain = el.load(write(tmp_path, MISTRAL))
    layer = el.load(write(tmp_path, MISTRAL | dict.fromkeys(BLOCKS, 7) | {"anything": None, "other": False}))
    assert repr(layer.position) == repr(plain.position)
    assert layer.window_of_block(0) is None
