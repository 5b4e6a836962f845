"""What torchao's metadata adds to its tensors, and what is refused. Laws of all: `test_stored_formats.py`."""

import json

import pytest
import torch
from stored_cases import CASES, NAME, StoredCase, load, refused

KEY = f"{NAME}.weight"


@pytest.fixture
def case() -> StoredCase:
    return CASES["torchao 4 bits, bfloat16"]()


def stating(case: StoredCase, **data: object) -> StoredCase:
    stated = json.loads(case.metadata[KEY])
    return case._replace(metadata={KEY: json.dumps({**stated, "_data": {**stated["_data"], **data}})})


def test_codes_without_a_type_are_refused(case) -> None:
    for metadata in ({}, {KEY: "{"}, {KEY: "[]"}, {KEY: "{}"}, {"lm_head.weight": "{}"}):
        refused(case._replace(metadata=metadata), "_weight_qdata .*no type of torchao in the metadata")


def test_tensors_that_do_not_belong_together_are_refused(case) -> None:
    refused(stating(case, block_size=[1, 64]), r"_weight_scale .*states \[1, 64\]")
    refused(case.changed(_weight_scale=torch.ones(7, 6)), r"_weight_scale .*has shape \[7, 6\] for 77 rows")
    refused(case.changed(_weight_scale=torch.ones(77, 5)), r"_weight_scale .*has shape \[77, 5\] for 77 rows")
    refused(case.changed(_weight_zero_point=torch.ones(77, 6)), "_weight_zero_point .*F32")
    factor = torch.ones(192)
    refused(case.changed(_weight_act_pre_scale=factor), "_weight_act_pre_scale .*rows alone do not give")


def test_one_scale_of_the_whole_matrix_is_read(case) -> None:
    codes = case.tensors["_weight_qdata"]
    whole = stating(case, block_size=[77, 192])
    table = load(whole.changed(_weight_scale=torch.full((1, 1), 0.5), _weight_zero_point=torch.full((1, 1), 3).char()))
    assert torch.equal(table.float().rows(0, 77), (codes.float() - 3) * 0.5)
    assert torch.equal(table(torch.tensor([4])), (codes[4:5].float() - 3) * 0.5)
