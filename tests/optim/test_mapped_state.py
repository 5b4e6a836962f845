"""The optimizer state of mapped tables: of one rule, at one step, and the same after resuming."""

import re
from copy import deepcopy
from functools import partial

import pytest
import torch
from covering import cases
from row_rules import RULES, train
from torch import nn

import embedlayer as el
from embedlayer.core.errors import CheckpointError, SizeError, StaleRowsError
from embedlayer.optim import RowAdagrad, RowAdamW
from embedlayer.row_sparse import StochasticRounding
from embedlayer.tables import MappedEmbedding


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("name", RULES)
def test_a_table_is_resumed_with_the_rule_of_its_state_and_no_other(tmp_path, name) -> None:
    with MappedEmbedding.create(tmp_path / "rows", 40, 3, init_std=1.0) as table:
        first = RULES[name](table.parameters())
        train(table, first, range(3))
        with table.checkpoint():
            pass
        train(table, first, range(3, 5))
        expected = table.weight.detach().clone()
    rule = re.escape(repr(first.row_state))
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        stored = table.source.folder("test").weight
        before, linear = stored.clone(), nn.Linear(2, 2)
        for wrong in RULES.keys() - {name}:
            optimizer = RULES[wrong]([*linear.parameters(), table.weight])
            linear.weight.grad, unchanged = torch.ones(2, 2), linear.weight.detach().clone()
            table.weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (40, 3), check_invariants=True)
            for use in (optimizer.step, optimizer.state_dict, partial(optimizer.moments, table.weight)):
                with pytest.raises(CheckpointError, match=f"that of {rule} .* and this optimizer's rule is"):
                    use()
            assert torch.equal(linear.weight, unchanged)
        assert torch.equal(stored, before)
        optimizer = RULES[name](table.parameters())
        assert int(optimizer.moments(table.weight)["step"]) == 3
        train(table, optimizer, range(3, 5))
        assert torch.equal(table.weight, expected)
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        assert int(RULES[name](table.parameters()).state_dict()["state"][0]["step"]) == 3


def by_state_dict(optimizer, state) -> None:
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})


def by_moments(optimizer, state) -> None:
    optimizer.load_moments(optimizer.param_groups[0]["params"][0], state)


@pytest.mark.usefixtures("both_paths")
@cases("name, trained_before, load", RULES, [False, True], [by_state_dict, by_moments])
def test_a_checkpoint_right_after_loading_optimizer_state_has_its_step(tmp_path, name, trained_before, load) -> None:
    memory = el.RowSparseEmbedding(40, 3, init_std=1.0)
    expected = RULES[name](memory.parameters())
    train(memory, expected, range(4))
    with MappedEmbedding.create(tmp_path / "rows", 40, 3) as table:
        optimizer = RULES[name](table.parameters())
        train(table, optimizer, range(7 if trained_before else 0))
        load(optimizer, deepcopy(expected.state_dict()["state"][0]))
        table.load_state_dict(memory.state_dict())
        with table.checkpoint():
            pass
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        optimizer = RULES[name](table.parameters())
        train(table, optimizer, range(4, 6))
        train(memory, expected, range(4, 6))
        assert int(optimizer.state[table.weight]["step"]) == 6
        assert torch.equal(table.weight, memory.weight)


@pytest.mark.usefixtures("both_paths")
def test_state_that_was_replaced_without_its_step_is_refused_at_a_checkpoint(tmp_path) -> None:
    with MappedEmbedding.create(tmp_path / "rows", 40, 3) as table:
        fresh, optimizer = RowAdamW(table.parameters()).state_dict(), RowAdamW(table.parameters())
        train(table, optimizer, range(2))
        optimizer.load_state_dict(fresh)
        with pytest.raises(SizeError, match="was replaced, and its step is unknown"), table.checkpoint():
            pass
        train(table, optimizer, range(1))
        with table.checkpoint():
            pass
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        assert table.weight.pending_updates.step == 1


@cases("name, with_dense", RULES, [False, True])
@pytest.mark.usefixtures("both_paths")
def test_the_optimizers_state_is_saved_inside_a_checkpoint_if_updates_were_applied_before(
    tmp_path, name, with_dense
) -> None:
    with MappedEmbedding.create(tmp_path / "rows", 40, 3) as table:
        linear = nn.Linear(3, 3)
        optimizer = RULES[name]([*table.parameters(), *(linear.parameters() if with_dense else ())])
        train(nn.Sequential(table, linear), optimizer, range(4))
        with pytest.raises(StaleRowsError, match="inside `with table.checkpoint"), table.checkpoint():
            optimizer.state_dict()
        optimizer.apply_pending_updates()
        with table.checkpoint():
            state = deepcopy(optimizer.state_dict())
        assert len(state["state"]) == (3 if with_dense else 1)
        assert int(state["state"][0]["step"]) == 4


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("seed", [None, 7])
def test_a_resumed_table_goes_on_with_its_stored_seed_of_stochastic_rounding(tmp_path, seed) -> None:
    def optimizer_of(table, *seeds):
        return RowAdagrad(table.parameters(), lr=0.01, rounding=StochasticRounding(*seeds))

    with MappedEmbedding.create(tmp_path / "rows", 40, 3, dtype=torch.bfloat16, init_std=1.0) as table:
        first = optimizer_of(table, 5)
        train(table, first, range(3))
        with table.checkpoint():
            pass
        train(table, first, range(3, 8))
        expected = table.weight.detach().clone()
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        optimizer = optimizer_of(table, *([] if seed is None else [seed]))
        train(table, optimizer, range(3, 8))
        assert optimizer.state_dict()["param_groups"][0]["rounding_seed"] == 5
        assert torch.equal(table.weight, expected)
