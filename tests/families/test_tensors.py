"""What follows the vocabulary is found by building the model, and records name the same tensors, with their axis."""

import warnings

import pytest
import torch
from covering import some
from model_families import families
from tiny_models import VOCAB, build, quiet
from torch import nn

import embedlayer as el
from embedlayer.families.vocabulary_tensors import tensors_in

ALWAYS = [("causal", "bart"), ("masked", "bert"), ("masked", "mobilebert"), ("causal", "deepseek_v4")]


def weights_of(model: nn.Module) -> set[int]:
    parts = [part for part in model.modules() if isinstance(part, el.TokenEmbedding | el.OutputHead)]
    return {id(part._parameters["weight"]) for part in parts if "weight" in part._parameters}


@pytest.mark.parametrize(("kind", "model_type"), some(ALWAYS, families()))
def test_a_record_names_each_tensor_that_follows_the_vocabulary(kind, model_type, unchecked) -> None:
    """An encoder that is a part of another model may have a record of its own, which load does not read."""
    apart = {"evolla": "protein_encoder.", "instructblip": "qformer.", "instructblipvideo": "qformer."}
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = el.patch(build(model_type, kind)[1])
        random_state = torch.get_rng_state()
        found = {name: (tensor, axes, rule) for name, tensor, axes, rule in tensors_in(model, weights_of(model), str)}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {id(tensor) for tensor, _, _ in found.values()} >= weights_of(model)
    for name, (tensor, axes, rule) in found.items():
        if apart.get(model_type, "-") not in name:
            assert rule.end is not None or rule.use, name
            assert (rule.axis % tensor.dim(),) == axes, name
    assert all(
        VOCAB not in each.shape or id(each) in {id(t) for t, *_ in found.values()} for each in model.parameters()
    )


def llama(**settings: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    with quiet():
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))


def test_a_width_that_equals_the_number_of_tokens_is_no_evidence(tmp_path) -> None:
    """Neither a live model nor a folder of an unknown family is refused for it, and only the tokens' axis moves."""
    model = llama(vocab_size=24, hidden_size=24, intermediate_size=24)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with quiet():
        model.save_pretrained(tmp_path / "old")
    el.vocab.edit_vocabulary(el.patch(model), remove=[20], add=3)
    el.vocab.edit_vocabulary(tmp_path / "old", remove=[20], add=3, out=tmp_path / "new")
    with quiet():
        edited = type(model).from_pretrained(tmp_path / "new").state_dict()
    for name, tensor in model.state_dict().items():
        rows = 26 if name in ("model.embed_tokens.weight", "lm_head.weight") else len(before[name])
        assert tensor.shape == (rows, *before[name].shape[1:])
        assert torch.equal(tensor, edited[name])


def test_a_tensor_that_follows_the_vocabulary_and_has_no_rule_is_named(tmp_path) -> None:
    """NeoMME looks tokens up in a second table; of a class that is not in the records, all but the table is unknown."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        neomme = el.patch(build("neomme", "masked")[1])
        with pytest.raises(el.VocabularyError, match=r"model\.value_embeddings\.weight has values for each token"):
            el.vocab.add_tokens(neomme, 2)
        build("cpmant", "causal")[1].save_pretrained(tmp_path / "old")
        with pytest.raises(el.CheckpointError, match=r"cpmant\.input_embedding\.weight"):
            el.vocab.add_tokens(tmp_path / "old", 2, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("width", ["positions", "hidden"])
def test_positions_and_blocks_of_as_many_rows_as_tokens_stay_as_they_are(width, tmp_path) -> None:
    """Neither with a warning: the layer reads positions, and the class shows that the blocks do not follow."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 24, "n_embd": 12} if width == "positions" else {"n_positions": 9, "n_embd": 24}
    with quiet():
        model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, **sizes))
        model.save_pretrained(tmp_path / "old")
    el.vocab.remove_tokens(tmp_path / "old", [20], out=tmp_path / "new")
    with quiet():
        edited = GPT2LMHeadModel.from_pretrained(tmp_path / "new").state_dict()
    for name, tensor in model.state_dict().items():
        rows = (
            tensor[[row for row in range(24) if row != 20]]
            if name.endswith(("wte.weight", "lm_head.weight"))
            else tensor
        )
        assert torch.equal(edited[name], rows), name
