"""Bags over any table: equal to `nn.EmbeddingBag`, forward and gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import cases
from kinds import BAGS, EMBED_DIM, LOOKUP_TABLES, VOCAB_SIZE
from torch import Tensor, nn

from embedlayer import (
    CheckpointError,
    RowAdamW,
    RowSparseEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenIdError,
    patch,
)
from embedlayer.tables import Bag

V, D = 12, 6
OFFSETS = torch.tensor([0, 3, 3, 4, 19])
"""Bags of 3, 0, 1, 15 and 5 tokens."""


def ids_of(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def gradients(bag: nn.Module, *arguments: Any, **options: Any) -> list[Tensor]:
    """The result of a call, then gradients of the weight and of the weights by sample."""
    weights = [each.requires_grad_() for each in arguments if each is not None and each.is_floating_point()]
    out = bag(*arguments, **options)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad(out, [*bag.parameters(), *weights], cotangent)
    return [out.detach(), *(each.to_dense() for each in found)]


CALLS = {
    "offsets": (ids_of(24), OFFSETS),
    "no bag": (ids_of(0), OFFSETS[:0]),
    "only empty bags": (ids_of(0), OFFSETS[:1].repeat(3)),
    "int32": (ids_of(24).int(), OFFSETS.int()),
    "batch": (ids_of(4, 7),),
}


@cases(
    "call, mode, padding_idx, sparse",
    CALLS,
    ["sum", "mean"],
    [None, 2],
    [False, True],
    pairs=["call, mode", "padding_idx, sparse", "mode, padding_idx"],
)
def test_it_equals_torch_forward_and_backward(call, mode, padding_idx, sparse) -> None:
    theirs = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding_idx, sparse=sparse, dtype=torch.float64)
    ours = Bag.from_embedding_bag(copy.deepcopy(theirs))
    assert ours.table.row_sparse is sparse
    torch.testing.assert_close(gradients(ours, *CALLS[call]), gradients(theirs, *CALLS[call]))


@cases(
    "call, padding_idx, sparse, dtype",
    ["offsets", "batch"],
    [None, 2],
    [False, True],
    [torch.float32, torch.bfloat16],
    pairs=["call, padding_idx", "sparse, dtype", "call, sparse"],
)
def test_weights_by_sample_equal_those_of_torch(call, padding_idx, sparse, dtype) -> None:
    theirs = nn.EmbeddingBag(V, D, mode="sum", padding_idx=padding_idx, sparse=sparse)
    ids, offsets = (*CALLS[call], None)[:2]
    weights = torch.randn(ids.shape)
    expected = gradients(theirs, ids, offsets, weights.clone())
    ours = Bag.from_embedding_bag(copy.deepcopy(theirs)).to(dtype)
    found = gradients(ours, ids, offsets, weights.to(dtype))
    torch.testing.assert_close([each.float() for each in found], expected, **({} if dtype == torch.float32 else
                               {"rtol": 0.05, "atol": 0.1}))  # fmt: skip


def test_the_last_offset_is_the_end_of_the_last_bag() -> None:
    theirs = nn.EmbeddingBag(V, D, include_last_offset=True)
    ids, bounds = ids_of(24), torch.cat([OFFSETS, torch.tensor([24])])
    assert torch.equal(Bag.from_embedding_bag(theirs)(ids, bounds), theirs(ids, bounds))


@cases("name, mode", LOOKUP_TABLES, ["sum", "mean"])
def test_of_every_table_it_is_the_sum_or_mean_of_looked_up_vectors(name, mode) -> None:
    bag = Bag(LOOKUP_TABLES[name](), mode=mode)
    ids = torch.randint(0, VOCAB_SIZE, (24,))
    ids[:3] = 0  # padding, in all tables but one
    bags = [ids[start:stop] for start, stop in zip(OFFSETS, [*OFFSETS[1:], 24], strict=True)]
    bags = [each[each != (-1 if bag.table.padding_idx is None else bag.table.padding_idx)] for each in bags]
    with torch.no_grad():
        expected = torch.stack([bag.table(each).sum(0) / (max(len(each), 1) if mode == "mean" else 1) for each in bags])
        torch.testing.assert_close(bag(ids, OFFSETS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BAGS)
def test_a_padded_batch_equals_its_bags(name) -> None:
    bag, lengths = BAGS[name](), torch.tensor([[3, 0, 5], [1, 2, 4]])
    ids = torch.randint(0, VOCAB_SIZE, (2, 3, 5))
    mask = torch.arange(5) < lengths.unsqueeze(-1)
    expected = bag(ids[mask], torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)[:-1]]))
    expected = expected.view(2, 3, EMBED_DIM)
    batch = ids.masked_fill(~mask, -100)  # what is not in a bag is not read
    torch.testing.assert_close(bag(batch, mask=mask), expected)
    torch.testing.assert_close(bag(batch, mask=mask.long()), expected)
    torch.testing.assert_close(bag(batch, lengths=lengths), expected)
    torch.testing.assert_close(torch.vmap(lambda ids, mask: bag(ids, mask=mask))(batch, mask), expected)


@pytest.mark.parametrize("padding_idx", [None, pytest.param(2, marks=pytest.mark.long)])
def test_a_compiled_bag_is_one_graph_and_equal(padding_idx, unchecked) -> None:
    bag = Bag(TokenEmbedding(V, D, padding_idx, dtype=torch.float64))
    compiled = torch.compile(bag, fullgraph=True, backend="eager")
    torch.testing.assert_close(gradients(compiled, *CALLS["offsets"]), gradients(bag, *CALLS["offsets"]))


def test_a_batch_of_bags_without_tokens_is_zeros() -> None:
    bag = Bag(TokenEmbedding(V, D))
    assert torch.equal(gradients(bag, ids_of(4, 0))[0], torch.zeros(4, D))


def test_the_row_of_padding_is_not_read() -> None:
    bag = Bag(TokenEmbedding(V, D, 2), mode="sum")
    with torch.no_grad():
        bag.table.weight[2] = torch.nan
    assert bag(torch.tensor([[1, 2], [2, 2]])).isfinite().all()


def test_row_adamw_has_the_results_of_adamw() -> None:
    torch.manual_seed(0)
    dense = Bag(TokenEmbedding(V, D, 2))
    sparse = Bag(RowSparseEmbedding(V, D, 2))
    sparse.load_state_dict(dense.state_dict())
    optimizers = torch.optim.AdamW(dense.parameters(), lr=0.1), RowAdamW(sparse.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(5):
        ids = ids_of(24)
        for bag, optimizer in zip((dense, sparse), optimizers, strict=True):
            optimizer.zero_grad()
            bag(ids, OFFSETS).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(sparse.table.weight.detach(), dense.table.weight.detach())


def test_files_of_torch_fit_in_both_directions() -> None:
    theirs = nn.ModuleDict({"embedding": nn.EmbeddingBag(V, D)})
    ours = nn.ModuleDict({"embedding": Bag(TokenEmbedding(V, D))})
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours["embedding"](ids := ids_of(3, 4)), theirs["embedding"](ids))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    broken = nn.ModuleDict({"embedding": Bag(TokenEmbedding(V + 1, D))})
    with pytest.raises(RuntimeError, match="size mismatch for embedding"):
        broken.load_state_dict(theirs.state_dict())


def test_a_damaged_save_is_one_error(tmp_path) -> None:
    Bag(TokenEmbedding(V, D)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mean"', '"max"'))
    with pytest.raises(CheckpointError):
        Bag.from_pretrained(tmp_path)


def test_states_of_torch_distributed_have_the_names_of_the_state_dict() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = nn.Sequential(Bag(TokenEmbedding(V, D)), nn.Linear(D, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(BATCH).sum().backward()
    optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    assert list(state) == list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    with torch.no_grad():
        trained = model[0].weight.clone()
        model[0].weight.zero_()
    set_state_dict(model, optimizer, model_state_dict=state | {"0.weight": trained}, optim_state_dict=moments)
    assert torch.equal(model[0].weight, trained)


class Doubled(nn.EmbeddingBag):
    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*arguments, **options)


OTHER_MODULES: list[Callable[[], nn.Module]] = [
    *(lambda options=options: nn.EmbeddingBag(V, D, **options)
      for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"mode": "max"})),
    lambda: Doubled(V, D),
    lambda: nn.utils.parametrizations.spectral_norm(nn.EmbeddingBag(V, D)),
    lambda: nn.Embedding(V, D),
]  # fmt: skip


def test_a_module_that_means_something_else_is_refused(unchecked) -> None:
    for module in OTHER_MODULES:
        with pytest.raises(SizeError):
            Bag.from_embedding_bag(module())


IDS, BATCH = ids_of(24), ids_of(4, 7)


BAD_INPUT: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((IDS,), {}),
    ((IDS[0], OFFSETS), {}),
    ((IDS, OFFSETS), {"lengths": [3]}),
    ((BATCH, OFFSETS), {}),
    ((BATCH,), {"mask": BATCH > 0, "lengths": [1, 2, 3, 4]}),
    *(((BATCH,), {"lengths": lengths}) for lengths in ([1, 2, 3], [1, 2, 8, 4], [1, -2, 7, 4])),
    ((BATCH,), {"mask": BATCH[:3] > 0}),
    ((BATCH.float(),), {}),
    *(((IDS, offsets), {}) for offsets in (OFFSETS.float(), *map(torch.tensor, ([1, 5], [0, 9, 5], [0, 30])))),
    ((BATCH, None, torch.rand(28)), {}),
]


def test_bad_input_is_one_error(unchecked) -> None:
    bag = Bag(TokenEmbedding(V, D, 2), mode="sum")
    for arguments, options in BAD_INPUT:
        with pytest.raises(ShapeError):
            bag(*arguments, **options)
    with pytest.raises(SizeError):  # a mean has no weights
        Bag(TokenEmbedding(V, D))(BATCH, per_sample_weights=torch.rand(4, 7))


def test_a_bad_id_is_named_with_its_bag_and_place() -> None:
    ids = BATCH.clone()
    ids[2, 5] = V
    for padding_idx in (None, 2):
        with pytest.raises(TokenIdError, match=f"token id {V} at row 2, column 5"):
            Bag(TokenEmbedding(V, D, padding_idx))(ids)


def test_a_bag_by_itself_is_not_patched() -> None:
    with pytest.raises(CheckpointError):
        patch(nn.EmbeddingBag(V, D))
