"""Token Distillation: new rows that the model reads as their old subwords."""

import copy

import pytest
import torch
from covering import some

import embedlayer as el
from embedlayer import SizeError, TrainingOptions, VocabularyError
from embedlayer.vocab import add_tokens, distill_rows, find_snippets

TEXT = "the small dog loved other small dogs . they barked ; the dog loved it . " * 9
TERMS = [" loved", " barked", " otters"]


def edited(*, tied: bool):
    """A model with new tokens, the model before, and the keywords of `distill_rows`."""
    torch.manual_seed(0)
    old = el.train_tokenizer((), "byte")
    head = None if tied else el.OutputHead(vocab_size=257, embed_dim=8)
    model = el.DecoderLM(el.TokenEmbedding(257, 8), el.RotaryEmbedding(4), head, num_layers=1, num_heads=2)
    teacher = copy.deepcopy(model)
    receipt = add_tokens(model, TERMS, tokenizer=old)
    options = {"tokenizer": receipt.tokenizer, "teacher_tokenizer": old, "token_ids": list(receipt.added)}
    return model, teacher, options


@pytest.mark.parametrize("tied", some([True], [True, False]))
def test_rows_of_tokens_that_occur_learn_to_be_read_as_subwords_and_nothing_else_changes(tied) -> None:
    model, teacher, options = edited(tied=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = options["token_ids"]
    snippets = find_snippets([TEXT], options["tokenizer"], ids, per_token=4, length=40)
    assert len(snippets) == 8
    training = TrainingOptions(steps=40, learning_rate=0.01, batch_size=8, max_length=40)
    only_hidden = {"prediction_weight": 0.0, "start_weight": 0.0}
    losses = distill_rows(model.train(), teacher, snippets, training, **options, **only_hidden)
    assert losses.trained == tuple(ids[:2])
    assert min(losses.hidden) < 0.8 * losses.hidden[0]
    for name, tensor in model.state_dict().items():
        changed = (tensor != before[name]).reshape(len(tensor), -1).any(1).nonzero().squeeze(1).tolist()
        assert changed == (ids if name == "table.weight" else [])
    shared, (one, other) = model.table.weight[ids[2]] - before["table.weight"][ids[2]], ids[:2]
    assert not torch.equal(model.table.weight[one] - before["table.weight"][one], shared)
    assert not torch.equal(model.table.weight[other] - before["table.weight"][other], shared)
    assert model.training
    assert model.head.tied == tied
    assert all(parameter.requires_grad for parameter in model.parameters())
    losses = distill_rows(model, teacher, snippets, training, **options)
    assert losses.prediction[-1] < losses.prediction[0]
    if not tied:
        assert (model.head.weight[ids] != before["head.weight"][ids]).any(1).all()
        assert torch.equal(model.head.weight[:257], before["head.weight"][:257])


def test_the_loss_is_that_of_the_definition() -> None:
    """Before the first step: hidden states at equal ends of the texts, from the first new token on."""
    model, teacher, options = edited(tied=True)
    snippet = "it loved it"
    training = TrainingOptions(steps=1, batch_size=2, max_length=11)
    own = torch.tensor(options["tokenizer"].encode(snippet).ids)
    theirs = torch.tensor(list(snippet.encode()))
    hidden, wanted = model.hidden(own).detach(), teacher.hidden(theirs).detach()
    expected = (hidden[2:] - wanted[7:]).square().mean()
    prediction = model.loss(own[:-1], own[1:]).detach()
    losses = distill_rows(model, teacher, [snippet], training, **options)
    torch.testing.assert_close(torch.tensor(losses.hidden[0]), expected)
    torch.testing.assert_close(torch.tensor(losses.prediction[0]), prediction)


def test_rows_near_their_start_cost_less() -> None:
    """One token occurs, so its row moves by the shared change and its own."""
    moved = []
    for weight in (0.0, 10.0):
        model, teacher, options = edited(tied=True)
        before = model.table.weight.detach().clone()
        training = TrainingOptions(steps=10, learning_rate=0.05)
        distill_rows(model, teacher, ["it loved it"], training, start_weight=weight, **options)
        change = (model.table.weight - before)[257:]
        moved.append((change[0] - change[2]).norm().item())
    assert moved[1] < 0.9 * moved[0]


def test_what_cannot_be_trained_is_an_error_and_changes_nothing() -> None:
    model, teacher, options = edited(tied=True)
    before = model.table.weight.detach().clone()
    with pytest.raises(VocabularyError):
        distill_rows(model, teacher, ["the dog", ""], TrainingOptions(steps=1), **options)
    with pytest.raises(SizeError):
        distill_rows(model, teacher, ["it loved it"], TrainingOptions(minutes=1.0), **options)
    with pytest.raises(SizeError):
        find_snippets([TEXT], options["tokenizer"], [257], length=0)
    assert torch.equal(model.table.weight, before)
    assert isinstance(model.table, el.TokenEmbedding)
