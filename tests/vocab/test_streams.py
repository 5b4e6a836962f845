"""Models with K streams of codes: edits move their table of text, and raise an error for models of codes alone."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from stream_models import STREAM_MODELS, stream_model
from tiny_models import quiet

import embedlayer as el
from embedlayer.tables import StreamTable
from embedlayer.vocab import add_tokens, edit_vocabulary, remove_tokens, train_only_rows

WITH_TEXT = ("csm", "csm, untied", "dia", "higgs")
"""Models with a table of text and streams of codes."""

CODES_ALONE = [name for name in STREAM_MODELS if name not in (*WITH_TEXT, "moshi")]


def saved(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def opened(folder: Path) -> el.EmbeddingLayer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return el.load(folder)


@pytest.mark.parametrize("name", some(("csm", "higgs"), WITH_TEXT))
def test_the_text_of_a_model_with_streams_is_edited_and_its_codes_stay(tmp_path, name, unchecked) -> None:
    folder = saved(stream_model(name), tmp_path / "old")
    layer, old = opened(folder), opened(folder)
    receipt = edit_vocabulary(layer, add=2, remove=[3])
    edit_vocabulary(folder, add=2, remove=[3], out=tmp_path / "new")
    for edited in (layer, opened(tmp_path / "new")):
        assert edited.table.vocab_size == old.table.vocab_size + 1
        kept = receipt.new_ids >= 0
        assert torch.equal(edited.table.weight[receipt.new_ids[kept]], old.table.weight[kept])
        for key, value in old.state_dict().items():
            assert not key.startswith("codes.") or torch.equal(edited.state_dict()[key], value), key


@pytest.mark.parametrize("name", some(("musicgen", "kyutai, tied", "bark, fine"), CODES_ALONE))
def test_a_model_of_codes_alone_is_not_edited_and_nothing_is_written(tmp_path, name, unchecked) -> None:
    folder = saved(stream_model(name), tmp_path / "old")
    layer = opened(folder)
    layer.save_pretrained(tmp_path / "layer")
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    for target in (layer, folder, tmp_path / "layer"):
        options = {} if target is layer else {"out": tmp_path / "new"}
        for edit, what in ((add_tokens, 2), (remove_tokens, [3])):
            with pytest.raises(el.SizeError, match="streams of codes"):
                edit(target, what, **options)
    with pytest.raises(el.SizeError, match="streams of codes"):
        train_only_rows(layer, [1])
    assert not (tmp_path / "new").exists()
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in state.items())


def test_a_folder_with_a_second_table_of_text_is_not_edited(tmp_path, unchecked) -> None:
    folder = saved(stream_model("moshi"), tmp_path / "old")
    with pytest.raises(el.CheckpointError, match="depth_decoder.text_embed_tokens"):
        add_tokens(folder, 2, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_table_of_streams_is_not_edited() -> None:
    table = StreamTable(el.TokenEmbedding(24, 4), (7, 9, 8))
    with pytest.raises(el.SizeError, match="3 streams of codes"):
        add_tokens(table, 1)
