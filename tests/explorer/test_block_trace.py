"""The first block, opened: its last vectors are the model's, and its weights those of its attention."""

import pytest
import torch
import torch.nn.functional as F
from decoders import small
from kinds import INJECTIONS, POSITIONS

from embedlayer.explorer.block_trace import trace_first_block

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2])  # more than a head is wide
PLACES = torch.arange(len(IDS))
OPTIONS = {"plain": {}, "grouped": {"num_kv_heads": 2}, "scaled": {"query_scale": 0.5, "mlp_dim": 10, "norm_eps": 0.1}}


def traced(model):
    return trace_first_block(model, IDS if len(model.injections) else None, model.table(IDS).detach(), PLACES)


@torch.no_grad()
def states_of(model):
    ids = IDS if len(model.injections) else None
    return list(model.hidden_states(ids, inputs_embeds=model.table(IDS), positions=PLACES))


def sums_of_values(trace):
    values = trace.values.repeat_interleave(len(trace.weights) // len(trace.values), 0)
    return trace.weights @ values


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_last_vectors_are_the_models_output_of_its_first_block(name, options):
    model = small(name, **OPTIONS[options])
    trace, states = traced(model), states_of(model)
    assert trace.vectors["input"].equal(states[0])
    assert trace.vectors["mlp_sum"].equal(states[1])
    assert all(mine.equal(its) for mine, its in zip(trace.states, states, strict=True))


@pytest.mark.parametrize("name", INJECTIONS)
def test_vectors_of_other_tables_have_their_place(name):
    model = small(injections=[INJECTIONS[name]()])
    trace, states = traced(model), states_of(model)
    assert list(trace.vectors.values())[-1].equal(states[1])
    assert ("stream" in trace.vectors) == (name in ("n-gram, gated", "per-layer"))
    torch.testing.assert_close(sums_of_values(trace), trace.heads)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("options", OPTIONS)
def test_each_vector_follows_from_those_before_it(name, options):
    model = small(name, **OPTIONS[options])
    block, trace = model.blocks[0], traced(model)
    vectors = trace.vectors
    with torch.no_grad():
        expected = {
            "attention_norm": F.rms_norm(
                vectors["input"], (24,), block.attention_norm.weight, block.attention_norm.eps
            ),
            "attention": sums_of_values(trace).transpose(0, 1).flatten(1) @ block.attention.out.weight.T,
            "attention_sum": vectors["input"] + vectors["attention"],
            "mlp_norm": F.rms_norm(vectors["attention_sum"], (24,), block.mlp_norm.weight, block.mlp_norm.eps),
            "gate": vectors["mlp_norm"] @ block.mlp.gate.weight.T,
            "up": vectors["mlp_norm"] @ block.mlp.up.weight.T,
            "product": vectors["gate"] * vectors["gate"].sigmoid() * vectors["up"],
            "mlp": vectors["product"] @ block.mlp.down.weight.T,
            "mlp_sum": vectors["attention_sum"] + vectors["mlp"],
        }
    assert list(vectors) == ["input", *expected]
    for step, numbers in expected.items():
        torch.testing.assert_close(vectors[step], numbers, msg=lambda text, step=step: f"{step}: {text}")
    torch.testing.assert_close(trace.weights.sum(-1), torch.ones(4, len(IDS)))
    assert trace.weights.triu(1).count_nonzero() == 0


def test_the_weights_are_the_softmax_of_rotated_queries_and_keys():
    model = small("rotary", num_kv_heads=2, query_scale=0.5)
    attention, trace = model.blocks[0].attention, traced(model)
    normed = trace.vectors["attention_norm"]
    queries, keys = (each(normed).unflatten(-1, (-1, 6)).transpose(0, 1) for each in (attention.query, attention.key))
    queries, keys = model.position.rotate(queries, keys, PLACES)
    scores = 0.5 * queries @ keys.repeat_interleave(2, 0).transpose(1, 2) / 6**0.5
    masked = scores.masked_fill(torch.ones(len(IDS), len(IDS)).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(trace.weights, masked.softmax(-1))


def test_the_model_has_no_hooks_and_the_same_modules_afterwards():
    model = small()
    modules = list(model.modules())
    traced(model)
    assert list(model.modules()) == modules
    assert not any(module._forward_hooks for module in modules)
