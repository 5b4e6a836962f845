import pytest
import torch
from stored_formats import CASES

from embedlayer.formats.recognition import recognise


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))


def test_rows_are_those_of_the_library_bit_for_bit(case):
    record, vocab_size = recognise(case.module)
    rows = record.read(case.module, vocab_size)
    assert rows.shape == case.rows.shape
    assert record.dtype == case.rows.dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same_bits(rows.dequantise(dtype), case.rows.to(dtype))
