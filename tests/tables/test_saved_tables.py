"""A table of any kind, a bag and a table of streams are saved, read, copied and pickled with their numbers."""

import copy
import pickle

import pytest
import torch
from covering import looped
from kinds import BAGS, STREAM_IDS, STREAM_TABLES, TABLES
from safetensors.torch import load_file

from embedlayer import QuantizedEmbedding, TokenEmbedding, TokenTable

KINDS = {
    **TABLES,
    "spare rows, bfloat16": lambda: TokenEmbedding(
        50, 6, 1, scale="sqrt_dim", round_scale=True, pad_to_multiple_of=8, dtype=torch.bfloat16
    ),
    "int4 of bfloat16": lambda: QuantizedEmbedding.from_table(
        TokenEmbedding(50, 6, 2, scale="sqrt_dim", round_scale=True, dtype=torch.bfloat16), 4, group_size=2
    ),
    **{f"bag, {name}": build for name, build in BAGS.items()},
    **{f"streams, {name}": build for name, build in STREAM_TABLES.items()},
}


@pytest.mark.usefixtures("both_paths")
@looped("name", KINDS)
@torch.no_grad()
def test_what_was_saved_is_read_back_and_copied_bit_for_bit(name, tmp_path) -> None:
    table, ids = KINDS[name]().eval(), STREAM_IDS if name.startswith("streams") else torch.arange(50).view(5, 10)
    expected = table(ids)
    table.save_pretrained(tmp_path)
    if isinstance(table, QuantizedEmbedding):
        stored = load_file(tmp_path / "model.safetensors").values()
        assert sum(tensor.nbytes for tensor in stored) == table.nbytes
    again = type(table).from_pretrained(tmp_path)
    built = type(table).from_config(table.config)
    built.load_state_dict(table.state_dict())
    built = built.to(table.dtype) if isinstance(table, TokenTable) else built
    trained = [name for name, part in table.named_parameters() if part.requires_grad]
    others = [again, built, copy.deepcopy(table)]  # torch reads no pickled FP8
    for other in others if isinstance(table, TokenTable) else [*others, pickle.loads(pickle.dumps(table))]:
        assert other.config == table.config
        assert torch.equal(other(ids), expected)
        if isinstance(table, TokenTable):
            assert (other.dtype, other.factor) == (table.dtype, table.factor)
            assert torch.equal(other.rows(0, 50), table.rows(0, 50))
        assert not {part.data_ptr() for part in other.buffers()} & {part.data_ptr() for part in table.buffers()} - {0}
    assert [name for name, part in again.named_parameters() if part.requires_grad] == trained
