"""Ctrl-C ends a command while foreign code runs in its main thread, and leaves no partial file."""

import os
import signal
from pathlib import Path

from processes import Program

import embedlayer as el

COMMAND = """
import hashlib, json, os, runpy
dumps, there = json.dumps, len(os.listdir())

def busy(*arguments, **options):
    if len(os.listdir()) > there:  # the command has begun to write
        print("busy", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes, without the interpreter
    return dumps(*arguments, **options)

json.dumps = busy
runpy.run_module("embedlayer", run_name="__main__", alter_sys=True)
"""


def test_foreign_code_in_the_main_thread_is_ended_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    el.TokenEmbedding(20, 16).save_pretrained(tmp_path / "table")
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    with Program("-c", COMMAND, "compress", "table", "--to", "int8", "-o", "out", TMPDIR="temporary") as program:
        while program.stdout.readline() != "busy\n":
            pass
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
        assert program.stderr.read().endswith("Stopped.\n")
    assert sorted(os.listdir(tmp_path)) == ["table", "temporary"]
    assert os.listdir(tmp_path / "temporary") == []
