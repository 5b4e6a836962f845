"""Ranks that were given something else are named."""

import torch.distributed as dist
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import FactorizedEmbedding, PeerError, TokenEmbedding, shard_table
from embedlayer.distributed.agreement import differences, require_agreement


def test_each_rank_that_differs_is_named() -> None:
    assert differences({0: {"a": 1}, 1: {"a": 1}}) == ""
    found = differences({2: {"a": 1}, 3: {"a": 2}, 4: {}, 5: {"a": 1}})
    assert found.startswith("Rank 3 differs from rank 2 in a: 2 there, 1 on rank 2. Rank 4 differs from rank 2 in a: ")


def refusals():
    """What a rank is told where the last one of its mesh has another vocabulary, or another kind of table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    require_agreement({"word": "like"}, dist.group.WORLD, "cpu")
    found, last = [], dist.get_rank() == 3
    for table in (
        TokenEmbedding(999 if last else 1000, 8),
        TokenEmbedding(3 if last else 2, 8),
        FactorizedEmbedding(1000, 8, 2) if last else TokenEmbedding(1000, 8),
    ):
        try:
            shard_table(table, mesh["rows"])
            found.append("")
        except PeerError as error:
            found.append(str(error))
    return found


def test_a_table_of_another_vocabulary_or_kind_is_refused_by_name_where_it_is_divided() -> None:
    for rank, (vocabulary, small, kind) in enumerate(on_ranks(4, refusals)):
        if rank < 2:  # another copy, in which all are alike
            assert vocabulary == small == kind == ""
        else:
            assert vocabulary.startswith("Rank 3 differs from rank 2 in vocab_size: 999 there, 1000 on rank 2.")
            assert "vocab_size: 3 there, 2 on rank 2" in small
            assert "kind of table: FactorizedEmbedding there, TokenEmbedding on rank 2" in kind
