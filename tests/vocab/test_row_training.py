"""A few rows learn, and nothing else."""

from typing import Any

import pytest
import torch
from covering import cases
from torch import nn
from vocab_models import IDS, MODELS, D, V, state_of, train

import embedlayer as el
from embedlayer.vocab import merge_rows, train_only_rows

KINDS = ["tied", "padded", "free", "tied, with a bias", "row-sparse"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_new_rows_learn_and_every_other_number_stays(kind) -> None:
    made = MODELS[kind]()
    free = not made.head.tied
    receipt = el.vocab.add_tokens(made, 3, train_only_new=True)
    assert list(receipt.added) == [V, V + 1, V + 2]
    learning = {name: p.shape for name, p in made.named_parameters() if p.requires_grad}
    assert set(learning.values()) == {(3, D)}
    assert len(learning) == (2 if free else 1)
    before, logits = state_of(made), made(IDS)
    optimizer = el.RowAdamW(el.param_groups(made), lr=0.1)
    ids = torch.where(IDS == 4, V, torch.where(IDS == 7, V + 2, IDS))
    first = made.loss(ids[:, :-1], ids[:, 1:]).item()
    train(made, optimizer, ids, steps=5)
    assert made.loss(ids[:, :-1], ids[:, 1:]).item() < first
    trained = made(IDS)
    assert torch.equal(trained[..., :V], logits[..., :V])
    merge_rows(made)
    assert torch.equal(made(IDS)[..., :V], logits[..., :V])
    torch.testing.assert_close(made(IDS), trained)
    after = state_of(made)
    for name, tensor in after.items():
        old = before.get(name, before.get(name.replace("table.weight", "table.base.weight")))
        changed = (tensor != old).reshape(len(tensor), -1).any(1).nonzero().squeeze(1).tolist()
        assert set(changed) <= ({V, V + 1, V + 2} if name in ("table.weight", "head.weight") else set())
    assert made.head.tied != free
    assert all(parameter.requires_grad for parameter in made.parameters())
    fresh = MODELS[kind]()
    el.vocab.add_tokens(fresh, 3)
    fresh.load_state_dict(made.state_dict())
    assert made.config == fresh.config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "unmerged"])
def test_the_undo_after_training_the_new_rows_restores_every_bit(kind, merged) -> None:
    made = MODELS[kind]()
    before = state_of(made)
    receipt = el.vocab.add_tokens(made, 2, train_only_new=True)
    train(made, el.RowAdamW(el.param_groups(made), lr=0.1), torch.where(IDS == 4, V, IDS))
    if merged:
        merge_rows(made)
    receipt.undo(made)
    after = state_of(made)
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert all(parameter.requires_grad for parameter in made.parameters())


@pytest.mark.parametrize("kind", ["tied", "free"])
def test_an_undo_that_is_refused_leaves_the_rows_separate(kind) -> None:
    made = MODELS[kind]()
    receipt = el.vocab.add_tokens(made, 2)
    train_only_rows(made, [3])  # a row that the edit kept
    optimizer = el.RowAdamW(el.param_groups(made), lr=0.1)
    train(made, optimizer, IDS)
    before, logits = state_of(made), made(IDS)
    with pytest.raises(el.CheckpointError):
        receipt.undo(made)
    after = state_of(made)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(made(IDS), logits)
    train(made, optimizer, IDS)
    assert not torch.equal(made(IDS), logits)
    with pytest.raises(el.SizeError, match="merge_rows"):
        el.vocab.add_tokens(made, 1)
    merge_rows(made)
    el.vocab.add_tokens(made, 1)


def test_what_cannot_be_trained_so_is_refused() -> None:
    factorised = MODELS["factorised"]()
    made = MODELS["tied"]()
    for error, refused in (
        (el.SizeError, lambda: el.vocab.add_tokens(factorised, 2, train_only_new=True)),
        (el.SizeError, lambda: train_only_rows(el.TokenEmbedding(V, D), [3])),
        (el.SizeError, lambda: merge_rows(factorised)),
        (el.SizeError, lambda: el.vocab.add_tokens("folder", 2, train_only_new=True)),
        (el.TokenIdError, lambda: train_only_rows(made, [V])),
    ):
        with pytest.raises(error):
            refused()
    assert factorised.table.vocab_size == V
    assert all(parameter.requires_grad for each in (factorised, made) for parameter in each.parameters())


def test_an_optimizer_from_before_refuses_to_train_nothing() -> None:
    model = nn.ModuleDict({"table": el.TokenEmbedding(20, 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    el.vocab.train_only_rows(model, [3])
    model["table"](torch.tensor([3])).sum().backward()
    with pytest.raises(el.StaleRowsError, match="AdamW"):
        optimizer.step()
    torch.optim.AdamW(each for each in model.parameters() if each.requires_grad).step()
    el.vocab.merge_rows(model)
    optimizer.step()


@cases("architecture, tied", [("llama", "causal"), ("bert", "masked")], [True, False])
def test_a_saved_model_of_transformers_has_the_trained_rows_in_its_weights(architecture, tied, tmp_path) -> None:
    """transformers and load read it; `state_dict` has the rows separately, and both are loaded bit for bit."""
    from safetensors.torch import load_file
    from tiny_models import VOCAB, build, quiet

    model_type, kind = architecture
    with quiet():
        model: Any = el.patch(build(model_type, kind, {"tie_word_embeddings": tied})[1])
    el.vocab.add_tokens(model, 3, train_only_new=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        nn.init.normal_(parameter)
    ids = torch.tensor([[5, VOCAB, VOCAB + 2, 7]])
    logits = model(input_ids=ids).logits.detach().clone()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with quiet():
        model.save_pretrained(tmp_path / "whole")
        model.save_pretrained(tmp_path / "state", state_dict=model.state_dict())
        read, problems = type(model).from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(problems.values())
    torch.testing.assert_close(read.eval()(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    layer = el.load(tmp_path / "whole")
    assert torch.equal(layer.table.rows(VOCAB, VOCAB + 3), trained[0])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    saved = load_file(tmp_path / "whole" / "model.safetensors")
    again = load_file(tmp_path / "state" / "model.safetensors")
    assert saved.keys() == again.keys()
    for loaded in (saved, state):
        for parameter in trained:
            nn.init.zeros_(parameter)
        model.load_state_dict(loaded, strict=loaded is state)
        assert torch.equal(model(input_ids=ids).logits, logits)
    el.vocab.merge_rows(model)
    assert not {"save_pretrained", "_hooks_of_its_rows"} & vars(model).keys()
    with quiet():
        model.save_pretrained(tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(tensor, merged[name]) for name, tensor in saved.items())


def patched_with_padding_at_the_end_of_text() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return el.patch(LlamaForCausalLM(LlamaConfig(vocab_size=V, pad_token_id=2, eos_token_id=2, **sizes)))


@pytest.mark.parametrize("head", ["tied", "untied", "patched"])
def test_the_row_of_a_padding_token_that_texts_contain_is_trained_as_the_error_says(head: str, unchecked) -> None:
    if head == "patched":
        model, (table, output) = patched_with_padding_at_the_end_of_text(), ("model.embed_tokens", "lm_head")
    else:
        untied = el.OutputHead(vocab_size=V, embed_dim=D, padding_idx=2) if head == "untied" else None
        model = el.DecoderLM(el.TokenEmbedding(V, D, padding_idx=2), "none", untied, num_layers=1, num_heads=2)
        table, output = "table", "head"
    with pytest.raises(el.SizeError, match="Token 2 is the padding token"):
        train_only_rows(model, [2])
    model.get_submodule(table).padding_idx = model.get_submodule(output).padding_idx = None
    train_only_rows(model, [2])
    before = model.get_submodule(table).delta.detach().clone()
    ids = torch.tensor([[5, 2, 7, 2]])
    logits = model(ids).logits if head == "patched" else model(ids)
    logits.square().mean().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    assert not torch.equal(model.get_submodule(table).delta, before)
    merge_rows(model)


def test_rows_that_a_model_reads_itself_are_not_trained_alone(unchecked) -> None:
    from tiny_models import VOCAB, build

    model = el.patch(build("mobilebert", "masked")[1])
    with pytest.raises(el.SizeError, match="train_only_new"):
        el.vocab.add_tokens(model, 2, train_only_new=True)
    assert model.get_input_embeddings().vocab_size == VOCAB
    el.vocab.add_tokens(model, 2)
