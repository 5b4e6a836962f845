"""A run that `distributed_state` saved on four ranks goes on in fresh objects on two and on one as if it had not ended.

On four ranks its vocabulary is edited as in one process, and the edit undone, before it goes on.

A law over how the model is divided, what its table is, its head and the optimizer; the table of its results is in the
documentation. What does not go on is refused by name before any training.
"""

import sys
from pathlib import Path

import pytest
from covering import LONG
from processes import PRELOADED

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from resumed_runs import (  # noqa: E402
    BY_COLUMNS,
    GOES_ON,
    LAWS,
    LOGITS,
    PAGE,
    TWO_DIMENSIONS,
    WAYS,
    Way,
    markdown,
    measured,
    read_results,
    support,
)

PRELOADED += ["embedlayer.distributed.state", "embedlayer.vocab.operations", "torch.distributed.checkpoint"]
PRELOADED += ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"]

DOCUMENTED = read_results()
GOING = {
    Way("distributed_data_parallel", "whole, row-sparse", "untied", "RowAdamW"),
    Way("fully_shard", "shard_table", "untied", "AdamW"),
    Way(TWO_DIMENSIONS, BY_COLUMNS, "untied", "RowAdamW"),
}
"""Ways whose tables and moments are whole, of `shard_table`, and divided by torch; and of both kinds of optimizers."""
REFUSED = {sentence: way for way, sentence in reversed(DOCUMENTED.items()) if sentence != GOES_ON}
"""The first way that each sentence refuses, which has the fewest dimensions."""
ALWAYS = {*GOING, *REFUSED.values()}


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param([way for way in WAYS if way in ALWAYS], id="covering"),
        pytest.param([way for way in WAYS if way not in ALWAYS], id="the others", marks=LONG),
    ],
)
def test_a_saved_run_goes_on_in_fresh_objects_on_two_ranks_and_on_one_or_is_refused(ways, tmp_path) -> None:
    found = measured(ways, str(tmp_path))
    assert found == {way: DOCUMENTED[way] for way in ways}, "run python docs/resumed_runs.py --write"


def test_dense_tables_go_on_in_all_ways_and_the_others_are_refused_by_name() -> None:
    assert all(DOCUMENTED[way] == GOES_ON for way in WAYS if way.table in ("whole", "shard_table", LOGITS))
    told = {way: sentence for way, sentence in DOCUMENTED.items() if sentence != GOES_ON}
    for way, sentence in told.items():
        if way.table == "RowwiseParallel":
            assert "docs/errors.md, Divided weights" in sentence
        elif way.table == BY_COLUMNS:
            assert way.head == "tied"
            assert "This head is tied to its table" in sentence
        elif way.head == "tied":
            assert "A head cannot be tied to a row-sparse table" in sentence
        elif "fully_shard" in way.division and way.table == "whole, row-sparse":
            assert "See docs/errors.md, Row-sparse tables" in sentence
        else:
            assert way.optimizer == "AdamW"
            assert "Adam does not support sparse gradients" in sentence


def test_the_tables_in_the_documentation_have_every_way_and_name_tests_on_several_ranks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert markdown(DOCUMENTED) in text, "run python docs/resumed_runs.py --write"
    assert support(DOCUMENTED) in text, "run python docs/resumed_runs.py --write"
    for law in LAWS:
        code = (DOCS.parent / law.test).read_text(encoding="utf-8")
        assert ("on_ranks(" in code or "together(" in code) == (law.ranks != "1"), law.test
