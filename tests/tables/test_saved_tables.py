"""A table of any kind is saved, read and copied with its numbers."""

import copy

import pytest
import torch
from covering import looped
from kinds import TABLES
from safetensors.torch import load_file

from embedlayer import QuantizedEmbedding, TokenEmbedding

KINDS = {
    **TABLES,
    "spare rows, bfloat16": lambda: TokenEmbedding(
        50, 6, 1, scale="sqrt_dim", round_scale=True, pad_to_multiple_of=8, dtype=torch.bfloat16
    ),
    "int4 of bfloat16": lambda: QuantizedEmbedding.from_table(
        TokenEmbedding(50, 6, 2, scale="sqrt_dim", round_scale=True, dtype=torch.bfloat16), 4, group_size=2
    ),
}


@pytest.mark.usefixtures("both_paths")
@looped("name", KINDS)
@torch.no_grad()
def test_what_was_saved_is_read_back_and_copied_bit_for_bit(name, tmp_path) -> None:
    table, ids = KINDS[name](), torch.arange(50)
    expected, rows = table(ids), table.rows(0, 50)
    table.save_pretrained(tmp_path)
    if isinstance(table, QuantizedEmbedding):
        stored = load_file(tmp_path / "model.safetensors").values()
        assert sum(tensor.nbytes for tensor in stored) == table.nbytes
    again = type(table).from_pretrained(tmp_path)
    built = type(table).from_config(table.config)
    built.load_state_dict(table.state_dict())
    trained = [name for name, part in table.named_parameters() if part.requires_grad]
    for other in (again, copy.deepcopy(table), built.to(table.dtype)):
        assert other.config == table.config
        assert (other.dtype, other.factor) == (table.dtype, table.factor)
        assert torch.equal(other(ids), expected)
        assert torch.equal(other.rows(0, 50), rows)
        assert not {part.data_ptr() for part in other.buffers()} & {part.data_ptr() for part in table.buffers()} - {0}
    assert [name for name, part in again.named_parameters() if part.requires_grad] == trained
