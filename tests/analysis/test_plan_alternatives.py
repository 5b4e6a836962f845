"""Changes to a plan, and what they save."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlayer.analysis.embedding_plan import EmbeddingPlan, plan_alternatives


@given(
    tied=st.booleans(),
    rank=st.none() | st.just(16),
    dtype=st.sampled_from(["fp32", "bf16", "int8"]),
    optimizer=st.sampled_from(["adamw", "adagrad", "sgd", "none"]),
    plain_loss=st.booleans(),
    delta_rows=st.sampled_from([0, 7]),
    used=st.none() | st.just(50),
)
@settings(max_examples=60)
def test_every_change_can_be_planned_and_the_best_comes_first(used, **options):
    now = EmbeddingPlan(1000, 64, tokens=256, **options)
    found = plan_alternatives(now, used=used)
    assert [change.saved_bytes for change in found] == sorted((change.saved_bytes for change in found), reverse=True)
    assert all(change.plan != now and change.plan.name == change.change for change in found)
    assert any(change.change.startswith("trim") for change in found) == (used is not None)


@pytest.mark.parametrize(
    "processes", [{"vocab_parallel_size": 4}, {"replicas": 2}, {"vocab_parallel_size": 2, "replicas": 2}]
)
def test_every_change_to_a_sharded_table_can_be_planned(processes):
    found = plan_alternatives(EmbeddingPlan(1000, 64, tied=False, tokens=256, **processes), used=50)
    assert not any(change.plan.delta_rows for change in found)
    assert {"row-sparse table", "trim to 50 tokens"} <= {change.change for change in found}
