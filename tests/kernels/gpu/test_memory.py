"""The memory that Triton kernels read and write, in Triton's interpreter: how much, and beyond 2^31 numbers."""

import pytest
from covering import some
from far_blocks import FAR, assert_places_beyond_2_to_31_are_those_of_a_small_block, far_blocks
from logit_blocks import BLOCKS_MOVED, assert_little_more_than_the_logits_is_moved
from quantised_tables import (
    Kind,
    assert_rows_beyond_2_to_31_are_those_of_a_small_table,
    assert_stored_bytes_are_read_once,
)
from rotary_schemes import assert_far_heads_are_rotated_as_near_ones, assert_little_more_than_queries_and_keys_is_moved
from torch import Tensor

pytestmark = pytest.mark.usefixtures("triton")


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize("name", some(["statistics"], BLOCKS_MOVED))
def test_little_more_than_the_logits_is_read_and_written(name) -> None:
    assert_little_more_than_the_logits_is_moved(name)


READ_ONCE: list[Kind] = [(8, None), (8, 32), (4, None), (4, 32), (8, "gguf"), (4, "gguf")]


@pytest.mark.parametrize(("bits", "group_size"), some([(8, None), (4, 32)], READ_ONCE))
def test_stored_bytes_of_quantised_rows_are_read_once(bits, group_size) -> None:
    assert_stored_bytes_are_read_once((bits, group_size))


def test_quantised_rows_beyond_2_to_31_are_those_of_a_small_table(tmp_path) -> None:
    assert_rows_beyond_2_to_31_are_those_of_a_small_table(tmp_path)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    return far_blocks(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("label", some(["softmax.statistics_gradient"], FAR))
def test_places_beyond_2_to_31_are_those_of_a_small_block(label, blocks) -> None:
    assert_places_beyond_2_to_31_are_those_of_a_small_block(label, blocks)


@pytest.mark.parametrize("interleaved", some([False], [False, True]))
def test_little_more_than_queries_and_keys_is_read_and_written(interleaved) -> None:
    assert_little_more_than_queries_and_keys_is_moved(interleaved)


@pytest.mark.parametrize("tokens_first", some([True], [True, False]))
def test_heads_beyond_2_to_31_are_rotated_as_near_ones(tokens_first, blocks) -> None:
    assert_far_heads_are_rotated_as_near_ones(tokens_first, blocks)
