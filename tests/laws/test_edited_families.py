"""An edit of a model, live or in its folder, moves all that a token ID names, or refuses: over the model types.

`tools/edited_families.py` compares; it runs all types and all edits as a command.
"""

import pytest
from covering import some
from edited_families import EDITS, examine
from model_families import few_layers
from tiny_models import KINDS, MORE_KINDS, SAMPLE, model_types

WHOLE_SAMPLE = [(kind, name) for kind, names in SAMPLE.items() for name in names]
ALWAYS = [(*case, EDITS[number % 3]) for number, case in enumerate(WHOLE_SAMPLE)]
"""Each type of the sample with one edit, in turn; `--all` adds the other edits and the other types."""

LIKE_OTHERS = "qwen2 olmo2 smollm3 exaone4 stablelm ministral3 hunyuan_v1_dense granite deepseek_v3 minicpm3".split()
LIKE_OTHERS += "llama4_text nanochat jamba gpt_oss falcon".split()
"""Types whose table and head are those of another type of the sample: `--all` adds them."""

COUNTED = ("xlm-roberta", "roberta", "m2m_100", "nllb-moe")
ALWAYS += [("image-text", "gemma4", "permute"), ("image-text", "evolla", "permute"), ("causal", "whisper", "permute")]
ALWAYS += [("seq2seq", "encoder-decoder", "add"), ("text encoder", "clip_text_model", "permute")]
ALWAYS += [("image-text", "mistral_large4", "remove"), ("causal", "deepseek_v4", "permute")]
RUN = [case for case in ALWAYS if case[1] not in LIKE_OTHERS]
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
