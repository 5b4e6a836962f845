"""bitsandbytes' records: what is refused. Laws of all: `test_stored_formats.py`; nested blocks: `test_refused.py`."""

import json

import pytest
import torch
from stored_cases import StoredCase, bitsandbytes_case, refused, weights
from torch import Tensor

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture
def case() -> StoredCase:
    return bitsandbytes_case(weights(192, torch.bfloat16), "nf4")


def as_bytes(text: str) -> Tensor:
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def stating(case: StoredCase, **sizes: object) -> StoredCase:
    state = json.loads(bytes(case.tensors[STATE].tolist()))
    return case.changed(**{STATE: as_bytes(json.dumps({**state, **sizes}))})


def test_a_state_that_tells_no_sizes_is_refused(case) -> None:
    for text in ("{", "[]", "\x00"):
        refused(case.changed(**{STATE: as_bytes(text)}), f"{STATE} is not")
    for sizes in ({"shape": [192]}, {"shape": None}, {"blocksize": 0}, {"blocksize": "64"}):
        refused(stating(case, **sizes), f"{STATE} states shape")


def test_sizes_that_the_tensors_contradict_are_refused(case) -> None:
    refused(stating(case, shape=[76, 192]), r"weight is stored as U8 \[7392, 1\], for \[76, 192\]")
    refused(stating(case, blocksize=32), r"weight\.absmax is stored as F32 \[231\]")


@pytest.mark.parametrize("part", ["weight.absmax", "weight.quant_map", "weight"])
def test_a_tensor_that_is_missing_or_cut_short_is_named(case, part) -> None:
    refused(case.changed(**{part: None}), f"{part} is missing")
    refused(case.changed(**{part: case.tensors[part][:-1]}), f"{part} is stored as")


def test_scales_that_are_not_finite_or_of_another_size_are_refused(case) -> None:
    damaged = case.tensors["weight.absmax"].clone()
    damaged[7] = torch.nan
    refused(case.changed(**{"weight.absmax": damaged}), "absmax holds NaN")
    int8 = bitsandbytes_case(weights(192), "int8")
    refused(int8.changed(SCB=int8.tensors["SCB"][:-1]), r"SCB is stored as F32 \[76\] for 77 rows")
    refused(int8.changed(SCB=int8.tensors["SCB"] * torch.inf), "SCB holds NaN")
    refused(int8.changed(weight=None), "weight is missing")
