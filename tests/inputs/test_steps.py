"""Named steps of the input embedding: their names, what they say, and the tensors that they pass on."""

import pytest
import torch
from kinds import EMBED_DIM, MAX_SEQ_LEN, POSITIONS, VOCAB_SIZE

import embedlayer as el
from embedlayer.inputs.steps import EmbeddingStep, TokenBatch, input_steps, run_steps, trace_steps

IDS = torch.tensor([[1, 7, 0, 49], [3, 7, 48, 2]])


@pytest.mark.parametrize("name", POSITIONS)
def test_the_steps_of_a_layer_are_named_and_say_what_they_did(name) -> None:
    position = POSITIONS[name]()
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, position=position).eval()
    steps = {step.name: step for step in layer.trace(IDS)}
    assert list(steps) == ["look_up", "scale", "position", "dropout"]
    assert steps["look_up"].description == "a table of 50 × 24"
    assert steps["scale"].description == "each row times 4.89898 = √D"
    assert steps["position"].description.startswith(f"{type(position).__name__}: adds ")
    assert (steps["position"].added is None) == (position.hook != "add")
    if position.hook == "add":
        torch.testing.assert_close(steps["position"].added, position(torch.arange(4)))


def test_vectors_in_place_of_ids_have_no_look_up() -> None:
    layer = el.lessons.GPTEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN)
    vectors = torch.randn(2, 4, EMBED_DIM)
    steps = list(layer.trace(inputs_embeds=vectors))
    assert [step.name for step in steps] == ["position"]
    assert torch.equal(steps[-1].vectors, layer(inputs_embeds=vectors))
    with pytest.raises(el.SizeError):
        next(layer.trace(IDS, inputs_embeds=vectors))


def test_a_table_whose_call_is_hooked_is_one_step() -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM, scale=2.0)
    steps, batch = input_steps(table, el.Position()), TokenBatch(IDS, torch.arange(4))
    assert [step.name for step in trace_steps(steps, batch)] == ["look_up", "scale", "position"]
    table.register_forward_hook(lambda _, given, found: found + 1)
    traced = list(trace_steps(steps, batch))
    assert [step.name for step in traced] == ["look_up", "position"]
    assert torch.equal(traced[-1].vectors, run_steps(steps, batch))


def test_token_types_norm_and_projection_are_steps_in_any_order() -> None:
    table, types = el.TokenEmbedding(10, 8), el.TokenEmbedding(2, 12)
    norm, projection = torch.nn.LayerNorm(12), torch.nn.Linear(8, 12)
    steps = [
        EmbeddingStep("look_up", table),
        EmbeddingStep("project", projection),
        EmbeddingStep("types", types),
        EmbeddingStep("norm", norm),
    ]
    ids, segments = torch.tensor([5, 2, 7]), torch.tensor([0, 1, 1])
    for chosen, said in ((None, "no segments"), (torch.zeros(3).long(), "segment 0"), (segments, "the segments")):
        batch = TokenBatch(ids, torch.arange(3), chosen)
        traced = {step.name: step for step in trace_steps(steps, batch)}
        assert traced["types"].description.startswith(said)
        expected = projection(table(ids))
        assert torch.equal(traced["project"].vectors, expected)
        expected = norm(expected if chosen is None else expected + types(chosen))
        assert torch.equal(traced["norm"].vectors, expected)
        assert torch.equal(run_steps(steps, batch), expected)
    assert (traced["project"].description, traced["norm"].description) == ("8 to 12", "width 12")


def test_a_later_loss_has_a_gradient_at_every_step() -> None:
    frozen = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM, scale=2.0).requires_grad_(requires_grad=False)
    trace = trace_steps(input_steps(frozen, el.Position()), TokenBatch(IDS, torch.arange(4)))
    rows = next(trace).vectors.requires_grad_()
    *_, last = trace
    (gradient,) = torch.autograd.grad(last.vectors.sum(), rows)
    assert torch.equal(gradient, torch.full_like(rows, 2.0))
