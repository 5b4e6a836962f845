"""Shares of a sequence: what is computed from the shares of all ranks, joined, has the bits of the whole sequence."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from kinds import EMBED_DIM, INJECTIONS, MAX_SEQ_LEN, NUM_HEADS, POSITIONS, TABLES, VOCAB_SIZE, ngrams
from releases import skip_without
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.documents import shifted_targets
from embedlayer.distributed import halo_rows, join_shares, share_of, token_ranges, without_halo
from embedlayer.inputs.context_gate import ShortConvolution
from embedlayer.inputs.gated import GatedEmbedding
from embedlayer.inputs.injection import EmbeddingInjection, InjectionContext
from embedlayer.positions import DynamicNTKScaling, LongRopeScaling
from embedlayer.positions.position import positions_of

T, WIDTH = MAX_SEQ_LEN, EMBED_DIM // NUM_HEADS
ORDERS: tuple[Any, ...] = ("contiguous", "zigzag")
RANKS = (1, 2, 4)
DOCUMENTS = torch.tensor([
    [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4, 5, 0],
    [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
])  # fmt: skip
"""Documents of 1 to 15 tokens, of which some go on in the next chunk, whatever the number of ranks."""
IDS = torch.randint(1, VOCAB_SIZE, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))
AT = positions_of(IDS, DOCUMENTS)

every_share = pytest.mark.parametrize(("ranks", "order"), [(ranks, order) for ranks in RANKS for order in ORDERS])


def shares(x: Tensor, ranks: int, order: Any, dim: int = -1) -> list[Tensor]:
    return [share_of(x, rank, ranks, order=order, dim=dim) for rank in range(ranks)]


Module = TypeVar("Module", bound=nn.Module)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def randomised(module: Module) -> Module:
    torch.manual_seed(0)
    for parameter in module.parameters():  # a gate or convolution that starts at zero depends on nothing
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


@every_share
@looped("shape, dim", [((T,), 0), ((2, 3, T), -1), ((2, T, 5), 1), ((T, 4), -2)])
def test_joined_shares_are_the_whole_and_a_share_is_that_of_torch(ranks, order, shape, dim) -> None:
    x = drawn(*shape)
    parts = shares(x, ranks, order, dim)
    assert torch.equal(join_shares(parts, order=order, dim=dim), x)
    if order == "zigzag":
        skip_without("torch.distributed.tensor.experimental._attention:_HeadTailLoadBalancer")
        from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

        x = x.index_select(dim, _HeadTailLoadBalancer(T, ranks, "cpu")._generate_indices()[0])
    for part, theirs in zip(parts, x.chunk(ranks, dim), strict=True):
        assert torch.equal(part, theirs)
    for rank, part in enumerate(shares(torch.arange(T), ranks, order)):
        assert part.tolist() == [at for each in token_ranges(T, rank, ranks, order=order) for at in each]


LENGTH_RULE = {
    "dynamic, at its length": DynamicNTKScaling(factor=2.0, original_max_seq_len=6),
    "longrope, at its length": LongRopeScaling([1.0, 2.0, 3.0], [2.0, 4.0, 8.0], original_max_seq_len=6, factor=2.0),
}
"""Frequencies that depend on the longest position of a call, which one rank does not have: `at_length` states it."""


def position_of(name: str) -> el.Position:
    if name not in LENGTH_RULE:
        return POSITIONS[name]()
    return el.RotaryEmbedding(WIDTH, scaling=LENGTH_RULE[name]).at_length(int(AT.max()) + 1)


@looped("name, ranks, order", [*POSITIONS, *LENGTH_RULE], RANKS, ORDERS, pairs=["ranks, order"])
@torch.no_grad()
def test_a_position_scheme_of_the_shares_is_that_of_the_whole(name, ranks, order) -> None:
    position, at = position_of(name), AT
    if position.num_axes > 1:
        at = torch.stack([AT + axis * IDS // 7 for axis in range(position.num_axes)])
    parts = shares(at, ranks, order)
    x, q, k = drawn(2, T, EMBED_DIM), drawn(2, NUM_HEADS, T, WIDTH), drawn(2, 2, T, WIDTH)
    added = [position.add(*each) for each in zip(shares(x, ranks, order, -2), parts, strict=True)]
    assert torch.equal(join_shares(added, order=order, dim=-2), position.add(x, at))
    for prepare in (position.prepare, lambda positions: positions):
        heads = zip(shares(q, ranks, order, -2), shares(k, ranks, order, -2), map(prepare, parts), strict=True)
        rotated = zip(*(position.rotate(*each) for each in heads), strict=True)
        for ours, whole in zip(rotated, position.rotate(q, k, prepare(at)), strict=True):
            assert torch.equal(join_shares(ours, order=order, dim=-2), whole)
    if (bias := position.bias(AT, AT)) is not None:
        rows = [position.bias(part, AT) for part in parts]
        assert torch.equal(join_shares(rows, order=order, dim=-2), bias)


@looped("name, ranks, order", TABLES, RANKS, ORDERS, pairs=["ranks, order"])
@torch.no_grad()
def test_an_input_embedding_of_the_shares_is_that_of_the_whole(name, ranks, order) -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, T, dropout=0.0, table=TABLES[name]())
    ids = zip(shares(IDS, ranks, order), shares(AT, ranks, order), strict=True)
    ours = [layer(part, positions=at) for part, at in ids]
    assert torch.equal(join_shares(ours, order=order, dim=-2), layer(IDS, positions=AT))


@every_share
@torch.no_grad()
def test_hashes_and_convolutions_of_the_shares_are_those_of_the_whole(ranks, order) -> None:
    width = (
        64  # torch's silu rounds the last elements of a buffer otherwise than those before them: here there are none
    )
    table, convolution, x = ngrams(), randomised(ShortConvolution(width)), drawn(2, T, width)
    layers: list[tuple[Callable[..., Tensor], Tensor, int]] = [
        (table.hash, IDS, table.hash.max_order - 1),
        (table, IDS, table.hash.max_order - 1),
        (convolution, x, (convolution.kernel_size - 1) * convolution.dilation),
    ]
    for layer, tokens, halo in layers:
        assert torch.equal(layer(tokens, torch.ones_like(DOCUMENTS)), layer(tokens))
        for documents in (DOCUMENTS, torch.ones_like(DOCUMENTS)):
            ours = []
            for rank in range(ranks):
                rows = [halo_rows(each, rank, ranks, halo=halo, order=order) for each in (tokens, documents)]
                ours.append(without_halo(layer(*rows), halo=halo, order=order))
            assert torch.equal(join_shares(ours, order=order, dim=1), layer(tokens, documents))


def outputs(injection: EmbeddingInjection, ids: Tensor, documents: Tensor, x: Tensor) -> list[Tensor]:
    """What an injection adds at each of its points, with the tokens along dimension 1."""
    context = InjectionContext(ids, documents)
    vectors = injection.look_up(x, context)
    values = x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
    return [
        injection.add_to_input(x, vectors),
        *(injection.add_to_stream(x, vectors, depth, context) for depth in range(3)),
        *(injection.add_to_values(values, x, vectors, block).transpose(1, 2) for block in range(2)),
    ]


GATED = ("value", "n-gram, gated", "per-layer")
"""Torch's sigmoid and GELU have other last bits for the last elements of a buffer."""


@looped("name, ranks, order", INJECTIONS, RANKS, ORDERS, pairs=["ranks, order"])
@torch.no_grad()
def test_vectors_of_additional_tables_of_the_shares_are_those_of_the_whole(name, ranks, order) -> None:
    injection, x = randomised(INJECTIONS[name]()), drawn(2, T, EMBED_DIM)
    halo = 2 + (9 if isinstance(injection, GatedEmbedding) else 0)
    ours = []
    for rank in range(ranks):
        rows = [halo_rows(each, rank, ranks, halo=halo, order=order) for each in (IDS, DOCUMENTS, x)]
        ours.append([without_halo(each, halo=halo, order=order) for each in outputs(injection, *rows)])
    for parts, whole in zip(zip(*ours, strict=True), outputs(injection, IDS, DOCUMENTS, x), strict=True):
        tolerance = {"atol": 1e-6, "rtol": 1e-6} if name in GATED else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(join_shares(parts, order=order, dim=1), whole, **tolerance)


@every_share
def test_the_sum_over_the_shares_of_a_loss_is_that_of_the_whole(ranks, order) -> None:
    table, targets = TABLES["dense"](), F.pad(shifted_targets(IDS, DOCUMENTS), (0, 1), value=-100)
    hidden = drawn(2, T, EMBED_DIM)
    counted = int((targets != -100).sum())
    parts = zip(shares(hidden, ranks, order, 1), shares(targets, ranks, order), strict=True)
    sums = [table.loss(*part, reduction="sum") for part in parts]
    torch.testing.assert_close(torch.stack(sums).sum() / counted, table.loss(hidden, targets))


def test_a_length_that_does_not_divide_is_refused_and_the_advice_works() -> None:
    ids, documents = IDS[:, :13], DOCUMENTS[:, :13]
    targets = F.pad(shifted_targets(ids, documents), (0, 1), value=-100)
    words = (
        r"^13 tokens do not divide into 8 equal chunks, which 4 ranks need in zigzag order: .*F.pad\(x, \(0, 3\), val"
    )
    with pytest.raises(el.SizeError, match=words):
        share_of(ids, 0, 4, order="zigzag")
    model = el.DecoderLM(el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM), "rotary", num_layers=1)
    loss = model.loss(ids, targets, attention_mask=documents)
    ids, documents, targets = (F.pad(x, (0, 3), value=each) for x, each in ((ids, 1), (documents, 0), (targets, -100)))
    torch.testing.assert_close(model.loss(ids, targets, attention_mask=documents), loss)
    assert torch.equal(join_shares(shares(ids, 4, "zigzag"), order="zigzag"), ids)
    hidden = drawn(2, 13, EMBED_DIM)
    with pytest.raises(el.SizeError, match=r"hidden states by F.pad\(x, \(0, 0, 0, 3\)\)"):
        share_of(hidden, 0, 4, order="zigzag", dim=1)
    assert share_of(F.pad(hidden, (0, 0, 0, 3)), 0, 4, order="zigzag", dim=1).shape == (2, 4, EMBED_DIM)


def test_what_is_no_share_is_refused_by_name() -> None:
    with pytest.raises(el.SizeError, match="Rank 2 of 2 does not exist"):
        share_of(IDS, 2, 2)
    with pytest.raises(el.SizeError, match="^order is one of contiguous, zigzag, not 'round-robin'"):
        share_of(IDS, 0, 2, order="round-robin")
    with pytest.raises(el.ShapeError, match=r"^Shares of one sequence .*found \[\(2, 3\), \(2, 5\)\]"):
        join_shares([IDS[:, :3], IDS[:, :5]])
    with pytest.raises(el.ShapeError, match="with an even number"):
        join_shares([IDS[:, :3]], order="zigzag")
    with pytest.raises(el.ShapeError, match=r"found \[\]"):
        join_shares([])
    with pytest.raises(el.SizeError, match="^halo is a number of earlier tokens, at least 0, not -1"):
        halo_rows(IDS, 0, 2, halo=-1)
    with pytest.raises(el.SizeError, match="at most the 16 of a chunk, not 17"):
        without_halo(IDS, halo=17)
    with pytest.raises(el.ShapeError, match=r"two equal chunks: \(3, 16\) is odd in dimension 0"):
        without_halo(torch.zeros(3, T), halo=0, order="zigzag")
