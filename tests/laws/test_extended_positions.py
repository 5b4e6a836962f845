"""Longer context: what is written is what transformers computes, and other bytes stay.

`tools/rotary_families.py --extend` compares every configuration class with a method as a command.
"""

import json
from pathlib import Path

import pytest
import torch
from commands import run
from covering import looped, some
from releases import skip_before, skip_without_type
from rotary_families import Extended, compare_class
from tiny_models import build

import embedlayer as el
from embedlayer.families import ROTARY

transformers = pytest.importorskip("transformers")

METHODS = ("linear", "dynamic", "yarn", "llama3", "longrope", "base")
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


@looped("model_type, method, old_keys", some([case for case in CASES if case[0] not in LIKE_OTHERS], ALL))
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


NOT_EXTENDED = {
    "t5": ("seq2seq", "relative positions"),
    "bloom": ("causal", "alibi positions"),
    "xglm": ("causal", "sinusoidal positions"),
    "gpt2": ("causal", "table of learned positions"),
    "bert": ("masked", "table of learned positions"),
    "bart": ("seq2seq", "table of learned positions"),
}
"""Type -> kind, and words of what its positions are."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def saved(folder: Path, model_type: str, kind: str, settings: dict, **options: object) -> None:
    """Write a small model of transformers, and a tokenizer's configuration, into a folder."""
    build(model_type, kind, settings)[1].save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))


@pytest.mark.parametrize("method", some(["linear", "dynamic"], ["linear", "dynamic", "yarn", "llama3", "base"]))
def test_a_folder_keeps_its_weights_and_is_opened_by_transformers(method, tmp_path, capsys) -> None:
    saved(tmp_path / "old", "llama", "causal", {"max_position_embeddings": 64}, max_shard_size="40KB")
    before = contents(tmp_path / "old")
    options = ["--to", 256, "--method", method, "-o", tmp_path / "new", "--json"]
    assert run("positions", "extend", tmp_path / "old", *options) == 0
    assert contents(tmp_path / "old") == before
    new = contents(tmp_path / "new")
    assert new.keys() == before.keys()
    assert {name for name in before if before[name] != new[name]} == {"config.json", "tokenizer_config.json"}
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["largest_change"] == 0) == (method == "dynamic")
    scheme = el.positions.rotary_positions(json.loads(new["config.json"]))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    model(torch.full((1, 8), 5))
    rotary = model.model.rotary_emb
    for positions in (torch.arange(60), torch.arange(64), torch.arange(65), torch.arange(256)):
        for ours, theirs in zip(scheme.cos_sin(positions), rotary(torch.zeros(1), positions[None]), strict=True):
            torch.testing.assert_close(torch.cat([ours, ours], -1), theirs[0], rtol=0, atol=3e-5)


@looped("model_type", NOT_EXTENDED)
def test_other_positions_are_refused_and_nothing_is_written(model_type, tmp_path, capsys) -> None:
    kind, known = NOT_EXTENDED[model_type]
    saved(tmp_path / "old", model_type, kind, {})
    before = contents(tmp_path)
    assert run("positions", "extend", tmp_path / "old", "--to", 8192, "-o", tmp_path / "new") == 2
    assert known in " ".join(capsys.readouterr().err.split())
    assert contents(tmp_path) == before
