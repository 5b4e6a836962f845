"""One model, one answer: all paths to the distribution of a model of transformers give the same, or refuse by name.

Families with every form of what a model does to its logits run always; all others of `tools/tiny_models.py` are `long`,
and tests/test_all_families.py compares the loaded head and the patched loss of the sample.
"""

import re
import warnings

import pytest
import torch
from covering import looped, some
from exported import by_onnxruntime
from model_families import families
from model_paths import compare_paths, inputs_of, log_probs
from tiny_models import KINDS, PARTS, VARIANTS, CannotBuild, build, quiet
from torch.export import Dim
from transformers_probe import observe

import embedlayer as el

ALWAYS = {
    ("causal", "llama"): {},
    ("causal", "gemma2"): {"final_logit_softcapping": 2.0},
    ("causal", "cohere"): {},
    ("causal", "granite"): {"logits_scaling": 8.0},
    ("causal", "minicpm3"): {},
    ("causal", "phi"): {},
    ("causal", "opt"): {},
    ("seq2seq", "t5"): {},
    ("seq2seq", "bart"): {},
    ("masked", "bert"): {},
    ("masked", "mobilebert"): {},
}
"""Kind and model type -> settings. They have a soft cap, a factor behind the head and one before it, a bias of the head
and one outside of it, a projection and a transform before the head, and columns beside its rows."""

LIKE_OTHERS = {("causal", "llama"), ("causal", "cohere"), ("seq2seq", "t5")}
"""A head with nothing to it, another factor behind the head, and another one before it: `--all` adds them."""
LIMIT = 1e-5
PATHS = {"token_log_probs", "token_statistics", "divergence", "logits", "logits, bits"}
HEAD = {"head.loss", "head.token_log_probs", "head.token_statistics", "hidden and head", "draft head"}
NOT_BUILT = "transformers cannot build or run it here"


def test_the_families_are_those_of_the_page() -> None:
    assert len(families()) > 300
    assert {*ALWAYS} <= {*families()}
    assert {kind for kind, _ in families()} == {*KINDS}


ALL = dict.fromkeys([*ALWAYS, *families()])


@looped("kind, model_type", some(ALWAYS.keys() - LIKE_OTHERS, ALL))
def test_all_paths_give_the_distribution_of_the_model(kind, model_type, tmp_path, unchecked) -> None:
    settings = ALWAYS.get((kind, model_type))
    try:
        _, model = build(model_type, kind, settings)
    except CannotBuild:
        pytest.skip(NOT_BUILT)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        model = model.get_submodule(PARTS[model_type]) if model_type in PARTS else model
        differences, refusals = compare_paths(model, el.load(tmp_path), export=settings is not None)
    assert {name: value for name, value in differences.items() if value > LIMIT} == {}
    assert differences.keys() >= PATHS
    if refusals:
        assert refusals.keys() == HEAD
        assert all(re.search(f"'{model_type}'.*token_log_probs.model.ids..logits", each) for each in refusals.values())
    elif settings is not None:
        assert differences.keys() >= HEAD | {"loaded head", "loss", "exported head"}
    assert bool(refusals) == (model_type == "mobilebert")


@pytest.mark.long  # tests/laws/test_export.py has ONNX of heads always, and above loaded heads are exported
@pytest.mark.parametrize(("kind", "model_type"), ALWAYS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnxruntime_gives_the_distribution_of_the_model(kind, model_type, tmp_path, unchecked) -> None:
    _, model = build(model_type, kind, ALWAYS[kind, model_type])
    with quiet():
        model.save_pretrained(tmp_path)
        layer = el.load(tmp_path)
        run = observe(model, inputs_of(model))
    [logits] = by_onnxruntime(layer.head, (run.hidden[:, :5],), (run.hidden,), {0: Dim("B"), 1: Dim("T")})
    torch.testing.assert_close(logits.log_softmax(-1), run.logits.log_softmax(-1), rtol=0, atol=LIMIT)


def test_the_law_sees_a_path_that_is_wrong(tmp_path, unchecked) -> None:
    _, model = build("gemma2", "causal", {"final_logit_softcapping": 2.0})
    with quiet():
        model.save_pretrained(tmp_path)
        layer = el.load(tmp_path)
        layer.head.softcap = None
        differences, _ = compare_paths(model, layer)
    assert max(differences.values()) > 0.01


def test_a_model_type_that_is_not_known_is_refused_by_the_head_and_taken_as_logits(unchecked, monkeypatch) -> None:
    _, model = VARIANTS["LLaMA 2"].build()
    inputs = inputs_of(model)
    monkeypatch.setattr(type(model.config), "model_type", "unheard_of")
    el.patch(model)
    outputs, tokens = model(**inputs), inputs["input_ids"]
    with pytest.raises(el.CheckpointError, match="model type 'unheard_of'.*not known.*token_log_probs"):
        model.get_output_embeddings().loss(torch.randn(2, 9, 64), tokens)
    torch.testing.assert_close(
        el.token_log_probs(outputs.logits, tokens), log_probs(outputs.logits.detach(), tokens), rtol=0, atol=LIMIT
    )
