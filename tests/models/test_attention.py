"""Attention in blocks of queries, or of each document by itself, equals that with all scores at once.

It has no tensor of T x T.
"""

from itertools import pairwise, product
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from covering import cases, covering, some
from decoders import CACHES, small
from kernel_paths import cpu_taken_for_cuda
from kinds import POSITIONS, VOCAB_SIZE
from memory import Shapes
from releases import skip_without
from torch.nn.attention import SDPBackend, sdpa_kernel

from embedlayer import DecoderLM, Position, positions_of
from embedlayer.core import block_sizes
from embedlayer.models import attention
from embedlayer.models.attention import AddedScores

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


BY_HOOK = ["learned", "rotary", "rotary, query scaling", "alibi", "relative", "none"]
"""Schemes of each form that attention knows."""


@pytest.mark.parametrize(
    ("position", "is_masked"), some(covering(product(BY_HOOK, [False, True])), product(POSITIONS, [False, True]))
)
def test_blocks_give_the_loss_and_the_gradients_of_all_scores_at_once(position, is_masked, blocks) -> None:
    model, mask = small(position, num_kv_heads=2), DOCUMENTS if is_masked else None
    for dtype, error, sizes in ((torch.float64, 1e-12, (1, 150, 700)), (torch.float32, 1e-5, (150,))):
        model.to(dtype)
        blocks(1 << 24)
        expected = loss_and_gradients(model, mask)
        for most in sizes:
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


@pytest.mark.parametrize(
    ("position", "backend"), some([("relative", "eager")], product(["rotary", "relative"], ["eager", "aot_eager"]))
)
def test_compiled_blocks_are_one_graph(position, backend, blocks, unchecked: None) -> None:
    model = small(position, num_layers=1).double()
    expected = loss_and_gradients(model, DOCUMENTS)
    blocks(1000)
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, fullgraph=True, backend=backend)
    torch.testing.assert_close(loss_and_gradients(model, DOCUMENTS, compiled), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", some(["alibi"], ["rotary", "alibi"]))
def test_transforms_and_exports_compute_all_scores_at_once(position, blocks, unchecked: None) -> None:
    model = small(position).double()
    weights = dict(model.named_parameters())

    def loss(weights, ids=IDS, mask=DOCUMENTS):
        return torch.func.functional_call(model, weights, (ids,), {"attention_mask": mask}).square().mean()

    blocks(150)
    expected = dict(zip(weights, torch.autograd.grad(loss(weights), list(weights.values())), strict=True))
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


class VarlenAttention:
    """The definition of torch's `varlen_attn` for causal attention of sequences to themselves; it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ) -> torch.Tensor:
        assert cu_seq_q is cu_seq_k
        ends = cu_seq_q.tolist()
        assert (cu_seq_q.dtype, ends[0], ends[-1], window_size) == (torch.int32, 0, len(q), (-1, 0))
        assert max_q == max_k == max(b - a for a, b in pairwise(ends))
        assert enable_gqa or q.shape[1] == k.shape[1]
        self.calls += 1
        parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in pairwise(ends)]
        options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        return torch.cat([F.scaled_dot_product_attention(*each, **options).transpose(0, 1) for each in parts])


@pytest.fixture
def varlen_attention(monkeypatch):
    """Compute as on CUDA, where torch takes every dtype and calls the definition of its variable-length attention."""
    skip_without("torch.nn.attention.varlen:varlen_attn")
    from torch.nn.attention import varlen

    definition = VarlenAttention()
    monkeypatch.setattr(varlen, "varlen_attn", definition)
    monkeypatch.setattr(attention, "_has_flash_attention", lambda *tensors: True)
    with cpu_taken_for_cuda():
        yield definition


MASKS = {
    "padding": DOCUMENTS,
    "no padding": DOCUMENTS.where(DOCUMENTS != 0, 1).cummax(-1).values,
    "padding alone": torch.zeros_like(DOCUMENTS),
    "booleans": DOCUMENTS > 1,
}


@pytest.mark.parametrize(("position", "mask"), some(covering(product(BY_HOOK, MASKS)), product(POSITIONS, MASKS)))
def test_documents_by_themselves_give_the_loss_and_the_gradients_of_all_scores_at_once(
    position, mask, varlen_attention, monkeypatch
) -> None:
    model, is_biased = small(position, num_kv_heads=2, query_scale=0.7).double(), position in ("alibi", "relative")
    mask = MASKS[mask]
    with monkeypatch.context() as patched:
        patched.setattr(attention, "_has_flash_attention", lambda *tensors: False)
        expected = loss_and_gradients(model, mask)
    assert not varlen_attention.calls
    reads = Mock(side_effect=attention.packed_lengths)
    monkeypatch.setattr(attention, "packed_lengths", reads)
    torch.testing.assert_close(loss_and_gradients(model, mask), expected, rtol=1e-12, atol=1e-12)
    assert varlen_attention.calls == (0 if is_biased or not mask.any() else len(model.blocks))
    assert reads.call_count == (not is_biased)


def test_documents_are_computed_again_where_activations_are_not_saved(varlen_attention) -> None:
    model = small(num_kv_heads=2).double()
    expected = loss_and_gradients(model, DOCUMENTS)

    def loss(ids, targets, attention_mask):
        call = lambda: model.loss(ids, targets, attention_mask=attention_mask)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(call, use_reentrant=False)

    varlen_attention.calls = 0
    torch.testing.assert_close(loss_and_gradients(model, DOCUMENTS, loss), expected, rtol=1e-12, atol=1e-12)
    assert varlen_attention.calls == 2 * len(model.blocks)


def test_variable_lengths_are_not_for_transforms_compiled_graphs_and_cached_tokens(
    varlen_attention, unchecked: None
) -> None:
    model, ids = small(num_layers=1).double(), IDS.where(DOCUMENTS != 0, 0)
    weights = dict(model.named_parameters())

    def loss(weights):
        hidden = torch.func.functional_call(model, weights, (ids,), {"attention_mask": DOCUMENTS})
        return hidden.square().mean()

    expected = dict(zip(weights, torch.autograd.grad(loss(weights), list(weights.values())), strict=True))
    assert varlen_attention.calls == 1
    torch.testing.assert_close(torch.func.grad(loss)(weights), expected, rtol=1e-12, atol=1e-12)
    tangents = {name: torch.randn_like(each) for name, each in weights.items()}
    slope = sum((expected[name] * tangents[name]).sum() for name in weights)
    with torch.autograd.forward_ad.dual_level():
        dual = {name: torch.autograd.forward_ad.make_dual(each, tangents[name]) for name, each in weights.items()}
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, slope, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        whole = model(ids, attention_mask=MASKS["no padding"])
        assert varlen_attention.calls == 2
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, attention_mask=MASKS["no padding"]), whole)
        for kind in CACHES.values():
            cache, positions = kind(), positions_of(ids, MASKS["no padding"])
            parts = [
                model(ids[:, a:b], attention_mask=MASKS["no padding"][:, a:b], positions=positions[:, a:b], cache=cache)
                for a, b in pairwise((0, 5, 13, T))
            ]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    assert varlen_attention.calls == 4  # of the two prompts


ON_A_GPU = {
    "padding": DOCUMENTS.repeat_interleave(37, 1),
    "no padding": 1 + torch.arange(700).expand(2, 700) // 130,
    "one token each": 1 + torch.arange(300).expand(2, 300),
    "one document": torch.ones(1, 513, dtype=torch.int64),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("unchecked")
@cases("mask, dtype, groups, width, scale", list(ON_A_GPU), [torch.bfloat16, torch.float16], [8, 2],
       [128, 64, 8, 192], [None, 0.3],
       pairs=["mask, groups"])  # fmt: skip
def test_variable_lengths_on_a_gpu_are_as_close_to_float32_as_all_scores_at_once(
    mask, dtype, groups, width, scale
) -> None:
    documents, heads = ON_A_GPU[mask].cuda(), 8
    (rows, tokens), places = documents.shape, torch.arange(documents.shape[1], device="cuda")
    torch.manual_seed(0)
    shapes = [(rows, tokens, count, width) for count in (heads, groups, groups, heads)]
    q, k, v, grad = (torch.randn(shape, device="cuda").to(dtype).transpose(1, 2) for shape in shapes)

    def computed(dtype: torch.dtype, *, is_packed: bool) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q.detach(), k.detach(), v.detach())]
        scores = AddedScores(Position(), places, places, documents, None, heads)
        result = scores.attend(inputs[0], inputs[1], inputs[2], scale)
        assert (scores.packed is not None) == is_packed
        return [x.double() for x in (result.detach(), *torch.autograd.grad(result, inputs, grad.to(dtype)))]

    packed, exact = computed(dtype, is_packed=True), computed(torch.float32, is_packed=False)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        at_once = computed(dtype, is_packed=False)
    for name, new, old, true in zip(("result", "dq", "dk", "dv"), packed, at_once, exact, strict=True):
        unit = torch.finfo(dtype).eps * true.norm()  # FlashAttention rounds more of what its gradients are sums of
        assert (new - true).norm() <= 1.1 * (old - true).norm() + 0.5 * unit + 1e-5, name
