"""Attention in blocks of queries equals attention with all scores at once, and has no tensor of T x T."""

from itertools import pairwise

import pytest
import torch
from decoders import CACHES, small
from kinds import POSITIONS, VOCAB_SIZE
from memory import Shapes

from embedlayer import DecoderLM, positions_of
from embedlayer.core import block_sizes

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3, 0, 3, 4, 4, 4, 0], [0] * 14, [1] * 14, [*range(1, 15)]])
"""Padding at both ends and inside of a document, padding alone, one document, documents of one token."""
B, T = DOCUMENTS.shape
IDS = torch.arange(B * T).view(B, T) % VOCAB_SIZE


@pytest.fixture
def blocks(monkeypatch):
    """A function that sets how many scores are computed at once."""
    return lambda most: monkeypatch.setitem(block_sizes.ATTENTION_SCORES, "cpu", most)


def loss_and_gradients(model: DecoderLM, mask, loss=None) -> list[torch.Tensor]:
    model.zero_grad()
    result = (loss or model.loss)(IDS, IDS, attention_mask=mask)
    result.backward()
    return [result.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("mask", [DOCUMENTS, None], ids=["documents", "one document"])
@pytest.mark.parametrize("position", POSITIONS)
def test_blocks_give_the_loss_and_the_gradients_of_all_scores_at_once(position, mask, blocks) -> None:
    model = small(position, num_kv_heads=2)
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model.to(dtype)
        blocks(1 << 24)
        expected = loss_and_gradients(model, mask)
        for most in (1, 150, 700):
            blocks(most)
            torch.testing.assert_close(loss_and_gradients(model, mask), expected, rtol=error, atol=error)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("position", ["rotary", "alibi", "relative", "learned"])
def test_blocks_of_a_long_prompt_attend_to_what_is_cached(position, kind, blocks) -> None:
    model, mask = small(position).double(), DOCUMENTS.where(DOCUMENTS != 0, 1).cummax(-1).values
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask)
        blocks(150)
        cache, positions = CACHES[kind](), positions_of(IDS, mask)
        parts = [
            model(IDS[:, a:b], attention_mask=mask[:, a:b], positions=positions[:, a:b], cache=cache)
            for a, b in pairwise((0, 5, 13, 14))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_compiled_blocks_are_one_graph(position, blocks, unchecked: None) -> None:
    model = small(position, num_layers=1).double()
    expected = loss_and_gradients(model, DOCUMENTS)
    blocks(1000)
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model, DOCUMENTS, compiled), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_transforms_and_exports_compute_all_scores_at_once(position, blocks, unchecked: None) -> None:
    model = small(position).double()
    weights = dict(model.named_parameters())

    def loss(weights, ids=IDS, mask=DOCUMENTS):
        return torch.func.functional_call(model, weights, (ids,), {"attention_mask": mask}).square().mean()

    blocks(150)
    expected = dict(zip(weights, torch.autograd.grad(loss(weights), [*weights.values()]), strict=True))
    torch.testing.assert_close(torch.func.grad(loss)(weights), expected, rtol=1e-12, atol=1e-12)
    tangents = {name: torch.randn_like(each) for name, each in weights.items()}
    _, tangent = torch.func.jvp(loss, (weights,), (tangents,))
    slope = sum((expected[name] * tangents[name]).sum() for name in weights)
    torch.testing.assert_close(tangent, slope, rtol=1e-10, atol=1e-12)
    rows = torch.func.vmap(lambda ids, mask: loss(weights, ids[None], mask[None]))(IDS, DOCUMENTS)
    torch.testing.assert_close(rows.mean(), loss(weights), rtol=1e-12, atol=1e-12)
    length = torch.export.Dim("T", min=2, max=T)
    shapes = {"ids": {1: length}, "attention_mask": {1: length}}
    exported = torch.export.export(model, (IDS,), {"attention_mask": DOCUMENTS}, dynamic_shapes=shapes)
    found = exported.module()(IDS[:, :9], attention_mask=DOCUMENTS[:, :9])
    torch.testing.assert_close(found, model(IDS[:, :9], attention_mask=DOCUMENTS[:, :9]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["rotary", "alibi", "relative"])
def test_no_tensor_has_all_scores_of_a_long_sequence(position, blocks, unchecked: None) -> None:
    tokens, most = 512, 1 << 15
    model = small(position, num_layers=1)
    ids, mask = torch.ones(1, tokens).long(), 1 + torch.arange(tokens)[None] // 100
    blocks(most)
    with Shapes() as shapes:
        model(ids, attention_mask=mask).square().sum().backward()
    assert not shapes.largest(tokens * tokens // 2)
