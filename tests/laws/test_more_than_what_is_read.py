"""A checkpoint with more than what is read says so: equal to the original, or refused with advice that works."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from all_families import LIMIT, Row, compare
from covering import some
from safetensors.torch import load_file
from tiny_models import FURTHER_KINDS, OTHER_KINDS, CannotBuild, build, model_types, quiet

import embedlayer as el
from embedlayer.families import REFUSED

CALL = re.compile(r"load\(\.\.\., table_only=(True|'[^']+')\)")

ALWAYS = [
    ("text encoder", "t5"),
    ("base", "xlm"),
    ("base", "bark"),
    ("base", "canine"),
    ("base", "dia"),
    ("base", "lxmert"),
    ("causal", "musicgen"),
    ("causal", "cpmant"),
    ("visual question", "blip"),
    ("pretraining", "bert"),
]
"""The types of the reports, and some with sizes under keys of other meanings."""

OWN_TYPES = {("question", "big_bird")}
"""Models that compute types from the separators in a text, and are compared with types that are stated."""

TEXT_KINDS = ("causal", "masked", "seq2seq", "image-text")
ALL = [(kind, name) for kind in (*FURTHER_KINDS, *OTHER_KINDS) for name in model_types(kind)]
ALL += [(kind, name) for kind in TEXT_KINDS for name in model_types(kind) if name in REFUSED or name == "musicgen"]


def advised(folder: Path, message: str) -> dict[bool | str, el.EmbeddingLayer]:
    """Carry out the calls that a message advises, each of which must succeed."""
    calls = [True if each == "True" else each.strip("'") for each in CALL.findall(message)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", el.EmbedLayerWarning)  # which of several tables was read
        return {call: el.load(folder, table_only=call) for call in calls}


def save(folder: Path, kind: str, model_type: str) -> Any:
    try:
        _, model = build(model_type, kind)
    except (CannotBuild, ValueError, AttributeError) as error:
        pytest.skip(f"transformers cannot build it so small: {error}")
    with quiet():
        model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("kind", "model_type"), some(ALWAYS, ALL))
def test_a_model_is_read_as_it_is_or_refused_with_advice_that_works(tmp_path, kind, model_type, unchecked) -> None:
    model = save(tmp_path, kind, model_type)
    layer, message = None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", el.EmbedLayerWarning)
            layer = el.load(tmp_path)
    except el.CheckpointError as error:
        message = str(error)
    if layer is None:
        layers = advised(tmp_path, message)
        tensors = load_file(tmp_path / "model.safetensors")
        if not layers:
            with pytest.raises(el.CheckpointError):
                el.load(tmp_path, table_only=True)
        for each in layers.values():
            (name,) = each.tensor_names["table.weight"][:1]
            assert torch.equal(each.table.rows(0, each.table.vocab_size), tensors[name])
        return
    row = Row(model_type, kind)
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        compare(row, model, layer)
    if (kind, model_type) in OWN_TYPES:
        row.differences = {"input": row.differences["input, token_type_ids"]}
    assert not {name: value for name, value in row.differences.items() if value > LIMIT}
    if kind == "text encoder":
        assert layer.head is None
    if kind == "pretraining" and layer.head is not None and layer.decoder is None:
        ids = torch.arange(5, 17)[None]
        with torch.no_grad():
            output, hidden = model(ids), model.base_model(ids).last_hidden_state
            theirs = output.logits if hasattr(output, "logits") else output.prediction_logits
            torch.testing.assert_close(layer.head(hidden), theirs, rtol=1e-5, atol=1e-5)
    if "input" not in row.differences:
        pytest.skip(row.left_out["input"])


def test_a_speech_model_has_the_decoder_of_a_text_model_alone(tmp_path, unchecked) -> None:
    model = save(tmp_path, "speech", "seamless_m4t")
    layer, ids, seen = el.load(tmp_path), torch.tensor([[5, 9, 3]]), []
    decoder = model.text_decoder
    decoder.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        decoder(input_ids=ids, encoder_hidden_states=torch.zeros(1, 2, decoder.layers[0].embed_dim))
        torch.testing.assert_close(layer.input(ids), seen[0])
    assert layer.decoder is None


def test_a_table_that_the_checkpoint_lacks_is_refused_with_the_names_that_it_has(tmp_path, unchecked) -> None:
    save(tmp_path, "base", "dia")
    with pytest.raises(el.CheckpointError, match="has no matrix 'embed.weight'") as caught:
        el.load(tmp_path, table_only="embed.weight")
    assert {layer.table.vocab_size for layer in advised(tmp_path, str(caught.value)).values()} == {131, 1179}
