"""The folder of a run."""

import pytest
import torch

from embedlayer import (
    CheckpointError,
    DecoderLM,
    FileError,
    LearnedPositionalEmbedding,
    RowSparseEmbedding,
    RunDirectory,
    TokenCorpus,
    TokenEmbedding,
    Trainer,
    TrainingOptions,
    VocabularyError,
    open_model,
    train_tokenizer,
)
from embedlayer.inputs import GatedEmbedding, NgramEmbedding, NgramHash, ValueEmbedding
from embedlayer.tables.stored.mapped import MappedEmbedding
from embedlayer.tokenization import compressed_tokens
from embedlayer.vocab import edit_vocabulary

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 100


@pytest.fixture
def started(tmp_path):
    tokenizer = train_tokenizer(TEXT, "byte")
    directory = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    corpus = TokenCorpus.build([tmp_path / "text.txt"], tokenizer, directory.corpus)
    torch.manual_seed(0)
    model = DecoderLM(
        TokenEmbedding(257, 16), LearnedPositionalEmbedding(8, 16), num_layers=1, num_heads=2, dropout=0.1
    )
    options = TrainingOptions(steps=6, batch_size=2, max_length=8, log_every=2, seed=0, monitor_every=2)
    trainer = Trainer(model, *corpus.split(0.2), options)
    directory.start(trainer, tokenizer, validation_fraction=0.2, notes={"who": "test"})
    return directory, trainer, tokenizer


def train(directory, trainer, until=None) -> None:
    for line in trainer.run(on_step=lambda step: trainer.stop() if step == until else None):
        directory.add_metrics(line)


def test_a_run_comes_back_bit_for_bit_from_its_folder(started) -> None:
    directory, trainer, tokenizer = started
    train(directory, trainer)
    directory.finish(trainer, tokenizer)
    opened = open_model(directory.path)
    model, read = opened.model, opened.tokenizer
    ids = torch.tensor([read.encode("the cat").ids])
    assert torch.equal(model(ids), trainer.model.eval()(ids))
    assert read.to_str() == tokenizer.to_str()


def test_a_run_killed_after_its_checkpoint_resumes_to_the_same_result_and_metrics(started) -> None:
    directory, trainer, _ = started
    train(directory, trainer, until=4)
    directory.save_checkpoint(trainer)
    train(directory, trainer)
    expected = [{**line, "tokens_per_second": 0} for line in directory.read_metrics()]
    assert expected[-1]["monitor"]["never_seen"] < expected[1]["monitor"]["never_seen"] < 1
    end = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}

    with directory.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    resumed, _, notes = directory.resume()
    assert (resumed.step, notes) == (4, {"who": "test"})
    assert trainer.monitor.text(ord("t")) == resumed.monitor.text(ord("t")) == "'t'"
    train(directory, resumed)
    assert [{**line, "tokens_per_second": 0} for line in directory.read_metrics()] == expected
    assert all(torch.equal(end[name], tensor) for name, tensor in resumed.model.state_dict().items())


def test_a_run_killed_before_its_first_checkpoint_starts_again_as_it_would_have_gone(started) -> None:
    directory, trainer, _ = started
    train(directory, trainer)
    end = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    resumed, _, _ = directory.resume()
    assert resumed.step == 0
    assert directory.read_metrics() == []
    train(directory, resumed)
    assert all(torch.equal(end[name], tensor) for name, tensor in resumed.model.state_dict().items())


def validated(step: int, loss: float) -> dict:
    return {"step": step, "loss": 9.0, "validation_loss": loss, "validation_bits_per_byte": loss / 2}


def test_the_weights_with_the_lowest_validation_loss_are_the_result(started) -> None:
    directory, trainer, tokenizer = started
    kept = []
    for step, loss in ((2, 3.0), (4, 2.0), (6, float("nan")), (8, 2.5)):
        torch.nn.init.constant_(trainer.model.table.weight, step)
        kept.append(directory.keep_best(trainer, validated(step, loss)))
        with pytest.raises(FileError):
            open_model(directory.path)
    assert kept == [True, True, False, False]
    assert directory.best() == {"step": 4, "validation_loss": 2.0, "validation_bits_per_byte": 1.0}
    directory.finish(trainer, tokenizer)
    assert open_model(directory.path).model.table.weight.eq(4).all()


def test_a_kill_between_weights_and_their_facts_leaves_none_that_are_wrong(started, monkeypatch) -> None:
    directory, trainer, _ = started
    directory.keep_best(trainer, validated(2, 3.0))
    monkeypatch.setattr(
        "embedlayer.training.run_directory.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        directory.keep_best(trainer, validated(4, 2.0))
    assert directory.best() is None
    monkeypatch.undo()
    assert directory.keep_best(trainer, validated(4, 2.5))


def test_a_run_that_never_got_a_finite_validation_loss_keeps_its_last_weights(started) -> None:
    directory, trainer, tokenizer = started
    assert not directory.keep_best(trainer, validated(2, float("nan")))
    directory.finish(trainer, tokenizer)
    assert torch.equal(open_model(directory.path).model.table.weight, trainer.model.table.weight)


def test_what_is_missing_or_too_large_is_refused(started, tmp_path) -> None:
    """tests/laws/test_damage.py damages each file of a run."""
    directory, _, _ = started
    for open_it in (lambda: open_model(directory.path), RunDirectory(tmp_path).resume):
        with pytest.raises(FileError):
            open_it()
    directory.run.write_text(directory.run.read_text().replace('"vocab_size": 257', f'"vocab_size": {1 << 39}'))
    with pytest.raises(CheckpointError):
        directory.resume()


def test_starting_again_clears_what_an_earlier_run_left(started) -> None:
    directory, trainer, tokenizer = started
    train(directory, trainer)
    directory.save_checkpoint(trainer)
    directory.finish(trainer, tokenizer)
    directory.start(trainer, tokenizer, validation_fraction=0.2)
    assert not directory.metrics.exists()
    assert not directory.checkpoint.exists()
    with pytest.raises(FileError):
        open_model(directory.path)


def test_a_model_that_could_not_be_loaded_again_is_refused_before_it_is_trained(started, tmp_path) -> None:
    _, trainer, tokenizer = started
    trainer.model.norm = torch.nn.LayerNorm(16, bias=False)
    with pytest.raises(CheckpointError):
        RunDirectory(tmp_path / "other").start(trainer, tokenizer, validation_fraction=0.2)
    assert not (tmp_path / "other").exists()


def start_with_mapped_tables(path, tokenizer, text):
    """Start a run with an n-gram table and value embeddings, whose rows are in files of the run."""
    directory = RunDirectory(path)
    path.mkdir()
    corpus = TokenCorpus.build([text], tokenizer, directory.corpus)
    torch.manual_seed(0)
    hash = NgramHash.for_rows(2000, 257, heads=2, token_map=compressed_tokens(tokenizer))
    tables = [
        MappedEmbedding.create(directory.tables / "0", hash.num_rows, 4, init_std=0.02),
        MappedEmbedding.create(directory.tables / "1", 257, 16, init_std=0.02),
    ]
    added = [
        GatedEmbedding(NgramEmbedding(hash, tables[0]), 16, block=0),
        ValueEmbedding(tables[1], 2, blocks=[0], gate_channels=8),
    ]
    table = TokenEmbedding(257, 16)
    model = DecoderLM(table, "rotary", num_layers=1, num_heads=2, dropout=0.1, injections=added)
    options = TrainingOptions(steps=6, batch_size=2, max_length=8, log_every=2, validation_tokens=64)
    trainer = Trainer(model, *corpus.split(0.2), options)
    directory.start(trainer, tokenizer, validation_fraction=0.2)
    directory.save_checkpoint(trainer)
    return directory, trainer


def close(trainer) -> None:
    for part in trainer.model.modules():
        if isinstance(part, MappedEmbedding):
            part.close()


def test_a_run_with_mapped_tables_is_killed_and_resumes_bit_for_bit(tmp_path) -> None:
    text, tokenizer = tmp_path / "text.txt", train_tokenizer(TEXT, "byte")
    text.write_text(TEXT)
    whole, trainer = start_with_mapped_tables(tmp_path / "whole", tokenizer, text)
    train(whole, trainer)
    whole.finish(trainer, tokenizer)
    close(trainer)
    killed, trainer = start_with_mapped_tables(tmp_path / "killed", tokenizer, text)
    for saved, reached in ((0, 1), (2, 4), (4, 4)):
        train(killed, trainer, until=saved)
        if saved:
            killed.save_checkpoint(trainer)
        train(killed, trainer, until=reached)  # rows of these steps are in the files, and are rolled back
        close(trainer)
        trainer, _, _ = killed.resume()
        assert trainer.step == saved
    train(killed, trainer)
    killed.finish(trainer, tokenizer)
    assert (killed.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()
    assert isinstance(open_model(killed.path).model.injections[1].table, RowSparseEmbedding)
    with pytest.raises(VocabularyError):
        edit_vocabulary(killed.path, remove=[200], out=tmp_path / "edited")
    killed.checkpoint.unlink()
    close(trainer)
    with pytest.raises(CheckpointError):
        killed.open()
