"""A job that is offered for a model of transformers ends, for every family that is taken.

The families are those of `examples/tiny_models.py`: a sample is run always, the other causal ones of the sample of
`tests/test_all_families.py` with `make test-all`.
"""

import warnings

import pytest
import torch
from covering import some
from torch import nn

import embedlayer as el

VOCAB = 131
NEW = 3
IDS = torch.randint(20, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))

CASES = [
    *((kind, "causal") for kind in ("llama", "gpt2", "gemma2", "opt", "granite", "mamba", "bloom", "mpt", "phi")),
    *((kind, "causal") for kind in ("qwen2", "gptj", "gpt_neox", "falcon", "olmo2", "cohere2", "gemma3_text", "jamba")),
    *((kind, "causal") for kind in ("deepseek_v3", "llama4_text", "exaone4", "stablelm", "xglm", "biogpt", "bart")),
    *((kind, "masked") for kind in ("bert", "roberta", "electra", "modernbert", "deberta-v2")),
]
ALWAYS = [("llama", "causal"), ("gpt2", "causal"), ("gemma2", "causal"), ("opt", "causal"), ("bert", "masked")]


def built(model_type: str, kind: str) -> nn.Module:
    """A small random model, patched; soft caps are low, so that leaving them out shows."""
    from tiny_models import build

    settings = {"final_logit_softcapping": 3.0} if model_type == "gemma2" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return el.patch(build(model_type, kind, settings)[1])


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("model_type", "kind"), some(ALWAYS, CASES))
def test_added_rows_are_trained_merged_and_undone(model_type, kind, unchecked) -> None:
    model = built(model_type, kind)
    before, size = state_of(model), model.config.get_text_config().vocab_size
    receipt = el.vocab.add_tokens(model, NEW, train_only_new=True)
    rows = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert rows
    assert {len(each) for each in rows} == {NEW}
    optimizer, start = torch.optim.AdamW(rows, lr=0.1), [each.detach().clone() for each in rows]
    ids = torch.where(IDS > VOCAB - 60, VOCAB + 1, IDS)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert not any(torch.equal(each, old) for each, old in zip(rows, start, strict=True))
    with pytest.raises(el.CheckpointError, match=r"call embedlayer\.vocab\.merge_rows\(model\) before unpatch"):
        el.unpatch(model)
    logits = model(input_ids=ids).logits.detach()
    el.vocab.merge_rows(model)
    torch.testing.assert_close(model(input_ids=ids).logits.detach(), logits)
    receipt.undo(model)
    assert same(state_of(model), before)
    assert model.config.get_text_config().vocab_size == size
    el.unpatch(model)
    assert same(state_of(model), before)
    assert not any(isinstance(part, el.TokenEmbedding | el.OutputHead) for part in model.modules())


@pytest.mark.parametrize(("model_type", "kind"), some(ALWAYS[:2], ALWAYS))
def test_a_receipt_in_a_saved_folder_is_the_one_that_undo_reads(model_type, kind, tmp_path, unchecked) -> None:
    from safetensors.torch import load_file

    model = built(model_type, kind)
    before = state_of(model)
    receipt = el.vocab.add_tokens(model, NEW, train_only_new=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    el.vocab.merge_rows(model)
    model.save_pretrained(tmp_path / "new")
    receipt.save(tmp_path / "new")
    assert (tmp_path / "new" / "vocabulary-1.receipt").exists()
    el.vocab.last_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    undone = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in undone.items())
    assert type(model).from_pretrained(tmp_path / "back").config.vocab_size == VOCAB
