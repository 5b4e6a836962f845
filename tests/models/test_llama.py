"""LLaMA-type checkpoints beside transformers' LlamaForCausalLM."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_folders import save_tensors

from embedlayer import (
    CheckpointError,
    DecoderLM,
    EmbedLayerError,
    EmbedLayerWarning,
    FileError,
    RotaryEmbedding,
    generate,
    load_llama,
    load_tokenizer,
)
from embedlayer.families import HUGGING_FACE_TENSORS, META_TENSORS
from embedlayer.positions import permute_qk

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def peer(**options):
    torch.manual_seed(1)
    kind = options.pop("model_type", "Llama")
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "initializer_range": 0.2, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms that are all ones would hide a norm that is not read
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def as_meta(state, path, *, heads=4, kv_heads=2, **metadata):
    """A state of transformers' model in Meta's layout."""
    ours = {theirs: ours for ours, theirs in HUGGING_FACE_TENSORS.items()}
    tensors = {}
    for name, tensor in state.items():
        pattern, number = name, ""
        for part in name.split("."):
            if part.isdigit():
                pattern, number = name.replace(f".{part}.", ".{}."), part
        if "q_proj" in name or "k_proj" in name:
            tensor = permute_qk(tensor, heads if "q_proj" in name else kv_heads, to="interleaved")
        tensors[META_TENSORS[ours[pattern]].format(number)] = tensor.clone()
    sizes = {"n_heads": heads, "n_kv_heads": kv_heads, "norm_eps": "1e-06", **metadata}
    save_file(tensors, path, metadata={key: str(value) for key, value in sizes.items()})


@pytest.fixture
def folder(tmp_path):
    peer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
        {"num_key_value_heads": 1, "head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"model_type": "Mistral", "sliding_window": None},
    ],
    ids=["grouped", "tied", "plain", "head-dim", "llama3", "mistral"],
)
def test_logits_are_those_of_transformers(tmp_path, options) -> None:
    theirs = peer(**options)
    theirs.save_pretrained(tmp_path)
    ours = load_llama(tmp_path)
    ids = torch.randint(0, 61, (2, 40))
    with torch.no_grad():
        expected = theirs(ids).logits
        assert expected.abs().max() > 0.5
        assert (ours(ids) - expected).abs().max() < 1e-5
    assert ours.head.tied == options.get("tie_word_embeddings", False)
    assert not ours.training
    alone = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    new = theirs.generate(ids, max_new_tokens=8, do_sample=False, **alone)
    assert torch.equal(generate(ours, ids, max_new_tokens=8), new)


@pytest.mark.parametrize("tied", [False, True])
def test_metas_layout_gives_the_same_logits(tmp_path, tied) -> None:
    theirs = peer(tie_word_embeddings=tied)
    state = {name: tensor for name, tensor in theirs.state_dict().items() if not (tied and name == "lm_head.weight")}
    file = tmp_path / "model.safetensors"
    as_meta(state, file, rope="interleaved pairs, theta 10000")
    ids = torch.randint(0, 61, (2, 40))
    for path in (file, tmp_path):
        ours = load_llama(path)
        assert ours.position.interleaved
        assert ours.head.tied == tied
        with torch.no_grad():
            assert (ours(ids) - theirs(ids).logits).abs().max() < 1e-5


def test_sizes_may_stand_in_params_json(tmp_path) -> None:
    theirs = peer(rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    as_meta(theirs.state_dict(), tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").unlink()  # older releases of safetensors map the file that they read
    save_file(tensors, tmp_path / "a.safetensors")  # without metadata
    with pytest.raises(CheckpointError):
        load_llama(tmp_path)
    params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-6}
    (tmp_path / "params.json").write_text(json.dumps({**params, "rope_theta": 700.0}))
    ids = torch.randint(0, 61, (1, 20))
    with torch.no_grad():
        assert (load_llama(tmp_path)(ids) - theirs(ids).logits).abs().max() < 1e-5
    (tmp_path / "params.json").write_text(json.dumps({**params, "use_scaled_rope": True}))
    with pytest.raises(CheckpointError):
        load_llama(tmp_path)


def test_shards_are_read_through_their_index(tmp_path) -> None:
    theirs = peer()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(0, 61, (1, 9))
    with torch.no_grad():
        for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
            assert (load_llama(path)(ids) - theirs(ids).logits).abs().max() < 1e-5


def test_it_keeps_the_dtype_or_takes_another_one_and_saves_as_ours(tmp_path) -> None:
    peer().bfloat16().save_pretrained(tmp_path)
    assert load_llama(tmp_path).table.weight.dtype == torch.bfloat16
    ours = load_llama(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    ours.save_pretrained(tmp_path / "ours")
    ids = torch.randint(0, 61, (1, 9))
    assert torch.equal(DecoderLM.from_pretrained(tmp_path / "ours").eval()(ids), ours(ids))


def test_a_tied_head_that_is_stored_too_must_be_the_table(folder) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.warns(EmbedLayerWarning, match="hold other numbers: the head is read as untied"):
        assert not load_llama(folder).head.tied
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_tensors(folder / "model.safetensors", weights)
    assert load_llama(folder).head.tied


REFUSED: list[dict[str, Any]] = [
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"model_type": "qwen2"},
    {"sliding_window": 4096},
    *({"rms_norm_eps": value} for value in (None, -1.0)),
    *({"num_attention_heads": value} for value in ("many", 2.5, 0, True)),
    *({"num_key_value_heads": value} for value in (3, 0, 4)),
    *({"num_hidden_layers": value} for value in (10**12, 3)),
    {"vocab_size": 62},
    {"hidden_size": 64},
    {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
    {"rope_parameters": [1]},
    {"head_dim": float("nan")},
]


def test_what_decoderlm_is_not_is_refused(folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    for changes in REFUSED:
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(EmbedLayerError):
            load_llama(folder)


def test_tensors_that_are_missing_unknown_or_of_another_type_are_refused(folder) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_tensors(file, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load_llama(folder)  # old checkpoints carry what follows from the sizes
    for name, change in (
        ("model.layers.1.mlp.up_proj.weight", None),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
        ("model.layers.7.self_attn.q_proj.weight", torch.ones(32, 32)),
        ("model.norm.weight", torch.ones(32).char()),
        ("model.embed_tokens.weight", torch.ones(32)),
    ):
        changed = {key: tensor for key, tensor in weights.items() if key != name}
        save_tensors(file, changed if change is None else {**changed, name: change})
        with pytest.raises(CheckpointError):
            load_llama(folder)


def test_pickles_are_refused_with_the_line_that_converts_them(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError):
            load_llama(path)
    with pytest.raises(FileError, match="holds no safetensors file"):
        load_llama(tmp_path.joinpath("empty").mkdir() or tmp_path / "empty")
    with pytest.raises(FileError):
        load_llama(tmp_path / "nowhere")


def test_stories260k_says_its_story_word_for_word(shared_data) -> None:
    models = shared_data / "models"
    model, tokenizer = load_llama(models / "stories260K.safetensors"), load_tokenizer(models / "tok512.bin")
    assert isinstance(model.position, RotaryEmbedding)
    assert model.head.tied
    ids = generate(model, torch.tensor([1]), max_new_tokens=256, stop_id=1)
    story = (models / "stories260K.md").read_text().partition("-t 0.0\n")[2].partition("\n```")[0]
    assert len(story) > 500
    assert tokenizer.decode(ids.tolist()) == story
