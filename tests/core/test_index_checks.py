"""Bad IDs and positions at the door."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from kernel_paths import cpu_taken_for_cuda

from embedlayer import (
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    PositionError,
    ShapeError,
    TokenEmbedding,
    TokenIdError,
)


def test_a_bad_id_is_named_with_its_place_and_the_size(unchecked: None) -> None:
    ids = torch.zeros(4, 20, dtype=torch.long)
    ids[3, 17] = 50257
    with pytest.raises(
        TokenIdError, match=r"token id 50257 at row 3, column 17 is outside this table of 50257 rows"
    ) as error:
        TokenEmbedding(50257, 4)(ids)
    assert isinstance(error.value, IndexError)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (torch.tensor([[1, -1]]), TokenIdError, "token id -1 at row 0, column 1"),
    (torch.tensor([[1.0, 2.0]]), ShapeError, "must be int64 or int32, not float32"),
    (torch.tensor([[True]]), ShapeError, "not bool"),
    (torch.tensor([3], dtype=torch.uint8), ShapeError, r"not uint8.*for instance ids.long\(\)"),
    ([1.0, 2.0], ShapeError, "not float64"),
    ([True], ShapeError, "not bool"),
    (np.array([1.0], dtype=np.float32), ShapeError, "not float32.*ids.astype"),
    ("a text", ShapeError, r"not text.*tokenizer.encode\(text\).ids"),
    (["a", "text"], ShapeError, "not text"),
    (None, ShapeError, "not NoneType"),
    ([[1, 2], [3]], ShapeError, "must have one length to form a batch.*pad them"),
    ({"input_ids": [[1]], "attention_mask": [[1]]}, ShapeError, "keys input_ids, attention_mask.*pass its 'inp"),
    (torch.tensor(10), TokenIdError, "token id 10 at row 0, column 0"),
    ([[3, 4], [5, 10]], TokenIdError, "token id 10 at row 1, column 1"),
    (torch.tensor([[3, 9], [10, 3]]), TokenIdError, r"token id 10 at row 1, column 0(.|\n)*table_size"),
]


def test_what_cannot_be_looked_up_is_refused(unchecked: None) -> None:
    for table in (TokenEmbedding(10, 4), FactorizedEmbedding(10, 4, 2)):
        for ids, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                table(ids)


def test_int32_and_any_number_of_dimensions_are_looked_up() -> None:
    table = TokenEmbedding(10, 4)
    ids = torch.randint(0, 10, (2, 3, 5))
    assert torch.equal(table(ids), table.weight[ids])
    assert torch.equal(table(ids.int()), table(ids))
    assert torch.equal(table(ids[0, 0]), table(ids)[0, 0])


CHECKED = {
    "token id": (lambda: TokenEmbedding(10, 4), TokenIdError),
    "position": (lambda: LearnedPositionalEmbedding(10, 4), PositionError),
}


@pytest.mark.parametrize("kind", CHECKED)
def test_without_waiting_the_first_bad_index_is_remembered(kind) -> None:
    """What runs on an accelerator, run here: `clamp_and_record` reads no value back."""
    build, error = CHECKED[kind]
    bounds = build().index_check
    safe, outside = bounds.clamp_and_record(torch.tensor([[1, 2, 3], [4, 12, -5]]))
    assert safe.tolist() == [[1, 2, 3], [4, 9, 0]]
    assert outside.tolist() == [[False] * 3, [False, True, True]]
    bounds.clamp_and_record(torch.tensor([[99]]))
    assert [found.shape for found in bounds.clamp_and_record(torch.empty(0, 3, dtype=torch.int64))] == [(0, 3)] * 2
    with pytest.raises(error, match=f"{kind} 12 at row 1, column 1"):
        bounds.check()
    bounds.check()


def test_a_clamped_id_gives_zeros_and_gets_no_gradient() -> None:
    table = TokenEmbedding(10, 4)
    with cpu_taken_for_cuda():
        vectors = table(torch.tensor([[3, 11]]))
        vectors.sum().backward()
    assert vectors[0, 1].eq(0).all()
    assert table.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("kind", CHECKED)
def test_a_recorded_index_outlives_every_cast_and_move_until_it_is_raised(kind) -> None:
    for change in (
        lambda module: module.half(),
        lambda module: module.to(torch.bfloat16).float(),
        lambda module: module.to("cpu"),
        lambda module: module.to_empty(device="cpu"),
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
    ):
        build, error = CHECKED[kind]
        module = torch.nn.Sequential(build())
        saved = [*module.state_dict()]
        module[0].index_check.clamp_and_record(torch.tensor([[1, 2, 3], [4, 12, -5]]))
        bounds = change(module)[0].index_check
        assert bounds.first_bad_index.dtype == torch.int64
        assert [*module.state_dict()] == saved == ["0.weight"]
        with pytest.raises(error, match=f"{kind} 12 at row 1, column 1"):
            bounds.check()
        bounds.check()


def test_a_table_made_on_the_meta_device_has_recorded_nothing() -> None:
    with torch.device("meta"):
        table = TokenEmbedding(10, 4)
    assert table.to_empty(device="cpu").index_check.first_bad_index.tolist() == [-1, -1, -1]
    table.check()


def test_under_compile_one_graph_stays_one_graph_and_still_checks(unchecked: None) -> None:
    table = TokenEmbedding(10, 4)
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, 10, (2, 3))
    assert torch.equal(compiled(ids), table(ids))
    with pytest.raises(TokenIdError, match="token id 10 at row 1, column 2"):
        compiled(torch.tensor([[0, 1, 2], [3, 4, 10]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_the_error_comes_when_somebody_waits() -> None:
    table = TokenEmbedding(10, 4).cuda()
    table(torch.tensor([[1, 11]], device="cuda"))
    with pytest.raises(TokenIdError, match="token id 11 at row 0, column 1"):
        table.check()


def test_rows_in_front_of_row_0_are_reached_and_errors_name_the_index_itself() -> None:
    bounds = LearnedPositionalEmbedding(10, 4, offset=2).index_check
    assert bounds(torch.tensor([-2, 0, 9]))[0].tolist() == [0, 2, 11]
    safe, outside = bounds.clamp_and_record(torch.tensor([[-2, 9], [10, -3]]) + 2)
    assert safe.tolist() == [[0, 11], [11, 0]]
    assert outside.tolist() == [[False, False], [True, True]]
    with pytest.raises(PositionError, match="position 10 at row 1, column 0: a sequence of 11 exceeds the 10"):
        bounds.check()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("bad", "advice"), [(-1, "value of ignore_index"), (9, "table_size")])
def test_the_advice_fits_the_id(bad, advice) -> None:
    table = TokenEmbedding(9, 4)
    for call in (lambda ids: table(ids), lambda ids: table.loss(torch.zeros(1, 2, 4), ids)):
        with pytest.raises(TokenIdError, match=advice):
            call(torch.tensor([[3, bad]]))
