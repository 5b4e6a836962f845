"""An edit of the vocabulary moves each tensor that follows it, in a live model as in its folder, or is refused by name.

The families are those of docs/families.md: some of each pattern run always, all with `make test-all`. Tokens that a
configuration names keep their IDs here; all others are permuted, some are removed and some added.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from model_families import families, few_layers
from tiny_models import PARTS, VOCAB, build, quiet
from torch import Tensor, nn

import embedlayer as el

ADDED, REMOVED = 3, 2
ALWAYS = [
    *(("causal", name) for name in "gptj opt deepseek_v4".split()),
    *(("masked", name) for name in "esm mobilebert reformer".split()),
    ("seq2seq", "marian"),
]
"""Patterns that the types of test_edited_families.py, which are always edited, do not have."""
SIZES, NGRAMS = "do not share a vocabulary", "hashed n-grams"
EXPERTS = "(values for each|tensors with rows for) token"
RANGES = "takes token IDs from 20 on for images or sounds"
REFUSED = {
    "apertus1p5": RANGES,
    "deepseek_v4": EXPERTS,
    "fsmt": SIZES,
    "mllama": SIZES,
    "moshi": SIZES,
    "qwen4_exp": NGRAMS,
    "qwen4_exp_text": NGRAMS,
}
"""Model types whose vocabulary is not edited, live and in a folder, with the reason that the error states."""
SETTINGS: dict[str, dict[str, Any]] = {
    "evolla": {"protein_encoder_config.vocab_size": 97},
    "instructblip": {"qformer_config.vocab_size": 97},
    "instructblipvideo": {"qformer_config.vocab_size": 97},
}
"""Models with a second vocabulary, of another size; only that of the text is edited."""
UNREADABLE = ("nemo_speechlm", "shieldgemma2")
"""Models that transformers does not open as it has saved them, without an edit too."""
UNTIED = ("bert", "roberta", "xlm-roberta", "albert", "deberta", "deberta-v2", "mobilebert")


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Build models with two layers; with `--all`, which adds types that cannot be built so, with more."""
    if not pytestconfig.getoption("--all"):
        few_layers(monkeypatch)


def is_of_tokens(tensor: Tensor) -> bool:
    return VOCAB in tensor.shape


@torch.no_grad()
def with_distinct_values(model: nn.Module) -> nn.Module:
    """Give each value that belongs to a token another one, in biases and integers too."""
    saved = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_of_tokens(tensor) and name in saved:
            tensor.copy_(
                torch.randn(tensor.shape) / 5 if tensor.is_floating_point() else torch.randint(4, tensor.shape)
            )
    return model


def named_ids(part: Any, key: str = "") -> set[int]:
    """The IDs that a configuration may name: whole numbers under a name with `token`, `pad` or `id`."""
    part = part.to_dict() if hasattr(part, "to_dict") else part
    if isinstance(part, dict):
        return {token for name, value in part.items() for token in named_ids(value, str(name))}
    if isinstance(part, list | tuple):
        return {token for value in part for token in named_ids(value, key)}
    is_id = type(part) is int and 0 <= part < VOCAB and any(word in key for word in ("token", "pad", "_id"))
    return {part} if is_id else set()


def request_for(model: nn.Module) -> dict[str, Any]:
    """All tokens that no configuration names are permuted, the last of them removed, and some added."""
    named = {*named_ids(model.config)}
    for part in model.modules():
        named |= named_ids({key: value for key, value in vars(part).items() if type(value) is int})
    free = [token for token in range(VOCAB) if token not in named]
    order = torch.arange(VOCAB)
    order[free] = torch.tensor(free)[torch.randperm(len(free))]
    first = max(named, default=-1) + 1
    removed = order[max(first, VOCAB - REMOVED) :].tolist()
    return {"order": order[: VOCAB - len(removed)].tolist(), "remove": removed, "add": ADDED}


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The logits of a text, from the language model of a model that needs an image."""
    model = model.get_submodule(PARTS.get(model.config.model_type, ""))
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return (model(input_ids=ids, **inputs).logits + 0).detach()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one | other if name not in one or name not in other or not one[name].equal(other[name])]


def check(model: Any, folder: Path, *, live: str | None, saved: str | None, is_readable: bool = True) -> None:
    """Check the law of one model, live and in its folder, each of which may be refused with a reason.

    Args:
        model: The model, not yet patched.
        folder: An empty folder.
        live: Reason for which an edit of the live model is refused.
        saved: Reason for which an edit of the folder is refused.
        is_readable: Whether transformers reads what it has saved of this model.
    """
    old, new = folder / "old", folder / "new"
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_distinct_values(model).save_pretrained(old)
        request, before = request_for(model), state_of(model)
        ids = torch.tensor(request["order"][-20:]).unsqueeze(0)
        logits, edited = logits_of(el.patch(model), ids), []
        if saved is None:
            el.vocab.edit_vocabulary(old, **request, out=new)
            edited += [type(model).from_pretrained(new, attn_implementation="eager").eval()] if is_readable else []
        else:
            with pytest.raises(el.core.errors.EmbedLayerError, match=saved):
                el.vocab.edit_vocabulary(old, **request, out=new)
            assert not new.exists()
        if live is None:
            receipt = el.vocab.edit_vocabulary(model, **request)
            edited += [model]
        else:
            with pytest.raises(el.core.errors.EmbedLayerError, match=live):
                el.vocab.edit_vocabulary(model, **request)
            assert different(state_of(model), before) == []
    for each in edited:
        found, kept = logits_of(each, receipt.remap(ids)), receipt.row_map.sources >= 0
        assert found.shape[-1] == VOCAB - len(request["remove"]) + ADDED
        limit = 1e-5 * logits.abs().max().item()
        torch.testing.assert_close(found[..., kept], logits[..., receipt.row_map.sources[kept]], rtol=1e-5, atol=limit)
        assert different(each.state_dict(), edited[0].state_dict()) == []
    if live is None:
        receipt.undo(model)
        assert different(model.state_dict(), before) == []


@pytest.mark.parametrize(("kind", "model_type"), some(ALWAYS, families()))
def test_an_edit_moves_each_tensor_that_follows_the_vocabulary_or_is_refused(kind, model_type, tmp_path, unchecked):
    settings, refusal = SETTINGS.get(model_type), REFUSED.get(model_type)
    model = build(model_type, kind, settings)[1]
    check(model, tmp_path, live=refusal, saved=refusal, is_readable=model_type not in UNREADABLE)


@pytest.mark.parametrize("model_type", some(("bert", "mobilebert"), UNTIED))
def test_both_biases_of_an_untied_masked_model_are_moved(model_type, tmp_path, unchecked) -> None:
    """As after training, `predictions.bias` and `predictions.decoder.bias` differ; transformers adds the second."""
    model = build(model_type, "masked", {"tie_word_embeddings": False})[1]
    biases = {id(each) for name, each in model.named_parameters() if name.endswith("bias") and is_of_tokens(each)}
    assert len(biases) == 2
    check(model, tmp_path, live=None, saved=None)
