"""A sample of the model types of transformers, compared by tools/all_families.py, and its page.

The sample is `SAMPLE` of tools/tiny_models.py; `python tools/all_families.py` runs all types.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from all_families import LIMIT, examine, examine_varied
from covering import some
from model_families import PAGE, page_rows
from releases import is_older
from tiny_models import FURTHER_KINDS, KINDS, SAMPLE, model_types

import embedlayer as el
from embedlayer.families import MULTIMODAL, TRANSFORMERS_VERSION, family_of

NEW_CASES = [
    *(("causal", name) for name in ("apertus1p5_text", "dory", "exaone", "inkling2_loop_text", "lara_mini")),
    *(("causal", name) for name in ("sarvam_mla", "sarvam_moe")),
    ("seq2seq", "omniasr"),
    *(("image-text", name) for name in ("apertus1p5", "hy_v4_vl", "inkling2_loop")),
]
"""Types that the pinned release of transformers (5.24) added."""

CASES = [(kind, model_type) for kind, model_types in SAMPLE.items() for model_type in model_types]


SHORT_FURTHER = [
    *(("text encoder", "clip_text_model"), ("text encoder", "t5"), ("speech", "whisper"), ("speech", "dia")),
    *(("ctc", "wav2vec2"), ("rnnt", "parakeet_rnnt"), ("retrieval", "colpali"), ("zero-shot image", "siglip")),
    *(("base", name) for name in ("gpt2", "bart", "dpr", "canine", "vit", "wav2vec2")),
]
"""Types of further kinds: without a head, with sound, with images, with codes, refused, and without a vocabulary."""

SIMILAR = (
    *("qwen2", "opt", "bloom", "mpt", "granite", "llama", "roberta", "gpt2", "t5", "gpt_neox", "phi", "falcon"),
    *("stablelm", "olmo2", "hunyuan_v1_dense", "smollm3", "minicpm3", "gpt_oss", "jamba", "bert"),
    *("gemma3_text", "ministral3", "exaone4", "xglm", "biogpt", "electra", "paligemma"),
)
"""Types of the sample whose patterns others here have, or the models that tests/test_families.py examines always."""
ALL_CASES = some([case for case in CASES if case[1] not in SIMILAR and case != ("seq2seq", "bart")], CASES + NEW_CASES)


@pytest.mark.parametrize(("kind", "model_type"), ALL_CASES, ids=[" ".join(case) for case in CASES + NEW_CASES])
def test_a_model_type_gives_the_result_on_the_page(kind, model_type, unchecked) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine(model_type, kind)
    assert row.verdict in ("equal", "refused"), row
    assert row.verdict == page_rows()[kind, model_type]["result"], row
    if (kind, model_type) in CASES and row.verdict == "equal":
        assert row.differences["final norm"] <= LIMIT, row


ALL_FURTHER = [case for case in page_rows() if case[0] in FURTHER_KINDS]


@pytest.mark.parametrize(("kind", "model_type"), some(SHORT_FURTHER, ALL_FURTHER))
def test_a_type_of_a_further_kind_gives_the_result_on_the_page(kind, model_type, unchecked) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine(model_type, kind)
    assert row.verdict in ("equal", "refused", "not built", "no vocabulary"), row
    assert row.verdict == page_rows()[kind, model_type]["result"], row
    if row.verdict == "refused":
        assert "is not known" not in row.reason, row


def change_loaded_layers(patch: pytest.MonkeyPatch, change: Callable[[el.EmbeddingLayer], object]) -> None:
    def load_and_change(*arguments: object, load: Callable[..., Any] = el.load, **options: object) -> el.EmbeddingLayer:
        layer: el.EmbeddingLayer = load(*arguments, **options)
        change(layer)
        return layer

    patch.setattr(el, "load", load_and_change)


def test_a_head_that_the_model_does_not_have_is_reported_wrong(monkeypatch, unchecked) -> None:
    change_loaded_layers(monkeypatch, lambda layer: setattr(layer, "head", el.OutputHead(layer.table)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine("gpt2", "base")
    assert row.verdict == "wrong"
    assert row.left_out["head"] == "the model has no head"


def test_the_page_has_every_type_of_the_installed_release_and_nothing_is_wrong() -> None:
    """The page is of one release: older ones lack types; types that a newer one adds are refused."""
    rows = page_rows()
    installed = {(kind, model_type) for kind in (*KINDS, *FURTHER_KINDS) for model_type in model_types(kind)}
    absent, new = {*rows} - installed, installed - {*rows}
    assert not absent or is_older()
    assert not any(family_of(model_type) or model_type in MULTIMODAL for _, model_type in new)
    if transformers.__version__.startswith(TRANSFORMERS_VERSION):
        assert absent | new == set()
    assert {row["result"] for row in rows.values()} <= {"equal", "refused", "not built", "no vocabulary"}
    assert all(kind in FURTHER_KINDS for (kind, _), row in rows.items() if row["result"] == "no vocabulary")


def test_the_counts_on_the_page_are_those_of_its_tables() -> None:
    from all_families import TITLES

    rows = page_rows()
    for kind in TITLES:
        results = [row["result"] for (own, _), row in rows.items() if own == kind]
        verdicts = ("equal", "refused", "wrong", "not built", *["no vocabulary"] * (kind in FURTHER_KINDS))
        counts = [len(results), *map(results.count, verdicts)]
        assert f"| {kind} | {' | '.join(map(str, counts))} |" in PAGE.read_text()


def test_the_counts_in_the_readme_and_on_the_page_of_live_models_are_those_of_the_page() -> None:
    counts = PAGE.read_text().partition("<!-- families:")[2]
    row = next(line for line in counts.splitlines() if line.startswith("| causal |"))
    types, equal, *_, losses, without_logits = (int(cell) for cell in row.strip("| ").split(" | ")[1:])
    readme, live = ((PAGE.parents[1] / name).read_text() for name in ("README.md", "docs/live-models.md"))
    assert f"{equal} of transformers' {types} causal" in readme
    assert f"{types} causal types" in live
    assert f"builds and compares {losses} offline; {without_logits} of these" in live


VARIED = (
    ("granite", "causal"),
    ("mobilebert", "masked"),
    ("bart", "seq2seq"),
    ("t5", "seq2seq"),
    ("qwen2_vl", "image-text"),
)
"""Types with factors, a head with a transform, tables of two stacks, tying by other keys, and positions on axes."""


@pytest.mark.parametrize(("model_type", "kind"), some(VARIED[1:2], VARIED), ids=[name for name, _ in VARIED])
def test_other_settings_and_left_out_ones_give_equal_results(model_type, kind, unchecked) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = examine_varied(model_type, kind)
    assert {row.verdict for row in rows} <= {"equal", "refused", "not built"}, rows
    assert sum(row.verdict == "equal" for row in rows) >= 3


def test_a_layer_that_differs_with_some_setting_is_reported_wrong(monkeypatch, unchecked) -> None:
    change_loaded_layers(monkeypatch, lambda layer: layer.table.weight.data.mul_(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = examine_varied("albert", "masked")
    assert "wrong" in {row.verdict for row in rows} <= {"wrong", "refused", "not built"}


def test_the_page_counts_the_variations_and_none_is_wrong() -> None:
    text = PAGE.read_text().partition("made by `python tools/all_families.py --varied")[2].partition("<!-- end")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, *rows = lines
    assert header == ["kind", "model types", "variations", "equal", "refused", "wrong", "not built"]
    assert {row[0] for row in rows} == {*KINDS}
    for kind, types, variations, *counts in rows:
        assert int(types) == sum(own == kind for own, _ in page_rows())
        assert int(variations) == sum(map(int, counts))
        assert counts[2] == "0"
