"""A call depends on its positions and masks alone; those without meaning are refused where they enter."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, LAYERS, MAX_SEQ_LEN, NUM_HEADS, POSITIONS, VOCAB_SIZE, dense, ngrams
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.documents import check_mask
from embedlayer.inputs.gated import GatedEmbedding
from embedlayer.positions.position import AdditivePosition

B, T = 2, 5
IDS = torch.arange(1, 1 + B * T).view(B, T)
WIDTH = EMBED_DIM // NUM_HEADS
CHECK = "call self.check_positions(positions, (*q.shape[:-3], q.shape[-2])) first in rotate"
"""Line of a scheme that rotates."""

every_scheme = looped("name", POSITIONS)
ADDITIVE = [name for name, build in POSITIONS.items() if isinstance(build(), AdditivePosition)]
IN_ATTENTION = [name for name in POSITIONS if name not in ADDITIVE]


def heads(batch: int = B) -> Tensor:
    return torch.randn(batch, NUM_HEADS, T, WIDTH)


def entries(name: str) -> dict[str, Callable[[Any], object]]:
    """Every function that takes positions of tokens `(B, T)` for a scheme."""
    position = POSITIONS[name]()
    model = el.DecoderLM(dense(), position, num_layers=1, num_heads=NUM_HEADS)
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, position=position)
    loaded = el.EmbeddingLayer(dense(), position, recipe=["position"] if isinstance(position, AdditivePosition) else [])
    own: dict[str, dict[str, Callable[[Any], object]]] = {
        "add": {"add": lambda at: position.add(torch.randn(B, T, EMBED_DIM), at)},
        "rotate": {"rotate": lambda at: position.rotate(heads(), heads(), at)},
    }
    return {
        "DecoderLM": lambda at: model(IDS, positions=at),
        "DecoderLM, cached": lambda at: model(IDS, positions=at, cache=el.KeyValueCache()),
        "DecoderLM.trace": lambda at: list(model.trace(IDS, positions=at)),
        "TransformerEmbedding": lambda at: layer(IDS, positions=at),
        "TransformerEmbedding.trace": lambda at: list(layer.trace(IDS, positions=at)),
        "EmbeddingLayer": lambda at: loaded(IDS, positions=at),
        **own.get(position.hook or "", {}),
    }


def without_tokens(name: str) -> dict[str, Callable[[Any], object]]:
    """Every function that takes positions of a scheme and no tokens beside them."""
    position: Any = POSITIONS[name]()
    if isinstance(position, AdditivePosition):
        return {"forward": position, "vectors": position.vectors}
    if position.hook == "bias":
        found = {
            "query": lambda at: position.bias(at, torch.arange(T)),
            "key": lambda at: position.bias(torch.arange(T), at),
        }
        return {**found, **({"score_mod": position.score_mod} if hasattr(position, "score_mod") else {})}
    return {} if type(position).prepare is el.Position.prepare else {"prepare": position.prepare}


@every_scheme
def test_what_is_no_tensor_of_whole_numbers_is_refused(name, unchecked) -> None:
    at = torch.arange(T)
    for entry, call in {**entries(name), **without_tokens(name)}.items():
        for wrong in (at / 4, at.double(), at > 2, at.short(), at.tolist(), at.numpy()):
            with pytest.raises(el.ShapeError, match="^Positions are int64 or int32 tensors, such as"):
                call(wrong)
                check = "check_integer_positions" if entry == "vectors" else "self.check_positions"
                pytest.fail(f"{entry} took {wrong!r}: call {check}(positions) first")


@looped("name", [name for name, make in POSITIONS.items() if hasattr(make(), "head_dim")])
def test_heads_of_another_width_than_that_of_the_scheme_are_refused(name, unchecked) -> None:
    right, wrong = heads(), torch.randn(B, NUM_HEADS, T, 2 * WIDTH)
    for q, k in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(el.ShapeError):
            POSITIONS[name]().rotate(q, k, torch.arange(T))
            pytest.fail("compare the last dimension of q and k with self.head_dim in rotate")


@every_scheme
def test_there_is_one_position_for_each_token_on_each_axis_of_the_scheme(name, unchecked) -> None:
    at, axes = torch.arange(T), POSITIONS[name]().num_axes
    right = [
        at,
        at[None],
        at.expand(B, T),
        at.int(),
        *([at.expand(axes, B, T), at.expand(axes, 1, T)] if axes > 1 else []),
    ]
    wrong = [torch.arange(T + 1), at[:-1], at.expand(B + 1, T), at[:1], torch.tensor(3), at.expand(7, B, T)]
    for entry, call in entries(name).items():
        for positions in right:
            call(positions)
        for positions in wrong:
            with pytest.raises(el.ShapeError, match=r"^positions of shape .* do not fit tokens of shape \(2, 5\)"):
                call(positions)
                pytest.fail(f"{entry} took positions of shape {tuple(positions.shape)}: {CHECK}")


@every_scheme
def test_no_positions_enlarge_a_batch_of_one(name, unchecked) -> None:
    position, two = POSITIONS[name](), torch.arange(T).expand(2, T)
    model = el.DecoderLM(dense(), position, num_layers=1, num_heads=NUM_HEADS)
    calls = [lambda: model(IDS[:1], positions=two), lambda: model(IDS[0], positions=two)]
    if position.hook == "rotate":
        prepared = position.prepare(two)
        calls += [
            lambda: position.rotate(heads(1), heads(1), two),
            lambda: position.rotate(heads(1), heads(1), prepared),
        ]
    for call in calls:
        with pytest.raises(el.ShapeError, match=r"positions of shape \(2, 5\) do not fit tokens of shape \(1, 5\)"):
            call()
            pytest.fail(CHECK)


@every_scheme
def test_a_position_outside_the_scheme_is_named_and_negative_ones_count_distances(name) -> None:
    position: Any = POSITIONS[name]()
    at, offset = torch.arange(T), getattr(position, "offset", 0)
    if position.max_seq_len is not None:
        with pytest.raises(
            el.PositionError, match=f"^position {MAX_SEQ_LEN} at row 0, column 4: .* exceeds the 16 positions"
        ):
            position(at + MAX_SEQ_LEN - 4)
        below = f"^position {-1 - offset} at row 0, column 0 is below {-offset}, the first position covered here"
        with pytest.raises(el.PositionError, match=below):
            position(at - 1 - offset)
    elif position.hook == "bias":
        torch.testing.assert_close(position.bias(at - 3, at - 3), position.bias(at, at))
    elif getattr(position, "query_scaling", None) is not None:
        with pytest.raises(el.PositionError, match="^position -3 at row 0, column 0 is below 0"):
            position.rotate(heads(), heads(), at - 3)
    elif position.hook == "rotate" and name != "dynamic":
        q, k = heads().double(), heads().double()
        (one, other), (q, k) = position.rotate(q, k, at - 3), position.rotate(q, k, at)
        torch.testing.assert_close(one @ other.mT, q @ k.mT, atol=1e-12, rtol=0)


OTHERS: dict[str, Callable[[], el.Position]] = {
    **{name: build for name, build in POSITIONS.items() if type(build()).prepare is not el.Position.prepare},
    "rotary, another base": lambda: el.RotaryEmbedding(WIDTH, 500.0),
    "rotary, scaled": lambda: el.RotaryEmbedding(WIDTH, scaling=el.positions.LinearScaling(2.0)),
    "rotary, interleaved": lambda: el.RotaryEmbedding(WIDTH, interleaved=True),
    "rotary, reversed": lambda: el.RotaryEmbedding(WIDTH, reversed=True),
    "another query scaling": lambda: el.positions.QueryScaledPosition(
        el.positions.PowerQueryScaling(exponent=0.2, length=4)
    ),
}


def test_what_one_scheme_prepared_no_other_one_accepts(unchecked: None) -> None:
    prepared = {name: build().prepare(torch.arange(T)) for name, build in OTHERS.items()}
    for name, build in OTHERS.items():
        build().rotate(heads(), heads(), prepared[name])
    for name, other in permutations(OTHERS, 2):
        with pytest.raises(el.ShapeError, match=r"call prepare of (this|the same)"):
            OTHERS[name]().rotate(heads(), heads(), prepared[other])
            pytest.fail(f"{name} took what {other} prepared")


def as_plain_embedding(position: AdditivePosition) -> nn.Embedding:
    return nn.Embedding.from_pretrained(position.vectors(torch.arange(MAX_SEQ_LEN)).detach())


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5, 8),
        torch.tensor(7),
        torch.tensor([[3, 1], [0, 15]]),
        torch.tensor([[[2]], [[9]]], dtype=torch.int32),
        torch.arange(MAX_SEQ_LEN).view(4, 4)[:, ::2],
        torch.tensor([4]).expand(2, 3),
    ],
    ids=["from the middle", "scalar", "batch", "int32", "strided", "expanded"],
)
@looped("name", ADDITIVE)
def test_a_call_returns_the_rows_at_these_positions_as_an_embedding_does(name, positions) -> None:
    position = POSITIONS[name]()
    assert torch.equal(position(positions), as_plain_embedding(position)(positions))


@looped("name", ADDITIVE)
def test_hidden_states_of_another_width_are_refused_and_never_broadcast(name, unchecked) -> None:
    position = POSITIONS[name]()
    assert position.embed_dim == EMBED_DIM
    for width in (1, EMBED_DIM + 1):
        with pytest.raises(el.ShapeError, match=f"width {width} cannot take positions of width {EMBED_DIM}"):
            position.add(torch.randn(2, 3, width), torch.arange(3))


@looped("name", IN_ATTENTION)
def test_positions_of_32_bits_are_as_far_apart_as_those_of_64(name) -> None:
    position, (q, k) = POSITIONS[name](), torch.randn(2, 1, NUM_HEADS, 3, EMBED_DIM // NUM_HEADS)
    if position.max_seq_len is not None:
        pytest.skip("it has no positions so far apart")
    places = torch.tensor([0 if "query" in name else -(2**31), 0, 2**31 - 1])  # the scale of queries counts from 0
    for wide, narrow in zip(position.rotate(q, k, places), position.rotate(q, k, places.int()), strict=True):
        assert torch.equal(wide, narrow)
    biases = [position.bias(each, each) for each in (places, places.int())]
    assert all(bias is None for bias in biases) or torch.equal(*biases)


@looped("name", IN_ATTENTION)
def test_a_scheme_without_rows_says_where_it_is_applied(name) -> None:
    with pytest.raises(el.ShapeError):
        POSITIONS[name]()(torch.arange(3))


WRONG_MASKS: dict[str, Any] = {
    "additive": torch.tensor([[0.0, -1e4, 0.0, 0.0, 0.0]] * B),
    "ones as floats": torch.ones(B, T),
    "of another length": torch.ones(B, T + 1).long(),
    "of one sequence": torch.ones(T).long(),
    "that falls": torch.tensor([[1] * T, [2, 2, 1, 1, 1]]),
    "of a document that comes back": torch.tensor([[1] * T, [1, 2, 1, 1, 0]]),
    "that falls behind padding": torch.tensor([[1] * T, [2, 0, 0, 1, 1]]),
    "below 0": torch.tensor([[1] * T, [-1, 1, 1, 1, 1]]),
    "list": [[1] * T] * B,
}
RIGHT_MASKS = [
    torch.ones(B, T, dtype=torch.bool),
    torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]),
    torch.tensor([[1, 1, 2, 3, 3], [0, 1, 2, 2, 0]], dtype=torch.int32),
    torch.tensor([[2, 2, 5, 5, 5], [0, 0, 0, 0, 0]], dtype=torch.uint8),
]


def mask_takers() -> dict[str, Callable[[Any], object]]:
    at, decoder, gpt = torch.arange(T), LAYERS["DecoderLM"](), LAYERS["GPTEmbedding"]()
    injected = el.DecoderLM(
        dense(), "none", num_layers=2, num_heads=NUM_HEADS, injections=[GatedEmbedding(ngrams(), EMBED_DIM, block=1)]
    )
    loaded = el.EmbeddingLayer(dense(), el.LearnedPositionalEmbedding(9, EMBED_DIM), recipe=["position", "mask"])
    states, table = [torch.randn(B, T, EMBED_DIM)] * 2, ngrams()
    return {
        "positions_of": lambda mask: el.positions_of(IDS, mask),
        "DecoderLM": lambda mask: decoder(IDS, attention_mask=mask),
        "DecoderLM, positions": lambda mask: decoder(IDS, attention_mask=mask, positions=at),
        "DecoderLM, cached": lambda mask: decoder(IDS, attention_mask=mask, cache=el.KeyValueCache()),
        "DecoderLM, labels": lambda mask: decoder(input_ids=IDS, labels=IDS, attention_mask=mask),
        "DecoderLM.loss": lambda mask: decoder.loss(IDS, IDS, attention_mask=mask),
        "DecoderLM.trace": lambda mask: list(decoder.trace(IDS, attention_mask=mask)),
        "DecoderLM, injections": lambda mask: injected(IDS, attention_mask=mask),
        "GPTEmbedding": lambda mask: gpt(IDS, attention_mask=mask),
        "GPTEmbedding, positions": lambda mask: gpt(IDS, attention_mask=mask, positions=at),
        "GPTEmbedding.trace": lambda mask: list(gpt.trace(IDS, attention_mask=mask)),
        "EmbeddingLayer": lambda mask: loaded(IDS, mask),
        "EmbeddingLayer.trace": lambda mask: list(loaded.trace(IDS, mask)),
        "NgramEmbedding": lambda mask: table(IDS, mask),
        "multi_token_loss": lambda mask: decoder.head.multi_token_loss(states, IDS, documents=mask),
    }


@looped("name", mask_takers())
def test_a_mask_without_meaning_is_refused_by_one_sentence(name, unchecked) -> None:
    take = mask_takers()[name]
    for right in RIGHT_MASKS:
        take(right)
    for kind, mask in WRONG_MASKS.items():
        sentence = (
            r"^(attention_mask|documents) must be integers or booleans of shape \(2, 5\), one for each token: 0 for"
        )
        with pytest.raises(el.ShapeError, match=sentence):
            take(mask)
            pytest.fail(f"{name} took a mask {kind}")


def test_a_cached_document_does_not_come_back() -> None:
    model, cache, at = LAYERS["DecoderLM"](), el.KeyValueCache(), torch.arange(2)
    model(IDS[:, :2], attention_mask=torch.tensor([[1, 2], [1, 1]]), cache=cache)
    with pytest.raises(
        el.ShapeError, match=r"The last cached document with the attention_mask.*found row 0 \[2, 1, 1\]"
    ):
        model(IDS[:, 2:4], attention_mask=torch.ones(B, 2).long(), positions=at, cache=cache)
    model(IDS[:, 2:4], attention_mask=torch.tensor([[2, 3], [1, 2]]), positions=at, cache=cache)


def test_what_a_mask_may_be_does_not_depend_on_the_dtype_or_on_padding_inside_of_a_document() -> None:
    check_mask(torch.tensor([1, 0, 1, 2, 0, 2]), (6,))
    with pytest.raises(el.ShapeError, match=r"without padding inside of one; found row 0 \[1, 0, 1\]"):
        check_mask(torch.tensor([True, False, True]), (3,), gaps=False)
