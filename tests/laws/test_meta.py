"""What is built on the meta device and given its weights works on the device that it is moved to."""

import copy
from typing import Any

import pytest
import torch
from covering import looped, some
from kinds import (
    BAGS,
    EMBED_DIM,
    LAYERS,
    POSITIONS,
    STREAM_HEADS,
    STREAM_IDS,
    STREAM_TABLES,
    TABLES,
    UNTIED_HEADS,
    VOCAB_SIZE,
)
from tiny_models import build
from torch import nn

import embedlayer as el
from embedlayer.heads import StreamHead

IDS = torch.randint(1, VOCAB_SIZE, (2, 7), generator=torch.Generator().manual_seed(0))
HEADS = {**UNTIED_HEADS, **STREAM_HEADS}
MODULES = {**LAYERS, **{f"table: {name}": make for name, make in TABLES.items()}}
MODULES |= {f"streams: {name}": make for name, make in STREAM_TABLES.items() if name != "mapped"}
MODULES |= BAGS
MOVES = {
    "to": lambda module: module.to("cpu"),
    "cast before": lambda module: module.double().cpu(),
}


@looped("name, move", MODULES, MOVES)
@torch.no_grad()
def test_a_layer_of_the_meta_device_works_after_weights_are_assigned(name, move) -> None:
    torch.manual_seed(0)
    real = MODULES[name]().eval()
    with torch.device("meta"):
        made = copy.deepcopy(real).to("meta").eval()
    made.load_state_dict(copy.deepcopy(real.state_dict()), assign=True)
    assert MOVES[move](made) is made
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    if move == "cast before":
        real = real.double()
    ids = STREAM_IDS if name.startswith("streams") else IDS
    assert torch.equal(made(ids), real(ids))
    for part in made.modules():
        if isinstance(part, el.TokenTable):
            part.check()


@looped("name", POSITIONS)
def test_a_position_of_the_meta_device_works_after_weights_are_assigned(name) -> None:
    torch.manual_seed(0)
    real = POSITIONS[name]()
    made = copy.deepcopy(real).to("meta")
    made.load_state_dict(real.state_dict(), assign=True)
    made.to("cpu")
    positions = torch.arange(5)
    x = torch.randn(2, 5, EMBED_DIM)
    torch.testing.assert_close(made.add(x, positions), real.add(x, positions))
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


@looped("name", HEADS)
def test_a_head_of_the_meta_device_works_after_weights_are_assigned(name) -> None:
    real = HEADS[name]()
    with torch.device("meta"):
        made = copy.deepcopy(real).to("meta") if "int8" in name else HEADS[name]()
    made.load_state_dict(copy.deepcopy(real.state_dict()), assign=True)
    hidden = torch.randn(3, EMBED_DIM)
    if isinstance(real, StreamHead) and real.hidden_per_stream:
        hidden = torch.randn(5, 3, EMBED_DIM)
    torch.testing.assert_close(made.to("cpu")(hidden), real(hidden), rtol=0, atol=0)


@looped("name", MODULES)
def test_what_stays_on_the_meta_device_stays_there_through_a_cast(name) -> None:
    made = MODULES[name]().to("meta")
    made.bfloat16()
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    made.to_empty(device="cpu")
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def test_parameters_that_were_never_assigned_are_an_error_as_in_torch() -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        TABLES["dense"]().to("meta").to("cpu")


# transformers and accelerate


MODELS = [("llama", "causal"), ("gemma", "causal"), ("t5", "seq2seq")]


def logits_of(model: nn.Module) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **more).logits


@pytest.mark.parametrize(("model_type", "kind"), MODELS)
@torch.no_grad()
def test_a_model_that_is_patched_on_the_meta_device_is_the_one_that_is_patched_later(model_type, kind) -> None:
    real: Any = build(model_type, kind)[1]
    with torch.device("meta"):
        made = type(real)(copy.deepcopy(real.config)).eval()
    el.patch(made)
    made.load_state_dict(real.state_dict(), assign=True)
    made.tie_weights()
    original = [name for name, buffer in made.named_buffers() if buffer.is_meta]
    for name in original:  # transformers' own, that a checkpoint does not have: inverse frequencies
        parent, _, key = name.rpartition(".")
        made.get_submodule(parent)._buffers[key] = dict(real.named_buffers())[name]
    made.to("cpu")
    torch.testing.assert_close(logits_of(made), logits_of(real))
    el.unpatch(made)
    torch.testing.assert_close(logits_of(made), logits_of(real))


@pytest.mark.parametrize(("model_type", "kind"), some(MODELS[1:2], MODELS))
@torch.no_grad()
def test_accelerate_loads_and_dispatches_a_patched_model(model_type, kind, tmp_path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the interop group is not installed")
    real: Any = build(model_type, kind)[1]
    real.save_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=False):
        made = type(real)(copy.deepcopy(real.config)).eval()
    made.tie_weights()
    el.patch(made)
    made = accelerate.load_checkpoint_and_dispatch(made, tmp_path, device_map={"": "cpu"})
    assert torch.equal(logits_of(made), logits_of(real))
    made.to("cpu")
    assert torch.equal(logits_of(made), logits_of(real))
