"""The library's two ends inside live transformers models; `tests/laws` has all types of models, and PEFT on them."""

import copy
import warnings

import pytest
import torch
from tiny_models import build

from embedlayer import CheckpointError, OutputHead, TokenEmbedding, patch, unpatch

pytest.importorskip("transformers", reason="the dev extra is not installed")

pytestmark = pytest.mark.usefixtures("unchecked")


def pair(kind):
    """A model, and a patched copy of it."""
    plain = build(kind, "causal")[1]
    return plain, patch(copy.deepcopy(plain))


@pytest.fixture
def ids():
    return torch.randint(0, 99, (2, 9))


def test_a_copy_reads_its_own_table(ids) -> None:
    _, patched = pair("gpt2")
    twin = copy.deepcopy(patched)
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, patched(ids).logits)
        twin.get_input_embeddings().weight.zero_()
        assert twin(ids).logits.abs().max() == 0
        assert patched(ids).logits.abs().max() > 0


def test_what_is_no_plain_table_is_refused_and_left_alone() -> None:
    class Odd(torch.nn.Embedding):
        pass

    model = build("gpt2", "causal")[1]
    width = model.config.n_embd
    for table in (torch.nn.Embedding(99, width, max_norm=1.0), Odd(99, width), torch.nn.Linear(2, 2)):
        model.transformer.wte = table
        with pytest.raises(CheckpointError):
            patch(model)
        assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(CheckpointError):
        patch(torch.nn.Linear(2, 2))


def with_lora(model):
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    table = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[table.rsplit(".", 1)[-1]], init_lora_weights=False)
    with warnings.catch_warnings():  # that the head of a tied model does not follow: here it does
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")  # where PEFT fears that merging unties
def test_a_model_is_unpatched_under_peft_and_after_merging(kind, ids) -> None:
    plain, patched = pair(kind)
    adapted = with_lora(patched)
    with torch.no_grad():
        expected = adapted(ids).logits + 0
        merged = copy.deepcopy(adapted).merge_and_unload()
        assert isinstance(merged.get_input_embeddings(), TokenEmbedding)
        torch.testing.assert_close(unpatch(merged)(ids).logits, expected, rtol=1e-4, atol=1e-3)
        unpatch(adapted)
        assert not any(isinstance(module, TokenEmbedding | OutputHead) for module in adapted.modules())
        with adapted.disable_adapter():
            torch.testing.assert_close(adapted(ids).logits, plain(ids).logits)
    with pytest.raises(CheckpointError, match="an Embedding of peft: patch before it wraps them"):
        patch(with_lora(plain))
