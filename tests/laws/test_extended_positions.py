"""Longer context: what is written is what transformers computes, other bytes stay, and undo restores all of them.

`tools/rotary_families.py --extend` compares every configuration class with a method as a command.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from covering import some
from releases import skip_before, skip_without_type
from rotary_families import Extended, compare_class
from tiny_models import build

import embedlayer as el
from embedlayer.families import ROTARY
from embedlayer.io.safetensors_files import load_tensors
from embedlayer.positions.rotary.extension import METHODS
from embedlayer.vocab import extend_positions, last_context_receipt
from embedlayer.vocab.targets.positions import TABLE_METHODS

transformers = pytest.importorskip("transformers")

EVERY_FORM = (
    *("llama", "qwen2", "gpt_neox", "phi3", "gemma3_text", "modernbert", "olmo3", "deepseek_v3", "deepseek_v4"),
    *("qwen2_vl_text", "qwen3_5_text", "ministral3", "mixtral", "molmo2_text", "dbrx", "nanochat", "glm4", "gpt_oss"),
    *("gemma4_text", "cohere2", "gptj", "roformer", "cosmos3_edge_text", "hunyuan_vl_text", "pixtral", "jamba"),
)
"""Types with each form of keys, axes, layer types and shares of channels, and one for each reason of a refusal."""

REFUSED = {
    "cohere2": "Only the layers of sliding attention",
    "gptj": "no rope_type|reads no other one",
    "roformer": "no rope_type|reads no other one",
    "hunyuan_vl_text": "has an alpha",
    "pixtral": "rows and columns of patches",
    "jamba": "No block of jamba rotates",
    ("phi3", "yarn"): "reads rope_type 'yarn' as another one",
    **{("phi3", method): "no rope_type" for method in ("linear", "dynamic", "llama3")},
    **{("gemma4_text", method): "scale linearly alone" for method in ("yarn", "dynamic", "llama3", "longrope")},
    **{("cosmos3_edge_text", method): "no rope_type" for method in ("linear", "yarn", "dynamic", "llama3", "longrope")},
}
"""Type, or type and method -> words of the sentence with which it is refused; every other pair is equal."""

CASES = [(name, METHODS[number % len(METHODS)], False) for number, name in enumerate(EVERY_FORM)]
CASES += [(name, "yarn", True) for name in ("llama", "gpt_neox", "qwen2_vl_text")] + [("llama", "base", True)]
BY_LAYER = ("gemma3_text", "modernbert", "olmo3", "deepseek_v4", "qwen3_5_text", "gpt_oss", "gemma4_text")
"""Types with several types of layers: models of others have two layers in place of six, except with `--all`."""
ALL = CASES + [
    case
    for name in sorted({*ROTARY} & {*transformers.models.auto.configuration_auto.CONFIG_MAPPING})
    for method in METHODS
    for old_keys in (False, True)
    if (case := (name, method, old_keys)) not in CASES
]


LIKE_OTHERS = "qwen2 olmo3 deepseek_v4 qwen3_5_text ministral3 mixtral molmo2_text nanochat glm4 gpt_oss".split()
"""Types whose keys, axes and layer types are those of another type: `--all` adds them."""


@pytest.mark.parametrize(
    ("model_type", "method", "old_keys"), some([case for case in CASES if case[0] not in LIKE_OTHERS], ALL)
)
def test_transformers_rotates_by_the_written_keys_below_at_and_beyond_the_old_length(
    model_type, method, old_keys, unchecked, monkeypatch, pytestconfig
) -> None:
    if model_type not in BY_LAYER and not pytestconfig.getoption("--all"):
        monkeypatch.setattr("rotary_families.LAYERS", 2)
    skip_without_type(model_type)
    if model_type == "dbrx":
        skip_before("configuration of DBRX from its dictionary")
    if model_type in BY_LAYER:
        skip_before("YaRN of one layer type")
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    row = compare_class(config_class, extended=Extended(method, old_keys))
    assert row.verdict in ("equal", "refused"), row
    if (model_type, method, old_keys) in CASES:
        reason = REFUSED.get(model_type, REFUSED.get((model_type, method)))
        assert row.verdict == ("equal" if reason is None else "refused"), row
        assert reason is None or any(each in row.reason for each in reason.split("|")), row


SIZES = {"max_position_embeddings": 64}
TABLES = {
    "gpt2": ("causal", {"n_positions": 64}, 0),
    "opt": ("causal", SIZES, 2),
    "bert": ("masked", SIZES, 0),
    "roberta": ("masked", {"max_position_embeddings": 66, "pad_token_id": 1}, 2),
    "bart": ("seq2seq", SIZES, 2),
}
"""Type with learned positions -> kind, settings for 64 positions, and rows before position 0."""

NOT_EXTENDED = {
    "t5": ("seq2seq", "share the last bucket"),
    "bloom": ("causal", "ALiBi"),
    "xglm": ("causal", "computed"),
}
"""Type -> kind, and words of what is known of its lengths."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def saved(folder: Path, model_type: str, kind: str, settings: dict, **options: object) -> torch.nn.Module:
    """Write a small model of transformers, and a tokenizer's configuration, into a folder; return the model."""
    _, model = build(model_type, kind, settings)
    model.save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return model


def run(folder: Path, model_type: str, kind: str, length: int) -> torch.nn.Module:
    """Open a folder with transformers and run it on `length` tokens."""
    from tiny_models import model_types

    model = getattr(transformers, model_types(kind)[model_type]).from_pretrained(folder).eval()
    with torch.no_grad():
        model(torch.full((1, length), 5))
    return model


TABLE_CASES = [(name, TABLE_METHODS[number % 3]) for number, name in enumerate(TABLES)]
ALL_TABLES = TABLE_CASES + [
    pair for name in TABLES for method in TABLE_METHODS if (pair := (name, method)) not in TABLE_CASES
]


@pytest.mark.parametrize(("model_type", "method"), some([case for case in TABLE_CASES if case[0] != "opt"], ALL_TABLES))
def test_a_longer_table_is_opened_by_transformers_and_undone_byte_for_byte(model_type, method, tmp_path) -> None:
    kind, settings, offset = TABLES[model_type]
    saved(tmp_path / "old", model_type, kind, settings)
    receipt = extend_positions(tmp_path / "old", 160, method=method, out=tmp_path / "new")
    assert receipt.lengths == (64, 160)
    old, new = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("old", "new"))
    tables = {name for name in old if old[name].shape != new[name].shape}
    assert len(tables) == len(receipt.changes) == (2 if model_type == "bart" else 1)
    for name in old:
        if name not in tables:  # token types among them
            assert torch.equal(old[name], new[name])
        else:
            table = el.LearnedPositionalEmbedding(64, old[name].shape[1], offset=offset)
            table.weight.data = old[name]
            kept = 64 + offset if method != "interpolate" else offset
            assert torch.equal(new[name][:kept], old[name][:kept])
            if method != "extend":
                assert torch.equal(new[name], table.resize(160, method).weight)
    model = run(tmp_path / "new", model_type, kind, 160)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "new").max_position_embeddings in (160, 160 + offset)
    assert model.config.max_position_embeddings in (160, 160 + offset)
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == {"model_max_length": 160}
    assert el.checkpoints.load(tmp_path / "new").position.max_seq_len == 160
    last_context_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "old")


@pytest.mark.parametrize("method", some(["linear", "dynamic"], ["linear", "dynamic", "yarn", "llama3", "base"]))
def test_a_folder_with_rotary_positions_keeps_its_weights_and_is_undone_byte_for_byte(method, tmp_path) -> None:
    saved(tmp_path / "old", "llama", "causal", SIZES, max_shard_size="40KB")
    before = contents(tmp_path / "old")
    receipt = extend_positions(tmp_path / "old", 256, method=method, out=tmp_path / "new")
    new = contents(tmp_path / "new")
    assert {name for name in before if before[name] != new[name]} == {"config.json", "tokenizer_config.json"}
    assert new.keys() - before.keys() == {"positions-1.receipt"}
    assert (receipt.changes[0].largest_change == 0) == (method == "dynamic")
    scheme = el.positions.rotary_positions(json.loads(new["config.json"]))[0]
    rotary = run(tmp_path / "new", "llama", "causal", 8).model.rotary_emb
    for positions in (torch.arange(60), torch.arange(64), torch.arange(65), torch.arange(256)):
        for ours, theirs in zip(scheme.cos_sin(positions), rotary(torch.zeros(1), positions[None]), strict=True):
            torch.testing.assert_close(torch.cat([ours, ours], -1), theirs[0], rtol=0, atol=3e-5)
    last_context_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    assert contents(tmp_path / "back") == before


LIVE = ("llama", "gpt_neox", "gemma3_text", "deepseek_v3")


@pytest.mark.parametrize(
    ("model_type", "method"),
    some([("gpt_neox", "dynamic"), ("gemma3_text", "yarn")], product(LIVE, ["yarn", "dynamic"])),
)
def test_a_live_model_of_transformers_computes_what_its_extended_folder_does(model_type, method, tmp_path) -> None:
    if model_type == "gemma3_text":
        skip_before("YaRN of one layer type")
    model = saved(tmp_path / "old", model_type, "causal", {"max_position_embeddings": 64})
    long = torch.arange(150)[None] % 100
    with torch.no_grad():
        before = model(long).logits
        receipt = extend_positions(model, 256, method=method)
        after = model(long).logits
        assert not torch.equal(after, before)
        extend_positions(tmp_path / "old", 256, method=method, out=tmp_path / "new")
        again = type(model).from_pretrained(tmp_path / "new", attn_implementation=model.config._attn_implementation)
        torch.testing.assert_close(again.eval()(long).logits, after, rtol=1e-5, atol=1e-5)
        receipt.undo(model)
        assert torch.equal(model(long).logits, before)
    with pytest.raises(el.CheckpointError, match="other positions than this edit left"):
        receipt.undo(model)


@pytest.mark.parametrize(
    ("model_type", "kind", "known"),
    [
        ("gpt2", "causal", "save the model, extend its folder"),
        ("bloom", "causal", "ALiBi"),
        ("t5", "seq2seq", "last bucket"),
    ],
)
def test_a_live_model_without_rotary_positions_is_refused_with_what_to_do(model_type, kind, known, tmp_path) -> None:
    with pytest.raises(el.CheckpointError, match=known):
        extend_positions(saved(tmp_path / "old", model_type, kind, {}), 8192)


@pytest.mark.parametrize("model_type", NOT_EXTENDED)
def test_positions_without_a_length_are_refused_with_what_is_known_and_nothing_is_written(model_type, tmp_path) -> None:
    kind, known = NOT_EXTENDED[model_type]
    saved(tmp_path / "old", model_type, kind, {})
    before = contents(tmp_path)
    with pytest.raises(el.CheckpointError, match=known):
        extend_positions(tmp_path / "old", 8192, out=tmp_path / "new")
    assert contents(tmp_path) == before
