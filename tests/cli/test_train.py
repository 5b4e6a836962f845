"""The main job through the command, on a small scale."""

import gzip
import io
import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from commands import answer, leave_out_answers, printed, refused, run
from launches import free_port
from processes import run_program

import embedlayer
from embedlayer import RunDirectory, open_model
from embedlayer.analysis import TokenVectors, table_health

SMALL = "--dim 24 --heads 2 --layers 1 --length 32 --batch-size 4 --vocab-size 400 --log-every 2".split()
SMALL += ["--validation-fraction", "0.05"]
FILES = {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "report.html", "run.json", "corpus"}


@pytest.fixture(scope="module")
def text(reference, tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "reference.txt"
    file.write_text(reference[:20_000])
    return file


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = ["--steps", 6, "--position", "learned", "--monitor", 4, *SMALL]
    assert run("train", text, "-o", folder, *options, whole_report=True) == 0
    return folder


def test_a_run_leaves_a_self_contained_folder(trained) -> None:
    assert {file.name for file in trained.iterdir()} >= FILES
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert all({"step", "loss", "lr", "tokens_per_second"} <= line.keys() for line in lines)
    assert "validation_loss" in lines[0]
    assert "validation_loss" in lines[-1]
    assert [line["step"] for line in lines if "monitor" in line] == [4]
    page = (trained / "report.html").read_text()
    assert '"exported":true' in page
    assert "metrics?source=0" in page
    assert not list(trained.glob(".*"))


def test_embed_shows_the_way_in_step_by_step(trained) -> None:
    shown = printed("embed", trained, "I love dogs")
    words = ["1 tokens", "2 ids", "3 rows", "4 scale", "5 positions  LearnedPositionalEmbedding", "6 sum", "7 dropout"]
    for word in [*words, "8 block", "9 next token", "10 gradient"]:
        assert word in shown
    steps = answer("embed", trained, "I love dogs")
    assert steps["shape"] == [1, len(steps["ids"]), 24]
    for t, (row, added) in enumerate(zip(steps["rows"], steps["added"], strict=True)):
        expected = [steps["scale"] * a + b for a, b in zip(row, added, strict=True)]
        assert steps["vectors"][0][t] == pytest.approx(expected, abs=1e-6)


def test_neighbors_are_those_of_most_similar(trained) -> None:
    opened = open_model(trained)
    vectors, tokens = TokenVectors(opened.table, opened.tokenizer), [" the", " and", " of"]
    for plus, minus, count in ((tokens[:1], [], 10), (tokens[:2], tokens[2:], 4)):
        words = [*plus, *(word for each in minus for word in ("--minus", each)), "-n", count]
        found = answer("neighbors", trained, *words)
        assert [(row["token"], row["cosine"]) for row in found["neighbors"]] == vectors.most_similar(plus, minus, count)
        assert (found["tokens"], found["minus"]) == (plus, minus)
        assert len(printed("neighbors", trained, *words).splitlines()) == count


def test_json_is_one_line_and_nothing_else(text, tmp_path) -> None:
    shown = printed("train", text, "-o", tmp_path / "run", "--steps", 2, *SMALL, "--json")
    assert len(shown.splitlines()) == 1
    summary = json.loads(shown)
    assert summary["steps"] == 2
    assert summary["first_loss"] == pytest.approx(summary["ln_vocab_size"], abs=0.3)
    assert set(summary["files"]) >= FILES - {"corpus"}
    opened, learned = open_model(tmp_path / "run"), summary["learned"]
    counts, loss = opened.counts, summary["validation_loss"]
    assert learned["frequent"] == int((counts >= 50).sum())
    assert learned["rows"]["never_seen"] == int((counts == 0).sum())
    assert sum(learned["rows"].values()) == len(counts)
    assert learned["gain"] == pytest.approx(1 - loss / learned["unigram_entropy"])
    assert (learned["is_little"], learned["is_sound"]) == (True, False)
    before = opened.before().table
    health = table_health(opened.table, opened.tokenizer, before=before, counts=counts, validation_loss=loss)
    assert learned["verdict"] == health.summary()


@pytest.mark.parametrize(
    "options",
    [
        "--untied --pad-to-multiple-of 64 --position none --tokenizer byte",
        "--rank 8 --kv-heads 1 --position sinusoidal --tokenizer wordpiece",
        "--dropout 0.1 --position alibi --tokenizer unigram --probe ' the' --probe ' is'",
        "--value-embedding --ngram 600 --ngram-order 2 --per-layer 4 --kv-heads 1 --layers 2",
    ],
)
def test_every_option_of_the_decoder_trains_and_is_read_back(text, tmp_path, capsys, options) -> None:
    folder, arguments = tmp_path / "run", ["--steps", 2, *SMALL, *shlex.split(options)]
    assert run("train", text, "-o", folder, *arguments) == 0, capsys.readouterr().err
    assert run("embed", folder, "a class", "--json") == 0


def test_folders_gz_and_standard_input_are_read(text, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    content = text.read_bytes()
    (folder / "a.txt").write_bytes(content[:10_000])
    (folder / "b.txt.gz").write_bytes(gzip.compress(content[10_000:]))
    assert run("train", folder, "-o", tmp_path / "one", "--steps", 1, *SMALL) == 0

    class Input:
        buffer = io.BytesIO(content)

    monkeypatch.setattr(sys, "stdin", Input)
    assert run("train", "-", "-o", tmp_path / "two", "--steps", 1, *SMALL) == 0
    assert {file.name for file in (tmp_path / "two").iterdir()} >= FILES


INTERRUPTED = """
import os, signal, sys
from embedlayer.cli.main import main
from embedlayer.training.loop import Trainer

def interrupted(trainer, optimizer, step, learning_rate, update=Trainer._update):
    if step == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return update(trainer, optimizer, step, learning_rate)

Trainer._update = interrupted
main(sys.argv[1:])
"""


def test_ctrl_c_saves_and_resuming_gives_the_uninterrupted_result(text, tmp_path, capsys) -> None:
    """A real signal to a real process, then the rest of the run."""
    added = ["--value-embedding", "--ngram", "900", "--per-layer", "4"]
    (tmp_path / "other.jsonl").write_text('{"text": "Dogs love dogs, and cats love naps."}\n' * 400)
    mixture = [str(text), str(tmp_path / "other.jsonl"), "--weights", "3,1", "--documents"]
    arguments = ["train", *mixture, "--steps", "6", "--dropout", "0.1", *added, *SMALL]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    code, _, errors = run_program("-c", INTERRUPTED, *arguments, "-o", stopped)
    assert code == 130, errors
    assert "Stopped at step 3 of 6; everything is saved" in errors
    assert "embedlayer train --resume -o" in errors
    for command in (["train", "--resume", "-o", stopped], [*arguments, "-o", whole]):
        assert run(*command) == 0, capsys.readouterr().err
    assert "in 401 documents, vocabulary of" in capsys.readouterr().out
    assert RunDirectory(stopped).options().documents
    assert "leave --documents out" in refused("train", "--resume", "--documents", "-o", stopped)
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_mixture_of_a_text_and_a_corpus_is_one_run_with_a_loss_for_each(text, tmp_path) -> None:
    (tmp_path / "dogs.txt").write_text("Dogs love dogs, and cats love naps. " * 400)
    corpus, folder = tmp_path / "dogs", tmp_path / "run"
    assert run("corpus", "build", tmp_path / "dogs.txt", "-o", corpus, "--vocab-size", 300) == 0
    mixture = [text, corpus, "--weights", "3,1"]
    shown = printed("train", *mixture, "-o", folder, "--steps", 2, *SMALL)
    assert "75.0% of the windows" in shown
    directory = RunDirectory(folder)
    assert directory.read()["weights"] == [3, 1]
    assert directory.read()["notes"]["sources"] == [str(text), str(corpus)]
    assert (directory.corpus / "1").resolve() == corpus
    assert (folder / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()
    line = directory.read_metrics()[-1]
    first, second = line["validation_losses"]
    assert line["validation_loss"] == pytest.approx((3 * first + second) / 4)
    trainer, _ = directory.open()
    assert trainer.sampler.counts == (768, 256)
    assert open_model(folder).counts.sum() == len(directory.open_corpus())
    resume = ("train", "--resume", "-o", folder)
    said = refused(*resume, "--dim", 8, "--steps", 300, "--tokenizer", "word")
    assert "continues with the options of the run: leave --dim, --steps, --tokenizer out." in said
    assert "The run is complete at step" in printed(*resume, "--device", "cpu", "--save-seconds", 5)
    assert "which trains on the weights 3,1" in refused("train", "--resume", "-o", folder, "--weights", "1,1")
    assert run("train", "--resume", "-o", folder, "--weights", "3,1") == 0
    assert run("train", text, "-o", folder, "--overwrite", "--steps", 1, *SMALL) == 0
    assert "which trains on one text, without weights" in refused("train", "--resume", "-o", folder, "--weights", "3,1")
    found = answer("train", *mixture, "-o", folder, "--overwrite", "--steps", 1, *SMALL)["corpora"]
    assert [(one["source"], one["weight"]) for one in found] == [(str(text), 3), (str(corpus), 1)]


def test_a_report_can_be_written_again(trained, monkeypatch) -> None:
    leave_out_answers(monkeypatch)
    (trained / "report.html").unlink()
    assert run("report", trained) == 0
    assert (trained / "report.html").exists()


def test_the_demo_takes_its_smallest_number_of_steps_and_says_what_was_not_learned(
    reference, tmp_path, monkeypatch
) -> None:
    """With the `sys.argv` of `python -m embedlayer demo`, where no shell finds `embedlayer`; what it prints is run."""
    assert len(reference) > 400_000
    monkeypatch.setattr("pydoc_data.topics.topics", {"": reference[:120_000]})
    monkeypatch.setattr(sys, "argv", [str(Path(embedlayer.__file__).with_name("__main__.py"))])
    monkeypatch.chdir(tmp_path)
    shown = printed("demo", "--minutes", "0.0001", "--min-steps", "2")
    first, *lines = shown.splitlines()
    assert first.endswith("(0.0001 minutes, longer on a busy or slow machine: at least 2 steps)")
    assert "step 2/2 " in shown
    assert "  (at least 2 steps: about " in shown
    assert "  Faulty. Barely trained: the run recorded a loss on held-out text of 8." in shown
    assert "Sound" not in shown
    assert " not learned and " in " ".join(shown.split())
    assert "of similar use" not in shown
    start = json.loads((tmp_path / "out/demo/metrics.jsonl").read_text().splitlines()[0])
    assert start["loss"] == pytest.approx(math.log(4096), abs=0.3)
    summary = json.loads((tmp_path / "out/demo/run.json").read_text())
    probes = [row["token"] for row in summary["notes"]["neighbors_before"]]
    assert (len(probes), all(token.startswith(" ") for token in probes)) == (8, True)
    typed = [shlex.split(line) for line in lines if line.startswith("  ") and " embedlayer " in line]
    assert [words[3] for words in typed] == ["explore", "embed", "neighbors", "generate"]
    monkeypatch.setattr("embedlayer.explorer.server.serve", lambda opened, **_: None)  # serves until Ctrl-C
    monkeypatch.setenv("EMBEDLAYER_GENERATE_TOKENS", "4")
    for words in typed:
        assert Path(shutil.which(words[0])).samefile(sys.executable)  # "python" where the environment is active
        assert run(*words[3:]) == 0
    assert lines[-1].endswith(" -m embedlayer demo -o out/demo --minutes 5")


def test_roles_have_rates_of_their_own_and_unknown_ones_are_refused(text, tmp_path) -> None:
    rates = ["--rate", "tables", 0.02, "--rate", "heads", 0.004]
    assert run("train", text, "-o", tmp_path / "run", "--steps", 2, "--untied", *rates, *SMALL) == 0
    assert RunDirectory(tmp_path / "run").options().rates == {"tables": 0.02, "heads": 0.004}
    for wrong, message in (("head", "the roles of parameters are tables, heads,"), ("heads", "A tied head is trained")):
        assert message in refused("train", text, "-o", tmp_path / wrong, "--steps", 2, "--rate", wrong, 0.1, *SMALL)
        assert not (tmp_path / wrong / "run.json").exists()


def test_torchrun_neither_starts_nor_resumes_a_run_with_mapped_tables(text, tmp_path, monkeypatch) -> None:
    mapped = [*SMALL, "--steps", 2, "--value-embedding", "--mapped", "--tokenizer", "byte"]
    assert run("train", text, "-o", tmp_path / "run", *mapped) == 0
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():  # as torchrun --nproc-per-node 1 sets them
        monkeypatch.setenv(name, str(value))
    files = {file: file.read_bytes() for file in (tmp_path / "run").rglob("[!.]*") if file.is_file()}
    assert "--mapped is for one process" in refused("train", text, "-o", tmp_path / "new", *mapped)
    assert not (tmp_path / "new").exists()
    said = refused("train", "--resume", "-o", tmp_path / "run")
    assert "which only one process without torchrun can train: leave torchrun out" in said
    assert files == {file: file.read_bytes() for file in files}
