"""An edit of a model, live or in its folder, moves all that a token ID names, or refuses: over the model types.

`tools/edited_families.py` compares; it runs all types and all edits as a command.
"""

import pytest
import torch
from covering import some
from edited_families import EDITS, examine
from model_families import few_layers
from releases import skip_before
from tiny_models import KINDS, MORE_KINDS, SAMPLE, VOCAB, build, model_types, quiet
from torch import nn

import embedlayer as el

WHOLE_SAMPLE = [(kind, name) for kind, names in SAMPLE.items() for name in names]
ALWAYS = [(*case, EDITS[number % 3]) for number, case in enumerate(WHOLE_SAMPLE)]
"""Each type of the sample with one edit, in turn."""

OF_THE_SAMPLE = [("causal", "llama"), ("causal", "phi"), ("masked", "bert"), ("masked", "roberta")]
OF_THE_SAMPLE += [("seq2seq", "t5"), ("seq2seq", "bart"), ("image-text", "qwen2_vl")]
"""An untied head, biases of the head and outside of it, IDs that count positions, several modules of one table, a
configuration with parts. `--all` adds the other types, and the other edits of each."""

COUNTED = ("xlm-roberta", "roberta", "m2m_100", "nllb-moe")
MORE = [("image-text", "gemma4", "permute"), ("image-text", "evolla", "permute"), ("causal", "whisper", "permute")]
MORE += [("seq2seq", "encoder-decoder", "add"), ("text encoder", "clip_text_model", "permute")]
MORE += [("image-text", "mistral_large4", "remove"), ("causal", "gptj", "permute"), ("causal", "opt", "remove")]
MORE += [("masked", "esm", "add"), ("masked", "mobilebert", "permute"), ("masked", "reformer", "add")]
MORE += [("seq2seq", "marian", "remove"), ("causal", "deepseek_v4", "permute")]
RUN = [case for case in ALWAYS if case[:2] in OF_THE_SAMPLE] + MORE
ALWAYS += MORE
IN_TWO_TENSORS = ("molmo2_text",)
"""Types whose table transformers writes as two tensors: an edit of the folder is refused, a live one is not."""
ALL = ALWAYS + [
    case
    for kind in (*KINDS, *MORE_KINDS)
    for name in sorted(model_types(kind))
    for edit in EDITS
    if (case := (kind, name, edit)) not in ALWAYS
]


@pytest.mark.parametrize(("kind", "model_type", "edit"), some(RUN, ALL), ids=[" ".join(case) for case in ALL])
def test_an_edit_moves_all_that_an_id_names_or_refuses(kind, model_type, edit, monkeypatch, unchecked) -> None:
    if model_type == "encoder-decoder":
        skip_before("encoder-decoder of any two models")
    if (kind, model_type, edit) in ALWAYS:  # which can be built with so few layers
        few_layers(monkeypatch)
    outcome = examine(model_type, kind, edit)
    assert outcome.live in ("equal", "refused", "not built"), outcome
    assert outcome.folder in ("equal", "refused", "not built"), outcome
    assert (kind, model_type, edit) not in ALWAYS or outcome.live != "not built", outcome
    if model_type not in IN_TWO_TENSORS:
        assert not (outcome.live == "equal" and outcome.folder == "refused"), outcome
    if (kind, model_type) in WHOLE_SAMPLE and not (model_type in COUNTED and edit == "permute"):
        assert (outcome.live, outcome.folder) == ("equal", "equal"), outcome


UNTIED = ("bert", "roberta", "xlm-roberta", "albert", "deberta", "deberta-v2", "mobilebert")


@pytest.mark.parametrize("model_type", some(("bert", "mobilebert"), UNTIED))
def test_both_biases_of_an_untied_masked_model_are_moved(model_type, tmp_path, unchecked) -> None:
    """As after training, `predictions.bias` and `predictions.decoder.bias` differ; transformers adds the second."""
    model = build(model_type, "masked", {"tie_word_embeddings": False})[1]
    biases = [each for name, each in model.named_parameters() if name.endswith("bias") and VOCAB in each.shape]
    assert len(biases) == 2
    for each in biases:
        nn.init.normal_(each)
    order, ids = [*range(20), *range(VOCAB - 1, 19, -1)], torch.arange(20, 40)[None]
    with quiet(), torch.no_grad():
        model.save_pretrained(tmp_path / "old")
        receipt = el.vocab.edit_vocabulary(tmp_path / "old", order=order, out=tmp_path / "new")
        logits = el.patch(model)(ids).logits[..., order] + 0
        el.vocab.edit_vocabulary(model, order=order)
        for each in (model, type(model).from_pretrained(tmp_path / "new").eval()):
            torch.testing.assert_close(each(receipt.remap(ids)).logits, logits, rtol=1e-5, atol=1e-5)
