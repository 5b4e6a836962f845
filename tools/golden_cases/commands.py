"""Commands as a person runs them, one after another in one folder: exit codes, `--json`, and the files they write."""

import io
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path

from golden import files_of
from stored_folders import words
from tiny_models import build, quiet
from tokenizer_kinds import ENGLISH

SIZES = "--dim 16 --layers 1 --heads 2 --length 16 --vocab-size 300 --batch-size 4 --steps 6 --seed 1"
COMMANDS = {
    "train": f"train text.txt -o run {SIZES} --json",
    "resume": "train --resume -o run --json",
    "train again": f"train text.txt -o run {SIZES}",
    "train row-sparse": f"train text.txt -o sparse {SIZES} --row-sparse --untied --json",
    "train without text": "train none.txt -o other",
    "corpus build": "corpus build text.txt -o corpus --tokenizer run/tokenizer.json",
    "corpus export": "corpus export corpus -o ids.npy",
    "embed": "embed run dogs --json",
    "embed a folder": "embed model t5 --json",
    "neighbors": "neighbors run dog --json",
    "neighbors by ID": "neighbors model #5 --json",
    "generate": "generate run dogs --tokens 5 --greedy --json",
    "inspect": "inspect run --json",
    "inspect a folder": "inspect model --json",
    "inspect two": "inspect model gpt2 --json",
    "inspect text": "inspect text.txt --json",
    "evaluate": "evaluate run --text text.txt --json",
    "evaluate two": "evaluate run sparse --text text.txt --json",
    "vocab add": "vocab add model t1t2 -o added --json",
    "vocab add to a run": "vocab add run loveliest -o added_run --json",
    "vocab add nothing": "vocab add model -o nothing --json",
    "vocab remove": "vocab remove model t3 t4 -o removed --json",
    "vocab trim": "vocab trim model words.txt -o trimmed --json",
    "vocab transplant": "vocab transplant model run -o transplanted --json",
    "vocab suggest": "vocab suggest run text.txt --json",
    "vocab compare": "vocab compare run model --text text.txt --json",
    "compress": "compress model --to int8 -o int8 --json",
    "compress compared": "compress model --compare --json",
    "plan": "plan --checkpoint model --json",
    "plan by name": "plan gpt2 --json",
    "export word2vec": "export model -o rows.bin --format word2vec-binary",
    "export NumPy": "export model -o rows.npy",
    "export GloVe": "export model -o rows.txt --format glove",
    "no such folder": "inspect nothing --json",
    "no such option": "inspect model --nothing",
    "help": "--help",
    "version": "--version",
}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for name in COMMANDS:
        yield name, partial(run, COMMANDS[name])


@cache
def folder() -> Path:
    """Return a folder with a text, and two models with a tokenizer, that exists until the process ends."""
    path = Path(tempfile.mkdtemp(prefix="golden"))
    (path / "text.txt").write_text(ENGLISH)
    (path / "words.txt").write_text("t1 t2 t3 t50 t99\n" * 9)
    for name, model_type in (("model", "llama"), ("gpt2", "gpt2")):
        with quiet():
            build(model_type, "causal")[1].save_pretrained(path / name)
        words(131).save(str(path / name / "tokenizer.json"))
    return path


def run(command: str) -> object:
    """Return the exit code of a command, what it prints, and the files that are new in the folder."""
    before = {*folder().iterdir()}
    printed, warned = io.StringIO(), io.StringIO()
    arguments = sys.argv
    sys.argv = ["embedlayer", *command.split()]
    code: object = 0
    try:
        with redirect_stdout(printed), redirect_stderr(warned), chdir(folder()):
            runpy.run_module("embedlayer", run_name="__main__")
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = arguments
    new: dict[str, object] = {}
    for path in sorted({*folder().iterdir()} - before):
        if path.is_file():
            new[path.name] = path.read_bytes()
        else:
            files = {name: content for name, content in files_of(path).items() if not name.endswith(".html")}
            new[path.name] = {name: timeless(content) for name, content in files.items()}
    return {"code": code, "printed": timeless(printed.getvalue()), "error": warned.getvalue().split(":")[0], "new": new}


def timeless(content: object) -> object:
    """Return the content of a file, or what a command prints, without times and speeds."""
    if isinstance(content, bytes | str):
        text = content.decode("latin-1") if isinstance(content, bytes) else content
        text = text.replace(folder().name, "FOLDER")
        text = re.sub(r'"\w*(second|_at|time|readings)\w*": *(\[[^"]*\]|[^,}]*)', "", text)
        return re.sub(r"[\d,.]+ (s left|tokens/s|s)\b", "", text)
    if isinstance(content, dict) and "size and hash" in content:
        return timeless(content["size and hash"])
    return content
