"""Tokenizer files that are not read are named as what they are, and commands that need no text work."""

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from covering import cases
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.train import train_tokenizer

RANKS = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tokenizer.model": (text(RANKS), "a vocabulary of tiktoken"),
    "qwen.tiktoken": (text(RANKS), "a vocabulary of tiktoken"),
    "tekken.json": (text(json.dumps({"config": {"pattern": "."}, "vocab": []})), "a tekken tokenizer"),
    "source.spm": (text("model"), "of a Marian model, whose IDs are in vocab.json"),
    "tokenizer.model.v3": (text("model"), "a SentencePiece model under a name of Mistral's"),
    "spiece.spm": (text("model"), "a SentencePiece model under another name"),
}
"""Name of a file -> what writes it, and what it is said to be."""


def make(folder: Path, name: str) -> Path:
    """Write a checkpoint whose tokenizer is not read."""
    folder.mkdir()
    write, _ = FILES[name]
    write(folder / name)
    if name == "source.spm":
        (folder / "vocab.json").write_text('{"a": 0}')
    sizes = {"vocab_size": 300, "n_embd": 8, "n_positions": 4, "n_layer": 1, "n_head": 2, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    tensors = {"wte.weight": torch.randn(300, 8), "wpe.weight": torch.randn(4, 8)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_named_as_what_it_is_and_the_advice_works(tmp_path, request, name) -> None:
    folder = make(tmp_path / "model", name)
    for path in (folder, folder / name):
        with pytest.raises(el.TokenizerError, match=rf"{re.escape(name)} is .*{FILES[name][1]}") as caught:
            el.load_tokenizer(path)
    copied = re.search(r"Copy it to (.*)\.$", str(caught.value))
    if copied is None:
        place = re.search(r"Put the model's tokenizer\.json into (.*);", str(caught.value))
        assert place is not None
        save_tokenizer(train_tokenizer((), kind="byte"), Path(place[1]) / "tokenizer.json")
    else:
        pytest.importorskip("sentencepiece")
        shared = request.getfixturevalue("shared_data")
        shutil.copy(shared / "tokenizers" / "llama2-tokenizer.model", folder / name)
        shutil.copy(folder / name, copied[1])
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert el.load_tokenizer(folder).get_vocab_size() > 255


WORKING = {
    "inspect": "inspect DIR",
    "plan": "plan --checkpoint DIR",
    "neighbors": "neighbors DIR #7",
    "export": "export DIR -o OUT.npy",
    "compress": "compress DIR -o OUT --to int8",
    "explore": "explore DIR --export OUT.html",
}
REFUSED = {"neighbors": "neighbors DIR cat", "embed": "embed DIR cat", "export": "export DIR -o OUT.vec"}


def run_on(folder: Path, line: str, capsys) -> tuple[int, str, str]:
    out = folder.parent / "out"
    words = (word.replace("DIR", str(folder)).replace("OUT", str(out)) for word in line.split())
    code = run(*words)
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


@cases("name, command", FILES, WORKING)
def test_a_command_that_needs_no_text_works_with_at_most_one_warning(tmp_path, capsys, name, command) -> None:
    code, out, errors = run_on(make(tmp_path / "model", name), WORKING[command], capsys)
    assert code == 0, errors
    warnings = int(command != "plan")  # sizes are planned without a tokenizer
    assert errors.count("Warning: ") == errors.count(f"{name} is ") == warnings
    assert out


@cases("name, command", FILES, REFUSED)
def test_a_command_that_needs_text_is_refused(tmp_path, capsys, name, command) -> None:
    code, _, errors = run_on(make(tmp_path / "model", name), REFUSED[command], capsys)
    assert code
    assert re.search(rf"TokenizerError: .*{re.escape(name)} is ", errors)
    assert "Name one with --tokenizer." in errors


def test_rows_by_number_are_those_of_the_table(tmp_path, capsys) -> None:
    folder = make(tmp_path / "model", "tokenizer.model")
    rows = el.load(folder).table.weight.detach().double()
    cosines = torch.nn.functional.cosine_similarity(rows, rows[[7]])
    cosines[7] = -2
    code, out, _ = run_on(folder, "neighbors DIR #7 -n 3 --json", capsys)
    assert code == 0
    found = json.loads(out)
    assert [int(each["token"].removeprefix("#")) for each in found["neighbors"]] == cosines.topk(3).indices.tolist()
    assert found["ids"] == [7]
    run_on(folder, "export DIR -o OUT.npy", capsys)
    assert np.array_equal(np.load(tmp_path / "out.npy"), rows.float().numpy())


def test_a_readable_tokenizer_beside_it_is_read(tmp_path) -> None:
    folder = make(tmp_path / "model", "tekken.json")
    save_tokenizer(train_tokenizer((), kind="byte"), folder / "tokenizer.json")
    assert el.open_model(folder).encode("a") == [97]
