"""Every family compared with transformers: the first block's input, positions, logits. The records themselves."""

import ast
import re
from pathlib import Path

import pytest
import torch
from peers import LENGTH, PEERS, compare, largest, position_difference, quiet

import embedlayer as el
from embedlayer import families
from embedlayer.families import FAMILIES, family_of, rotary_facts
from embedlayer.families.records import RotaryPositions
from embedlayer.families.rotary import ROTARY

READERS = ("checkpoints", "layers", "models", "positions", "vocab")

every_peer = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)


@every_peer
def test_a_family_equals_transformers(peer, tmp_path) -> None:
    differences = compare(peer, tmp_path)
    assert differences.input <= 1e-6
    assert differences.logits is not None
    assert differences.logits <= 1e-6
    assert (differences.positions is None) == (peer.positions == "none")
    assert (differences.positions or 0) <= 1e-6
    assert el.load(tmp_path).family == peer.family


@every_peer
def test_what_is_saved_is_read_back_bit_for_bit(peer, tmp_path) -> None:
    with quiet():
        peer.make().save_pretrained(tmp_path / "model")
    layer = el.load(tmp_path / "model")
    layer.save_pretrained(tmp_path / "layer")
    again = el.load(tmp_path / "layer")
    assert isinstance(again, el.EmbeddingLayer)
    assert again.config == layer.config
    assert again.state_dict().keys() == layer.state_dict().keys()
    ids = torch.randint(2, 90, (2, LENGTH))
    assert torch.equal(again.input(ids), layer.input(ids))
    hidden = torch.randn(2, 3, (layer.head.dense if hasattr(layer.head, "dense") else layer.head).in_features)
    assert torch.equal(again.head(hidden), layer.head(hidden))
    assert repr(again.position) == repr(layer.position)


def test_every_model_type_belongs_to_one_family_and_every_family_that_is_loaded_has_a_peer() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    loadable = {family.name for family in FAMILIES}
    assert loadable - {peer.family for peer in PEERS} == {
        *("model2vec", "static_embedding"),
        "llama_meta",  # compared in tests/models/test_llama.py
    }
    assert family_of("llama") is not None
    assert family_of(None) is None


def loaded(name, folder):
    """A peer by its name, its model, and what is loaded of that."""
    peer = next(peer for peer in PEERS if peer.name == name)
    with quiet():
        model = peer.make()
        model.save_pretrained(folder)
    return peer, model, el.load(folder)


def test_far_positions_are_exact_where_transformers_rounds_them(tmp_path) -> None:
    _, model, layer = loaded("LLaMA 2", tmp_path)
    at = torch.arange(2000, 2064)
    exact = (at.double().unsqueeze(-1) * 10000.0 ** -(torch.arange(4).double() / 4)).cos()
    theirs = model.model.rotary_emb(torch.zeros(1), at.unsqueeze(0))[0][0, :, :4]
    assert largest(layer.position.cos_sin(at)[0], exact) < 1e-6
    assert 1e-6 < largest(theirs, exact) < 1e-4


def test_falcons_alibi_is_the_product_that_transformers_rounds_to_bfloat16(tmp_path) -> None:
    peer, model, layer = loaded("Falcon RW", tmp_path)
    assert position_difference(peer, model, layer, 200) <= 1e-5
    assert 1e-3 < position_difference(peer, model, layer, 400) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Gemma", "Gemma 2", "Gemma 3"])
def test_gemma_rounds_its_scale_to_the_type_of_the_rows(name, dtype, tmp_path) -> None:
    from dataclasses import replace

    from peers import run
    from transformers import AutoModelForCausalLM

    peer = next(peer for peer in PEERS if peer.name == name)
    peer = replace(peer, sizes=peer.sizes | {"hidden_size": 48})
    with quiet():
        peer.make().save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    layer = el.load(tmp_path, dtype=dtype)
    ids = torch.randint(2, 90, (2, LENGTH))
    assert torch.equal(layer.input(ids), run(peer, model, ids)[0])
    assert layer.table.embed_scale.dtype == dtype
    assert layer.table.embed_scale == torch.tensor(48**0.5, dtype=dtype)
    report = layer.report()
    assert report.scale == 48**0.5
    assert report.embed_scale == torch.tensor(48**0.5, dtype=dtype).item()


def test_no_other_module_names_a_model_type() -> None:
    types = {model_type for family in FAMILIES for model_type in family.model_types} | set(ROTARY)
    package = Path(el.__file__).parent
    named = []
    for path in package.rglob("*.py"):
        package_part = path.relative_to(package).parts[0]
        # the planner and the default tokenizer name the model "gpt2" of the hub, not a model_type
        allowed = set() if package_part in READERS else {"gpt2"}
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        if path.parent != Path(families.__file__).parent:
            named += [(str(path), word) for word in words & types - allowed]
    assert named == []


def test_families_depends_on_no_other_module_of_the_package() -> None:
    for path in Path(families.__file__).parent.glob("*.py"):
        assert not re.findall(r"^(?:from|import) embedlayer(?!\.families)", path.read_text(), re.MULTILINE), path.name


def test_an_unknown_family_has_no_rotary_facts() -> None:
    assert rotary_facts("llama") == RotaryPositions()
    assert rotary_facts("novel") is rotary_facts("gpt2") is rotary_facts(None) is None
    assert rotary_facts("gptj").interleaved
    assert rotary_facts("glm4").default_share == 0.5
