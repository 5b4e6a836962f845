"""The lists of kinds that the laws are run over are complete."""

import pytest
import torch
from kinds import EMBED_DIM, LAYERS, POSITIONS, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE, TableOfAUser

import embedlayer as el
from embedlayer import OutputHead, Position, TokenTable


def exported(base: type) -> set[type]:
    found = (getattr(el, name) for name in el.__all__)
    return {value for value in found if isinstance(value, type) and issubclass(value, base) and value is not base}


def test_every_public_table_and_position_is_in_the_lists() -> None:
    elsewhere = {el.distributed.ShardedTable}  # needs a process group: tests/distributed
    assert exported(TokenTable) - elsewhere == {type(build()) for build in TABLES.values()} - {TableOfAUser}
    assert exported(Position) <= {type(build()) for build in POSITIONS.values()}


@pytest.mark.parametrize("name", [*UNTIED_HEADS, *TIED_HEADS])
def test_every_head_maps_hidden_states_to_a_logit_per_token(name) -> None:
    head = UNTIED_HEADS[name]() if name in UNTIED_HEADS else OutputHead(TABLES[TIED_HEADS[name]]())
    assert head(torch.randn(2, 3, EMBED_DIM)).shape == (2, 3, VOCAB_SIZE)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_takes_a_sequence_and_a_batch(name) -> None:
    layer = LAYERS[name]()
    assert layer(torch.tensor([1, 2, 3])).shape[:-1] == (3,)
    assert layer(torch.tensor([[1, 2, 3], [7, 48, 0]])).shape[:-1] == (2, 3)
