"""Standard streams: every command has one outcome where they are full, closed or of a small encoding."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import pytest
import torch
from commands import leaf_commands, run
from covering import cases

import embedlayer as el

RUNS = {
    "inspect": "inspect model",
    "neighbors": "neighbors model e --topn 3",
    "embed": "embed model née",
    "generate": "generate model née --tokens 3",
    "evaluate": "evaluate model --text text.txt --window 16",
    "compress": "compress model --compare",
    "plan": "plan gpt2",
    "vocab compare": "vocab compare model model",
    "vocab suggest": "vocab suggest model text.txt --count 3 --held-out text.txt",
}
"""Commands that take little time; of the others the help page is printed."""


def ascii_stream() -> TextIO:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8")


def full_unbuffered() -> TextIO:
    return io.TextIOWrapper(open("/dev/full", "wb", buffering=0), encoding="utf-8", write_through=True)


def without_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w", encoding="utf-8")


def closed() -> None:
    return None


STREAMS = {
    "stdout": (ascii_stream, full, full_unbuffered, without_reader, closed),
    "stderr": (full, without_reader, closed),
}
CASES = [f"{name} {stream.__name__}" for name, streams in STREAMS.items() for stream in streams]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("streams")
    (folder / "text.txt").write_text("née à côté, née à côté. " * 40)
    model = el.DecoderLM(el.TokenEmbedding(257, 32), "rotary", num_layers=1, num_heads=2)
    model.save_pretrained(folder / "model", tokenizer=el.train_tokenizer((), "byte"))
    return folder


@contextmanager
def replaced(name: str, stream: TextIO | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, nullcontext() if stream is None else stream:
        patch.setattr(sys, name, stream)
        yield


@cases("name, case", [name for name, _ in leaf_commands()], CASES)
@pytest.mark.filterwarnings("ignore::embedlayer.core.errors.EmbedLayerWarning")
def test_every_command_has_one_outcome_on_every_stream(name, case, folder, capsys) -> None:
    which, _, kind = case.partition(" ")
    stream = next(make for make in STREAMS[which] if make.__name__ == kind)()
    line = RUNS.get(name, f"{name} --help")
    with replaced(which, stream):
        code = run(*(folder / word if (folder / word).exists() else word for word in line.split()))
        if kind == "ascii_stream":
            assert stream.buffer.getvalue().decode("ascii")
    shown, said = capsys.readouterr()
    is_full = which == "stdout" and kind.startswith("full")
    assert code == is_full
    if which == "stderr":
        assert shown
    elif is_full:
        assert said.endswith("FileError: Cannot write the output: No space left on device.\n")
    else:
        assert "Error" not in said


def test_an_error_has_its_code_where_it_cannot_be_printed(folder) -> None:
    for make in STREAMS["stderr"]:
        with replaced("stderr", make()):
            assert run("neighbors", folder / "nowhere", "a") == 1
            assert run("plan", "gtp2") == 2


def test_progress_is_a_bar_in_a_terminal(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = ascii_stream()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with replaced("stdout", terminal):
        assert run("corpus", "build", folder / "text.txt", "--tokenizer", folder / "model", "-o", tmp_path / "out") == 0
        shown = re.sub(r"\x1b\[[\d;?]*\w", "", terminal.buffer.getvalue().decode())  # without colours
    assert re.search(r"---- 1\.\d/1\.\d kB", shown)


def test_no_file_of_a_command_gets_the_number_of_a_closed_stream() -> None:
    code = "import os, sys; os.close(1); sys.stdout = None; from embedlayer.cli.streams import safe_streams\n"
    code += "with safe_streams(): print('lost'); print(os.open('/dev/zero', os.O_RDONLY) > 2, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "True\n")
