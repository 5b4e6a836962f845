"""Every family compared with transformers: the first block's input, positions, logits. The records themselves."""

import ast
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from all_families import examine
from covering import cases, some
from releases import is_older, per_layer_rows, skip_before
from safetensors.torch import save_file
from test_all_families import CASES
from tiny_models import VARIANTS, VOCAB, build, model_types, quiet
from transformers_probe import ends

import embedlayer as el
from embedlayer import families
from embedlayer.families import FAMILIES, REFUSED, ROTARY, TRANSFORMERS_VERSION, family_of, rotary_facts
from embedlayer.families.default_ids import DEFAULT_IDS

READERS = ("checkpoints", "layers", "models", "positions", "vocab")

OTHERS = [
    name for name, (model_type, kind, settings) in VARIANTS.items() if settings or (kind, model_type) not in CASES
]
"""Well-known models that are not in the sample of test_all_families.py."""
SIMILAR = ("Mistral", "Qwen2", "Qwen2.5, YaRN", "Qwen3", "Gemma", "Cohere", "OPT", "Falcon RW")
"""Those whose patterns others here, or in the sample, have."""
SAVED = (
    *("GPT-2", "BERT", "ALBERT", "OPT 350M's projections", "BLOOM, 6 heads", "T5", "M2M100", "LLaMA 3", "Gemma 3"),
    *("GPT-J", "Phi-3, LongRoPE", "Falcon RW", "Granite"),
)
"""Those whose layers have each kind of part that is saved."""


NOT_OF_TRANSFORMERS = {
    *("model2vec", "StaticEmbedding"),
    "llama_meta",  # compared in tests/models/test_llama.py
    *("semantic", "coarse_acoustics", "fine_acoustics"),  # compared in tests/checkpoints/test_streams.py
}
"""Model types that transformers does not have."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some({*OTHERS} - {*SIMILAR}, OTHERS))
def test_a_well_known_model_equals_transformers(name, unchecked) -> None:
    row = examine(VARIANTS[name].model_type, VARIANTS[name].kind, VARIANTS[name].settings)
    assert row.verdict == "equal", row
    assert {"input", "input, padded", "positions", "head", "patched loss"} <= row.differences.keys()
    assert row.differences["input"] == row.differences["input, padded"] == 0
    assert row.without_logits


@pytest.mark.parametrize("name", some(SAVED, VARIANTS))
def test_what_is_saved_is_read_back_bit_for_bit(name, tmp_path) -> None:
    with quiet():
        VARIANTS[name].build()[1].save_pretrained(tmp_path / "model")
    layer = el.load(tmp_path / "model")
    layer.save_pretrained(tmp_path / "layer")
    again = el.load(tmp_path / "layer")
    assert isinstance(again, el.EmbeddingLayer)
    assert again.config == layer.config
    assert again.state_dict().keys() == layer.state_dict().keys()
    ids = torch.randint(2, VOCAB, (2, 12))
    assert torch.equal(again.input(ids), layer.input(ids))
    hidden = torch.randn(2, 3, (layer.head.dense if hasattr(layer.head, "dense") else layer.head).in_features)
    assert torch.equal(again.head(hidden), layer.head(hidden))
    assert repr(again.position) == repr(layer.position)


def test_every_model_type_belongs_to_one_family_and_is_one_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))
    assert {variant.model_type for variant in VARIANTS.values()} <= set(types)
    absent = set(types) - set(CONFIG_MAPPING)
    assert absent == NOT_OF_TRANSFORMERS or is_older(), "add it to NOT_OF_TRANSFORMERS, with the test that compares it"
    assert not set(types) & set(REFUSED)
    assert family_of("llama") is not None
    assert family_of(None) is None


@cache
def default_config(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with quiet():
        return CONFIG_MAPPING[model_type]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: "-".join(family.model_types[:2]))
def test_what_a_record_assumes_of_a_missing_key_is_the_default_of_transformers(family) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family.position == "rotary":
        names = ("rope_theta", "rope_local_base_freq", "sliding_window_pattern")  # of published files alone
        family = replace(family, defaults=tuple(pair for pair in family.defaults if pair[0] not in names))
    if "voxtral_realtime_text" in family.model_types:
        skip_before("tied head of Voxtral Realtime's language model")
    for model_type in set(family.model_types) & set(CONFIG_MAPPING):
        config = default_config(model_type)
        for stack in family.sub_configs[-1:]:
            config = getattr(config, stack)
        for key, value in family.defaults:
            assert getattr(config, key) == value, (model_type, key)
        if family.head is None:
            continue
        if isinstance(family.head.tied, bool) and hasattr(config, "tie_word_embeddings"):
            assert bool(config.tie_word_embeddings) == family.head.tied, model_type
        if family.head.softcap is not None:
            default = dict(family.defaults).get(family.head.softcap)
            assert getattr(config, family.head.softcap, None) == default, model_type
        for factor in filter(None, (family.scale, family.head.logit_scale)):
            for key in (factor.of, factor.per):
                assert key is None or "sqrt_dim" in key or hasattr(config, key), (model_type, key)


def test_epsilons_and_factors_that_a_record_assumes_are_the_defaults_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    different = []
    for family in FAMILIES:
        for model_type in set(family.model_types) & set(CONFIG_MAPPING):
            config = default_config(model_type)
            different += [
                (model_type, key, assumed)
                for key, assumed in assumptions(family)
                if getattr(config, key, assumed) not in (assumed, None)
            ]
    assert different == []


def test_the_ids_in_the_list_are_the_defaults_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if transformers.__version__ != TRANSFORMERS_VERSION:
        pytest.skip(f"the list is that of transformers {TRANSFORMERS_VERSION}")
    found, known = {}, {key for ids in DEFAULT_IDS.values() for key in ids}
    for model_type in CONFIG_MAPPING_NAMES:
        if family_of(model_type) is not None:
            entries = vars(default_config(model_type))
            ids = {key: value for key, value in entries.items() if key in known and value is not None}
            found[model_type] = {key: tuple(value) if isinstance(value, list) else value for key, value in ids.items()}
    assert {model_type: ids for model_type, ids in found.items() if ids} == {**DEFAULT_IDS}


def assumptions(family):
    """Keys of a configuration and the value that the record of a family assumes if they are missing."""
    stated, head = dict(family.defaults), family.head
    norms = [norm for norm in (family.norm, head and head.norm) if getattr(norm, "eps_key", None)]
    yield from ((norm.eps_key, stated.get(norm.eps_key, norm.eps)) for norm in norms)
    for factor in filter(None, (family.scale, head and head.logit_scale)):
        yield from ((key, stated.get(key, factor.otherwise)) for key in factor.only_if[:1])
        if factor.default is not None and None in (factor.of, factor.per):
            key = factor.of or factor.per
            yield key, stated.get(key, factor.default if factor.of else 1 / factor.default)


SMALL = {"vocab_size": 90, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def write(path, content) -> None:
    path.write_text(json.dumps(content))


def saved(folder, config, **tensors):
    """A checkpoint with this configuration, a table, and other tensors with dots in place of double underscores."""
    table = {"model.embed_tokens.weight": torch.randn(90, 16)}
    folder.mkdir(exist_ok=True)
    save_file(table | {name.replace("__", "."): t for name, t in tensors.items()}, folder / "model.safetensors")
    write(folder / "config.json", SMALL | config)
    return folder


def test_each_block_has_its_own_position_scheme_and_position_is_that_of_the_first(tmp_path) -> None:
    config = {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "rope_parameters": ROPE}
    layer = el.load(saved(tmp_path / "nope first", config))
    assert layer.block_positions == ("", "rotary", "rotary")
    assert [type(layer.position_of_block(i)).__name__ for i in range(3)] == ["Position", *["RotaryEmbedding"] * 2]
    assert layer.position.hook is None
    assert layer.position_of_block(-1) is layer.position_of("rotary")

    layer = el.load(saved(tmp_path / "nope last", config | {"no_rope_layers": [1, 1, 0]}))
    assert layer.block_positions == ("", "", "none")
    assert layer.position_of_block(2).hook is None
    layer.save_pretrained(tmp_path / "layer")
    assert el.load(tmp_path / "layer").block_positions == layer.block_positions

    layer = el.load(saved(tmp_path / "same", config | {"no_rope_layers": [1, 1, 1]}))
    assert layer.block_positions == ()
    assert layer.position_of_block(1000) is layer.position


def test_a_layer_that_an_earlier_version_saved_is_read(tmp_path) -> None:
    layer = el.load(saved(tmp_path / "model", {"model_type": "llama", "rope_parameters": ROPE}))
    layer.save_pretrained(tmp_path / "layer")
    new = {"block_positions", "encoder_block_positions", "token_dropout", "streams", "decoder", "per_layer"}
    config = json.loads((tmp_path / "layer" / "config.json").read_text())
    write(tmp_path / "layer" / "config.json", {key: value for key, value in config.items() if key not in new})
    again = el.load(tmp_path / "layer")
    assert again.config == layer.config
    assert torch.equal(again.input(torch.tensor([3, 5])), layer.input(torch.tensor([3, 5])))


def test_factors_are_quotients_of_keys_of_the_configuration(tmp_path) -> None:
    head = {"lm_head__weight": torch.randn(90, 16)}
    hidden = torch.randn(2, 16)

    def load(model_type, **config):
        return el.load(saved(tmp_path / "model", {"model_type": model_type, "rope_parameters": ROPE, **config}, **head))

    assert load("afmoe", mup_enabled=True, layer_types=["full_attention"] * 3).table.scale == 4.0
    assert load("afmoe", mup_enabled=False, layer_types=["full_attention"] * 3).table.scale is None
    layer = load("falcon_h1", embedding_multiplier=3.0, lm_head_multiplier=0.25)
    assert layer.table.scale == 3.0
    assert torch.allclose(layer.head(hidden), 0.25 * hidden @ head["lm_head__weight"].T)
    assert load("granite", embedding_multiplier=1.0, logits_scaling=8.0).head.logit_scale == 0.125
    untied = {"layer_types": ["full_attention"] * 3, "sliding_window": 4, "tie_word_embeddings": False}
    assert load("cohere2", logit_scale=0.5, **untied).head.logit_scale == 0.5
    with pytest.raises(el.CheckpointError, match="lm_head_multiplier must be a positive number"):
        load("falcon_h1", embedding_multiplier=3.0, lm_head_multiplier="2")
    assert load("falcon_h1", embedding_multiplier=1.0, lm_head_multiplier=1.0).report().family == "falcon_h1"
    assert load("apertus").family == "apertus"  # a member of a group is reported under its model_type


@pytest.mark.filterwarnings("ignore")
def test_a_head_with_fewer_rows_than_the_table_gives_the_logits_of_these_rows(tmp_path) -> None:
    if "apertus1p5_text" not in model_types("causal"):
        pytest.skip("the installed transformers has no apertus1p5_text")
    _, model = build("apertus1p5_text", "causal", {"output_vocab_size": 100})
    with quiet():
        model.save_pretrained(tmp_path)
    layer = el.load(tmp_path)
    hidden = torch.randn(2, 3, layer.table.embed_dim)
    assert (layer.table.vocab_size, layer.head(hidden).shape) == (VOCAB, (2, 3, 100))
    assert torch.equal(layer.head(hidden), model.lm_head(hidden))
    write(tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text()) | {"output_vocab_size": 101})
    with pytest.raises(el.CheckpointError, match=r"lm_head.weight has shape \[100, 64\]"):
        el.load(tmp_path)


def test_a_table_for_each_layer_is_reported_and_the_main_table_is_read(tmp_path) -> None:
    config: dict[str, Any] = {"model_type": "gemma3n_text", "layer_types": ["full_attention"] * 3}
    config["rope_parameters"] = {"full_attention": ROPE, "sliding_attention": ROPE}
    layer = el.load(saved(tmp_path / "model", config, model__embed_tokens_per_layer__weight=torch.randn(90, 24)))
    assert layer.table.embed_dim == 16
    (sentence,) = layer.report().other_tables
    assert "model.embed_tokens_per_layer.weight, 90 x 24, is not read" in sentence
    assert sentence in str(layer.report())


PER_LAYER: dict[str, Any] = {"hidden_size": 48, "hidden_size_per_layer_input": 8, "num_hidden_layers": 3}
PER_LAYER |= {"layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize(("model_type", "rows"), [("gemma3n_text", 100), ("gemma4_text", VOCAB)])
def test_per_layer_inputs_equal_those_of_transformers(model_type, rows, wrapper, tmp_path) -> None:
    if model_type == "gemma3n_text":
        skip_before("token without a row in a per-layer table of Gemma 3n")
    config, model = build(model_type, "causal", {**PER_LAYER, "vocab_size_per_layer_input": rows})
    model = model.bfloat16()
    with quiet():
        model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    if wrapper:  # the whole model has its language model under a prefix, and one of its files is the index
        tensors = {f"model.language_model.{key}": tensor for key, tensor in model.model.state_dict().items()}
        (tmp_path / "whole").mkdir()
        save_file(tensors, tmp_path / "whole" / "model.safetensors")
        outer = {"model_type": model_type.removesuffix("_text"), "text_config": config.to_dict()}
        write(tmp_path / "whole" / "config.json", outer)
    layer = el.load(tmp_path / ("whole" if wrapper else "model"))
    ids = torch.arange(VOCAB).view(1, -1)
    x = model.model.embed_tokens(ids)
    theirs = model.model.project_per_layer_inputs(x, per_layer_rows(model.model, ids))
    assert torch.equal(layer.per_layer(ids, layer.input(ids)), theirs)
    assert layer.report().per_layer == (rows, 3, 8)
    assert f"{rows} rows, a vector of width 8 for each of 3 blocks" in str(layer.report())
    layer.save_pretrained(tmp_path / "layer")
    assert torch.equal(el.load(tmp_path / "layer").per_layer(ids, x), theirs)
    assert el.load(tmp_path / "layer", per_layer=False).per_layer is None


def test_per_layer_inputs_that_are_absent_or_not_requested_are_none(tmp_path) -> None:
    with quiet():
        build("gemma4_text", "causal", {**PER_LAYER, "hidden_size_per_layer_input": 0})[1].save_pretrained(tmp_path)
    layer = el.load(tmp_path)
    assert layer.per_layer is None
    assert layer.report().other_tables == ()
    model = build("gemma4_text", "causal", PER_LAYER)[1]
    with quiet():
        model.save_pretrained(tmp_path)
    layer = el.load(tmp_path, per_layer=False)
    assert layer.per_layer is None
    (sentence,) = layer.report().other_tables
    assert "embed_tokens_per_layer.weight, 131 x 24, is not read" in sentence
    assert el.load(tmp_path, table_only=True).per_layer is None
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {**config, "hidden_size_per_layer_input": 4})
    with pytest.raises(el.CheckpointError, match="per-layer inputs"):
        el.load(tmp_path)
    write(tmp_path / "config.json", {**config, "vocab_size_per_layer_input": 99})
    with pytest.raises(el.CheckpointError, match="vocab_size_per_layer_input 99"):
        el.load(tmp_path)


def test_tables_and_heads_of_numbered_blocks_are_not_those_of_the_model(tmp_path) -> None:
    config = {"model_type": "apertus", "rope_parameters": ROPE}
    extra = {"model__layers__3__embed_tokens__weight": torch.randn(90, 16)}
    extra["model__layers__3__lm_head__weight"] = torch.randn(90, 16)
    layer = el.load(saved(tmp_path / "model", config, **extra))
    assert layer.tensor_names == {"table.weight": ("model.embed_tokens.weight",)}
    assert layer.head is None
    extra = {"audio__embed_tokens__weight": torch.randn(90, 16)}
    with pytest.raises(el.CheckpointError, match="several tables called embed_tokens.weight"):
        el.load(saved(tmp_path / "model", config, **extra))


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_known_type_that_is_not_read_is_refused_with_the_reason(model_type, tmp_path) -> None:
    folder = saved(tmp_path / "model", {"model_type": model_type})
    with pytest.raises(el.CheckpointError, match=re.escape(REFUSED[model_type])):
        el.load(folder)
    assert el.load(folder, table_only=True).table.vocab_size == 90


@pytest.mark.parametrize(
    ("classes", "tied"),
    [(["GPT2Model"], False), (["GPT2LMHeadModel"], True), (["GPT2DoubleHeadsModel"], True), ([], True)],
)
def test_a_base_model_has_no_head(classes, tied, tmp_path) -> None:
    save_file({"wte.weight": torch.randn(90, 16), "wpe.weight": torch.randn(8, 16)}, tmp_path / "model.safetensors")
    write(tmp_path / "config.json", {"model_type": "gpt2", "vocab_size": 90, "n_embd": 16, "architectures": classes})
    assert (el.load(tmp_path).head is not None) == tied


def loaded(name, folder):
    """The small model of a variant, and what is loaded of it."""
    _, model = VARIANTS[name].build()
    with quiet():
        model.save_pretrained(folder)
    return model, el.load(folder)


def test_far_positions_are_exact_where_transformers_rounds_them(tmp_path) -> None:
    model, layer = loaded("LLaMA 2", tmp_path)
    at = torch.arange(2000, 2064)
    exact = (at.double().unsqueeze(-1) * 10000.0 ** -(torch.arange(8).double() / 8)).cos()
    theirs = model.model.rotary_emb(torch.zeros(1), at.unsqueeze(0))[0][0, :, :8]
    assert (layer.position.cos_sin(at)[0] - exact).abs().max() < 1e-6
    assert 1e-6 < (theirs - exact).abs().max() < 1e-4


def test_falcons_alibi_is_the_product_that_transformers_rounds_to_bfloat16(tmp_path) -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    model, layer = loaded("Falcon RW", tmp_path)

    def difference(length: int) -> float:
        at, config = torch.arange(length), model.config
        keys = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), config.num_attention_heads, torch.float32)
        theirs = keys.squeeze(1) / config.head_dim**0.5
        theirs = (theirs.unsqueeze(-2) - theirs.unsqueeze(-1)).tril()
        return (layer.position.bias(at, at)[0].tril() - theirs).abs().max().item()

    assert difference(200) <= 1e-5
    assert 1e-3 < difference(400) < 1


@cases("model_type, dtype", ["gemma", "gemma2", "gemma3_text"], [torch.float32, torch.bfloat16])
def test_gemma_rounds_its_scale_to_the_type_of_the_rows(model_type, dtype, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    with quiet():
        build(model_type, "causal", {"hidden_size": 48})[1].save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    layer = el.load(tmp_path, dtype=dtype)
    ids = torch.randint(2, VOCAB, (2, 12))
    assert torch.equal(layer.input(ids), ends(model, ids)[0])
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
        allowed |= {"gemma"} if package_part == "formats" else set()  # a quant_method
        if path.parent == Path(families.__file__).parent:
            continue
        text = path.read_text()
        if names := {*re.findall(r"""["']([\w-]+)["']""", text)} & types - allowed:  # in code, or in a comment
            words = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
            named += [(str(path), word) for word in words & names]
    assert named == []


OF_EDITS = {"class_defaults", "configurations", "edit_report", "left_out_files", "vocabulary_tensors"}
"""Modules of `families` that edit or report; the others are records, which are data."""


def test_the_records_of_families_depend_on_no_other_package() -> None:
    for path in Path(families.__file__).parent.glob("*.py"):
        assert path.stem in OF_EDITS or not re.findall(
            r"^(?:from|import) embedlayer(?!\.families)", path.read_text(), re.MULTILINE
        ), path.name


def test_an_unknown_family_has_no_rotary_facts() -> None:
    assert rotary_facts("llama") == type(rotary_facts("llama"))()
    assert rotary_facts("novel") is rotary_facts("gpt2") is rotary_facts(None) is None
    assert rotary_facts("gptj").interleaved
    assert rotary_facts("glm4").default_share == 0.5
