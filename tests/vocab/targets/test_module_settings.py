"""Sizes and IDs that modules and configurations state follow an edit, its undo and `unpatch`."""

import pytest
import torch
from vocab_models import IDS, V, close, same, state_of

import embedlayer as el
from embedlayer.vocab.operations import edit_vocabulary, remove_tokens


@pytest.mark.parametrize("tied", [True, False])
def test_a_patched_model_of_transformers_is_edited_with_its_configuration(tied) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": [28, 29], "pad_token_id": 0}
    made = el.patch(LlamaForCausalLM(LlamaConfig(vocab_size=V, tie_word_embeddings=tied, **ids, **sizes)).eval())
    unread, before, state = made(IDS).logits, made(IDS).logits.detach(), state_of(made)
    receipt = edit_vocabulary(made, remove=[5], add=3)
    with pytest.raises(el.StaleRowsError, match="keep them with outputs.logits.detach"):
        unread.sum()
    new_ids = receipt.remap(torch.where(IDS == 5, 6, IDS))
    kept = receipt.row_map.sources[: V - 1]
    same_text = (IDS != 5).all(1)
    close(made(new_ids).logits[same_text][..., : V - 1], before[same_text][..., kept])
    config = made.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (V + 2, 1, [27, 28], 0)
    made(new_ids, labels=new_ids).loss.backward()
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
    el.unpatch(made)
    assert made(new_ids).logits.shape[-1] == V + 2
    el.patch(made)
    receipt.undo(made)
    assert same(state_of(made), state)
    assert made.config.eos_token_id == [28, 29]
    with pytest.raises(el.VocabularyError, match="names it as eos_token_id"):
        remove_tokens(made, [28])


def sizes_of(model: torch.nn.Module) -> dict[str, object]:
    names = ("num_embeddings", "padding_idx", "in_features", "out_features", "vocab_size")
    parts = model.named_modules()
    return {f"{name}.{key}": getattr(part, key) for name, part in parts for key in names if hasattr(part, key)}


@pytest.mark.parametrize(("kind", "model_type"), [("causal", "gpt2"), ("masked", "mobilebert"), ("seq2seq", "bart")])
def test_an_edit_is_undone_after_unpatch_as_the_error_says(kind: str, model_type: str, unchecked) -> None:
    from tiny_models import build

    model = build(model_type, kind)[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receipt = el.vocab.edit_vocabulary(el.patch(model), remove=[20], add=2)
    el.unpatch(model)
    assert sizes_of(model) == sizes_of(type(model)(model.config))
    with pytest.raises(el.SizeError, match=r"a model of transformers after patch\(model\)"):
        receipt.undo(model)
    receipt.undo(el.patch(model))
    assert same(el.unpatch(model).state_dict(), before)
    assert sizes_of(model) == sizes_of(type(model)(model.config))
