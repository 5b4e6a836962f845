"""This library's own folders: a saved layer, and the run that it came from."""

import argparse
import inspect
import json
from pathlib import Path

import pytest
import torch
from vocab_models import MODELS, D, V, close, same, state_of

import embedlayer as el
from embedlayer.inputs import NgramEmbedding, NgramHash
from embedlayer.vocab import RandomInit

TEXT = inspect.getsource(argparse)[:40_000]
OPTIONS = el.TrainingOptions(steps=6, batch_size=2, max_length=16, log_every=2, validation_tokens=64, monitor_every=2)


def start(folder: Path, *, row_sparse: bool, stop_at: int, finish: bool = False) -> el.RunDirectory:
    """A run that stopped after some steps, or came to its end."""
    run = el.RunDirectory(folder)
    tokenizer = el.train_tokenizer([TEXT, " zebra quagga okapi" * 300], vocab_size=300)
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    corpus = el.TokenCorpus.build([folder / "text.txt"], tokenizer, run.corpus)
    size = tokenizer.get_vocab_size()
    table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(size, 16)
    head = el.OutputHead(vocab_size=size, embed_dim=16) if row_sparse else None
    model = el.DecoderLM(table, el.RotaryEmbedding(8), head, num_layers=1, num_heads=2)
    trainer = el.Trainer(model, *corpus.split(0.1), OPTIONS)
    notes = {"neighbors_before": [{"id": 290, "token": "x", "near": []}, {"id": 5, "token": "y", "near": []}]}
    run.start(trainer, tokenizer, validation_fraction=0.1, notes=notes)
    go_on(run, trainer, stop_at)
    if finish:
        run.finish(trainer, tokenizer)
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> el.RunDirectory:
    """A run that came to its end; not to be written to."""
    return start(tmp_path_factory.mktemp("finished") / "run", row_sparse=False, stop_at=6, finish=True)


def go_on(run: el.RunDirectory, trainer: el.Trainer, to: int) -> None:
    for line in trainer.run(on_step=lambda step: trainer.stop() if step == to else None):
        run.add_metrics(line)
    run.save_checkpoint(trainer)


@pytest.mark.parametrize("row_sparse", [False, True])
def test_a_resumed_run_goes_on_as_the_untouched_one(row_sparse, tmp_path) -> None:
    old = start(tmp_path / "old", row_sparse=row_sparse, stop_at=3)
    other, _ = old.open()
    receipt = el.vocab.edit_vocabulary(old.path, order=[*range(299, -1, -1)], out=tmp_path / "new")
    new = el.RunDirectory(tmp_path / "new")
    trainer, tokenizer, notes = new.resume()
    assert (trainer.step, trainer.steps) == (3, 6)
    assert [row["id"] for row in notes["neighbors_before"]] == [9, 294]
    ids = torch.tensor(el.load_tokenizer(old.path).encode(TEXT[:500]).ids)
    assert tokenizer.encode(TEXT[:500]).ids == receipt.remap(ids).tolist()
    go_on(new, trainer, 6)
    go_on(old, other, 6)
    assert torch.equal(trainer.monitor.counts().flip(0), other.monitor.counts())
    if row_sparse:
        trainer.model.table.apply_pending_updates()
        other.model.table.apply_pending_updates()
    for name in ("table", "head"):
        weights = [getattr(each.model, name).weight for each in (trainer, other)]
        torch.testing.assert_close(weights[0].flip(0), weights[1], rtol=0, atol=1e-5)
    lines = [[line["loss"] for line in run.read_metrics()] for run in (new, old)]
    assert lines[0] == pytest.approx(lines[1], abs=1e-4)


@pytest.mark.parametrize("row_sparse", [False, True])
def test_new_rows_start_clean_and_alike_in_result_and_run(row_sparse, tmp_path) -> None:
    old = start(tmp_path / "old", row_sparse=row_sparse, stop_at=6, finish=True)
    receipt = el.vocab.add_tokens(old.path, [" otter", " lynx"], init=RandomInit(), out=tmp_path / "new")
    trainer, tokenizer, _ = el.RunDirectory(tmp_path / "new").resume()
    model = el.open_model(tmp_path / "new").model
    assert torch.equal(trainer.model.table.rows(0, 302), model.table.rows(0, 302))
    before = old.open()[0]
    before.optimizer.apply_pending_updates()
    assert torch.equal(model.table.rows(0, 300), before.model.table.rows(0, 300))
    weight = trainer.model.table.weight
    trainer.optimizer.apply_pending_updates()
    for key in ("exp_avg", "exp_avg_sq"):
        moments = trainer.optimizer.state[weight][key]
        assert torch.equal(moments[:300], before.optimizer.state[before.model.table.weight][key])
        assert not moments[300:].any()
    assert tokenizer.encode("an otter").ids[-1] == 300
    assert list(receipt.added.values()) == [" otter", " lynx"]


def test_trimming_to_the_own_text_leaves_outputs_and_the_run_as_they_were(finished, tmp_path) -> None:
    old = finished
    corpus = el.TokenCorpus.open(old.corpus)
    receipt = el.vocab.trim_vocabulary(old.path, corpus, out=tmp_path / "new")
    assert {"Ġzebra", "Ġquagga", "Ġokapi"} <= set(receipt.dropped.values())
    opened = el.open_model(tmp_path / "new")
    small, tokenizer = opened.model, opened.tokenizer
    ids = torch.from_numpy(corpus.ids[:64].astype("int64"))
    assert tokenizer.encode(TEXT).ids == receipt.remap(corpus.ids.astype("int64")).tolist()
    kept = receipt.row_map.sources
    large = el.open_model(old.path).model
    close(small(receipt.remap(ids)), large(ids)[:, kept])
    assert el.RunDirectory(tmp_path / "new").resume()[0].step == 6


def test_a_run_whose_text_needs_a_dropped_token_leaves_its_result(finished, tmp_path) -> None:
    old = finished
    tokenizer = el.load_tokenizer(old.path)
    with pytest.warns(el.EmbedLayerWarning, match="there is no run to resume"):
        receipt = el.vocab.remove_tokens(old.path, [290], out=tmp_path / "new")
    assert tokenizer.id_to_token(290) in receipt.dropped.values()
    assert not (tmp_path / "new" / "run.json").exists()
    el.open_model(tmp_path / "new")

    with pytest.raises(el.VocabularyError):
        el.vocab.add_tokens(old.path, ["otter"], tokenizer=el.train_tokenizer((), "byte"), out=tmp_path / "none")
    unfinished = start(tmp_path / "unfinished", row_sparse=False, stop_at=2)
    with (
        pytest.warns(el.EmbedLayerWarning, match="removed tokens"),
        pytest.raises(el.VocabularyError),
    ):
        el.vocab.remove_tokens(unfinished.path, [290], out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", MODELS)
def test_every_saved_layer_is_edited(kind, tmp_path) -> None:
    made = MODELS[kind]()
    made.save_pretrained(tmp_path / "old")
    el.vocab.add_tokens(tmp_path / "old", 3, pad_to_multiple_of=8, out=tmp_path / "new")
    read = el.DecoderLM.from_pretrained(tmp_path / "new")
    live = MODELS[kind]()
    live.load_state_dict(made.state_dict())
    el.vocab.add_tokens(live, 3, pad_to_multiple_of=8)
    assert read.config == live.config
    assert same(state_of(read), state_of(live))
    layer = el.TransformerEmbedding(V, D, 8)
    layer.save_pretrained(tmp_path / "layer")
    el.vocab.add_tokens(tmp_path / "layer", 1, out=tmp_path / "more")
    assert json.loads((tmp_path / "more" / "config.json").read_text())["vocab_size"] == V + 1


def test_the_compressed_ids_of_a_saved_ngram_layer_move_with_its_tokens(tmp_path) -> None:
    layer = NgramEmbedding.dense(NgramHash.for_rows(50, V, heads=1, token_map=torch.arange(V) // 3), 4)
    layer.save_pretrained(tmp_path / "old")
    ids = torch.tensor([[7, 8, 9, 7, 20]])
    receipt = el.vocab.edit_vocabulary(tmp_path / "old", add=2, remove=[3, 4], out=tmp_path / "new")
    edited = NgramEmbedding.from_pretrained(tmp_path / "new")
    assert edited.hash.vocab_size == V
    assert torch.equal(edited(receipt.remap(ids)), layer(ids))
