"""Folders whose table and head another library quantised: edited, or written into with a whole table.

Kept rows keep their bytes, and other tensors and files stay.
"""

import json
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from covering import covering
from safetensors.torch import load_file, save_file
from stored_cases import CASES, StoredCase, bitsandbytes_case, built, built_head, gptq_case, weights
from stored_folders import HEAD, TABLE, one_of_each, words, write_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from vocab_models import checkpoint

import embedlayer as el
from embedlayer.vocab import MeanInit, Receipt, write_into

MLX = "MLX 4 bits, groups of 64, bfloat16"
NAMES = [name for name in one_of_each() if "1 bits" not in name and not name.startswith("GPTQ")]  # rows of 1 bit are 0
BUILT: dict[str, Callable[[], StoredCase | Tensor]] = {
    "bfloat16": lambda: weights(64, torch.bfloat16),
    **{name: partial(built, name) for name in [*NAMES, MLX]},
    "GPTQ": cache(partial(gptq_case, weights(64, torch.bfloat16, 80), 4)),  # eight tokens in a word
}
LAYOUTS = [*{name.partition(" ")[0]: name for name in BUILT if name != "bfloat16"}.values()]
SOME = (MLX, "GPTQ", "float-quantized tensor, float32", "bitsandbytes fp4, float32")
"""Rows in several tensors, eight rows in a word, a scale that all rows share, and the shape in a tensor of its own."""
REMOVED, ADDED, CHANGED = [f"t{i}" for i in range(4, 20, 2)], [f"new{i}" for i in range(8)], 31
ENDS = (f"{TABLE}.weight", f"{HEAD}.weight")


def folder_of(folder: Path, name: str, *, tied: bool) -> Any:
    """Write a folder with a tokenizer, in which table and head are stored in one way; return the table."""
    table = BUILT[name]()
    write_folder(folder, table, None if tied else built_head(name) if name in CASES else table)
    words(len(table.rows if isinstance(table, StoredCase) else table)).save(str(folder / "tokenizer.json"))
    return table


def stored_ends(folder: Path) -> dict[str, Any]:
    """Return the rows of the table and of a head that is stored too: codes with their format, or a tensor."""
    names = load_file(folder / "model.safetensors").keys()
    ends = [end for end in ENDS if any(name.startswith(end.removesuffix("weight")) for name in names)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = {end: el.load(folder, table_only=end).table for end in ends}
    dense = el.TokenEmbedding
    return {k: t.weight.detach() if isinstance(t, dense) else t.stored_rows for k, t in tables.items()}


def bytes_of(stored: Any) -> Tensor:
    """Return the bytes of the rows of an end."""
    return stored.view(torch.uint8) if isinstance(stored, Tensor) else stored.row_bytes


def encoded(stored: Any, rows: Tensor) -> Tensor | None:
    """Return the bytes of other rows as an end stores them; `None` if nothing is quantised to its format."""
    if isinstance(stored, Tensor):
        return rows.to(stored.dtype).view(torch.uint8)
    return stored.quantised(rows).row_bytes if stored.format.can_quantise else None


def check_rest(old: Path, new: Path, size: int) -> None:
    """Check that all tensors but those of rows, and the configuration but the size, are the same."""
    files = [load_file(folder / "model.safetensors") for folder in (old, new)]
    assert [*files[0]] == [*files[1]]
    for name, tensor in files[0].items():
        if not name.startswith((f"{TABLE}.", f"{HEAD}.")) or name.endswith("input_scale"):
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), files[1][name].reshape(-1).view(torch.uint8))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (old, new)]
    assert configs[1] == {**configs[0], "vocab_size": size}


def check_edit(old: Path, new: Path, receipt: Receipt) -> None:
    """Check rows, other tensors and the configuration of an edit that set new rows to the mean of the live ones."""
    before, after, sources = stored_ends(old), stored_ends(new), receipt.row_map.sources
    assert before.keys() == after.keys() == receipt.stored.keys()
    for name, rows in before.items():
        assert after[name].format == rows.format
        assert (receipt.stored[name].old_type, receipt.stored[name].is_requantised) == (rows.format.name, False)
        assert after[name].shape == (len(sources), rows.shape[1])
        assert torch.equal(after[name].row_bytes[sources >= 0], rows.row_bytes[sources[sources >= 0]])
        live = rows.dequantise(torch.float32)
        mean = live[live.any(1)].double().mean(0, keepdim=True).float()
        assert (after[name].row_bytes[sources < 0] == rows.quantised(mean).row_bytes).all()
    check_rest(old, new, len(sources))


@pytest.mark.parametrize(("name", "tied"), sorted(covering(product(LAYOUTS, (True, False)))))
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


def edited(old: Path, new: Path) -> Receipt:
    return el.vocab.edit_vocabulary(old, add=[f"new{i}" for i in range(9)], remove=["t3"], init=MeanInit(), out=new)


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
        with pytest.raises(el.CheckpointError, match="in floating point"):
            layer.write_into(tmp_path / "old", tmp_path / "written")
    else:
        layer.write_into(tmp_path / "old", tmp_path / "written")
        assert len(load_file(tmp_path / "written" / "copy.safetensors")[f"{TABLE}.scales"]) == len(table.rows) + 1


@pytest.mark.parametrize("name", SOME)
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
    folder_of(tmp_path / "old", "GPTQ", tied=False)
    with pytest.raises(el.CheckpointError, match="at 4 bits has no 81 rows.*pad_to_multiple_of=8"):
        el.vocab.edit_vocabulary(tmp_path / "old", add=["new"], out=tmp_path / "new")
    with pytest.raises(el.CheckpointError, match="no fewer rows .16. than columns .64."):
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
        with pytest.raises(el.CheckpointError, match=r"stores model\.embed_tokens\.weight as"):
            el.load(tmp_path / source).write_into(tmp_path / target, tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_edits_of_rows_that_share_blocks_are_refused(tmp_path) -> None:
    words_of_rows = {"qweight": (10, 64), "qzeros": (2, 8)}
    transposed = {name: torch.zeros(size, dtype=torch.int32) for name, size in words_of_rows.items()}
    for tensors in (
        {"weight": torch.randn(77, 256).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 2)},
        bitsandbytes_case(weights(192), "nf4", is_nested=True).tensors,  # 256 of them share a scale
        {**transposed, "scales": torch.ones(2, 64).half(), "g_idx": torch.arange(80).int() // 40},
        {"trellis": torch.zeros(4, 4, 16, dtype=torch.int16)},
    ):
        write_folder(tmp_path / "old", StoredCase(tensors, {}, weights(192)), None)
        for options in ({"remove": [3]}, {"add": 200}, {"order": range(76, -1, -1)}):
            with pytest.raises(el.CheckpointError, match=r"(?s)model\.embed_tokens.* not read"):
                el.vocab.edit_vocabulary(tmp_path / "old", **options, out=tmp_path / "new")


UNKNOWN = {"model_type": "unheard_of", "architectures": ["UnheardOf"]}


@pytest.mark.parametrize("name", ["bitsandbytes nf4, float32", MLX])
def test_of_an_unknown_family_equal_copies_of_the_table_are_edited_and_another_matrix_is_refused(
    tmp_path, name
) -> None:
    table: Any = BUILT[name]()
    write_folder(tmp_path / "old", table, table, tied=True, config=UNKNOWN)
    words(len(table.rows)).save(str(tmp_path / "old" / "tokenizer.json"))
    with pytest.warns(el.EmbedLayerWarning, match="unknown family .*: only its table, model.embed_tokens.weight"):
        edited(tmp_path / "old", tmp_path / "new")
    rows, head = stored_ends(tmp_path / "new").values()
    assert len(rows.row_bytes) == len(table.rows) + 8
    assert torch.equal(rows.row_bytes, head.row_bytes)
    write_folder(tmp_path / "other", table.rows.clone(), table, config=UNKNOWN)
    with pytest.raises(el.CheckpointError, match="lm_head.* 77 rows"):
        edited(tmp_path / "other", tmp_path / "none")


@pytest.mark.parametrize(("name", "tied"), sorted(covering(product(["bfloat16", "AWQ", *SOME], (True, False)))))
def test_rows_that_did_not_change_keep_their_bytes_and_others_are_encoded(tmp_path, name, tied) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    folder_of(old, name, tied=tied)
    opened, ends = el.open_model(old, parts="layer"), stored_ends(old)
    size = opened.tokenizer.get_vocab_size()
    head = None if tied else opened.untied_head
    assert write_into(opened.table, opened.tokenizer, old, tmp_path / "same", head=head) == size
    assert all((tmp_path / "same" / file.name).read_bytes() == file.read_bytes() for file in old.iterdir())
    rounded = el.load(old).bfloat16()
    other_head = None if tied else rounded.head.own_rows or rounded.head.weight.detach()
    assert write_into(rounded.table, opened.tokenizer, old, tmp_path / "rounded", head=other_head) == size
    assert torch.equal(bytes_of(stored_ends(tmp_path / "rounded")[ENDS[0]]), bytes_of(ends[ENDS[0]]))
    edited = el.TokenEmbedding(size, 2)
    receipt = el.vocab.edit_vocabulary(edited, add=ADDED, remove=REMOVED, tokenizer=opened.tokenizer)
    sources = receipt.row_map.sources
    changed = (sources < 0) | (torch.arange(len(sources)) == CHANGED)
    expected: dict[str, Tensor] = {}
    numbers: list[Tensor] = []
    for end, stored in ends.items():
        rows = el.load(old, table_only=end).table.rows(0, size)[sources.clamp(min=0)]
        rows[sources < 0], rows[CHANGED] = rows[:8] * 0.5, rows[CHANGED] * 0.75
        numbers.append(rows)
        expected[end] = bytes_of(stored)[sources.clamp(min=0)]
        if (new_bytes := encoded(stored, rows[changed])) is not None:
            expected[end][changed] = new_bytes
    table = el.TokenEmbedding.from_pretrained(numbers[0])
    written = partial(write_into, table, receipt.tokenizer, old, new, head=None if tied else numbers[1])
    if encoded(ends[ENDS[0]], numbers[0]) is None:
        with pytest.raises(el.CheckpointError):
            written()
        assert not new.exists()
        return
    assert written() == len(sources) - 9
    for end, row_bytes in expected.items():
        assert torch.equal(bytes_of(stored_ends(new)[end]), row_bytes)
    layer = el.load(new)
    assert (layer.head.tied, layer.tokenizer.encode("new3 t1").ids) == (tied, [len(sources) - 5, 1])
    check_rest(old, new, len(sources))


def test_the_command_writes_a_model_into_a_quantised_folder(tmp_path, capsys) -> None:
    size = len(folder_of(tmp_path / "quantised", MLX, tied=True).rows)
    rows = el.load(tmp_path / "quantised").table.rows(0, size)
    rows[5] = 0.125
    write_folder(tmp_path / "dense", rows, None)
    words(size).save(str(tmp_path / "dense" / "tokenizer.json"))
    into = ["export", tmp_path / "dense", "--into", tmp_path / "quantised", "-o"]
    assert run(*into, tmp_path / "out", "--json") == 0
    facts = {"file": str(tmp_path / "out"), "format": "checkpoint", "rows": size, "columns": rows.shape[1]}
    assert json.loads(capsys.readouterr().out) == {**facts, "left_out": 0}
    before, after = (stored_ends(tmp_path / name)[ENDS[0]].row_bytes for name in ("quantised", "out"))
    assert (before != after).any(1).nonzero().flatten().tolist() == [5]
    assert el.load(tmp_path / "out").table.stored_type.startswith("MLX")
    assert run(*into, tmp_path / "out") == 1
    assert run(*into, tmp_path / "more", "--format", "gguf") == 1
    assert "leave --format out" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path) -> None:
    for name, tied in (("shared", True), ("untied", False)):
        folder_of(tmp_path / name, SOME[2], tied=tied)
    shared, tokenizer = tmp_path / "shared", words(77)
    rows = el.load(shared).table.rows(0, 77)
    table = el.TokenEmbedding.from_pretrained(rows)
    el.TokenEmbedding(77, rows.shape[1]).save_pretrained(tmp_path / "own")
    write_folder(tmp_path / "nameless", BUILT[SOME[2]](), None)
    for name, arguments in (
        ("shared", {"table": el.TokenEmbedding.from_pretrained(rows * 2)}),  # the scale that all rows share clips
        ("shared", {"table": el.TokenEmbedding(77, 8)}),
        ("shared", {"head": rows}),
        ("untied", {}),
        ("own", {}),  # a folder of embedlayer
        ("nameless", {}),  # without a tokenizer
        ("shared", {"tokenizer": words(78)}),
    ):
        choice = {"table": table, "tokenizer": tokenizer, "head": None, **arguments}
        with pytest.raises((el.CheckpointError, el.VocabularyError)):
            write_into(choice["table"], choice["tokenizer"], tmp_path / name, tmp_path / "out", head=choice["head"])
        assert not (tmp_path / "out").exists()


def test_rows_without_a_token_belong_together_by_their_numbers(tmp_path) -> None:
    old = checkpoint(tmp_path / "old", 8, words(5))  # t0 to t4 in 8 rows
    tokenizer = el.vocab.edit_tokenizer(words(5), add=["new"], remove=["t1", "t3"]).tokenizer  # t0, t2, t4, new
    rows = el.load(old).table.weight.detach()
    sources = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7])  # the rows 3 and 4 have no token in one of both
    table = el.TokenEmbedding.from_pretrained(rows[sources])
    assert write_into(table, tokenizer, old, tmp_path / "new") == 6
    assert torch.equal(el.load(tmp_path / "new").table.weight, rows[sources])


def test_a_bias_moves_with_its_tokens_and_is_not_made_up(tmp_path, unchecked) -> None:
    from tiny_models import build

    build("phi", "causal")[1].save_pretrained(tmp_path / "old")
    layer, tokenizer = el.load(tmp_path / "old"), words(131)
    tokenizer.save(str(tmp_path / "old" / "tokenizer.json"))
    with torch.no_grad():
        layer.head.bias.copy_(torch.arange(131.0))
    layer.write_into(tmp_path / "old", tmp_path / "biased")
    turned = Tokenizer(WordLevel({f"t{130 - i}": i for i in range(131)}, unk_token="t0"))
    turned.pre_tokenizer = WhitespaceSplit()
    rows = layer.table.rows(0, 131).flip(0), layer.head.weight.detach().flip(0)
    table = el.TokenEmbedding.from_pretrained(rows[0])
    assert write_into(table, turned, tmp_path / "biased", tmp_path / "out", head=rows[1]) == 131
    assert torch.equal(el.load(tmp_path / "out").head.bias, torch.arange(131.0).flip(0))
    with pytest.raises(el.CheckpointError, match="more values for each token"):
        write_into(el.TokenEmbedding(131, 64), words(131, "u"), tmp_path / "biased", tmp_path / "new", head=rows[1])
