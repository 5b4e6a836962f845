"""bitsandbytes' records: what is refused. Laws of all: `test_stored_formats.py`; nested blocks: `test_refused.py`."""

import json

import pytest
import torch
from stored_cases import NAME, StoredCase, bitsandbytes_case, weights
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.recognition import recognise

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture
def case() -> StoredCase:
    return bitsandbytes_case(weights(192, torch.bfloat16), "nf4")


def refused(case: StoredCase, part: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {NAME}\.{part} {message}"):
        recognised = recognise(case.module)
        assert recognised is not None
        recognised[0].read(case.module, recognised[1])


def as_bytes(text: str) -> Tensor:
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def stating(case: StoredCase, **sizes: object) -> StoredCase:
    state = json.loads(bytes(case.tensors[STATE].tolist()))
    return case.changed(**{STATE: as_bytes(json.dumps({**state, **sizes}))})


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_state_that_is_no_json_object_is_refused(case, text) -> None:
    refused(case.changed(**{STATE: as_bytes(text)}), STATE, "is not")


@pytest.mark.parametrize("sizes", [{"shape": [192]}, {"shape": None}, {"blocksize": 0}, {"blocksize": "64"}])
def test_sizes_that_are_none_are_refused(case, sizes) -> None:
    refused(stating(case, **sizes), STATE, "states shape")


def test_sizes_that_the_tensors_contradict_are_refused(case) -> None:
    refused(stating(case, shape=[76, 192]), "weight", r"is stored as U8 \[7392, 1\], for \[76, 192\]")
    refused(stating(case, blocksize=32), r"weight\.absmax", r"is stored as F32 \[231\]")


@pytest.mark.parametrize("part", ["weight.absmax", "weight.quant_map", "weight"])
def test_a_tensor_that_is_missing_or_cut_short_is_named(case, part) -> None:
    refused(case.changed(**{part: None}), part.replace(".", r"\."), "is missing")
    refused(case.changed(**{part: case.tensors[part][:-1]}), part.replace(".", r"\."), "is stored as")


def test_scales_that_are_not_finite_or_of_another_size_are_refused(case) -> None:
    damaged = case.tensors["weight.absmax"].clone()
    damaged[7] = torch.nan
    refused(case.changed(**{"weight.absmax": damaged}), "absmax", "holds NaN")
    int8 = bitsandbytes_case(weights(192), "int8")
    refused(int8.changed(SCB=int8.tensors["SCB"][:-1]), "SCB", r"is stored as F32 \[76\] for 77 rows")
    refused(int8.changed(SCB=int8.tensors["SCB"] * torch.inf), "SCB", "holds NaN")
    refused(int8.changed(weight=None), "weight", "is missing")
