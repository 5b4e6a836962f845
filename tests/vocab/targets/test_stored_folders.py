"""Edits of folders whose table and head another library quantised: kept rows keep their bytes, an undo every file."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_folders import HEAD, TABLE, one_of_each, words, write_folder
from stored_formats import CASES, StoredCase, gptq_case, weights
from torch import Tensor

import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.formats.stored import StoredRows
from embedlayer.vocab import MeanInit
from embedlayer.vocab.receipt import Receipt

BUILT = {name: CASES[name] for name in one_of_each() if "1 bits" not in name}  # rows of 1 bit are zero
BUILT |= {
    name: CASES[name]
    for name in (
        "MLX 4 bits, groups of 64, bfloat16",
        "pack-quantized 4 bits, group, asymmetric, bfloat16",
        "pack-quantized 3 bits, group, asymmetric, float32",
    )
}
# These store eight tokens in a word.
BUILT["GPTQ "] = partial(gptq_case, weights(64, torch.bfloat16, 80), 4)
BUILT |= {name: BUILT["GPTQ "] for name in BUILT if name.startswith("GPTQ")}
REMOVED = [f"t{i}" for i in range(4, 20, 2)]
ENDS = (f"{TABLE}.weight", f"{HEAD}.weight")


def folder_of(folder: Path, name: str, *, tied: bool) -> StoredCase:
    """Write a folder with a tokenizer and stored rows of one kind, also in the head unless it is tied."""
    table = BUILT[name]()
    write_folder(folder, table, None if tied else CASES.get(f"{name}, head", BUILT[name])())
    words(len(table.rows)).save(str(folder / "tokenizer.json"))
    return table


def stored_ends(folder: Path) -> dict[str, StoredRows]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read_stored(name) for name in ENDS if checkpoint.stored(name) is not None}


def mean_of_live(stored: StoredRows) -> Tensor:
    rows = stored.dequantise(torch.float32)
    return rows[rows.any(1)].double().mean(0, keepdim=True).float()


def check_edit(old: Path, new: Path, receipt: Receipt) -> None:
    """Check rows, other tensors and the configuration of an edit that set new rows to the mean of the live ones."""
    before, after, sources = stored_ends(old), stored_ends(new), receipt.row_map.sources
    assert before.keys() == after.keys() == receipt.stored.keys()
    for name, rows in before.items():
        assert after[name].format == rows.format
        assert (receipt.stored[name].old_type, receipt.stored[name].is_requantised) == (rows.format.name, False)
        assert after[name].shape == (len(sources), rows.shape[1])
        assert torch.equal(after[name].row_bytes[sources >= 0], rows.row_bytes[sources[sources >= 0]])
        if (sources < 0).any():
            assert (after[name].row_bytes[sources < 0] == rows.quantised(mean_of_live(rows)).row_bytes).all()
    files = [load_file(folder / "model.safetensors") for folder in (old, new)]
    assert [*files[0]] == [*files[1]]
    for name, tensor in files[0].items():
        if not name.startswith((f"{TABLE}.", f"{HEAD}.")) or name.endswith("input_scale"):
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), files[1][name].reshape(-1).view(torch.uint8))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (old, new)]
    assert configs[1] == {**configs[0], "vocab_size": len(sources)}


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(file.name for file in folder.iterdir()) for folder in (one, other)]
    return names[0] == names[1] and all((one / name).read_bytes() == (other / name).read_bytes() for name in names[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", BUILT)
def test_kept_rows_keep_their_bytes_and_the_undo_gives_every_file(tmp_path, name, tied) -> None:
    folder_of(tmp_path / "old", name, tied=tied)
    added = [f"new{i}" for i in range(200)]
    receipt = el.vocab.edit_vocabulary(
        tmp_path / "old", add=added, remove=REMOVED, init=MeanInit(), out=tmp_path / "new"
    )
    assert (len(receipt.added), len(receipt.dropped)) == (200, 8)
    check_edit(tmp_path / "old", tmp_path / "new", receipt)
    layer = el.load(tmp_path / "new")
    assert (layer.head.tied, layer.tokenizer.token_to_id("new199")) == (tied, receipt.row_map.size - 1)
    el.vocab.last_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    assert same_files(tmp_path / "old", tmp_path / "back")


@pytest.mark.parametrize("name", BUILT)
def test_a_trim_and_a_transplant_move_the_same_rows_and_are_undone_in_turn(tmp_path, name) -> None:
    folder_of(tmp_path / "old", name, tied=False)
    kept = [f"t{i}" for i in range(72)]
    trimmed = el.vocab.trim_vocabulary(tmp_path / "old", [" ".join(kept)], out=tmp_path / "trimmed")
    assert trimmed.row_map.size == 72
    check_edit(tmp_path / "old", tmp_path / "trimmed", trimmed)
    moved = el.vocab.transplant(tmp_path / "trimmed", words(80, "u"), init=MeanInit(), out=tmp_path / "moved")
    check_edit(tmp_path / "trimmed", tmp_path / "moved", moved)
    moved.undo(tmp_path / "moved", out=tmp_path / "trimmed again")
    assert same_files(tmp_path / "trimmed", tmp_path / "trimmed again")
    trimmed.undo(tmp_path / "trimmed again", out=tmp_path / "back")
    assert same_files(tmp_path / "old", tmp_path / "back")
