"""A whole table written into a copy of a checkpoint folder: rows that did not change keep their bytes."""

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from covering import covering, some
from safetensors.torch import load_file, save_file
from stored_cases import CASES, StoredCase, built, built_head, gptq_case, weights
from stored_folders import HEAD, TABLE, one_of_each, words, write_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from vocab_models import checkpoint

import embedlayer as el
from embedlayer.vocab import write_into

REMOVED, ADDED, CHANGED = [f"t{i}" for i in range(4, 20, 2)], [f"new{i}" for i in range(8)], 31
MLX = "MLX 4 bits, groups of 64, bfloat16"
ENDS = {"table": f"{TABLE}.weight", "head": f"{HEAD}.weight"}
GPTQ = cache(partial(gptq_case, weights(64, torch.bfloat16, 80), 4))  # eight tokens in a word
BUILT: dict[str, Callable[[], StoredCase | Tensor]] = {
    "float32": lambda: weights(64),
    "bfloat16": lambda: weights(64, torch.bfloat16),
    **{name: partial(built, name) for name in one_of_each() if not name.startswith("GPTQ") and "1 bits" not in name},
    "GPTQ": GPTQ,
    **{name: partial(built, name) for name in (MLX, "pack-quantized 4 bits, group, asymmetric, bfloat16")},
}
SOME = ("bfloat16", MLX, "GPTQ", "float-quantized tensor, float32", "bitsandbytes nf4, float32", "AWQ")
"""Rows in one tensor and in several, words of eight rows, a scale that all share, and the shape in a tensor."""


def folder_of(folder: Path, name: str, *, tied: bool) -> int:
    """Write a folder with a tokenizer, in which table and head are stored in one way; return the number of tokens."""
    table = BUILT[name]()
    write_folder(folder, table, None if tied else built_head(name) if name in CASES else BUILT[name]())
    size = len(table.rows if isinstance(table, StoredCase) else table)
    words(size).save(str(folder / "tokenizer.json"))
    return size


def stored_rows(folder: Path, end: str) -> Any:
    """Return the rows of an end: a tensor, or codes with their format."""
    table = el.load(folder, table_only=ENDS[end]).table
    return table.weight.detach() if isinstance(table, el.TokenEmbedding) else table.stored_rows


def bytes_of(folder: Path, end: str) -> Tensor:
    """Return the bytes of the rows of an end."""
    stored = stored_rows(folder, end)
    return stored.view(torch.uint8) if isinstance(stored, Tensor) else stored.row_bytes


def encoded(folder: Path, end: str, rows: Tensor) -> Tensor:
    """Return the bytes of rows as a folder stores those of an end."""
    stored = stored_rows(folder, end)
    return rows.to(stored.dtype).view(torch.uint8) if isinstance(stored, Tensor) else stored.quantised(rows).row_bytes


@pytest.mark.parametrize(("name", "tied"), some(covering(product(SOME, (True, False))), product(BUILT, (True, False))))
def test_rows_that_did_not_change_keep_their_bytes_and_others_are_encoded(tmp_path, name, tied) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    size = folder_of(old, name, tied=tied)
    opened = el.open_model(old, parts="layer")
    head = None if tied else opened.untied_head
    assert write_into(opened.table, opened.tokenizer, old, tmp_path / "same", head=head) == size
    assert all((tmp_path / "same" / file.name).read_bytes() == file.read_bytes() for file in old.iterdir())
    rounded = el.load(old).bfloat16()
    other_head = None if tied else rounded.head.own_rows or rounded.head.weight.detach()
    assert write_into(rounded.table, opened.tokenizer, old, tmp_path / "rounded", head=other_head) == size
    assert torch.equal(bytes_of(tmp_path / "rounded", "table"), bytes_of(old, "table"))
    receipt = el.vocab.edit_vocabulary(
        el.TokenEmbedding(size, 2), add=ADDED, remove=REMOVED, tokenizer=opened.tokenizer
    )
    sources = receipt.row_map.sources
    expected: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for end in ("table", "head")[: 1 if tied else 2]:
        before = opened.table if end == "table" else el.load(old, table_only=ENDS["head"]).table
        rows = numbers[end] = before.rows(0, size)[sources.clamp(min=0)]
        rows[sources < 0], rows[CHANGED] = rows[:8] * 0.5, rows[CHANGED] * 0.75
        changed = (sources < 0) | (torch.arange(len(sources)) == CHANGED)
        expected[end] = bytes_of(old, end)[sources.clamp(min=0)]
        if not _quantises(old, end):
            continue
        expected[end][changed] = encoded(old, end, rows[changed])
    table = el.TokenEmbedding.from_pretrained(numbers["table"])
    written = partial(write_into, table, receipt.tokenizer, old, new, head=numbers.get("head"))
    if not _quantises(old, "table"):
        with pytest.raises(el.CheckpointError, match="Rows are not quantised to"):
            written()
        assert not new.exists()
        return
    assert written() == len(sources) - 9
    for end, row_bytes in expected.items():
        assert torch.equal(bytes_of(new, end), row_bytes)
    layer = el.load(new)
    assert (layer.head.tied, layer.tokenizer.encode("new3 t1").ids) == (tied, [len(sources) - 5, 1])
    configs = [json.loads((folder / "config.json").read_text()) for folder in (old, new)]
    assert configs[1] == {**configs[0], "vocab_size": len(sources)}
    files = [load_file(folder / "model.safetensors") for folder in (old, new)]
    others = [key for key in files[0] if not key.startswith((f"{TABLE}.", f"{HEAD}."))]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in others)


def _quantises(folder: Path, end: str) -> bool:
    stored = stored_rows(folder, end)
    return isinstance(stored, Tensor) or stored.format.can_quantise


SHARED = partial(built, "float-quantized tensor, float32")
"""One scale for the whole matrix."""


def test_the_command_writes_a_model_into_a_quantised_folder(tmp_path, capsys) -> None:
    size = folder_of(tmp_path / "quantised", MLX, tied=True)
    rows = el.load(tmp_path / "quantised").table.rows(0, size)
    rows[5] = 0.125
    write_folder(tmp_path / "dense", rows, None)
    words(size).save(str(tmp_path / "dense" / "tokenizer.json"))
    into = ["export", tmp_path / "dense", "--into", tmp_path / "quantised", "-o"]
    assert run(*into, tmp_path / "out", "--json") == 0
    facts = {
        "file": str(tmp_path / "out"),
        "format": "checkpoint",
        "rows": size,
        "columns": rows.shape[1],
        "left_out": 0,
    }
    assert json.loads(capsys.readouterr().out) == facts
    before, after = bytes_of(tmp_path / "quantised", "table"), bytes_of(tmp_path / "out", "table")
    assert (before != after).any(1).nonzero().flatten().tolist() == [5]
    assert el.load(tmp_path / "out").table.stored_type.startswith("MLX")
    assert run(*into, tmp_path / "out") == 1
    assert run(*into, tmp_path / "more", "--format", "gguf") == 1
    assert "leave --format out" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path) -> None:
    for name, tied in (("shared", True), ("untied", False)):
        write_folder(tmp_path / name, SHARED(), None if tied else SHARED())
        words(77).save(str(tmp_path / name / "tokenizer.json"))
    shared, tokenizer = tmp_path / "shared", words(77)
    rows = el.load(shared).table.rows(0, 77)
    table = el.TokenEmbedding.from_pretrained(rows)
    el.TokenEmbedding(77, rows.shape[1]).save_pretrained(tmp_path / "own")
    write_folder(tmp_path / "nameless", SHARED(), None)
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
    with pytest.raises(el.CheckpointError, match="more values for each token .* such as a bias"):
        write_into(el.TokenEmbedding(131, 64), words(131, "u"), tmp_path / "biased", tmp_path / "new", head=rows[1])


def test_second_copies_get_the_same_rows(tmp_path) -> None:
    size = folder_of(tmp_path / "old", MLX, tied=True)
    tensors = load_file(tmp_path / "old" / "model.safetensors")
    dense = {**tensors, f"{TABLE}.weight": el.load(tmp_path / "old").table.rows(0, size)}
    for rest in ("scales", "biases"):
        del dense[f"{TABLE}.{rest}"]
    save_file(tensors, tmp_path / "old" / "copy.safetensors", {"format": "pt"})
    save_file(dense, tmp_path / "old" / "dense.safetensors", {"format": "pt"})
    rows = dense[f"{TABLE}.weight"].clone()
    rows[9] = 0.25
    table, tokenizer = el.TokenEmbedding.from_pretrained(rows), el.load(tmp_path / "old").tokenizer
    assert write_into(table, tokenizer, tmp_path / "old", tmp_path / "new") == size - 1
    new = {name: load_file(tmp_path / "new" / f"{name}.safetensors") for name in ("model", "copy", "dense")}
    for rest in ("weight", "scales", "biases"):
        assert torch.equal(new["model"][f"{TABLE}.{rest}"], new["copy"][f"{TABLE}.{rest}"])
    assert torch.equal(new["dense"][f"{TABLE}.weight"], el.load(tmp_path / "new").table.rows(0, size))
