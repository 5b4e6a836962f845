"""The kernels of rows that a codec describes: the numbers of the definition, in every format and dtype."""

import pytest
import torch
from covering import some
from stored_cases import CASES, VOCAB_SIZE, built, load
from stored_folders import one_of_each

from embedlayer.kernels import kernels_disabled
from embedlayer.tables import GGUFEmbedding, LookupTable

pytestmark = pytest.mark.usefixtures("kernels")

BLOCKS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def table_of(name: str) -> LookupTable:
    """Return a table of a stored case, or of a type of GGUF's blocks."""
    if name not in BLOCKS:
        return load(built(name))
    gguf_models = pytest.importorskip("gguf_models")
    table = GGUFEmbedding(VOCAB_SIZE, gguf_models.WIDTH, name)
    table.packed.copy_(torch.from_numpy(gguf_models.blocks(name, VOCAB_SIZE)))
    return table


@pytest.mark.parametrize("name", some([*one_of_each(), *BLOCKS], [*CASES, *BLOCKS]))
def test_rows_and_logits_are_those_of_the_definition(name) -> None:
    table, ids = table_of(name), torch.tensor([5, 70, 5, 0])
    for dtype in DTYPES:
        table.to(dtype)
        found = [table.rows(0, VOCAB_SIZE), table(ids), table(ids[:0])]
        with kernels_disabled():
            expected = [table.rows(0, VOCAB_SIZE), table(ids), table(ids[:0])]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    rows = table.double().rows(0, table.vocab_size)
    for tokens in (1, 8, 9):
        hidden = torch.randn(rows.shape[1], tokens).T
        logits = table.float().raw_logits(hidden)
        assert (logits.dtype, logits.is_contiguous()) == (torch.float32, True)
        tolerance = 1e-6 * (hidden.double().abs() @ rows.abs().T)
        assert ((logits.double() - hidden.double() @ rows.T).abs() <= tolerance).all()


@pytest.mark.parametrize(
    ("tokens", "dtype", "batch_invariant"),
    [
        (8, torch.float32, False),
        (9, torch.float32, False),
        (1, torch.bfloat16, False),
        (1, torch.float32, True),
    ],
)
def test_only_few_float32_tokens_of_no_invariant_batch_are_multiplied_by_codes(tokens, dtype, batch_invariant) -> None:
    table = table_of(one_of_each()[0]).to(dtype)
    hidden = torch.randn(tokens, table.embed_dim, dtype=dtype)
    with kernels_disabled():
        by_rows = table.logits(hidden, batch_invariant=batch_invariant)
    logits = table.logits(hidden, batch_invariant=batch_invariant)
    assert torch.equal(logits, by_rows) == ((tokens, dtype, batch_invariant) != (8, torch.float32, False))
    torch.testing.assert_close(logits, by_rows, rtol=1e-5, atol=2e-5)
