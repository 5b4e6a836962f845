"""`embedlayer positions`, end to end."""

import json
import re

import pytest
import torch
from commands import run

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.io.files import write_json

TRAINED, LONGER = 16, 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a saved decoder for each kind of positions, and a text."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = el.train_tokenizer(carried_text()[:5000], vocab_size=300)
    for name in ("rotary", "learned"):
        torch.manual_seed(0)
        table = el.TokenEmbedding(300, 16)
        model = el.DecoderLM(table, name, num_layers=1, num_heads=2, max_seq_len=TRAINED)
        model.save_pretrained(folder / name, tokenizer=tokenizer)
    (folder / "text.txt").write_text(carried_text()[:2000])
    return folder


def test_the_edit_says_what_changes_below_the_trained_length_and_what_is_lost_beyond_it(
    saved, tmp_path, capsys
) -> None:
    options = ["--to", LONGER, "--original", TRAINED, "--text", saved / "text.txt", "-o", tmp_path / "new"]
    assert run("positions", "extend", saved / "rotary", "--method", "linear", *options) == 0
    said = capsys.readouterr().out
    assert f"Context  {TRAINED} -> {LONGER} tokens by linear, trained on {TRAINED}" in said
    assert "base 10000 -> base 10000, LinearScaling(factor=4.0)" in said
    (largest,) = re.findall(r"Largest change of a cosine or sine below 16 tokens: (\S+)", said)
    old, new = (el.DecoderLM.from_pretrained(path).position for path in (saved / "rotary", tmp_path / "new"))
    positions = torch.arange(TRAINED)
    change = max(
        float((a - b).abs().max()) for a, b in zip(old.cos_sin(positions), new.cos_sin(positions), strict=True)
    )
    assert float(largest) == pytest.approx(change, rel=5e-3)
    rows = re.findall(r"(\d+) to (\d+) +(\d\.\d{4}) +(\d\.\d{4})", said)
    assert [(int(start), int(stop)) for start, stop, *_ in rows] == [(0, 8), (8, 16), (16, 32), (32, 64)]
    assert "texts of 16" in said
    assert f"undo with: embedlayer positions undo {tmp_path / 'new'} -o ..." in " ".join(said.split())
    assert run("positions", "undo", tmp_path / "new", "-o", tmp_path / "back") == 0
    assert "64 -> 16 tokens, as before the edit" in capsys.readouterr().out
    assert (tmp_path / "back" / "config.json").read_bytes() == (saved / "rotary" / "config.json").read_bytes()


def test_a_table_cannot_be_measured_beyond_its_end_before_the_edit(saved, tmp_path, capsys) -> None:
    options = ["--to", LONGER, "--text", saved / "text.txt", "-o", tmp_path / "new"]
    assert run("positions", "extend", saved / "learned", "--method", "repeat", *options) == 0
    said = capsys.readouterr().out
    assert "Largest change of a number of the table below 16 tokens: 0" in said
    rows = re.findall(r"(\d+) to (\d+) +(\S+) +(\d\.\d{4})", said)
    assert [before for *_, before, _ in rows][2:] == ["cannot", "cannot"]
    assert rows[0][2] == rows[0][3]  # the old rows are the same


def test_json_has_the_same_numbers(saved, tmp_path, capsys) -> None:
    options = ["--to", LONGER, "--original", TRAINED, "--text", saved / "text.txt", "-o", tmp_path / "new", "--json"]
    assert run("positions", "extend", saved / "rotary", *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tokens"], result["trained"], result["method"]) == ([TRAINED, LONGER], TRAINED, "yarn")
    model = el.open_model(tmp_path / "new")
    losses = el.analysis.evaluate_positions(
        el.analysis.CausalModel.of(model), saved / "text.txt", LONGER, trained=TRAINED
    )
    short, *long = result["loss_after"]
    assert long == [each._asdict() for each in losses]
    assert (short["start"], short["stop"]) == (0, TRAINED)
    assert len(result["loss_before"]) == 1 + len(losses)
    assert run("positions", "undo", tmp_path / "new", "-o", tmp_path / "back", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [LONGER, TRAINED]


def test_a_run_becomes_a_saved_model_whose_trained_length_is_that_of_its_windows(saved, tmp_path, capsys) -> None:
    sizes = "--dim 16 --heads 2 --layers 1 --length 8 --batch-size 2 --vocab-size 300 --steps 2".split()
    assert run("train", saved / "text.txt", "-o", tmp_path / "run", *sizes) == 0
    capsys.readouterr()
    assert run("positions", "extend", tmp_path / "run", "--to", 32, "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "trained on 8" in said.out
    assert "Left out: best.json, checkpoint.safetensors, corpus/" in " ".join(said.err.split())
    assert not (tmp_path / "new" / "run.json").exists()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "new")]
    assert weights[0] == weights[1]
    assert el.open_model(tmp_path / "new").require_causal() is not None


def test_a_text_that_ends_before_the_new_length_is_named(saved, tmp_path, capsys) -> None:
    (tmp_path / "short.txt").write_text(carried_text()[:60])
    options = ["--to", LONGER, "--original", TRAINED, "--text", tmp_path / "short.txt", "-o", tmp_path / "new"]
    assert run("positions", "extend", saved / "rotary", *options) == 0
    said = capsys.readouterr().out
    (*_, stop) = re.findall(r"\d+ to (\d+) +\d", said)
    assert int(stop) < LONGER
    assert f"The text ends after {stop} tokens" in said


def test_the_result_is_named_before_its_loss_is_measured(saved, tmp_path, capsys, monkeypatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("embedlayer.analysis.evaluation.positions.evaluate_positions", stopped)
    options = ["--to", LONGER, "--original", TRAINED, "--text", saved / "text.txt", "-o", tmp_path / "new"]
    assert run("positions", "extend", saved / "rotary", *options) == 130
    assert "undo with: embedlayer positions undo" in " ".join(capsys.readouterr().out.split())
    assert run("positions", "undo", tmp_path / "new", "-o", tmp_path / "back") == 0


def test_divisors_are_read_from_a_file_and_a_model_that_does_not_run_here_is_not_measured(tmp_path, capsys) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": TRAINED}
    write_json(folder / "config.json", {"model_type": "llama", "rope_theta": 1e4, **sizes})
    write_json(tmp_path / "factors.json", {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]})
    (tmp_path / "text.txt").write_text("text")
    options = ["--to", LONGER, "--factors", tmp_path / "factors.json", "--text", tmp_path / "text.txt"]
    assert run("positions", "extend", folder, "--method", "longrope", *options, "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "The loss is not measured here" in said.err
    assert "embedlayer evaluate" not in said.err  # which needs the same
    assert "Written to" in said.out
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["rope_scaling"]["long_factor"] == [1.0, 2.0, 3.0, 4.0]
    assert run("positions", "extend", folder, "--to", 8, "-o", tmp_path / "other") == 2
    assert "trained on 16 tokens" in capsys.readouterr().err
