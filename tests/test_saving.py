"""Saving and loading any layer."""

import json

import pytest

from embedlayer import CheckpointError, DecoderLM, DeltaEmbedding, RotaryEmbedding, TokenEmbedding, train_tokenizer


def test_a_description_is_json_and_builds_the_same_layer_again() -> None:
    model = DecoderLM(TokenEmbedding(20, 8, padding_idx=0), RotaryEmbedding(4), num_layers=1, num_heads=2)
    config = json.loads(json.dumps(model.config))
    assert DecoderLM.from_config(config).config == model.config == config


def built(description: dict[str, object]) -> None:
    DeltaEmbedding.from_config({"base": description, "token_ids": [1]})


@pytest.mark.parametrize("kind", ["os.system", "train_tokenizer", "EmbedLayerError", "GPT_CONFIG_124M", "Trainer"])
def test_only_layers_of_the_library_are_built(kind) -> None:
    with pytest.raises(CheckpointError, match=f"kind '{kind}' is not known"):
        built({"kind": kind})


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"kind": "token_embedding", "vocab_size": 10}, "needs vocab_size and embed_dim"),
        ({"kind": "token_embedding", "vocab_size": 0, "embed_dim": 4}, "vocab_size must be at least 1"),
        ({"kind": "rotary", "head_dim": 8, "bass": 1.0}, "unexpected keyword argument 'bass'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(unchecked: None, description, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        built(description)


def test_the_tokenizer_is_saved_beside_the_layer_and_nothing_else_is(tmp_path) -> None:
    TokenEmbedding(257, 4).save_pretrained(tmp_path, tokenizer=train_tokenizer((), "byte"))
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_tensors_of_another_shape_are_named_and_nothing_is_assigned(tmp_path) -> None:
    TokenEmbedding(10, 4).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"embed_dim": 4', '"embed_dim": 5'))
    with pytest.raises(CheckpointError, match=r"weight has shape \(10, 4\) where \(10, 5\) is expected"):
        TokenEmbedding.from_pretrained(tmp_path)
