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
from model_families import families
from tiny_models import VOCAB, build, quiet
from torch import Tensor, nn

import embedlayer as el

ADDED, REMOVED = 3, 2
ALWAYS = [
    *(("causal", name) for name in "llama gpt2 gptj bloom opt phi cohere2 apertus deepseek_v4 mamba bart".split()),
    *(("masked", name) for name in "bert roberta electra deberta-v2 modernbert esm mobilebert reformer".split()),
    *(("seq2seq", name) for name in "t5 bart marian".split()),
    ("image-text", "qwen2_vl"),
]
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
UNTIED = ("bert", "roberta", "xlm-roberta", "albert", "deberta", "deberta-v2", "mobilebert")


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
    return {"reorder": order[: VOCAB - len(removed)].tolist(), "remove": removed, "add": ADDED}


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return (model(input_ids=ids, **inputs).logits + 0).detach()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one | other if name not in one or name not in other or not one[name].equal(other[name])]


def check(model: nn.Module, folder: Path, refusal: str | None) -> None:
    """Check the law of one model, which is saved to the folder `old`, and edited live."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_distinct_values(model).save_pretrained(folder / "old")
        request, before = request_for(model), state_of(model)
        el.patch(model)
        if refusal is not None:
            for edit in (
                lambda: el.vocab.edit_vocabulary(folder / "old", **request, out=folder / "new"),
                lambda: el.vocab.edit_vocabulary(model, **request),
            ):
                with pytest.raises(el.errors.EmbedLayerError, match=refusal):
                    edit()
            assert not (folder / "new").exists()
            assert different(state_of(model), before) == []
            return
        ids = torch.tensor(request["reorder"][-20:]).unsqueeze(0)
        logits = logits_of(model, ids)
        receipt = el.vocab.edit_vocabulary(folder / "old", **request, out=folder / "new")
        receipt.undo(folder / "new", out=folder / "back")
        live = el.vocab.edit_vocabulary(model, **request)
        edited = type(model).from_pretrained(folder / "new", attn_implementation="eager").eval()
    kept = live.row_map.sources >= 0
    for result in (model, edited):
        found = logits_of(result, live.remap(ids))
        assert found.shape[-1] == VOCAB - len(request["remove"]) + ADDED
        expected = logits[..., live.row_map.sources[kept]]
        torch.testing.assert_close(found[..., kept], expected, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    assert different(edited.state_dict(), model.state_dict()) == []
    live.undo(model)
    assert different(model.state_dict(), before) == []
    for file in (folder / "old").glob("*.safetensors"):
        assert file.read_bytes() == (folder / "back" / file.name).read_bytes()


@pytest.mark.parametrize(("kind", "model_type"), some(ALWAYS, families()))
def test_an_edit_moves_each_tensor_that_follows_the_vocabulary_or_is_refused(kind, model_type, tmp_path, unchecked):
    check(build(model_type, kind)[1], tmp_path, REFUSED.get(model_type))


@pytest.mark.parametrize("model_type", some(("bert", "albert", "mobilebert"), UNTIED))
def test_both_biases_of_an_untied_masked_model_are_moved(model_type, tmp_path, unchecked) -> None:
    """As after training, `predictions.bias` and `predictions.decoder.bias` differ; transformers adds the second."""
    model = build(model_type, "masked", {"tie_word_embeddings": False})[1]
    biases = {id(each) for name, each in model.named_parameters() if name.endswith("bias") and is_of_tokens(each)}
    assert len(biases) == 2
    check(model, tmp_path, None)
