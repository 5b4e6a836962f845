"""One model, one answer: all paths to the distribution of a model of transformers give the same, or refuse by name.

Families with every form of what a model does to its logits run always; all others of `tools/tiny_models.py` are `long`,
and tests/test_all_families.py compares the loaded head and the patched loss of the sample.
"""

import re
import warnings

import pytest
import torch
from covering import looped, some
from model_families import families
from model_paths import compare_paths, inputs_of, log_probs
from tiny_models import PARTS, VARIANTS, CannotBuild, build, quiet

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
