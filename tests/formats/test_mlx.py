"""What the configuration adds to the tensors of MLX. Laws of all: `test_stored_formats.py`."""

import re

import pytest
import torch
from stored_cases import CASES, NAME, StoredCase, load, mlx_case, refused, weights


@pytest.fixture
def case() -> StoredCase:
    return mlx_case(weights(256), bits=4, group_size=64)


def test_the_configuration_tells_bits_and_group_size_where_the_shapes_do_not(case) -> None:
    for settings in (
        {"bits": 4, "group_size": 64},
        {"bits": 4},
        {"group_size": 64},
        {"bits": 8, "group_size": 32, NAME: {"bits": 4, "group_size": 64}},
        {"bits": 4, "group_size": 64, NAME: False},  # the tensors are quantised
        {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}},
    ):
        assert torch.equal(load(case._replace(settings=settings)).rows(0, 99), case.rows), settings


@pytest.mark.parametrize(
    ("settings", "stated"),
    [
        ({}, "nothing"),
        ({"bits": 3, "group_size": 64}, "{'bits': 3, 'group_size': 64}"),
        ({"bits": 4, "group_size": 32}, "{'bits': 4, 'group_size': 32}"),
        ({"bits": 4, "group_size": 64, NAME: {"bits": 6, "group_size": 64}}, "{'bits': 6, 'group_size': 64}"),
        ({"bits": "4", "group_size": [64]}, "{'bits': '4', 'group_size': [64]}"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "{'mode': 'mxfp4', 'bits': 4, 'group_size': 64}"),
    ],
)
def test_a_configuration_that_the_shapes_contradict_is_refused(case, settings, stated) -> None:
    fitting = "2 bits in groups of 128 or 4 bits in groups of 64 or 8 bits in groups of 32"
    refused(case._replace(settings=settings), f"weight .*{fitting}, and the .* states {re.escape(stated)}")


def test_a_single_layout_needs_no_configuration() -> None:
    for case in (mlx_case(weights(128), bits=5, group_size=128), CASES["MLX nvfp4"]()):
        assert torch.equal(load(case._replace(settings={})).rows(0, 99), case.rows)


def test_modes_of_floats_are_told_by_the_shapes_and_not_contradicted() -> None:
    case = CASES["MLX nvfp4"]()
    for settings in ({"mode": "mxfp4"}, {"mode": "nvfp4", "bits": 8}, {"bits": 4, "group_size": 64}):
        refused(case._replace(settings=settings), f"weight .* which is nvfp4, .* states .*{settings}")
    cut = case.changed(scales=case.tensors["scales"][:, :2], weight=case.tensors["weight"][:, :24])
    refused(cut, "weight has 24 words and 2 scales a row, which is none of mxfp4")
