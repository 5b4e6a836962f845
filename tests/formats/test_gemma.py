"""What Gemma's configuration adds to its tensors, and what is refused. Laws of all: `test_stored_formats.py`."""

import pytest
import torch
from stored_cases import StoredCase, gemma_case, load, read, refused, weights


@pytest.fixture
def case() -> StoredCase:
    return gemma_case(weights(96), 2)


def test_the_first_pattern_in_the_name_tells_the_bits(case) -> None:
    for settings, bits in (
        ({"num_bits": 2}, 2),
        ({"quant_method": "gemma"}, 4),
        ({"num_bits": 4, "module_quant_configs": {"lm_head": {"num_bits": 8}, r"\.embed_tokens$": {"num_bits": 2}}}, 2),
        ({"num_bits": 2, "module_quant_configs": {"embed": {}, "tokens": {"num_bits": 4}}}, 2),
        ({"num_bits": 2, "module_quant_configs": {"(": {"num_bits": 4}}}, 2),
    ):
        stored = read(case._replace(settings=settings))
        assert (stored.format.bits, stored.shape) == (bits, (77, 24 * 8 // bits)), settings


def test_bytes_whose_bits_are_not_stated_are_refused(case) -> None:
    part = "embedding_quantized .*"
    refused(case._replace(settings={}), part + "2 or 4 bits, and the configuration states nothing")
    refused(case._replace(settings={"num_bits": 8}), part + "states 8 bits")


def test_int8_needs_no_configuration_and_scales_may_be_those_of_groups() -> None:
    case = gemma_case(weights(96), 8)
    assert torch.equal(load(case._replace(settings={})).rows(0, 99), case.rows)
    grouped = case.changed(embedding_scale=torch.rand(77, 3))
    scales = grouped.tensors["embedding_scale"].repeat_interleave(32, 1)
    assert torch.equal(load(grouped).rows(0, 99), grouped.tensors["embedding_quantized"] * scales)
    refused(case.changed(embedding_scale=torch.ones(77, 5)), "embedding_scale .*5 scales a row, .* 96 columns")


def test_a_head_of_another_library_is_not_read_by_this_rounding() -> None:
    head = gemma_case(weights(96), 8, is_head=True)
    assert load(head).stored_type.startswith("Gemma")
    assert not load(head._replace(settings={})).stored_type.startswith("Gemma")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 96])
def test_the_largest_number_of_a_new_group_has_the_largest_code(bits: int, group_size: int) -> None:
    case = gemma_case(weights(96), bits)
    stored = read(case.changed(embedding_scale=torch.ones(77, 96 // group_size)))
    values = weights(96).to(torch.bfloat16)
    new = stored.quantised(values)
    scale = new.rows["embedding_scale"]
    largest = values.float().unflatten(1, (-1, group_size)).abs().amax(2)
    assert torch.equal(scale, largest / (2 ** (bits - 1) - 1))
    error = (new.dequantise(torch.float32) - values).unflatten(1, (-1, group_size)).abs().amax(2)
    assert (error <= 0.5001 * scale).all()
