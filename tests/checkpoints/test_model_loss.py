"""Weights of tokens in the loss of a patched model: who gets them, and who refuses them.

Values and gradients are in `test_patched_training.py`.
"""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedlayer import OutputHead, ShapeError, SizeError, patch, unpatch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

V, B, T = 97, 3, 10
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.linspace(-1, 2, B * T).view(B, T)


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()


def bart() -> Any:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=V, **sizes, **heads))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, token_weights: Tensor, **others: Any) -> Tensor:
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return (losses * token_weights[:, 1:]).mean()


@pytest.mark.parametrize("build", [bart, bert])
def test_a_model_whose_loss_is_code_of_its_own_refuses_them_by_name(build) -> None:
    with pytest.raises((SizeError, TypeError), match="token_weights"):
        patch(build())(IDS, labels=IDS, token_weights=WEIGHTS)


def test_another_loss_function_is_refused_or_gets_them() -> None:
    model = llama()
    model.loss_function = own_loss
    with pytest.raises(SizeError, match="The loss of a LlamaForCausalLM is own_loss, which has no token_weights"):
        patch(model)(IDS, labels=IDS, token_weights=WEIGHTS)
    assert unpatch(model).loss_function is own_loss
    model = patch(llama())
    expected = model(IDS, labels=IDS, token_weights=WEIGHTS).loss
    model.loss_function = own_loss  # after `patch`
    torch.testing.assert_close(model(IDS, labels=IDS, token_weights=WEIGHTS).loss, expected)
    assert unpatch(model).loss_function is own_loss


def test_what_does_not_fit_is_refused() -> None:
    model = patch(llama())
    with pytest.raises(SizeError, match="ignored token_weights"):
        model(IDS, token_weights=WEIGHTS)
    with pytest.raises(ShapeError, match=r"token_weights must be floats \(3, 10\)"):
        model(IDS, labels=IDS, token_weights=WEIGHTS[:, 1:])
    with pytest.raises(SizeError, match="token_weights: inf at row 0, column 4 is not finite"):
        model(IDS, labels=IDS, token_weights=WEIGHTS.index_fill(1, torch.tensor([5]), torch.inf))
    ignored = torch.full_like(IDS, -100)
    assert model(IDS, labels=ignored, token_weights=WEIGHTS).loss.isnan()  # as without weights
    assert model(IDS, labels=ignored, token_weights=WEIGHTS, num_items_in_batch=4).loss == 0


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # in peft
def test_copies_and_peft_take_them_without_logits_and_unpatch_restores_all() -> None:
    plain = llama()
    patched = patch(copy.deepcopy(plain))
    expected = patched(IDS, labels=IDS, token_weights=WEIGHTS).loss
    copies = copy.deepcopy(patched), pickle.loads(pickle.dumps(patched)), adapted(patch(copy.deepcopy(plain)))
    for model in copies:
        report, *_ = (module.logits_report for module in model.modules() if isinstance(module, OutputHead))
        report.is_done = False
        model.train().gradient_checkpointing_enable()
        loss = model(input_ids=IDS, labels=IDS, token_weights=WEIGHTS).loss
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert not report.is_done
    restored = unpatch(patched)
    assert not {"forward", "_loss_function"} & set(vars(restored))
    assert restored(IDS, labels=IDS).loss == plain(IDS, labels=IDS).loss
