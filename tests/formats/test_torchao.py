"""What torchao's metadata adds to its tensors, and what is refused. Laws of all: `test_stored_formats.py`."""

import json

import pytest
import torch
from stored_cases import CASES, NAME, StoredCase

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.recognition import recognise

KEY = f"{NAME}.weight"


@pytest.fixture
def case() -> StoredCase:
    return CASES["torchao 4 bits, bfloat16"]()


def refused(case: StoredCase, part: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {NAME}\.{part} .*{message}"):
        recognise(case.module)


def stating(case: StoredCase, **data: object) -> StoredCase:
    stated = json.loads(case.metadata[KEY])
    return case._replace(metadata={KEY: json.dumps({**stated, "_data": {**stated["_data"], **data}})})


@pytest.mark.parametrize("metadata", [{}, {KEY: "{"}, {KEY: "[]"}, {KEY: "{}"}, {"lm_head.weight": "{}"}])
def test_codes_without_a_type_are_refused(case, metadata) -> None:
    refused(case._replace(metadata=metadata), "_weight_qdata", "no type of torchao in the metadata")


def test_blocks_that_the_tensors_contradict_are_refused(case) -> None:
    refused(stating(case, block_size=[1, 64]), "_weight_scale", r"states \[1, 64\]")
    refused(case.changed(_weight_scale=torch.ones(7, 6)), "_weight_scale", r"has shape \[7, 6\] for 77 rows")
    refused(case.changed(_weight_scale=torch.ones(77, 5)), "_weight_scale", r"has shape \[77, 5\] for 77 rows")


def test_a_zero_point_in_floating_point_is_refused(case) -> None:
    refused(case.changed(_weight_zero_point=torch.ones(77, 6)), "_weight_zero_point", "F32")


def test_a_factor_on_the_hidden_states_is_refused(case) -> None:
    refused(case.changed(_weight_act_pre_scale=torch.ones(192)), "_weight_act_pre_scale", "rows alone do not give")


def test_one_scale_of_the_whole_matrix_is_read(case) -> None:
    codes = case.tensors["_weight_qdata"]
    whole = stating(case, block_size=[77, 192])
    whole = whole.changed(_weight_scale=torch.full((1, 1), 0.5), _weight_zero_point=torch.full((1, 1), 3).char())
    record, vocab_size = recognise(whole.module)
    rows = record.read(whole.module, vocab_size)
    assert torch.equal(rows.dequantise(torch.float32), (codes.float() - 3) * 0.5)
    assert torch.equal(rows.take(torch.tensor([4])).dequantise(torch.float32), (codes[4:5].float() - 3) * 0.5)
