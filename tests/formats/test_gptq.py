"""Heads of GPTQ and AWQ: what the configuration adds to the tensors, and what is refused.

GPTQModel is not installed here. Its `dequantize_weight` and the conversion of its first format to the second (7.7.0)
gave the same bits as these records for 2, 4 and 8 bits in both formats, and for 3 bits in the second. Its `Quantizer`
and the conversion of its second format to the first gave the bytes of new rows, symmetric or not, and so did
`pseudo_quantize_tensor` and `WQLinear_GEMM` of AutoAWQ (0.2.9) for groups of numbers with both signs.
"""

import pytest
import torch
from stored_cases import StoredCase, awq_case, gptq_case, load, read, refused, weights


@pytest.fixture
def case() -> StoredCase:
    return gptq_case(weights(64, torch.float16), 4)


def test_the_tensors_tell_the_bits(case) -> None:
    for same in (case._replace(settings={}), case.changed(g_idx=None)):
        assert torch.equal(load(same).rows(0, 99), case.rows)
    refused(case._replace(settings={"bits": 8}), "qweight .*4 bits, and the configuration states 8 bits")


def test_a_stored_zero_point_is_one_less_only_in_the_first_format() -> None:
    case = gptq_case(weights(64, torch.float16), 4, symmetric=True)  # a zero point of 0 would borrow from the next one
    first, second = (read(case._replace(settings={"checkpoint_format": name})) for name in ("gptq", "gptq_v2"))
    assert (first.format.zero_offset, second.format.zero_offset) == (1, 0)
    assert torch.equal(first.rows["qzeros"], second.rows["qzeros"] + 1)


def test_a_head_may_have_fewer_tokens_than_columns_and_an_embedding_is_refused() -> None:
    case = gptq_case(weights(64, torch.float16, 40), 4)
    refused(case, "scales .*groups run along the vocabulary")
    assert torch.equal(load(case, "lm_head").rows(0, 99), case.rows)


def test_columns_in_an_order_of_their_own_and_unequal_groups_are_refused(case) -> None:
    order = case.tensors["g_idx"].flip(0)
    refused(case.changed(g_idx=order), "g_idx .*act-order.* columns of a group must be neighbours")
    scales, zeros = (torch.cat([case.tensors[name]] * 2)[:3] for name in ("scales", "qzeros"))
    refused(case.changed(scales=scales, qzeros=zeros), "scales .*3 rows, into which 64 columns cannot be divided")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_damaged_tensor_is_named(case, part) -> None:
    refused(case.changed(**{part: case.tensors[part][:, :-1]}), f"({part}|qweight) ")
    if part != "qweight":
        refused(case.changed(**{part: None}), f"{part} .*is missing")
        refused(case.changed(**{part: case.tensors[part][:1], "g_idx": None}), "(qzeros|scales) ")
    scales = case.tensors["scales"].clone()
    scales[0, 5] = torch.inf
    refused(case.changed(scales=scales), "scales holds NaN or infinity")


def test_other_versions_of_awq_are_refused() -> None:
    case = awq_case(weights(64, torch.float16, 80))
    refused(case._replace(settings={"bits": 8}), "qweight .*has 4 bits, and the configuration states 8")
    words = torch.zeros(80, 8, dtype=torch.int32)  # version gemv: tokens are rows
    refused(case.changed(qweight=words), "qweight .*neither GPTQ nor AWQ of version gemm")
    refused(case.changed(qzeros=words), "qweight .*neither GPTQ nor AWQ of version gemm")


def test_many_tokens_of_awq_are_repacked_in_parts() -> None:
    case = awq_case(weights(32, torch.float16, 8200))
    assert torch.equal(load(case).rows(0, 8200), case.rows)
