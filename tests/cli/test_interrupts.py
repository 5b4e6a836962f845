"""Ctrl-C ends a command while foreign code runs in its main thread, and leaves no partial file."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import Program

from embedlayer.cli import interrupts
from embedlayer.cli.interrupts import ending_on_interrupt, raise_interrupt

COMMAND = """
import hashlib, random, sys, threading
from pathlib import Path
import click
from embedlayer.cli import interrupts
from embedlayer.cli.main import cli, main
from embedlayer.tokenization.train import train_tokenizer
from embedlayer.io.files import replace_file, replace_folder
from embedlayer.io.partials import temporary_folder

def hashes():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes, without the interpreter

letters = random.Random(0)
words = " ".join("".join(letters.choices("abcdefgh", k=12)) for _ in range(200_000)) if "tokenizer" in sys.argv else ""

def tokenizer():
    train_tokenizer(words, vocab_size=200_000)

@click.command()
@click.argument("work")
@click.argument("folder", type=Path)
def busy(work, folder):
    with replace_folder(folder / "new") as partial, replace_file(folder / "file") as file, temporary_folder() as other:
        (partial / "part").write_text("part")
        file.write_text("part")
        threading.Timer(0.2, lambda: print(other, flush=True)).start()
        {"hashes": hashes, "tokenizer": tokenizer}[work]()

cli.add_command(busy)
assert interrupts.SECONDS < 1
interrupts.SECONDS = 0.2
main(["busy", *sys.argv[1:]])
"""


@pytest.mark.parametrize("work", ["hashes", pytest.param("tokenizer", marks=pytest.mark.long)])
def test_foreign_code_in_the_main_thread_is_ended_and_leaves_nothing(work: str, tmp_path: Path) -> None:
    with Program("-c", COMMAND, work, tmp_path) as program:
        temporary = program.stdout.readline().strip()
        assert sorted(os.listdir(tmp_path)) != []
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
        assert program.stderr.read().endswith("Stopped.\n")
    assert os.listdir(tmp_path) == []
    assert not Path(temporary).exists()


def test_a_handler_in_python_ends_the_command_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(interrupts, "_end_at_once", lambda: ended.append(1))
    monkeypatch.setattr(interrupts, "SECONDS", 0.2)
    before = signal.getsignal(signal.SIGINT)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), ending_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is raise_interrupt
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        time.sleep(0.3)
    assert not ended
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_and_handlers_of_the_caller_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried() -> None:
        with ending_on_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=tried)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, handler := lambda *_: None)
    try:
        tried()
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [before, handler]
