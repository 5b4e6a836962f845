"""Cached decoding: what was read is not read again, and the logits are those of reading it all."""

from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from decoders import CACHES, small
from kernel_paths import cpu_taken_for_cuda, running_on
from kinds import EMBED_DIM, INJECTIONS, NUM_HEADS, POSITIONS, VOCAB_SIZE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.operator_counter import OperatorCounter
from embedlayer import (
    DecoderLM,
    KeyValueCache,
    PositionError,
    RotaryEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenIdError,
    positions_of,
)
from embedlayer.positions import DynamicNTKScaling, LongRopeScaling


@cases("position, steps, kind", POSITIONS, ([5, 1, 1, 1, 2], [1] * 10, [10], [3, 4, 3]), CACHES)
@torch.no_grad()
def test_logits_are_those_of_reading_everything_at_once(position, steps, kind) -> None:
    model = small(position, num_kv_heads=2)
    ids = torch.randint(1, 50, (2, 10))
    cache = CACHES[kind]()
    parts = [model(part, cache=cache) for part in ids.split(steps, dim=-1)]
    assert len(cache) == 10
    assert torch.allclose(torch.cat(parts, dim=1), model(ids), atol=1e-5)


@cases("position, kind", POSITIONS, CACHES)
@torch.no_grad()
def test_left_padding_is_remembered_and_a_further_document_has_its_own_positions(position, kind) -> None:
    model = small(position)
    texts = torch.randint(1, 50, (3, 8))
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = mask[1, :1] = 0
    cache = CACHES[kind]()
    first = model(texts[:, :5], attention_mask=mask[:, :5], cache=cache)
    rest = [model(texts[:, t : t + 1], cache=cache) for t in range(5, 8)]
    assert torch.isfinite(first).all()
    for row, start in enumerate((3, 1, 0)):
        cached = torch.cat([first, *rest], dim=1)[row, start:]
        assert torch.allclose(cached, model(texts[row, start:]), atol=1e-5)

    cache, ids = CACHES[kind](), texts[:1, :7]
    model(ids[:, :4], cache=cache)
    new = {"positions": torch.arange(3), "attention_mask": torch.full((1, 3), 2)}
    assert torch.allclose(model(ids[:, 4:], **new, cache=cache), model(ids[:, 4:]), atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_single_sequence_needs_no_batch(kind) -> None:
    model = small()
    ids = torch.randint(1, 50, (6,))
    cache = CACHES[kind]()
    parts = [model(part, cache=cache) for part in ids.split([4, 1, 1])]
    assert torch.allclose(torch.cat(parts), model(ids), atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind) -> None:
    model = small("learned")
    ids = torch.randint(1, 50, (1, 17))
    cache = CACHES[kind]()
    model(ids[:, :16], cache=cache)
    with pytest.raises(PositionError):
        model(ids[:, 16:], cache=cache)
    with pytest.raises(TokenIdError):
        model(torch.tensor([[50]]), positions=torch.tensor([3]), cache=cache)
    assert len(cache) == 16


def test_a_mask_without_positions_is_refused() -> None:
    model, cache = small(), KeyValueCache()
    model(torch.randint(1, 50, (2, 4)), cache=cache)
    with pytest.raises(ShapeError):
        model(torch.randint(1, 50, (2, 1)), attention_mask=torch.ones(2, 1, dtype=torch.long), cache=cache)


def test_gradients_reach_what_was_cached() -> None:
    model, cache = small(), KeyValueCache()
    ids = torch.randint(1, 50, (2, 6))
    model(ids[:, :3], cache=cache)
    model(ids[:, 3:], cache=cache).sum().backward()
    assert model.blocks[0].attention.key.weight.grad.abs().sum() > 0


def test_a_cache_of_a_fixed_size_refuses_more_tokens_and_gradients() -> None:
    model, cache = small(), KeyValueCache(max_seq_len=4)
    ids = torch.randint(1, 50, (2, 6))
    with pytest.raises(SizeError):
        model(ids[:, :3], cache=cache)
    with torch.no_grad():
        model(ids[:, :3], cache=cache)
        with pytest.raises(SizeError):
            model(ids[:, 3:], cache=cache)
        assert torch.equal(model(ids[:, :1], cache=KeyValueCache(1)), model(ids[:, :1]))
    assert len(cache) == 3


def scaled(scaling) -> DecoderLM:
    """Beyond the trained length, at which the frequencies are fixed; tests/laws/test_every_length.py has the others."""
    position = RotaryEmbedding(6, scaling=scaling).at_length(8)
    return DecoderLM(TokenEmbedding(50, 24, init_std=1.0), position, num_layers=1, num_heads=4).eval()


DECODERS = {
    **{name: partial(small, name, num_kv_heads=2) for name in POSITIONS},
    **{name: lambda name=name: small(injections=[INJECTIONS[name]()]) for name in INJECTIONS},
    "dynamic": lambda: scaled(DynamicNTKScaling(2.0, 6)),
    "long": lambda: scaled(LongRopeScaling([1.0, 1.5, 2.0], [2.0, 3.0, 4.0], 6, factor=2.0)),
}


class Operators(TorchDispatchMode):
    """Records operators on tensors, and replays them as a CUDA graph does: in the same memory, without the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        if isinstance(result, Tensor | tuple):
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextmanager
def recorder(device):
    """Yield what records a call on a device: a function that returns the replay, and whether recording runs it."""
    if device == "cuda":
        with running_on("cuda"):
            graph = torch.cuda.CUDAGraph()

            def captured(call):
                with torch.cuda.graph(graph):
                    call()
                return graph.replay, False

            yield captured
    else:
        operators = Operators()

        def recorded(call):
            with operators:
                call()
            return operators.replay, True

        with cpu_taken_for_cuda():
            yield recorded


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@cases("name, padding", DECODERS, [0, 2])
@torch.no_grad()
def test_a_step_can_be_recorded_and_replayed_for_the_next_tokens(name, padding, device) -> None:
    with recorder(device) as record:
        model, ids = DECODERS[name](), torch.randint(1, 50, (2, 5), device="cpu").to(torch.get_default_device())
        for parameter in model.injections.parameters():  # gates that start at zero depend on nothing
            nn.init.normal_(parameter, std=0.5)
        mask = torch.ones_like(ids) if padding else None
        if padding:
            mask[0, :padding] = 0
        expected, growing, unread, of_unread = [], KeyValueCache(), ids, mask
        for _ in range(4):
            unread, of_unread = model(unread, attention_mask=of_unread, cache=growing)[:, -1:].argmax(-1), None
            expected.append(unread)
        cache = KeyValueCache(max_seq_len=8)
        token = model(ids, attention_mask=mask, cache=cache)[:, -1:].argmax(-1)
        tokens = [token.clone()]

        def step() -> None:
            token.copy_(model(token, cache=cache)[:, -1:].argmax(-1))

        step()  # a first call may allocate
        tokens.append(token.clone())
        replay, is_done = record(step)
        while len(tokens) < 4:
            if not is_done:
                replay()
            is_done = False
            tokens.append(token.clone())
        assert torch.equal(torch.cat(tokens, -1), torch.cat(expected, -1))
        assert len(cache) == 8


WAITING = ["learned", "sinusoidal", "rotary", "rotary, query scaling", "alibi", "relative", *INJECTIONS, "long"]
"""A decoder of each class that computes; the recorded steps above show for all of them that the host reads nothing."""


@pytest.mark.parametrize(("name", "padding"), some(covering(product(WAITING, [0, 2])), product(DECODERS, [0, 2])))
@torch.no_grad()
def test_a_step_waits_for_nothing(unchecked: None, name, padding) -> None:
    cache, waits = KeyValueCache(max_seq_len=11), []
    model = DECODERS[name]().to("meta")
    ids, token = (torch.ones(2, length, dtype=torch.long, device="meta") for length in (5, 1))
    for tokens, mask in ((ids, torch.ones_like(ids) if padding else None), (token, None), (token, None)):
        with OperatorCounter() as count:
            model(tokens, attention_mask=mask, cache=cache)
        waits.append(count.waits)
    assert waits[-1] == []


@torch.no_grad()
def test_replays_behind_the_last_slot_give_nan() -> None:
    model, cache, operators = small(), KeyValueCache(max_seq_len=4), Operators()
    with cpu_taken_for_cuda():
        model(torch.tensor([[5, 6]]), cache=cache)
        with operators:
            logits = model(torch.tensor([[7]]), cache=cache)
    operators.replay()
    assert torch.isfinite(logits).all()
    operators.replay()
    assert torch.isnan(logits).all()


SHIFTED = [name for name, build in POSITIONS.items() if build().hook != "add"]
FIRST_ROWS = {
    "one document": None,
    "left padding": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]]),
    "documents": torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2], [1, 2, 3, 3, 3, 3, 0, 3, 3]]),
}


@cases("position, mask, kind", SHIFTED, FIRST_ROWS.values(), CACHES, pairs=["mask, kind"])
def test_shifted_keys_are_those_that_are_rotated_at_the_new_positions(position, mask, kind, unchecked: None) -> None:
    model, ids, cache = small(position), torch.arange(18).view(2, 9), CACHES[kind]()
    axes = 1 if position == "rotary, channel axes" else model.position.num_axes  # different ones cannot be moved
    at = positions_of(ids, mask).expand(2, 9)
    at = torch.stack([at * (1 + axis) for axis in range(axes)]) if axes > 1 else at
    projected = []
    hooks = [
        each.attention.key.register_forward_hook(lambda *call: projected.append(call[-1])) for each in model.blocks
    ]
    with torch.no_grad():
        model(ids, positions=at, attention_mask=mask, cache=cache)
    for hook in hooks:
        hook.remove()
    keep, drop = 1, 3
    cache.shift(model.position, drop, keep=keep)
    rest = [*range(keep), *range(keep + drop, 9)]
    moved, text = at[..., rest].clone(), torch.ones(2, 9) if mask is None else mask
    for row in range(2):
        cut = next(int(text[row, t]) for t in range(keep + drop, 9) if text[row, t])
        first, *_ = [*(t for t in range(keep, keep + drop) if text[row, t] == cut), None]
        own = [t for t in range(keep + drop, 9) if text[row, t] == cut]
        for t in own if first is not None else ():
            moved[..., row, t - drop] -= at[..., row, own[0]] - at[..., row, first]
    assert len(cache) == len(rest)
    assert torch.equal(cache.positions[..., : len(rest)], moved)
    assert mask is None or torch.equal(cache.documents[:, : len(rest)], mask[:, rest])
    for number, keys in enumerate(projected):
        k = keys[:, rest].unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        _, expected = model.position.rotate(k, k, moved)
        torch.testing.assert_close(cache.blocks[number].keys[..., : len(rest), :], expected, rtol=1e-5, atol=1e-5)


@cases("position, kind", SHIFTED, CACHES)
def test_one_block_goes_on_from_a_shifted_cache_as_from_the_remaining_text(position, kind) -> None:
    """Its keys and values depend on their own token alone."""
    model, ids, cache = small(position, num_layers=1), torch.arange(24).view(2, 12), CACHES[kind]()
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        cache.shift(model.position, 4, keep=2)
        found = [model(ids[:, start : start + 1], cache=cache) for start in (9, 10, 11)]
        expected = model(torch.cat([ids[:, :2], ids[:, 6:]], 1))[:, -3:]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("position", [name for name in POSITIONS if name not in SHIFTED])
def test_a_scheme_whose_keys_cannot_be_moved_is_named_and_the_cache_stays(position, kind) -> None:
    model, cache = small(position), CACHES[kind]()
    with torch.no_grad():
        model(torch.arange(9), cache=cache)
    before = [cache.positions.clone(), cache.blocks[0].keys.clone(), cache.blocks[1].values.clone()]
    for drop, keep in ((3, 0), (0, 0), (9, 0), (3, 6), (3, -1)):
        with pytest.raises(SizeError):
            cache.shift(model.position, drop, keep=keep)
    after = [cache.positions, cache.blocks[0].keys, cache.blocks[1].values]
    assert len(cache) == 9
    assert all(map(torch.equal, before, after))


def test_frequencies_that_depend_on_the_length_are_named() -> None:
    scaling = DynamicNTKScaling(factor=2.0, original_max_seq_len=6)
    position, cache = RotaryEmbedding(EMBED_DIM // NUM_HEADS, scaling=scaling), KeyValueCache()
    model = DecoderLM(TokenEmbedding(VOCAB_SIZE, EMBED_DIM), position, num_heads=NUM_HEADS)
    model(torch.arange(9), cache=cache)
    with pytest.raises(SizeError):
        cache.shift(position, 3)
    assert len(cache) == 9
    fixed = position.at_length(16)
    model.position, cache = fixed, KeyValueCache()
    model(torch.arange(9), cache=cache)
    cache.shift(fixed, 3)
    assert len(cache) == 6
    model = small("rotary, channel axes")
    cache, at = KeyValueCache(), torch.arange(9).expand(3, 1, 9)
    model(torch.arange(9), positions=at, cache=cache)
    with pytest.raises(SizeError):
        cache.shift(model.position, 3)
    assert torch.equal(cache.positions, at)
