"""Encoder-decoders at both inputs, decoders stored alone, and steps of encoders that BERT does not have."""

import json

import pytest
import torch
from covering import some
from safetensors.torch import load_file
from stored_folders import save_tensors
from tiny_models import build, quiet

import embedlayer as el

pytestmark = pytest.mark.filterwarnings("ignore:.*no part of this layer")  # DeBERTa, ProphetNet

ENCODER_DECODERS = ["bart", "blenderbot-small", "fsmt", "m2m_100", "marian", "pegasus", "prophetnet", "t5gemma", "umt5"]
SINGLE_STACKS = ["deberta", "esm", "layoutlm", "mobilebert", "mpnet", "reformer", "roc_bert", "tapas", "xlm"]


def saved(model_type: str, kind: str, folder):
    """A small model of a type, saved, and its configuration."""
    config, model = build(model_type, kind)
    with quiet():
        model.save_pretrained(folder)
    return config, model


def change(folder, **values) -> None:
    """Change keys of a saved configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(5, 100, (2, 9))


@pytest.mark.parametrize(
    ("model_type", "kind"),
    some(
        [
            *((each, "seq2seq") for each in ("marian", "prophetnet", "umt5")),
            *((each, "masked") for each in ("esm", "mobilebert", "mpnet", "reformer", "roc_bert", "tapas", "xlm")),
        ],
        [*((each, "seq2seq") for each in ENCODER_DECODERS), *((each, "masked") for each in SINGLE_STACKS)],
    ),
)
def test_a_saved_layer_is_read_back_bit_for_bit_at_all_inputs(model_type, kind, tmp_path, ids) -> None:
    saved(model_type, kind, tmp_path / "model")
    layer = el.load(tmp_path / "model")
    layer.save_pretrained(tmp_path / "layer")
    again = el.load(tmp_path / "layer")
    assert again.config == layer.config
    assert torch.equal(again.input(ids), layer.input(ids))
    if kind == "seq2seq":
        assert torch.equal(again.decoder_input(ids), layer.decoder_input(ids))
        assert again.head.tied == layer.head.tied
    hidden = torch.randn(2, 3, (layer.head.dense if hasattr(layer.head, "dense") else layer.head).in_features)
    assert torch.equal(again.head(hidden), layer.head(hidden))


@pytest.mark.parametrize("model_type", some(["fsmt", "marian"], ["bart", "fsmt", "marian", "prophetnet", "umt5"]))
def test_an_encoder_decoder_is_written_back_with_changes_at_both_ends(model_type, tmp_path, ids) -> None:
    saved(model_type, "seq2seq", tmp_path / "old")
    layer = el.load(tmp_path / "old")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    layer.write_into(tmp_path / "old", tmp_path / "new")
    again = el.load(tmp_path / "new")
    assert torch.equal(again.input(ids), layer.input(ids))
    assert torch.equal(again.decoder_input(ids), layer.decoder_input(ids))
    hidden = torch.randn(2, 3, layer.head.in_features)
    assert torch.equal(again.head(hidden), layer.head(hidden))


@pytest.mark.parametrize("model_type", some(["bart", "marian"], ["bart", "blenderbot-small", "marian", "prophetnet"]))
def test_the_decoder_alone_has_the_input_that_the_whole_model_has_at_its_decoder(model_type, tmp_path, ids) -> None:
    saved(model_type, "seq2seq", tmp_path)
    whole = el.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".encoder." not in name and "logits" not in name}
    shared = next((name for name in kept if name.endswith("shared.weight")), None)
    if shared is not None:
        kept["model.decoder.embed_tokens.weight"] = kept.pop(shared)
    save_tensors(tmp_path / "model.safetensors", kept)
    alone = el.load(tmp_path)
    assert alone.decoder is None
    assert torch.equal(alone.input(ids), whole.decoder_input(ids))
    with pytest.raises(el.SizeError, match="its only stack is read by input"):
        alone.decoder_input(ids)


def test_the_encoder_alone_has_one_input(tmp_path, ids) -> None:
    saved("t5", "seq2seq", tmp_path)
    whole = el.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path / "model.safetensors", {k: v for k, v in tensors.items() if not k.startswith("decoder.")})
    alone = el.load(tmp_path)
    assert alone.decoder is None
    assert torch.equal(alone.input(ids), whole.input(ids))
    assert isinstance(alone.position, el.RelativePositionBias)


def test_marian_with_separate_vocabularies_has_two_tables_and_a_head_tied_to_the_second(tmp_path, ids) -> None:
    import transformers

    config, _ = build("marian", "seq2seq")
    config.share_encoder_decoder_embeddings = False
    config.decoder_vocab_size = 140
    with quiet():
        model = transformers.MarianMTModel(config).eval()
        model.save_pretrained(tmp_path)
    layer = el.load(tmp_path)
    assert (layer.table.vocab_size, layer.decoder.table.vocab_size) == (131, 140)
    assert layer.head.weight is layer.decoder.table.weight
    assert layer.head(torch.randn(1, 1, 64)).shape == (1, 1, 140)
    assert torch.equal(layer.decoder.table.weight, model.model.decoder.embed_tokens.weight)
    with pytest.raises(el.TokenIdError, match="131 rows"):
        layer.input(torch.tensor([[135]]))
    assert layer.decoder_input(torch.tensor([[135]])).shape == (1, 1, 64)


def test_every_block_of_umt5_has_its_own_bias_in_both_stacks(tmp_path) -> None:
    _, model = saved("umt5", "seq2seq", tmp_path)
    layer = el.load(tmp_path)
    for encoder, stack in ((True, model.encoder), (False, model.decoder)):
        for index, block in enumerate(stack.block):
            table = block.layer[0].SelfAttention.relative_attention_bias.weight
            assert torch.equal(layer.position_of_block(index, encoder=encoder).weight, table)


def test_a_model_may_add_positions_and_have_a_bias(tmp_path) -> None:
    _, model = saved("mpnet", "masked", tmp_path)
    layer = el.load(tmp_path)
    assert layer.position.hook == "add"
    table = model.mpnet.encoder.relative_attention_bias.weight
    assert torch.equal(layer.position_of_block(-1).weight, table)


def test_a_mask_sets_padding_to_zero_and_xlm_finds_it_by_the_padding_token(tmp_path, ids) -> None:
    saved("xlm", "masked", tmp_path)
    layer = el.load(tmp_path)
    ids[1, -4:] = layer.padding_id
    assert not layer.input(ids)[1, -4:].any()
    assert torch.equal(layer.input(ids), layer.input(ids, (ids != layer.padding_id).long()))
    assert [step.name for step in layer.trace(ids)][-1] == "length_mask"


def test_esm_leaves_out_mask_tokens_and_rescales_the_others(tmp_path, ids) -> None:
    _, model = saved("esm", "masked", tmp_path)
    model.esm.embeddings.token_dropout = True
    change(tmp_path, token_dropout=True)
    layer = el.load(tmp_path)
    ids[0, 2:5] = model.config.mask_token_id
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        expected = model.esm.embeddings(ids, mask)
    assert torch.allclose(layer.input(ids, mask), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "values", "named"),
    [
        ("xlm", {"asm": True}, "asm"),
        ("roformer", {"rotary_value": True}, "rotary_value"),
        ("ibert", {"quant_mode": True}, "quant_mode"),
        ("mpnet", {"pad_token_id": 3}, "pad_token_id"),
        ("esm", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_what_a_family_computes_otherwise_is_refused_by_its_key(model_type, values, named, tmp_path) -> None:
    saved(model_type, "masked", tmp_path)
    change(tmp_path, **values)
    with pytest.raises(el.CheckpointError, match=named):
        el.load(tmp_path)


def test_stored_sinusoids_are_read_and_missing_ones_computed(tmp_path, ids) -> None:
    saved("fsmt", "seq2seq", tmp_path)
    stored = el.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path / "model.safetensors", {k: v for k, v in tensors.items() if "embed_positions" not in k})
    computed = el.load(tmp_path)
    assert isinstance(stored.position, el.LearnedPositionalEmbedding)
    assert isinstance(computed.position, el.SinusoidalPositionalEmbedding)
    assert computed.input(ids).shape == stored.input(ids).shape


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("deberta", "masked"), ("xlnet", "causal"), ("funnel", "masked"), ("prophetnet", "seq2seq")],
)
def test_positions_that_depend_on_hidden_states_are_noted(tmp_path, model_type, kind) -> None:
    saved(model_type, kind, tmp_path)
    with pytest.warns(el.EmbedLayerWarning, match="hidden states"):
        layer = el.load(tmp_path)
    assert any("no part of this layer" in note for note in layer.load_record.notes)
