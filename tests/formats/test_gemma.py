"""What Gemma's configuration adds to its tensors, and what is refused. Laws of all: `test_stored_formats.py`."""

import pytest
import torch
from stored_cases import NAME, StoredCase, gemma_case, weights

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.gemma import GemmaRows
from embedlayer.formats.recognition import recognise


@pytest.fixture
def case() -> StoredCase:
    return gemma_case(weights(96), 2)


def refused(case: StoredCase, part: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {NAME}\.{part} .*{message}"):
        recognise(case.module)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"num_bits": 2}, 2),
        ({"quant_method": "gemma"}, 4),
        ({"num_bits": 4, "module_quant_configs": {"lm_head": {"num_bits": 8}, r"\.embed_tokens$": {"num_bits": 2}}}, 2),
        ({"num_bits": 2, "module_quant_configs": {"embed": {}, "tokens": {"num_bits": 4}}}, 2),
        ({"num_bits": 2, "module_quant_configs": {"(": {"num_bits": 4}}}, 2),
    ],
)
def test_the_first_pattern_in_the_name_tells_the_bits(case, settings, bits) -> None:
    record, vocab_size = recognise(case._replace(settings=settings).module)
    assert (record.bits, record.embed_dim, vocab_size) == (bits, 24 * 8 // bits, 77)


def test_bytes_whose_bits_are_not_stated_are_refused(case) -> None:
    refused(case._replace(settings={}), "embedding_quantized", "2 or 4 bits, and the configuration states nothing")
    refused(case._replace(settings={"num_bits": 8}), "embedding_quantized", "states 8 bits")


def test_int8_needs_no_configuration_and_scales_may_be_those_of_groups() -> None:
    case = gemma_case(weights(96), 8)
    record, _ = recognise(case._replace(settings={}).module)
    assert (record.bits, record.group_size) == (8, 96)
    grouped = case.changed(embedding_scale=torch.rand(77, 3))
    record, vocab_size = recognise(grouped.module)
    rows = record.read(grouped.module, vocab_size).dequantise(torch.float32)
    scales = grouped.tensors["embedding_scale"].repeat_interleave(32, 1)
    assert torch.equal(rows, grouped.tensors["embedding_quantized"] * scales)
    refused(case.changed(embedding_scale=torch.ones(77, 5)), "embedding_scale", "5 scales a row, .* 96 columns")


def test_a_head_of_another_library_is_not_read_by_this_rounding() -> None:
    head = gemma_case(weights(96), 8, is_head=True)
    assert type(recognise(head.module)[0]).__name__ == "GemmaRows"
    assert type(recognise(head._replace(settings={}).module)[0]).__name__ != "GemmaRows"


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 96])
def test_the_largest_number_of_a_new_group_has_the_largest_code(bits: int, group_size: int) -> None:
    stored = GemmaRows(96, bits, group_size, "embedding_quantized")
    values = weights(96).to(torch.bfloat16)
    parts = stored.quantise(values, {})
    scale = parts["embedding_scale"]
    largest = values.float().unflatten(1, (-1, group_size)).abs().amax(2)
    assert torch.equal(scale, largest / (2 ** (bits - 1) - 1))
    error = (stored.dequantise(parts, {}, torch.float32) - values).unflatten(1, (-1, group_size)).abs().amax(2)
    assert (error <= 0.5001 * scale).all()
    assert parts["embedding_quantized"].dtype == stored.row_parts["embedding_quantized"].dtype
