"""The K largest logits: exact, and the lowest ID first among equal ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedlayer import SizeError
from embedlayer.losses import largest, top_k


def expected(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@given(st.data())
def test_it_is_a_stable_sort_however_many_logits_are_equal(data) -> None:
    rows, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 400))
    k, levels = data.draw(st.integers(1, min(size, 30))), data.draw(st.sampled_from([1, 2, 5, 1000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randint(0, levels, (rows, size), generator=generator).float()
    logits[:, ::7] = -torch.inf
    for least in (0, largest.LEAST_GROUPED):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(largest, "LEAST_GROUPED", least)
            for layout in (logits, logits.T.contiguous().T):
                for ours, plain in zip(top_k(layout, k), expected(logits, k), strict=True):
                    assert torch.equal(ours, plain)


def test_equal_logits_keep_their_order() -> None:
    values, ids = top_k(torch.tensor([[1.0, 2.0, 2.0, 2.0], [3.0, 1.0, 1.0, 0.0]]), 2)
    assert values.tolist() == [[2.0, 2.0], [3.0, 1.0]]
    assert ids.tolist() == [[1, 2], [0, 1]]


def test_the_candidates_of_blocks_are_merged_in_the_same_order() -> None:
    logits = torch.randint(0, 3, (5, 40)).float()
    blocks = [top_k(part, 4) for part in logits.split(10, dim=-1)]
    values = torch.cat([block[0] for block in blocks], dim=-1)
    ids = torch.cat([block[1] + 10 * place for place, block in enumerate(blocks)], dim=-1)
    mixed = torch.randperm(16)
    found = largest.ordered_top_k(values[:, mixed], ids[:, mixed], 4)
    for ours, plain in zip(found, expected(logits, 4), strict=True):
        assert torch.equal(ours, plain)


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
