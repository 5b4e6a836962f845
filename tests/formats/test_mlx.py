"""What the configuration adds to the tensors of MLX.

That rows are those of the library is a law of `test_stored_formats.py`.
"""

import re
from typing import Any

import pytest
from stored_cases import CASES, NAME, StoredCase, mlx_case, weights

from embedlayer.core.errors import CheckpointError
from embedlayer.formats.mlx import MLXAffineRows, MLXFloatRows
from embedlayer.formats.recognition import recognise


@pytest.fixture
def case() -> StoredCase:
    return mlx_case(weights(256), bits=4, group_size=64)


def stating(case: StoredCase, settings: dict[str, Any]) -> StoredCase:
    return case._replace(settings=settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4, "group_size": 64},
        {"bits": 4},
        {"group_size": 64},
        {"bits": 8, "group_size": 32, NAME: {"bits": 4, "group_size": 64}},
        {"bits": 4, "group_size": 64, NAME: False},  # the tensors are quantised
        {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}},
    ],
)
def test_the_configuration_tells_bits_and_group_size_where_the_shapes_do_not(case, settings):
    assert recognise(stating(case, settings).module) == (MLXAffineRows(256, 4, 64, "F32"), len(case.rows))


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
def test_a_configuration_that_the_shapes_contradict_is_refused(case, settings, stated):
    fitting = "2 bits in groups of 128 or 4 bits in groups of 64 or 8 bits in groups of 32"
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight .*{fitting}, and the .* states {re.escape(stated)}"):
        recognise(stating(case, settings).module)


def test_a_single_layout_needs_no_configuration():
    case = mlx_case(weights(128), bits=5, group_size=128)
    assert recognise(stating(case, {}).module) == (MLXAffineRows(128, 5, 128, "F32"), len(case.rows))


def test_modes_of_floats_are_told_by_the_shapes_and_not_contradicted():
    case = CASES["MLX nvfp4"]()
    assert recognise(stating(case, {}).module) == (MLXFloatRows(384, "nvfp4"), len(case.rows))
    for settings in ({"mode": "mxfp4"}, {"mode": "nvfp4", "bits": 8}, {"bits": 4, "group_size": 64}):
        with pytest.raises(CheckpointError, match=rf"{NAME}\.weight .* which is nvfp4, .* states .*{settings}"):
            recognise(stating(case, settings).module)
    with pytest.raises(CheckpointError, match=f"{NAME}.weight has 24 words and 2 scales a row, which is none of mxfp4"):
        recognise(case.changed(scales=case.tensors["scales"][:, :2], weight=case.tensors["weight"][:, :24]).module)
