"""Heads of GPTQ and AWQ: what the configuration adds to the tensors, and what is refused.

GPTQModel is not installed here. Its `dequantize_weight` and the conversion of its first format to the second (7.7.0)
gave the same bits as these records for 2, 4 and 8 bits in both formats, and for 3 bits in the second. Its `Quantizer`
and the conversion of its second format to the first gave the bytes of new rows, symmetric or not, and so did
`pseudo_quantize_tensor` and `WQLinear_GEMM` of AutoAWQ (0.2.9) for groups of numbers with both signs.
"""

import pytest
import torch
from stored_cases import NAME, StoredCase, awq_case, gptq_case, weights

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.recognition import recognise


@pytest.fixture
def case() -> StoredCase:
    return gptq_case(weights(64, torch.float16), 4)


def refused(case: StoredCase, part: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {NAME}\.{part} .*{message}"):
        recognise(case.module)


def test_the_tensors_tell_the_bits(case) -> None:
    record, vocab_size = recognise(case._replace(settings={}).module)
    assert (record.bits, record.embed_dim, record.group_size, vocab_size) == (4, 64, 32, 77)
    refused(case._replace(settings={"bits": 8}), "qweight", "4 bits, and the configuration states 8 bits")
    record, _ = recognise(case.changed(g_idx=None).module)
    assert record.embed_dim == 64


def test_a_stored_zero_point_is_one_less_only_in_the_first_format() -> None:
    case = gptq_case(weights(64, torch.float16), 4, symmetric=True)  # a zero point of 0 would borrow from the next one
    first, second = (
        recognise(case._replace(settings={"checkpoint_format": name}).module)[0] for name in ("gptq", "gptq_v2")
    )
    assert (first.zero_offset, second.zero_offset) == (1, 0)
    zeros = first.read(case.module, 77).rows["qzeros"]
    assert torch.equal(zeros, second.read(case.module, 77).rows["qzeros"] + 1)


def test_a_head_may_have_fewer_tokens_than_columns_and_an_embedding_is_refused() -> None:
    case = gptq_case(weights(64, torch.float16, 40), 4)
    refused(case, "scales", "groups run along the vocabulary")
    module = case.module._replace(name="lm_head")
    record, vocab_size = recognise(module)
    assert torch.equal(record.read(module, vocab_size).dequantise(torch.float16), case.rows)


def test_columns_in_an_order_of_their_own_are_refused(case) -> None:
    order = case.tensors["g_idx"].flip(0)
    refused(case.changed(g_idx=order), "g_idx", "act-order.* columns of a group must be neighbours")


def test_groups_that_do_not_divide_the_width_are_refused(case) -> None:
    scales, zeros = (torch.cat([case.tensors[name]] * 2)[:3] for name in ("scales", "qzeros"))
    refused(case.changed(scales=scales, qzeros=zeros), "scales", "3 rows, into which 64 columns cannot be divided")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_tensor_that_is_missing_or_cut_short_is_named(case, part) -> None:
    with pytest.raises(CheckpointError, match=f"{NAME}.({part}|qweight)"):
        record, vocab_size = recognise(case.changed(**{part: case.tensors[part][:, :-1].contiguous()}).module)
        record.read(case.module, vocab_size)
    if part != "qweight":
        refused(case.changed(**{part: None}), part, "is missing")
        damaged = case.changed(**{part: case.tensors[part][:1].contiguous(), "g_idx": None})
        with pytest.raises(CheckpointError, match=f"{NAME}.(qzeros|scales)"):
            record, vocab_size = recognise(damaged.module)
            record.read(damaged.module, vocab_size)


def test_a_scale_that_is_not_finite_is_named(case) -> None:
    scales = case.tensors["scales"].clone()
    scales[0, 5] = torch.inf
    damaged = case.changed(scales=scales)
    record, vocab_size = recognise(damaged.module)
    with pytest.raises(CheckpointError, match=rf"{NAME}\.scales holds NaN or infinity"):
        record.read(damaged.module, vocab_size)


def test_other_versions_of_awq_are_refused() -> None:
    case = awq_case(weights(64, torch.float16, 80))
    refused(case._replace(settings={"bits": 8}), "qweight", "has 4 bits, and the configuration states 8")
    words = torch.zeros(80, 8, dtype=torch.int32)  # version gemv: tokens are rows
    refused(case.changed(qweight=words), "qweight", "neither GPTQ nor AWQ of version gemm")
    refused(case.changed(qzeros=words), "qweight", "neither GPTQ nor AWQ of version gemm")


def test_many_tokens_of_awq_are_repacked_in_parts() -> None:
    rows = weights(32, torch.float16, 8200)
    case = awq_case(rows)
    record, vocab_size = recognise(case.module)
    assert torch.equal(record.read(case.module, vocab_size).dequantise(torch.float16), case.rows)
