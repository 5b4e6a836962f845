"""Edits of folders whose table and head another library quantised: kept rows keep their bytes, an undo every file."""

import json
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering, some
from safetensors.torch import load_file, save_file
from stored_cases import StoredCase, bitsandbytes_case, built, built_head, gptq_case, weights
from stored_folders import HEAD, TABLE, one_of_each, words, write_folder
from torch import Tensor

import embedlayer as el
from embedlayer.vocab import MeanInit, Receipt
from embedlayer.vocab.targets.folder import folder_census

BUILT: dict[str, Callable[[], StoredCase]] = {
    name: partial(built, name)
    for name in one_of_each()
    if "1 bits" not in name  # rows of 1 bit are zero
}
BUILT |= {
    name: partial(built, name)
    for name in (
        "MLX 4 bits, groups of 64, bfloat16",
        "pack-quantized 4 bits, group, asymmetric, bfloat16",
        "pack-quantized 3 bits, group, asymmetric, float32",
        "torchao int8, tensor",
        "torchao FP8, tensor",
    )
}
# These store eight tokens in a word.
BUILT["GPTQ "] = cache(partial(gptq_case, weights(64, torch.bfloat16, 80), 4))
BUILT |= {name: BUILT["GPTQ "] for name in BUILT if name.startswith("GPTQ")}
ONE_OF_EACH_LAYOUT = [*{name.partition(" ")[0]: name for name in BUILT}.values()]
MLX = "MLX 4 bits, groups of 64, bfloat16"
SOME = (MLX, "GPTQ ", "float-quantized tensor, float32", "bitsandbytes fp4, float32")
"""Rows in several tensors, eight rows in a word, a scale that all rows share, and the shape in a tensor of its own."""
REMOVED = [f"t{i}" for i in range(4, 20, 2)]
ENDS = (f"{TABLE}.weight", f"{HEAD}.weight")


def folder_of(folder: Path, name: str, *, tied: bool) -> StoredCase:
    """Write a folder with a tokenizer and stored rows of one kind, also in the head unless it is tied."""
    table = BUILT[name]()
    write_folder(folder, table, None if tied else table if BUILT[name] is BUILT["GPTQ "] else built_head(name))
    words(len(table.rows)).save(str(folder / "tokenizer.json"))
    return table


def stored_ends(folder: Path) -> dict[str, Any]:
    """Return the stored rows of the table, and those of a head that is stored too."""
    names = load_file(folder / "model.safetensors").keys()
    stored = [end for end in ENDS if any(name.startswith(end.removesuffix("weight")) for name in names)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: el.load(folder, table_only=name).table.stored_rows for name in stored}


def mean_of_live(stored: Any) -> Tensor:
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


@pytest.mark.parametrize(
    ("name", "tied"), some(covering(product(ONE_OF_EACH_LAYOUT, (True, False))), product(BUILT, (True, False)))
)
def test_kept_rows_keep_their_bytes(tmp_path, name, tied) -> None:
    folder_of(tmp_path / "old", name, tied=tied)
    added = [f"new{i}" for i in range(200)]
    receipt = el.vocab.edit_vocabulary(
        tmp_path / "old", add=added, remove=REMOVED, init=MeanInit(), out=tmp_path / "new"
    )
    assert (len(receipt.added), len(receipt.dropped)) == (200, 8)
    check_edit(tmp_path / "old", tmp_path / "new", receipt)
    layer = el.load(tmp_path / "new")
    assert (layer.head.tied, layer.tokenizer.token_to_id("new199")) == (tied, receipt.row_map.size - 1)


@pytest.mark.parametrize("name", some(SOME, BUILT))
def test_a_trim_and_a_transplant_move_the_same_rows(tmp_path, name) -> None:
    folder_of(tmp_path / "old", name, tied=False)
    kept = [f"t{i}" for i in range(72)]
    trimmed = el.vocab.trim_vocabulary(tmp_path / "old", [" ".join(kept)], out=tmp_path / "trimmed")
    assert trimmed.row_map.size == 72
    check_edit(tmp_path / "old", tmp_path / "trimmed", trimmed)
    moved = el.vocab.transplant(tmp_path / "trimmed", words(80, "u"), init=MeanInit(), out=tmp_path / "moved")
    check_edit(tmp_path / "trimmed", tmp_path / "moved", moved)


@pytest.mark.parametrize("tied", [True, False])
def test_the_census_names_matrices_of_stored_rows_with_their_sizes(tmp_path, tied) -> None:
    table = folder_of(tmp_path, MLX, tied=tied)
    report = folder_census(tmp_path)
    assert report.tensors == dict.fromkeys(ENDS[: 1 if tied else 2], tuple(table.rows.shape))
    assert (report.notes, report.refused) == ((), "")


def edited(old: Path, new: Path) -> Receipt:
    return el.vocab.edit_vocabulary(old, add=[f"new{i}" for i in range(9)], remove=["t3"], init=MeanInit(), out=new)


def test_two_stored_copies_of_a_tied_table_are_edited_alike(tmp_path) -> None:
    table = BUILT[MLX]()
    write_folder(tmp_path / "old", table, table, tied=True)
    words(len(table.rows)).save(str(tmp_path / "old" / "tokenizer.json"))
    receipt = edited(tmp_path / "old", tmp_path / "new")
    assert [*receipt.stored] == [ENDS[0]]
    rows, head = stored_ends(tmp_path / "new").values()
    assert torch.equal(rows.row_bytes, head.row_bytes)
    assert el.load(tmp_path / "new").head.tied


def test_shards_of_mlx_lm_and_their_index_are_in_step(tmp_path) -> None:
    mx = pytest.importorskip("mlx.core")
    table = folder_of(tmp_path / "old", MLX, tied=False)
    tensors = mx.load(str(tmp_path / "old" / "model.safetensors"))
    (tmp_path / "old" / "model.safetensors").unlink()
    shards: dict[str, dict] = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for number, name in enumerate(sorted(tensors)):
        shards[[*shards][number % 2]][name] = tensors[name]  # codes and scales of one table in two files
    for file, each in shards.items():
        mx.save_safetensors(str(tmp_path / "old" / file), each, {"format": "mlx"})
    weight_map = {name: file for file, each in shards.items() for name in each}
    nbytes = sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": nbytes, "total_parameters": 10_000}, "weight_map": weight_map}
    index_file = "model.safetensors.index.json"
    (tmp_path / "old" / index_file).write_text(json.dumps(index, indent=4))
    edited(tmp_path / "old", tmp_path / "new")
    loaded = {name: each for file in shards for name, each in mx.load(str(tmp_path / "new" / file)).items()}
    metadata = json.loads((tmp_path / "new" / index_file).read_text())["metadata"]
    assert metadata["total_size"] == sum(each.nbytes for each in loaded.values())
    assert metadata["total_parameters"] == 10_000 + 2 * 8 * table.rows.shape[1]
    assert el.load(tmp_path / "new").table.vocab_size == len(table.rows) + 8


@pytest.mark.parametrize("kind", ["the same bytes", "floating point", "other bytes", "a part"])
def test_a_second_copy_of_stored_rows_follows_or_is_refused(tmp_path, kind) -> None:
    table = folder_of(tmp_path / "old", MLX, tied=True)
    copy = {f"{TABLE}.{rest}": tensor.clone() for rest, tensor in table.tensors.items()}
    if kind == "floating point":
        copy = {f"{TABLE}.weight": table.rows.half()}
    elif kind == "other bytes":
        copy[f"{TABLE}.scales"][0] += 1
    elif kind == "a part":
        del copy[f"{TABLE}.biases"]
    save_file(copy, tmp_path / "old" / "copy.safetensors")
    if kind in ("other bytes", "a part"):
        with pytest.raises(el.CheckpointError, match=r"copy\.safetensors has a tensor model\.embed_tokens"):
            edited(tmp_path / "old", tmp_path / "new")
        return
    edited(tmp_path / "old", tmp_path / "new")
    main, other = (load_file(tmp_path / "new" / file) for file in ("model.safetensors", "copy.safetensors"))
    if kind == "floating point":
        new = stored_ends(tmp_path / "new")[ENDS[0]].dequantise(torch.float32)
        assert torch.equal(other[f"{TABLE}.weight"], new.half())
    else:
        assert all(torch.equal(tensor, main[name]) for name, tensor in other.items())
    layer = el.load(tmp_path / "old")
    el.vocab.add_tokens(layer, ["new"])
    if kind == "floating point":
        with pytest.raises(el.CheckpointError, match="in floating point, of which .* has quantised rows"):
            layer.write_into(tmp_path / "old", tmp_path / "written")
    else:
        layer.write_into(tmp_path / "old", tmp_path / "written")
        assert len(load_file(tmp_path / "written" / "copy.safetensors")[f"{TABLE}.scales"]) == len(table.rows) + 1


@pytest.mark.parametrize("name", some(SOME, BUILT))
def test_a_live_edit_that_is_written_gives_the_tensors_of_the_edit_of_the_folder(tmp_path, name) -> None:
    folder_of(tmp_path / "old", name, tied=False)
    receipt = edited(tmp_path / "old", tmp_path / "new")
    layer = el.load(tmp_path / "old")
    options = {"add": [*receipt.added.values()], "remove": ["t3"], "init": MeanInit()}
    el.vocab.edit_vocabulary(layer, **options)
    layer.write_into(tmp_path / "old", tmp_path / "written")
    one, other = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("new", "written"))
    assert one == other


def test_a_number_of_rows_that_the_format_cannot_store_is_refused(tmp_path) -> None:
    folder_of(tmp_path / "old", "GPTQ ", tied=False)
    with pytest.raises(el.CheckpointError, match="GPTQ matrix of 4 bits cannot have 81 rows.*pad_to_multiple_of=8"):
        el.vocab.edit_vocabulary(tmp_path / "old", add=["new"], out=tmp_path / "new")
    with pytest.raises(el.CheckpointError, match="of 64 columns cannot have 16 rows"):
        el.vocab.trim_vocabulary(tmp_path / "old", [" ".join(f"t{i}" for i in range(16))], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    el.vocab.edit_vocabulary(tmp_path / "old", add=["new"], pad_to_multiple_of=8, out=tmp_path / "new")
    assert el.load(tmp_path / "new").table.vocab_size == 88


def test_rows_that_a_shared_scale_would_clip_are_refused_with_the_factor(tmp_path) -> None:
    table = folder_of(tmp_path / "old", "ModelOpt NVFP4", tied=True)
    (rows,) = stored_ends(tmp_path / "old").values()
    span = rows.format.value_range(rows.shared)
    assert span is not None
    large = el.vocab.VectorsInit(2.5 * span[1] * torch.ones(1, table.rows.shape[1]))
    with pytest.raises(el.CheckpointError, match=r"is 2\.5 times the largest one .* would be clipped"):
        el.vocab.edit_vocabulary(tmp_path / "old", add=["new"], init=large, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_rows_of_one_format_are_not_written_into_a_folder_with_another(tmp_path) -> None:
    table = folder_of(tmp_path / "stored", MLX, tied=True)
    write_folder(tmp_path / "other", built("MLX 8 bits, groups of 64, bfloat16"), None)
    write_folder(tmp_path / "dense", table.rows, None)
    for source, target in (("stored", "other"), ("stored", "dense"), ("dense", "stored")):
        with pytest.raises(el.CheckpointError, match=r"stores model\.embed_tokens\.weight as .* Load the layer from"):
            el.load(tmp_path / source).write_into(tmp_path / target, tmp_path / "written")
    assert not (tmp_path / "written").exists()


def refused_layouts() -> dict[str, dict[str, Tensor]]:
    """Return tensors in which rows share blocks or words, by what the error says."""
    blocks = {"weight": torch.randn(77, 256).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 2)}
    nested = bitsandbytes_case(weights(192), "nf4", is_nested=True).tensors
    transposed = {
        "qweight": torch.zeros(10, 64, dtype=torch.int32),
        "qzeros": torch.zeros(2, 8, dtype=torch.int32),
        "scales": torch.ones(2, 64).half(),
        "g_idx": torch.arange(80).int() // 40,
    }
    return {
        "128 rows share a scale.* Dequantise it with the package compressed-tensors": blocks,
        "256 of them share a scale.* Dequantise the model": {**nested},
        "groups run along the vocabulary": transposed,
        "a trellis code runs over tiles of 16 rows": {"trellis": torch.zeros(4, 4, 16, dtype=torch.int16)},
    }


@pytest.mark.parametrize("reason", range(4))
def test_edits_of_rows_that_share_blocks_are_refused_with_reason_and_advice(tmp_path, reason) -> None:
    match, tensors = [*refused_layouts().items()][reason]
    write_folder(tmp_path / "old", StoredCase(tensors, {}, weights(192)), None)
    for edit in (
        partial(el.vocab.remove_tokens, tmp_path / "old", [3]),
        partial(el.vocab.add_tokens, tmp_path / "old", 200),
        partial(el.vocab.edit_vocabulary, tmp_path / "old", order=[*range(76, -1, -1)]),
    ):
        with pytest.raises(el.CheckpointError, match=rf"(?s)model\.embed_tokens.* not read: .*{match}"):
            edit(out=tmp_path / "new")


UNKNOWN = {"model_type": "unheard_of", "architectures": ["UnheardOf"]}


@pytest.mark.parametrize("copies", [1, 2])
def test_of_an_unknown_family_the_table_and_its_equal_copies_are_edited_with_a_warning(tmp_path, copies) -> None:
    table = BUILT["bitsandbytes nf4, float32"]()
    write_folder(tmp_path / "old", table, table if copies == 2 else None, tied=True, config=UNKNOWN)
    words(len(table.rows)).save(str(tmp_path / "old" / "tokenizer.json"))
    with pytest.warns(el.EmbedLayerWarning, match="unknown family .*: only its table, model.embed_tokens.weight"):
        edited(tmp_path / "old", tmp_path / "new")
    ends = stored_ends(tmp_path / "new")
    assert [rows.shape[0] for rows in ends.values()] == copies * [len(table.rows) + 8]
    assert all(torch.equal(rows.row_bytes, ends[ENDS[0]].row_bytes) for rows in ends.values())


@pytest.mark.parametrize("name", ["bitsandbytes nf4, float32", "nvfp4-pack-quantized", MLX])
def test_of_an_unknown_family_another_stored_matrix_of_as_many_rows_is_refused(tmp_path, name) -> None:
    head = BUILT[name]()
    write_folder(tmp_path / "old", head.rows.clone(), head, config=UNKNOWN)
    with pytest.raises(el.CheckpointError, match=r"unknown family .* lm_head.* 77 rows or columns"):
        edited(tmp_path / "old", tmp_path / "new")
