"""Statistics, log-probabilities and divergences take logits in every form, with equal results and gradients."""

import pytest
import torch
import torch.nn.functional as F
from deferred_heads import deferred, is_unread
from memory import Shapes
from small_blocks import small_blocks

import embedlayer as el
from embedlayer import token_log_probs
from embedlayer.losses import LinearLogits, divergence, token_statistics

B, T, V, D = 2, 7, 83, 6


class Model(torch.nn.Module):
    """A patched head, whose logits a model scales, caps and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = deferred(el.OutputHead(D, V, init_std=0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.tanh(self.head(hidden).float() * 0.7 / 2.0)


@pytest.fixture
def inputs():
    hidden = torch.randn(B, T + 1, D, requires_grad=True)
    tokens = torch.randint(0, V, (B, T))
    tokens[1, :3] = -100
    return Model(), hidden, tokens


def shifted(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[:, :-1]


FORMS = {
    "deferred logits": lambda model, hidden: (shifted(model(hidden)),),
    "real logits": lambda model, hidden: (shifted(model(hidden) + 0),),
    "uncomputed logits": lambda model, hidden: (
        LinearLogits(shifted(hidden), model.head.weight, logit_scale=0.7, softcap=2.0),
    ),
    "hidden and head": lambda model, hidden: (shifted(hidden), own_head(model)),
}


def own_head(model: Model) -> el.OutputHead:
    """A head with the same weight that applies scale and cap itself."""
    head = el.OutputHead(D, V, softcap=2.0, logit_scale=0.7)
    head.weight = model.head.weight
    return head


@pytest.mark.parametrize("form", FORMS)
def test_results_and_gradients_are_those_of_the_logits(form, inputs) -> None:
    model, hidden, tokens = inputs
    leaves = hidden, model.head.weight
    exact = shifted(2.0 * torch.tanh(0.7 * hidden @ model.head.weight.T / 2.0))
    expected = -F.cross_entropy(exact.flatten(0, 1), tokens.flatten(), reduction="none").view(B, T)
    arguments = FORMS[form](model, hidden)
    logits = arguments if len(arguments) > 1 else arguments[0]
    results = {
        "token_log_probs": token_log_probs(*arguments, tokens),
        "token_statistics": token_statistics(*arguments, tokens, statistics=("log_probs",)).log_probs,
    }
    for name, found in results.items():
        torch.testing.assert_close(found, expected, msg=name)
        gradients = torch.autograd.grad(found.sum(), leaves, retain_graph=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), leaves, retain_graph=True))
    teacher = torch.randn(B, T, V)
    kl = F.kl_div(exact.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    found = divergence(logits, teacher)
    torch.testing.assert_close(found, kl)
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(kl, leaves))
    torch.testing.assert_close(divergence(teacher, logits), divergence(teacher, exact.detach()))


def test_a_table_is_taken_beside_hidden_states(inputs) -> None:
    _, hidden, tokens = inputs
    table, states = el.TokenEmbedding(V, D, init_std=1.0), shifted(hidden)
    expected = table.token_log_probs(states, tokens)
    assert torch.equal(token_log_probs(states, table, tokens), expected)
    assert torch.equal(token_statistics((states, table), tokens).log_probs, table.token_statistics(states, tokens)[0])
    assert divergence((states, table), (states, table.weight)).item() == pytest.approx(0.0, abs=1e-6)


def test_the_logits_of_a_patched_head_stay_uncomputed(inputs) -> None:
    model, hidden, tokens = inputs
    logits = shifted(model(hidden))
    with Shapes() as shapes, small_blocks(tokens=4, rows=20, few_logits=0):
        token_statistics(logits, tokens).log_probs.sum().backward()
        divergence(logits, LinearLogits(shifted(hidden), torch.randn(V, D)))
    assert is_unread(logits)
    assert not shapes.largest(B * T * V)


def test_logits_that_were_read_and_changed_are_taken_as_they_are(inputs) -> None:
    model, hidden, tokens = inputs
    with torch.no_grad():
        logits = shifted(model(hidden))
        logits.div_(3.0)
        exact = shifted(2.0 * torch.tanh(0.7 * hidden @ model.head.weight.T / 2.0)) / 3.0
    expected = -F.cross_entropy(exact.flatten(0, 1), tokens.flatten(), reduction="none").view(B, T)
    torch.testing.assert_close(token_log_probs(logits, tokens), expected)


def test_logits_of_a_forward_pass_without_gradients_have_none(inputs) -> None:
    model, hidden, tokens = inputs
    with torch.no_grad():
        logits = shifted(model(hidden))
    assert not token_log_probs(logits, tokens).requires_grad


def test_logits_whose_weights_changed_are_refused(inputs) -> None:
    model, hidden, tokens = inputs
    logits = shifted(model(hidden))
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(el.StaleRowsError):
        token_log_probs(logits, tokens)


@pytest.mark.parametrize("form", FORMS)
def test_a_temperature_divides_the_logits(form, inputs) -> None:
    model, hidden, tokens = inputs
    exact = shifted(2.0 * torch.tanh(0.7 * hidden @ model.head.weight.T / 2.0)) / 1.7
    expected = -F.cross_entropy(exact.flatten(0, 1), tokens.flatten(), reduction="none").view(B, T)
    torch.testing.assert_close(token_log_probs(*FORMS[form](model, hidden), tokens, temperature=1.7), expected)


REFUSED = [
    (lambda h, y: token_log_probs(h, y, softcap=2.0), el.SizeError),
    (lambda h, y: token_statistics(h, y, vocab_size=5), el.SizeError),
    (lambda h, y: token_log_probs(h, y, temperature=0.0), el.SizeError),
    (lambda h, y: token_log_probs(h), el.SizeError),
    (lambda h, y: token_log_probs(y, y), el.ShapeError),
    (lambda h, y: el.losses.check_batch_invariance(torch.nn.Linear(D, V)), el.ShapeError),
    (lambda h, y: token_log_probs(h, torch.nn.LayerNorm(D), y), el.ShapeError),
    (lambda h, y: token_log_probs((h,), y), el.ShapeError),
    (lambda h, y: token_log_probs((h, h), h, y), el.ShapeError),
    (lambda h, y: token_log_probs(h, el.OutputHead(D, V), y, vocab_size=5), el.SizeError),
    (lambda h, y: divergence(LinearLogits(h, torch.randn(V, D)), h), el.ShapeError),
]


def test_what_does_not_apply_is_refused(unchecked) -> None:
    for call, error in REFUSED:
        with pytest.raises(error):
            call(torch.randn(3, D), torch.tensor([0, 1, 2]))


def test_a_linear_layer_becomes_a_head_as_the_error_advises(unchecked: None) -> None:
    hidden, tokens, linear = torch.randn(3, D), torch.tensor([0, 1, 2]), torch.nn.Linear(D, V)
    with pytest.raises(el.ShapeError, match=r"pass head = OutputHead\(6, 83, bias=True\)") as refused:
        token_log_probs(hidden, linear, tokens)
    assert "head.load_state_dict(linear.state_dict())" in str(refused.value)
    head = el.OutputHead(D, V, bias=True)
    head.load_state_dict(linear.state_dict())
    torch.testing.assert_close(token_log_probs(hidden, head, tokens), token_log_probs(linear(hidden), tokens))
