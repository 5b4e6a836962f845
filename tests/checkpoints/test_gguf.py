"""GGUF files as checkpoints: table, head, positions and decoder, beside the same facts in transformers' layout."""

import json
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import TYPES, WIDTH, blocks, finish, write_decoder, write_file
from stored_folders import save_tensors

import embedlayer as el
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import GGUF_ARCHITECTURES, META_LLAMA
from embedlayer.tables.gguf_rows import GGUFEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding

ADDED: dict[str, tuple[int, ...]] = {"position_embd.weight": (64, WIDTH), "token_types.weight": (2, WIDTH)}
ADDED |= {"token_embd_norm.weight": (WIDTH,), "token_embd_norm.bias": (WIDTH,)}
OWN = {
    "gpt2": {"position_embd.weight": "wpe.weight"},
    "bert": {
        "position_embd.weight": "embeddings.position_embeddings.weight",
        "token_types.weight": "embeddings.token_type_embeddings.weight",
        "token_embd_norm.weight": "embeddings.LayerNorm.weight",
        "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    },
}
TABLES = {"gpt2": "wte.weight", "bert": "embeddings.word_embeddings.weight", "gptneox": "embed_in.weight"}
SIZES = {"gemma3": {"rope_local_base_freq": 1e4, "num_hidden_layers": 8}, "gptneox": {"rotary_pct": 0.25}}
SIZES |= {"gemma2": {"final_logit_softcapping": 30.0}, "phi3": {"original_max_position_embeddings": 64}}
STATED = {"gemma3": {"block_count": 8, "rope.freq_base": 1e6}, "gptneox": {"rope.dimension_count": 16}}


@pytest.mark.parametrize("arch", GGUF_ARCHITECTURES)
def test_an_architecture_has_the_input_and_head_of_its_family(tmp_path, arch) -> None:
    tensors = {name: torch.randn(ADDED[name]) for name in OWN.get(arch, {})}
    path = write_file(
        tmp_path / "model.gguf",
        arch,
        dtype="F32",
        sizes=STATED.get(arch),
        tensors={name: tensor.numpy() for name, tensor in tensors.items()},
    )
    model_type = "llama" if arch == "llama" else GGUF_ARCHITECTURES[arch]
    config = {"model_type": model_type, "vocab_size": 12, "hidden_size": WIDTH, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 64, "tie_word_embeddings": True}
    config |= {"rope_theta": STATED.get(arch, {}).get("rope.freq_base", 1e4), **SIZES.get(arch, {})}
    rows = torch.from_numpy(blocks("F32", 12).copy()).view(torch.float32)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = {OWN[arch][name]: tensor for name, tensor in tensors.items()}
    save_tensors(folder / "model.safetensors", {TABLES.get(arch, "model.embed_tokens.weight"): rows, **names})
    ours, theirs = el.load(path), el.load(folder)
    ids = torch.tensor([[3, 0, 11]])
    assert torch.equal(ours.input(ids), theirs.input(ids))
    assert ours.recipe == theirs.recipe
    assert ours.block_positions == theirs.block_positions
    for kind in (None, *theirs.other_positions):
        found, expected = ours.position_of(kind), theirs.position_of(kind)
        if isinstance(expected, el.RotaryEmbedding):
            assert torch.equal(found.frequencies(), expected.frequencies())
            assert found.interleaved == (arch == "llama")  # the converter permutes queries and keys of LLaMA
    if theirs.head is not None:
        hidden = torch.randn(2, WIDTH) * 9
        assert torch.equal(ours.head(hidden), theirs.head(hidden))


def test_scaled_rotations_follow_the_metadata_and_the_factors(tmp_path) -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    plain = el.load(write_file(tmp_path / "a.gguf")).position
    found = el.load(write_file(tmp_path / "b.gguf", tensors={"rope_freqs.weight": factors})).position
    torch.testing.assert_close(found.frequencies(), plain.frequencies() / torch.from_numpy(factors))
    assert found.attention_scaling == 1
    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "qwen2")
    for key, value in {"embedding_length": 32, "block_count": 1, "attention.head_count": 2}.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    position = el.load(finish(writer, tmp_path / "c.gguf")).position
    expected = el.RotaryEmbedding(16, scaling=el.positions.YarnScaling(factor=4.0, original_max_seq_len=32))
    assert torch.equal(position.frequencies(), expected.frequencies())


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q6_K", "IQ4_XS"])
def test_a_quantised_table_dequantises_the_requested_rows_only(tmp_path, dtype) -> None:
    path = write_file(tmp_path / "model.gguf", "gemma", dtype=dtype, head=None)
    layer = el.load(path)
    rows = torch.from_numpy(gguf.quants.dequantize(blocks(dtype, 12), TYPES[dtype]))
    assert type(layer.table) is (QuantizedEmbedding if dtype.endswith("_0") else GGUFEmbedding)
    assert layer.table.packed.shape == (12, blocks(dtype, 12).shape[1])
    ids = torch.tensor([[3, 0, 11]])
    assert torch.equal(layer.table(ids), rows[ids] * 16)
    assert torch.equal(layer.table.rows(2, 5), rows[2:5])
    hidden = torch.randn(2, WIDTH)
    tolerance = 1e-6 * (hidden.double().abs() @ rows.double().abs().T)  # of sums in another order
    assert ((layer.head(hidden).double() - hidden.double() @ rows.double().T).abs() <= tolerance).all()
    layer.save_pretrained(tmp_path / "saved")
    assert torch.equal(el.load(tmp_path / "saved").input(ids), layer.input(ids))
    half = el.load(path, dtype=torch.bfloat16)
    assert torch.equal(half.table.look_up(ids), rows[ids].bfloat16())


@pytest.mark.parametrize("dtype", ["Q4_0", "Q6_K", "F16"])
def test_an_untied_head_is_read_in_its_type_and_a_folder_with_one_file_is_that_file(tmp_path, dtype) -> None:
    path = write_file(tmp_path / "model.gguf", dtype="F32", head=dtype)
    layer = el.load(tmp_path)
    rows = torch.from_numpy(gguf.quants.dequantize(blocks(dtype, 12, seed=1), TYPES[dtype]))
    assert not layer.head.tied
    assert (layer.head.own_rows is None) == (dtype == "F16")
    hidden = torch.randn(2, WIDTH)
    torch.testing.assert_close(layer.head(hidden), hidden @ rows.T)
    if layer.head.own_rows is not None:
        assert torch.equal(layer.head.own_rows.rows(0, 12), rows)
        assert layer.tensor_names["head.rows.packed"] == ("output.weight",)
    half = el.load(path, dtype=torch.bfloat16)
    torch.testing.assert_close(half.head(hidden.bfloat16()), hidden.bfloat16() @ rows.bfloat16().T)
    layer.save_pretrained(tmp_path / "saved")
    assert torch.equal(el.load(tmp_path / "saved").head(hidden), layer.head(hidden))
    write_file(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files: name one"):
        el.load(tmp_path)


def test_a_decoder_whose_blocks_are_not_quantised_is_read_whole(tmp_path) -> None:
    torch.manual_seed(0)
    rotary = el.RotaryEmbedding(8, interleaved=True)
    model = el.DecoderLM(el.TokenEmbedding(20, 32), rotary, num_layers=2, num_heads=4, num_kv_heads=2)
    sizes: dict[str, Any] = {"embedding_length": 32, "block_count": 2}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    sizes |= {"attention.layer_norm_rms_epsilon": model.norm.eps, "rope.dimension_count": 8, "rope.freq_base": 1e4}
    opened = el.open_model(write_decoder(tmp_path / "model.gguf", model, sizes))
    ids = torch.tensor([[3, 0, 11]])
    torch.testing.assert_close(opened.require_decoder()(ids), model.eval()(ids))
    assert opened.kind == "GGUF file"
    assert "has no tokenizer" in opened.no_tokenizer
    quantised = el.open_model(write_file(tmp_path / "b.gguf"))
    assert "its blocks are quantised (Q4_K)" in quantised.no_decoder
    assert quantised.kind == f"GGUF file of family {META_LLAMA}"


def test_an_unknown_architecture_opens_as_a_table_alone(tmp_path) -> None:
    path = write_file(tmp_path / "model.gguf", "unheard")
    with pytest.raises(CheckpointError, match="general.architecture 'unheard' is not known here"):
        el.load(path)
    with pytest.warns(EmbedLayerWarning, match="Only the table of .* can be read"):
        opened = el.open_model(path)
    assert (opened.model, opened.table.vocab_size) == (None, 12)
    assert "general.architecture 'unheard'" in opened.table_only


def test_what_does_not_belong_together_is_refused(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    with pytest.raises(CheckpointError, match="vocab_size 2"):
        el.open_model(finish(writer, tmp_path / "a.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "qwen2")
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    with pytest.raises(CheckpointError, match="has no table of token rows"):
        el.open_model(finish(writer, tmp_path / "b.gguf"))
