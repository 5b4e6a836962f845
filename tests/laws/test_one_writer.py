"""Whatever writes to a folder over time refuses to while another process does, and changes nothing there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import run
from covering import looped, some
from launches import SIZES, TRAIN, started

import embedlayer as el
from embedlayer.data.sharded_build import build_shard

pytestmark = pytest.mark.usefixtures("system")

WAIT_SECONDS = 120
HOLD = """
import sys
from embedlayer.io.locks import FileLock
lock = FileLock(sys.argv[1], "it")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the cat sat on the mat and the dog sat on the cat . " * 300)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text: Path) -> Iterator[Path]:
    """A finished run and a corpus in parts, both held by another process."""
    folder = tmp_path_factory.mktemp("held")
    assert run("train", text, "-o", folder / "run", *SIZES, "--steps", 2, "--json") == 0
    tokenizer = el.load_tokenizer(folder / "run")
    build_shard([text], tokenizer, folder / "corpus", shards=2, only=0)
    holders = []
    for lock in (folder / "run" / ".lock", folder / "corpus" / ".lock", folder / "corpus" / ".shard-00001.lock"):
        command = [sys.executable, "-c", HOLD, str(lock)]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout is not None
        assert holders[-1].stdout.readline() == "held\n"
    yield folder
    for holder in holders:
        holder.kill()
        holder.communicate()


COMMANDS: dict[str, tuple[str, Callable[[Path, Path], list[object]]]] = {
    "train --overwrite": ("run", lambda folder, text: ["train", text, "-o", folder / "run", "--overwrite", *SIZES]),
    "train --resume": ("run", lambda folder, text: ["train", "--resume", "-o", folder / "run"]),
    "train": ("run", lambda folder, text: ["train", text, "-o", folder / "run", *SIZES]),
    "vocab add": (
        "run",
        lambda folder, text: ["vocab", "add", folder / "run", "catdog", "-o", folder / "edited"],
    ),
    "corpus build": (
        "corpus",
        lambda folder, text: [
            *("corpus", "build", text, "-o", folder / "corpus"),
            *("--tokenizer", folder / "run" / "tokenizer.json", "--shards", 2),
        ],
    ),
    "corpus build --only": (
        "corpus",
        lambda folder, text: [
            *("corpus", "build", text, "-o", folder / "corpus", "--only", 1),
            *("--tokenizer", folder / "run" / "tokenizer.json", "--shards", 2),
        ],
    ),
}


@looped("name", COMMANDS)
def test_a_command_refuses_a_folder_that_another_process_writes_to(folder: Path, text: Path, name: str, capsys) -> None:
    inside, arguments = COMMANDS[name]
    before = contents(folder)
    assert run(*arguments(folder, text)) == 1
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert said.startswith("FileError: ")
    assert f"{folder / inside} is in use by process " in said
    assert contents(folder) == before
    assert not (folder / "edited").exists()


def test_a_folder_that_is_held_can_be_read(folder: Path) -> None:
    assert el.open_model(folder / "run").model.table.vocab_size > 256
    assert run("inspect", folder / "run", "--json") == 0


@pytest.mark.parametrize("system", some(["Linux"], ["Linux", "macOS", "POSIX"]), indirect=True)
def test_a_second_train_is_refused_while_one_trains_and_goes_on_when_it_was_killed(tmp_path: Path, text: Path) -> None:
    arguments = [*TRAIN, text, "-o", tmp_path / "run", *SIZES, "--steps", 10**6, "--save-seconds", 0.1]
    with started(*arguments) as process:
        until, checkpoint = time.monotonic() + WAIT_SECONDS, tmp_path / "run" / "checkpoint.safetensors"
        seen: set[int] = set()
        while len(seen) < 3:  # the first is that of step 0
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
            seen |= {checkpoint.stat().st_mtime_ns} if checkpoint.exists() else set()
        assert run("train", "--resume", "-o", tmp_path / "run") == 1
        assert run("train", text, "-o", tmp_path / "run", "--overwrite", *SIZES) == 1
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    trainer, _, _ = el.RunDirectory(tmp_path / "run").resume()
    assert trainer.step > 0


def test_a_run_that_is_refused_leaves_no_empty_folder(tmp_path: Path) -> None:
    assert run("train", tmp_path / "none.txt", "-o", tmp_path / "run") == 1
    assert run("train", "--resume", "-o", tmp_path / "run") == 1
    assert os.listdir(tmp_path) == []
