"""Decoding with a cache equals reading the whole text at every length, below and beyond the trained one."""

from collections.abc import Callable

import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, INJECTIONS, NUM_HEADS, POSITIONS, VOCAB_SIZE

from embedlayer import (
    DecoderLM,
    KeyValueCache,
    OutputHead,
    Position,
    RotaryEmbedding,
    SizeError,
    TokenEmbedding,
    generate,
)
from embedlayer.models.generation import GeneratedTokens
from embedlayer.positions import (
    DynamicNTKScaling,
    InterleavedAxes,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKAlphaScaling,
    ProportionalScaling,
    YarnScaling,
)
from embedlayer.positions.rotary.scaling import RotaryScaling

TRAINED, WIDTH = 6, EMBED_DIM // NUM_HEADS
LONG = LongRopeScaling([1.0, 1.5, 2.0], [20.0, 30.0, 4.0], TRAINED, factor=2.0)
SCALINGS: list[RotaryScaling] = [
    LinearScaling(2.0),
    DynamicNTKScaling(8.0, TRAINED),
    NTKAlphaScaling(4.0),
    YarnScaling(2.0, TRAINED),
    LONG,
    Llama3Scaling(2.0, TRAINED),
    ProportionalScaling(0.5),
]
SCHEMES: dict[str, Callable[[], Position]] = {
    **POSITIONS,
    **{
        type(scaling).__name__: lambda scaling=scaling: RotaryEmbedding(WIDTH, 100.0, scaling=scaling)
        for scaling in SCALINGS
    },
    "LongRope on axes": lambda: RotaryEmbedding(WIDTH, 100.0, scaling=LONG, axes=InterleavedAxes((1, 1, 1))),
}
CHANGING = ("DynamicNTKScaling", "LongRopeScaling", "LongRope on axes")
PADDING = {
    "one length": None,
    "padding at the left": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    "padding at the right": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
    "documents": torch.tensor([[1, 1, 2, 2], [1, 1, 1, 2]]),
}


def decoder(scheme: str, **options: object) -> DecoderLM:
    head = OutputHead(EMBED_DIM, VOCAB_SIZE, init_std=1.0)
    table = TokenEmbedding(VOCAB_SIZE, EMBED_DIM, init_std=1.0)
    return DecoderLM(table, SCHEMES[scheme](), head, num_layers=2, num_heads=NUM_HEADS, **options).double().eval()


def test_all_scalings_are_here() -> None:
    assert {type(scaling) for scaling in SCALINGS} == {*RotaryScaling.__subclasses__()}


@looped("scheme, padding", SCHEMES, PADDING)
@torch.no_grad()
def test_tokens_and_log_probs_are_those_of_the_whole_text_at_each_length(scheme, padding) -> None:
    model, mask, ids = decoder(scheme), PADDING[padding], torch.randint(1, VOCAB_SIZE, (2, 4))
    new = generate(model, ids, max_new_tokens=8, attention_mask=mask, return_log_probs=True)
    assert isinstance(new, GeneratedTokens)
    assert torch.equal(new.ids, generate(model, ids, max_new_tokens=8, attention_mask=mask))
    whole = None
    if mask is not None:
        last = mask.gather(-1, torch.where(mask != 0, torch.arange(4), 0).amax(-1, keepdim=True))
        whole = torch.cat([mask, last.expand(2, 8)], dim=-1)
    for step in range(8):
        length = 4 + step
        of_text = None if whole is None else whole[:, :length]
        at = torch.full((2, 1), length - 1)
        if step == 0 and mask is not None:
            at = torch.where(mask != 0, torch.arange(4), 0).amax(-1, keepdim=True)
        hidden = model.hidden(new.ids[:, :length], attention_mask=of_text)
        expected = model.head(hidden.take_along_dim(at.unsqueeze(-1), 1)[:, 0]).log_softmax(-1)
        assert torch.equal(new.ids[:, length], expected.argmax(-1))
        found = expected.gather(-1, new.ids[:, length : length + 1])[:, 0]
        torch.testing.assert_close(new.log_probs[:, step].double(), found, rtol=0, atol=1e-5)


@looped("scheme, sizes", SCHEMES, ([4, 3, 1, 2], [1] * 10, [5, 1, 4], [7, 3], [10]))
@torch.no_grad()
def test_so_is_a_text_that_is_read_in_parts(scheme, sizes) -> None:
    model, ids, cache, stop = decoder(scheme), torch.randint(1, VOCAB_SIZE, (2, 10)), KeyValueCache(), 0
    for size in sizes:
        start, stop = stop, stop + size
        expected = model(ids[:, :stop])[:, start:]
        torch.testing.assert_close(model(ids[:, start:stop], cache=cache), expected, rtol=0, atol=1e-5)
    assert len(cache) == 10


@pytest.mark.parametrize("scheme", CHANGING)
@looped("injection", [None, *INJECTIONS])
@torch.no_grad()
def test_so_are_vectors_positions_documents_and_injections(scheme, injection) -> None:
    model = decoder(scheme, injections=[] if injection is None else [INJECTIONS[injection]().double()])
    for parameter in model.injections.parameters():  # gates that start at zero depend on nothing
        torch.nn.init.normal_(parameter, std=0.5)
    ids, cache = torch.randint(1, VOCAB_SIZE, (2, 9)), KeyValueCache()
    vectors, at = model.table(ids), torch.arange(9).expand(3, 2, 9) * torch.tensor([1, 2, 1]).view(3, 1, 1)
    at = at if "axes" in scheme else at[1]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 2, 2, 2, 2]])
    stop = 0
    for size, by_vectors in ((2, False), (2, True), (1, False), (3, True), (1, False)):
        start, stop = stop, stop + size
        tokens = {"ids": ids[:, start:stop]} if injection is not None or not by_vectors else {}
        tokens |= {"inputs_embeds": vectors[:, start:stop]} if by_vectors else {}
        part = model(**tokens, positions=at[..., start:stop], attention_mask=mask[:, start:stop], cache=cache)
        expected = model(ids[:, :stop], positions=at[..., :stop], attention_mask=mask[:, :stop])[:, start:]
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", CHANGING)
@torch.no_grad()
def test_a_cache_of_a_fixed_size_needs_fixed_frequencies(scheme) -> None:
    model, ids = decoder(scheme), torch.randint(1, VOCAB_SIZE, (1, 10))
    with pytest.raises(SizeError, match=r"at_length\(12\)"):
        model(ids, cache=KeyValueCache(max_seq_len=12))
    position = model.position
    assert isinstance(position, RotaryEmbedding)
    model.position = position.at_length(12)
    cache = KeyValueCache(max_seq_len=12)
    parts = [model(part, cache=cache) for part in ids.split([5, 2, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("scheme", "most"), [("LongRopeScaling", 2), ("DynamicNTKScaling", 7), ("YarnScaling", 1)])
@torch.no_grad()
def test_a_text_is_read_again_only_where_its_frequencies_change(scheme, most) -> None:
    model, lengths = decoder(scheme), list[int]()
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    generate(model, torch.randint(1, VOCAB_SIZE, (2, 4)), max_new_tokens=9)  # the last length is 12
    assert sum(length > 1 for length in lengths) == most
