"""Train on plain windows and on documents, both at the same time and for the same time, and compare bits per byte.

    python examples/packed_documents.py TEXT --minutes 10 --write docs/documents.md

takes each paragraph of a text as a document, in random order, so that a document says nothing about the next one. Two
processes of `embedlayer train` with one thread each read them, one with `--documents`. Both models are then measured on
the held-out text in both ways.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.cli.demo import carried_text

WAYS = {"plain windows": [], "`--documents`": ["--documents"]}
SIZES = {"--vocab-size": 4096, "--dim": 192, "--layers": 4, "--heads": 6, "--batch-size": 8, "--length": 256}


def sizes() -> list[str]:
    """Return the sizes of the model as options of the command."""
    return [str(part) for pair in SIZES.items() for part in pair]


def write_documents(text: str, shortest: int, path: Path) -> None:
    """Write each line of so many characters or more as a row, in random order."""
    lines = [line for line in text.splitlines() if len(line) >= shortest]
    random.Random(0).shuffle(lines)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def bits_per_byte(run: el.RunDirectory, *, documents: bool) -> float:
    """Return those of the weights with the lowest validation loss, on all held-out text."""
    _, validation = run.open_corpus().split(run.read()["validation_fraction"])
    options = replace(run.options(), documents=documents, validation_tokens=len(validation))
    model = el.open_model(run.path).require_decoder()
    return el.Trainer(model, validation, validation, options).validate()["validation_bits_per_byte"]


def table_of(folder: Path) -> str:
    """Return the table of the runs in a folder, and a line with their sizes."""
    torch.set_num_threads(1)
    rows = []
    for number, name in enumerate(WAYS):
        run = el.RunDirectory(folder / str(number))
        rows.append(
            {
                "trained on": name,
                "steps": f"{run.read_metrics()[-1]['step']:,}",
                "bits per byte, plain windows": f"{bits_per_byte(run, documents=False):.3f}",
                "bits per byte, each document by itself": f"{bits_per_byte(run, documents=True):.3f}",
            }
        )
    corpus, minutes = run.open_corpus(), run.options().minutes
    mean = len(corpus) / len(corpus.documents)
    table = markdown_table(rows)
    table += f"\n{minutes:g} minutes each, {len(corpus.documents):,} paragraphs of {mean:.0f} tokens on average, "
    return table + f"`{' '.join(sizes())}`.\n"


def main(text: str, shortest: int, minutes: float, page: Path | None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_documents(text, shortest, folder / "rows.jsonl")
        embedlayer = [sys.executable, "-m", "embedlayer"]
        build = f"corpus build {folder}/rows.jsonl -o {folder}/corpus --vocab-size {SIZES['--vocab-size']}".split()
        subprocess.run([*embedlayer, *build], check=True)
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        train = ["train", folder / "corpus", "--minutes", minutes, *sizes()]
        commands = [
            [*map(str, train), *more, "-o", str(folder / str(number))] for number, more in enumerate(WAYS.values())
        ]
        quiet = {"env": one_thread, "stdout": subprocess.DEVNULL}
        runs = [subprocess.Popen([*embedlayer, *command, "--json"], **quiet) for command in commands]
        codes = [run.wait() for run in runs]
        if any(codes):
            raise SystemExit(f"the runs ended with {codes}")
        table = table_of(folder)
    print(table)
    if page is not None:
        write_between_markers(page, "packed-documents", table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", type=Path, help="a text file; by default the text of `embedlayer demo`")
    parser.add_argument("--shortest", type=int, default=81, help="characters of the shortest paragraph")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    text = arguments.text.read_text() if arguments.text else carried_text()
    main(text, arguments.shortest, arguments.minutes, arguments.write)
