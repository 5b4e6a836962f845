"""The kernels of rows that a codec describes: the bits of `Codec.decode`, in every layout and dtype."""

from unittest.mock import Mock

import pytest
import torch
from covering import cases, some
from stored_cases import CASES, OTHER_ROWS, VOCAB_SIZE, rows_of
from stored_folders import one_of_each
from torch import Tensor

from embedlayer.formats import compiled
from embedlayer.formats.codec import E2M1, E2M3, E4M3, E8M0, Codec, shifted, signed, unsigned
from embedlayer.formats.mlx import MLXAffineRows
from embedlayer.formats.stored import StoredRows
from embedlayer.kernels import kernels_disabled
from embedlayer.tables.stored_embedding import StoredEmbedding

pytestmark = pytest.mark.usefixtures("kernels")

COUNT = 53
LEVELS = {
    **{f"unsigned, {bits} bits": unsigned(bits) for bits in range(1, 9)},
    **{f"shifted, {bits} bits": shifted(bits) for bits in (2, 4, 8)},
    **{f"signed, {bits} bits": signed(bits) for bits in (4, 8)},
    "E2M1": E2M1,
    "E2M3": E2M3,
    "E4M3": E4M3,
}
SCALES: dict[str, torch.dtype | Tensor] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "E4M3": E4M3,
    "E8M0": E8M0,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def codec_of(levels: str, scales: str, sizes: tuple[int, int], rounding: torch.dtype, others: str) -> Codec:
    """Return a codec of random codes; its scales reach from subnormal numbers to infinite products."""
    width, group_size = sizes
    bits, groups = len(LEVELS[levels]).bit_length() - 1, -(-width // group_size)
    codes = torch.randint(256, (COUNT, -(-width * bits // 8)), dtype=torch.uint8)
    kind = SCALES[scales]
    by_code = isinstance(kind, Tensor)
    scale: Tensor = torch.randint(256, (COUNT, groups), dtype=torch.uint8)
    if not isinstance(kind, Tensor):
        scale = (torch.randn(COUNT, groups) * torch.logspace(-9, 5, COUNT).unsqueeze(1)).to(kind)
    return Codec(
        codes,
        bits,
        LEVELS[levels],
        scale[:1].expand(COUNT, groups) if "shared" in others else scale,
        group_size,
        width,
        rounding,
        scale_levels=kind if isinstance(kind, Tensor) else None,
        zero=torch.randint(-8, 8, (COUNT, groups), dtype=torch.int8) if "zero" in others else None,
        bias=scale.flip(0) if "bias" in others and not by_code else None,
        factor=7.874015718698502e-3 if "factor" in others else 1.0,
    )


def have_same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have equal bits where they are not NaN, and NaN at the same places."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    same = (left.view(words) == right.view(words)) | (left.isnan() & right.isnan())
    return left.dtype == right.dtype and left.shape == right.shape and bool(same.all())


@cases(
    "levels, scales, sizes, rounding, others",
    tuple(LEVELS),
    tuple(SCALES),
    ((1, 1), (50, 50), (50, 16), (96, 32), (768, 64)),
    (torch.float32, torch.bfloat16, torch.float16),
    ("", "zero", "bias", "zero, bias", "shared", "shared, bias", "factor", "factor, bias"),
    pairs=["levels, sizes", "scales, rounding", "rounding, others", "scales, others", "levels, rounding"],
)
def test_rows_have_the_bits_of_the_definition(levels, scales, sizes, rounding, others) -> None:
    codec, ids = codec_of(levels, scales, sizes, rounding, others), torch.tensor([52, 7, 7, 0])
    for dtype in DTYPES:
        numbers, numbers_of_ids = compiled.decoded(codec, dtype), compiled.decoded(codec, dtype, ids)
        assert numbers is not None
        assert numbers_of_ids is not None
        assert have_same_bits(numbers, codec.decode().to(dtype))
        assert have_same_bits(numbers_of_ids, numbers[ids])
    assert len(compiled._KERNELS[Codec]._compiled) == 1


@pytest.fixture(params=some([*one_of_each(), *OTHER_ROWS], [*CASES, *OTHER_ROWS]))
def stored(request: pytest.FixtureRequest) -> StoredRows:
    """Stored rows of every format."""
    return rows_of(request.param)


def test_rows_of_every_format_have_the_bits_of_the_definition(stored: StoredRows) -> None:
    ids = torch.tensor([5, 70, 5, 0])
    for dtype in DTYPES:
        assert have_same_bits(compiled.read_rows(stored, dtype), stored.dequantise(dtype))
        assert have_same_bits(compiled.read_rows(stored, dtype, ids), stored.take(ids).dequantise(dtype))
    assert len(compiled.read_rows(stored, torch.float32, ids[:0])) == 0


def test_logits_of_few_tokens_are_products_with_the_rows_of_every_format(stored: StoredRows) -> None:
    rows = stored.dequantise(torch.float64)
    for tokens in (1, compiled.FEW_TOKENS):
        hidden = torch.randn(stored.shape[1], tokens).T
        logits = compiled.logits_of_few_tokens(hidden, stored)
        assert (logits is None) == (stored.codec(torch.float32) is None)
        if logits is not None:
            assert (logits.dtype, logits.is_contiguous()) == (torch.float32, True)
            tolerance = 1e-6 * (hidden.double().abs() @ rows.abs().T)
            assert ((logits.double() - hidden.double() @ rows.T).abs() <= tolerance).all()
    assert all(len(each._compiled) <= 1 for each in compiled._KERNELS.values())  # once for all formats and dtypes


def table_of(vocab_size: int = VOCAB_SIZE) -> StoredEmbedding:
    table = StoredEmbedding(vocab_size, MLXAffineRows(64, 4, 32, "BF16"))
    for part in table.parts.tensors.values():
        part.copy_(torch.randint(1 << 30, part.shape) if part.dtype == torch.uint32 else torch.randn(part.shape))
    return table


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
def test_numbers_depend_neither_on_blocks_nor_on_threads(block, monkeypatch) -> None:
    table, ids, hidden = table_of(), torch.randint(VOCAB_SIZE, (500,)), torch.randn(1, 64)
    rows, logits = table(ids), table.logits(hidden, head_dtype=torch.float32)
    monkeypatch.setattr(compiled, "CLAIMED_NUMEL", block)
    torch.set_num_threads(3)
    assert torch.equal(table(ids), rows)
    assert torch.equal(torch.cat([table(each) for each in ids.split(1)]), rows)
    assert torch.equal(table.logits(hidden, head_dtype=torch.float32), logits)


@pytest.fixture
def run(monkeypatch) -> Mock:
    """The runs of the kernel; the number of tokens of each is that of its third argument."""
    run = Mock(wraps=compiled._KERNELS[Codec].run)
    monkeypatch.setattr(compiled._KERNELS[Codec], "run", run)
    return run


def test_only_few_float32_tokens_are_multiplied_by_codes(run) -> None:
    table = table_of()
    for tokens, dtype, expected in (
        (1, torch.float32, 1),
        (compiled.FEW_TOKENS, torch.float32, 1),
        (compiled.FEW_TOKENS + 1, torch.float32, 0),
        (1, torch.bfloat16, 0),
        (1, torch.float64, 0),
    ):
        run.reset_mock()
        hidden = torch.randn(tokens, 64, dtype=dtype)
        logits = table.raw_logits(hidden)
        assert sum(len(call.args[2]) > 0 for call in run.call_args_list) == expected
        with kernels_disabled():
            torch.testing.assert_close(logits, table.raw_logits(hidden), rtol=1e-5, atol=2e-5)


def test_a_batch_invariant_token_is_multiplied_as_many_are(run) -> None:
    table, hidden, ids = table_of(), torch.randn(3, 64), torch.randint(VOCAB_SIZE, (3,))
    options = {"head_dtype": torch.float32, "batch_invariant": True}
    together = table.token_log_probs(hidden, ids, **options)
    assert torch.equal(table.token_log_probs(hidden[1:2], ids[1:2], **options), together[1:2])
    assert torch.equal(table.logits(hidden[1:2], **options), table.logits(hidden, **options)[1:2])
    assert {len(call.args[2]) for call in run.call_args_list} == {0}
