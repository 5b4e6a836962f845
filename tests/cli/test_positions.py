"""`embedlayer positions`, end to end."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import answer, printed, refused, run

import embedlayer as el
from embedlayer.tokenization import save_tokenizer

TRAINED, LONGER = 16, 64
CONFIG = {"model_type": "llama", "rope_theta": 1e4, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
CONFIG |= {"max_position_embeddings": TRAINED}


@pytest.fixture(scope="module")
def saved(reference, tmp_path_factory) -> Path:
    """The folder of a LLaMA checkpoint with a tokenizer, and of a text."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text.txt").write_text(reference[:2000])
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=TRAINED)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "rotary")
    save_tokenizer(el.train_tokenizer(reference[:5000], vocab_size=300), folder / "rotary" / "tokenizer.json")
    return folder


def test_the_edit_says_what_changes_below_the_trained_length_and_what_is_lost_beyond_it(saved, tmp_path) -> None:
    options = ["--to", LONGER, "--text", saved / "text.txt", "-o", tmp_path / "new"]
    said = printed("positions", "extend", saved / "rotary", "--method", "linear", *options)
    assert f"Context  {TRAINED} -> {LONGER} tokens by linear, trained on {TRAINED}" in said
    assert "1 blocks: base 10000 -> base 10000, LinearScaling(factor=4.0)" in said
    (largest,) = re.findall(r"Largest change of a cosine or sine below 16 tokens: (\S+)", said)
    configs = [json.loads((path / "config.json").read_text()) for path in (saved / "rotary", tmp_path / "new")]
    old, new = (el.RotaryEmbedding.from_config(config) for config in configs)
    positions = torch.arange(TRAINED)
    change = max(
        float((a - b).abs().max()) for a, b in zip(old.cos_sin(positions), new.cos_sin(positions), strict=True)
    )
    assert float(largest) == pytest.approx(change, rel=5e-3)
    rows = re.findall(r"(\d+) to (\d+) +(\d\.\d{4}) +(\d\.\d{4})", said)
    assert [(int(start), int(stop)) for start, stop, *_ in rows] == [(0, 8), (8, 16), (16, 32), (32, 64)]
    assert "texts of 16" in said


def test_lengths_in_other_files_follow_and_exported_models_are_left_out(tmp_path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": TRAINED, "temperature": 0.7}))
    (folder / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": TRAINED}, "model": {}}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length":16,"x":[1,2]}')
    (folder / "model.onnx").write_text("angles as they were")
    assert answer("positions", "extend", folder, "--to", LONGER, "-o", tmp_path / "new")["left_out"] == ["model.onnx"]
    read = {file.name: json.loads(file.read_text()) for file in (tmp_path / "new").iterdir()}
    assert read["generation_config.json"] == {"max_length": LONGER, "temperature": 0.7}
    assert read["tokenizer.json"] == {"truncation": {"max_length": LONGER}, "model": {}}
    assert read["tokenizer_config.json"] == {"model_max_length": LONGER, "x": [1, 2]}
    assert read.keys() == {path.name for path in folder.iterdir()} - {"model.onnx"}


def test_the_result_is_named_before_its_loss_is_measured(saved, tmp_path, capsys, monkeypatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("embedlayer.analysis.text_evaluation.evaluate_positions", stopped)
    options = ["--to", LONGER, "--text", saved / "text.txt", "-o", tmp_path / "new"]
    assert run("positions", "extend", saved / "rotary", *options) == 130
    assert f"is unchanged; to undo, delete {tmp_path / 'new'}." in " ".join(capsys.readouterr().out.split())


def test_divisors_are_read_from_a_file_and_a_model_that_does_not_run_here_is_not_measured(tmp_path, capsys) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "factors.json").write_text(json.dumps({"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}))
    (tmp_path / "text.txt").write_text("text")
    options = ["--to", LONGER, "--factors", tmp_path / "factors.json", "--text", tmp_path / "text.txt"]
    assert run("positions", "extend", folder, "--method", "longrope", *options, "-o", tmp_path / "new") == 0
    said = capsys.readouterr()
    assert "The loss is not measured here" in said.err
    assert "embedlayer evaluate" not in said.err  # which needs the same
    assert "Written to" in said.out
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["rope_scaling"]["long_factor"] == [1.0, 2.0, 3.0, 4.0]
    assert "trained on 16 tokens" in refused("positions", "extend", folder, "--to", 8, "-o", tmp_path / "other")
