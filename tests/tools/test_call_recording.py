"""Calls of functions in modeling files, recorded while a model runs."""

from typing import Any

import pytest
import torch
from call_recording import is_rotary, recorded_calls, rotated_tensors
from tiny_models import build


@pytest.mark.parametrize(
    ("model_type", "kind", "name"),
    [
        ("llama", "causal", "apply_rotary_pos_emb"),
        ("gptj", "causal", "apply_rotary_pos_emb"),
        ("roformer", "masked", "apply_rotary_position_embeddings"),  # a static method
    ],
)
def test_queries_and_keys_are_kept_as_they_were_before_and_after(model_type, kind, name) -> None:
    _, model = build(model_type, kind)
    spaces = [vars(space) for space in (type(model), *map(type, model.modules()))]
    before = [dict(space) for space in spaces]
    calls: list[Any] = []
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain = model(ids).logits
        with recorded_calls(model, is_rotary, calls.append):
            assert torch.equal(model(ids).logits, plain)
    assert {call.name for call in calls} == {name}
    pairs = [pair for call in calls for pair in rotated_tensors(call)]
    assert len(pairs) == 2 * len(calls) or model_type == "gptj"  # GPT-J rotates queries and keys by one call each
    norms = [(x.norm(dim=-1), y.norm(dim=-1)) for x, y in pairs]
    assert all(torch.allclose(x, y, rtol=1e-5) for x, y in norms)
    assert any(not torch.equal(x, y) for x, y in pairs)
    assert [dict(space) for space in spaces] == before
    with torch.no_grad():
        model(ids)
    assert len(calls) == len(pairs) // (1 if model_type == "gptj" else 2)


def test_an_error_inside_leaves_the_functions_as_they_were() -> None:
    from transformers.models.llama import modeling_llama

    _, model = build("llama", "causal")
    function = modeling_llama.apply_rotary_pos_emb
    with pytest.raises(KeyError), recorded_calls(model, is_rotary, lambda _: None):
        assert modeling_llama.apply_rotary_pos_emb is not function
        raise KeyError
    assert modeling_llama.apply_rotary_pos_emb is function
