"""The K largest logits: exact, and the lowest ID first among equal ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_blocks import small_blocks

from embedlayer import SizeError
from embedlayer.losses import token_statistics, top_k


def expected(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@given(st.data())
def test_it_is_a_stable_sort_however_many_logits_are_equal(data) -> None:
    rows, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 400) | st.integers(2048, 4500))
    k, levels = data.draw(st.integers(1, min(size, 70))), data.draw(st.sampled_from([1, 2, 5, 1000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randint(0, levels, (rows, size), generator=generator).float()
    logits[:, ::7] = -torch.inf
    for layout in (logits, logits.T.contiguous().T):
        for ours, plain in zip(top_k(layout, k), expected(logits, k), strict=True):
            assert torch.equal(ours, plain)


def test_equal_logits_keep_their_order() -> None:
    values, ids = top_k(torch.tensor([[1.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 0.0]]), 2)
    assert values.tolist() == [[2.0, 2.0], [3.0, 1.0]]
    assert ids.tolist() == [[1, 2], [0, 1]]


@pytest.mark.usefixtures("both_paths")
def test_the_candidates_of_blocks_are_merged_in_the_same_order() -> None:
    hidden, weight = torch.ones(5, 1), torch.randint(0, 3, (40, 1)).float()
    with small_blocks(rows=10, tokens=2):
        found = token_statistics(hidden, weight, statistics=(), top_k=14, impl="chunked")
    values, ids = expected(hidden @ weight.T, 14)
    assert torch.equal(found.top_logits, values)
    assert torch.equal(found.top_ids, ids)


def test_it_compiles_and_is_batched(unchecked: None) -> None:
    logits = torch.randint(0, 5, (3, 4, 30)).float()
    plain = expected(logits, 6)
    compiled = torch.compile(lambda x: top_k(x, 6), fullgraph=True, backend="aot_eager")(logits)
    batched = torch.func.vmap(lambda x: top_k(x, 6))(logits)
    for found in (compiled, batched):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))


@pytest.mark.parametrize("k", [0, -1, 31])
def test_a_k_that_the_vocabulary_does_not_have_is_refused(k) -> None:
    with pytest.raises(SizeError, match=f"top_k must be from 1 to the 30 tokens of the vocabulary, not {k}"):
        top_k(torch.zeros(30), k)
