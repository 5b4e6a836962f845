"""Edits of model2vec's folders: rows that tokens share, with a mapping and weights by token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from safetensors.torch import load_file, save_file

import embedlayer as el

V, R, D = 300, 40, 6
TEXT = "the otter ate the fish in the river and the other otters were there "
KINDS = {"mapping": ("mapping",), "weights": ("weights",), "both, half precision": ("mapping", "weights")}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> Path:
    """A folder as model2vec writes it: 300 tokens that share 40 rows, of which some belong to one token or to none."""
    torch.manual_seed(0)
    stored = {"mapping": torch.randint(0, R - 2, (V,), dtype=torch.int32), "weights": torch.rand(V).double() + 0.5}
    stored["mapping"][[270, 271]] = R - 2
    stored = {name: stored[name] for name in KINDS[request.param]}
    rows = torch.randn(R if "mapping" in stored else V, D)
    rows = rows.half() if "half" in request.param else rows
    path = tmp_path / "old"
    path.mkdir()
    save_file({"embeddings": rows, **stored}, path / "model.safetensors")
    config = {"model_type": "model2vec", "hidden_dim": D, "normalize": True}
    (path / "config.json").write_text(json.dumps(config))
    el.train_tokenizer([TEXT * 50 + "the quick brown fox met another fox on the road " * 30], vocab_size=V).save(
        str(path / "tokenizer.json")
    )
    return path


def test_what_reads_only_the_table_reads_the_row_of_each_token(folder, tmp_path) -> None:
    expected = el.load(folder).table.weight
    alone = el.load(folder, table_only=True)
    assert torch.equal(alone.table.weight, expected)
    assert not any("reads another one" in note for note in alone.load_record.notes)
    assert run("export", folder, "-o", tmp_path / "rows.npy") == 0
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "rows.npy")), expected)
    assert run("neighbors", folder, "#7") == 0


EDITS: tuple[dict[str, Any], ...] = ({"add": ["zebra"], "remove": [270, 271, 290]}, {"order": [1, 0, *range(2, V)]})


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_moves_shared_rows(edit, folder, tmp_path) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    before = el.load(folder).table.weight
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": V}))
    receipt = el.vocab.edit_vocabulary(folder, **edit, out=tmp_path / "new")
    size = json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"]
    assert size == receipt.row_map.size == receipt.tokenizer.get_vocab_size()
    after = el.load(tmp_path / "new").table.weight
    sources = receipt.row_map.sources
    kept = sources >= 0
    assert torch.equal(after[kept], before[sources[kept]])
    assert torch.equal(StaticEmbedding.load(str(tmp_path / "new")).embedding.weight.to(after.dtype), after)
    old, new = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "new"))
    assert {name: tensor.dtype for name, tensor in new.items()} == {name: tensor.dtype for name, tensor in old.items()}
    if "mapping" in old:
        mapping = old["mapping"].long()
        left = {*mapping[sources[kept]].tolist()}
        dropped = {*mapping.tolist()} - left
        assert len(new["embeddings"]) == R - len(dropped) + int((~kept).sum())


def test_new_rows_are_computed_from_weighted_rows(folder, tmp_path) -> None:
    table = el.load(folder).table.weight.float()
    el.vocab.add_tokens(folder, ["zebra"], init=el.vocab.MeanInit(), out=tmp_path / "new")
    after = el.load(tmp_path / "new").table.weight
    torch.testing.assert_close(after[V].float(), table.mean(0), atol=1e-3, rtol=0)


def test_a_trained_table_is_written_into_the_folder(folder, tmp_path) -> None:
    layer = el.load(folder)
    with torch.no_grad():
        layer.table.weight[[4, 11]] += 1
    unchanged = el.vocab.write_into(layer.table, layer.tokenizer, folder, tmp_path / "new")
    assert unchanged == V - 2
    assert torch.equal(el.load(tmp_path / "new").table.weight, layer.table.weight)
    old, new = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "new"))
    if "mapping" in old:
        assert len(new["embeddings"]) <= R + 2


def test_a_second_copy_of_shared_rows_is_refused(folder, tmp_path) -> None:
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(el.CheckpointError, match="copy.safetensors"):
        el.vocab.remove_tokens(folder, [280], out=tmp_path / "new")


def test_model2vec_reads_what_was_edited(tmp_path) -> None:
    model2vec = pytest.importorskip("model2vec")
    rows, mapping, weights = torch.randn(R, D), torch.randint(0, R, (V,)), torch.rand(V).double()
    tokenizer = el.train_tokenizer([TEXT * 50], vocab_size=V)
    parts = {"token_mapping": mapping.numpy(), "weights": weights.numpy()}
    before = model2vec.StaticModel(rows.numpy(), tokenizer, **parts)
    before.save_pretrained(tmp_path / "old")
    receipt = el.vocab.edit_vocabulary(tmp_path / "old", add=["zebra"], remove=[280], out=tmp_path / "new")
    after = model2vec.StaticModel.from_pretrained(tmp_path / "new")
    assert (after.encode(["the otter ate fish"]) == before.encode(["the otter ate fish"])).all()
    assert after.tokenize(["zebra"]) == [[*receipt.added]]
