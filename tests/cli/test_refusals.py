"""What no command takes is refused in one sentence, with a code, and leaves nothing: paths, options, contents."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from commands import leaf_commands, run

from embedlayer import (
    DecoderLM,
    RotaryEmbedding,
    TokenCorpus,
    TokenEmbedding,
    train_tokenizer,
)
from embedlayer.checkpoints import write_vectors
from embedlayer.core import FileError
from embedlayer.opening import PathKind, path_kind
from embedlayer.tokenization import save_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 40

COMMANDS = {
    "train": "{files} -o {out} --steps 1 --dim 8 --heads 2 --layers 1 --length 8 --tokenizer byte "
    "--tokenizer-from {tokenizer_from}",
    "corpus build": "{files} -o {out} --workers 1 --tokenizer {tokenizer_from}",
    "corpus export": "{folder} -o {out}.npy",
    "embed": "{source} cat --tokenizer {tokenizer_from}",
    "neighbors": "{source} a --tokenizer {tokenizer_from}",
    "generate": "{source} cat --tokens 2 --tokenizer {tokenizer_from}",
    "explore": "{sources} --export {out} --tokenizer {tokenizer_from} --columns {columns_from}",
    "inspect": "{source} --tokenizer {tokenizer_from} --word-pairs {word_pairs} --analogies {analogies} --text {texts}",
    "inspect OTHER": "{source} {other}",
    "evaluate": "{model} {other} --text {text} --tokenizer {tokenizer_from}",
    "export": "{source} -o {out}.vec --tokenizer {tokenizer_from}",
    "export OTHER": "{source} -o {out}.gguf --into {into}",
    "report": "{directory}",
    "plan": "--checkpoint {checkpoint} --text {texts} --tokenizer {tokenizer_from}",
    "compress": "{source} --to int8 -o {out} --text {text} --tokenizer {tokenizer_from}",
    "vocab add": "{directory} -o {out} --terms {file} --train-on {train_on} --steps 1"
    " --auxiliary {auxiliary} --auxiliary-text {auxiliary_text}",
    "vocab add OTHER": "{directory} otter -o {out} --init omp --donor {donor}",
    "vocab remove": "{directory} -o {out} --tokens {file}",
    "vocab trim": "{directory} {files} -o {out}",
    "vocab transplant": "{directory} {tokenizer} -o {out} --auxiliary {auxiliary} --auxiliary-text {auxiliary_text}",
    "vocab transplant OTHER": "{directory} {tokenizer} -o {out} --init omp --donor {donor}",
    "vocab suggest": "{directory} {files} --held-out {held_out} -o {out}",
    "positions extend": "{directory} --to 64 -o {out} --text {text} --tokenizer {tokenizer_from} --factors {factors}",
    "vocab compare": "{first} {second} --text {text}",
}
"""Each command with every path that it reads, by the parameter's name; one that reads none is not here."""


def inputs_of(command: click.Command) -> dict[str, Any]:
    """The types of a command's paths to read, by the parameter's name; each knows the kinds of paths that it takes."""
    return {param.name: param.type for param in command.params if hasattr(param.type, "kinds")}


INPUTS = {name: inputs_of(command) for name, command in leaf_commands()}
CASES = [
    (line, name, INPUTS[line.removesuffix(" OTHER")][name])
    for line, template in COMMANDS.items()
    for name in INPUTS[line.removesuffix(" OTHER")]
    if f"{{{name}}}" in template
]


@pytest.fixture(scope="module")
def there() -> Iterator[dict[str, Path]]:
    """One path of each kind, below a folder that every user can enter."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    tokenizer = train_tokenizer((), "byte")
    (root / "notes.md").write_text(TEXT)
    (root / "factors.json").write_text("{}")
    for folder in ("an-empty-folder", "sealed", "run", "texts"):
        (root / folder).mkdir()
    (root / "texts" / "a.txt").write_text(TEXT)
    (root / "empty.txt").write_text("")
    (root / "model.gguf").write_bytes(b"GGUF")
    (root / "sealed.txt").write_text(TEXT)
    model = DecoderLM(TokenEmbedding(257, 8), RotaryEmbedding(4), num_layers=1, num_heads=2)
    model.save_pretrained(root / "run", tokenizer=tokenizer)
    TokenCorpus.build([root / "notes.md"], tokenizer, root / "run" / "corpus")
    (root / "run" / "corpus" / "tokenizer.json").unlink()
    assert run("corpus", "build", root / "notes.md", "-o", root / "corpus", "--tokenizer", root / "run") == 0
    for sealed in ("sealed", "sealed.txt"):
        (root / sealed).chmod(0)
    yield {
        "a missing path": root / "nothere",
        "a path through a file": root / "notes.md" / "nothere",
        "a text file": root / "notes.md",
        "an empty file": root / "empty.txt",
        "a GGUF file": root / "model.gguf",
        "an empty folder": root / "an-empty-folder",
        "an unreadable folder": root / "sealed",
        "an unreadable file": root / "sealed.txt",
        "a folder of texts": root / "texts",
        "a corpus": root / "corpus",
        "a corpus without its tokenizer": root / "run" / "corpus",
        "a run": root / "run",
    }
    shutil.rmtree(root)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root can read everything: be another user meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def command_line(line: str, there: dict[str, Path], out: Path, **paths: Path) -> list[str]:
    """A line of the table with these paths, and with a run or a text at the other places."""
    command = line.removesuffix(" OTHER")
    paths.setdefault("factors", there["a text file"].with_name("factors.json"))
    for name, kind in INPUTS[command].items():
        default = "a GGUF file" if PathKind.GGUF in kind.kinds else "a text file"
        paths.setdefault(name, there["a run" if PathKind.RUN in kind.kinds else default])
    return f"{command} {COMMANDS[line]}".format(**paths, out=out).split()


def test_every_command_that_reads_a_path_says_what_it_takes() -> None:
    for name, command in leaf_commands():
        for param in command.params:
            is_path = isinstance(param.type, click.Path)
            assert not is_path or param.name in ("output", "export_to"), f"{name} {param.name}: use InputPath"
    assert {(line.removesuffix(" OTHER"), name) for line, name, _ in CASES} == {
        (command, name) for command, inputs in INPUTS.items() for name in inputs
    }


@pytest.mark.parametrize("line", COMMANDS)
def test_a_path_that_is_something_else_ends_with_a_sentence_and_a_code(line, there, tmp_path, capsys) -> None:
    for name, kind in ((name, kind) for own, name, kind in CASES if own == line):
        for what, path in there.items():
            is_sealed = "unreadable" in what
            if path_kind(path) in kind.kinds and not is_sealed:
                continue  # what the command takes: its own tests
            with as_nobody() if is_sealed else nullcontext():
                code = run(*command_line(line, there, tmp_path / "out", **{name: path}))
            said = capsys.readouterr().err
            assert code == 1, f"{what}: {said}"
            assert re.fullmatch(f"FileError: {re.escape(str(path))} .*\\.\n", said), f"{name}, {what}: {said}"
            wanted = {"missing": "does not exist", "through": "does not exist", "unreadable": "cannot be read"}
            assert next((sentence for word, sentence in wanted.items() if word in what), "takes") in said
            assert not (tmp_path / "out").exists()
        if PathKind.FOLDER in kind.kinds and PathKind.TEXT not in kind.kinds:  # the loader judges what it holds
            texts = there["a folder of texts"]
            assert run(*command_line(line, there, tmp_path / "out", **{name: texts})) in (1, 2)
            said = capsys.readouterr().err
            assert said.partition(":")[0] in ("FileError", "CheckpointError", "TokenizerError", "VocabularyError")
            assert str(texts) in said


def test_what_is_at_a_path_is_found_by_names_and_first_bytes(there, tmp_path) -> None:
    found = {name: path_kind(path) for name, path in there.items() if "unreadable" not in name}
    assert found == {
        "a missing path": PathKind.MISSING,
        "a path through a file": PathKind.MISSING,
        "a text file": PathKind.TEXT,
        "an empty file": PathKind.EMPTY_FILE,
        "a GGUF file": PathKind.GGUF,
        "an empty folder": PathKind.EMPTY_FOLDER,
        "a folder of texts": PathKind.FOLDER,
        "a corpus": PathKind.CORPUS,
        "a corpus without its tokenizer": PathKind.CORPUS_ALONE,
        "a run": PathKind.SAVED,
    }
    with as_nobody():
        for path in (there["an unreadable folder"], there["an unreadable file"]):
            with pytest.raises(FileError, match=f"{path} cannot be read: Permission denied"):
                path_kind(path)
    with pytest.raises(FileError, match="cannot be read"):
        path_kind(Path("a\0b"))
    (tmp_path / "cut.md").write_text("é" * 3000 + "x")
    (tmp_path / "odd.md").write_text("x" + "é" * 3000)
    (tmp_path / "weights").write_bytes(bytes(range(256)))
    kinds = [PathKind.TEXT, PathKind.TEXT, PathKind.BINARY]
    assert [path_kind(tmp_path / name) for name in ("cut.md", "odd.md", "weights")] == kinds


# Options and contents


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the refusals name."""
    place = tmp_path_factory.mktemp("refusals")
    texts = {
        "notes.md": "# Notes\n",
        "pairs": "a\tb\t1\n",
        "short.txt": "a few words, fewer than a window",
        "long.txt": TEXT,
    }
    texts |= {"other.txt": "nothing of that kind stands here " * 200, "empty.json": "{}", "full/file": "x"}
    (place / "full").mkdir()
    for name, text in texts.items():
        (place / name).write_text(text)
    byte = train_tokenizer((), "byte")
    save_tokenizer(byte, place / "large.json")
    model = DecoderLM(TokenEmbedding(257, 16), RotaryEmbedding(8), num_layers=1, num_heads=2)
    for name in ("run", "damaged"):
        model.save_pretrained(place / name, tokenizer=byte)
    model.save_pretrained(place / "bare")
    weights = place / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    TokenEmbedding(30, 4).save_pretrained(place / "good")
    TokenEmbedding(257, 4).save_pretrained(place / "table", tokenizer=byte)
    write_vectors(place / "words.vec", [f"w{row}" for row in range(30)], torch.randn(30, 4))
    return place


REFUSALS = """
2 There is no text to train on: train -o NEW
2 too small for a validation part: train short.txt -o NEW --steps 1 --tokenizer byte
1 Cannot write into the folder: train short.txt -o short.txt/run --steps 1
1 holds no run: train -o full --resume
2 leave the files out: train short.txt -o full --resume
1 nowhere holds no run: train -o nowhere --resume
2 mixes several FILES, and there is one: train long.txt --weights 3 -o NEW
2 --weights has 1 numbers for 2 FILES: train long.txt long.txt --weights 3 -o NEW
2 '3,x' is not a list of numbers: train long.txt long.txt --weights 3,x -o NEW
2 needs --untied and no --rank: train long.txt -o NEW --row-sparse
1 A table is trained on it by embedlayer train PLACE/notes.md -o DIR: inspect notes.md
2 To train on it: embedlayer train PLACE/short.txt -o DIR: inspect short.txt
1 holds no safetensors file: embed full hello
2 gpt2: plan gtp2
2 --tokenizer is for a SOURCE: explore --tokenizer large.json
1 99999: explore words.vec --port 99999 --no-browser
2 #learn: explore words.vec --view learn --export NEW
2 IDs up to 256 and the table has 30 rows: inspect good --tokenizer large.json
2 no tokenizer: inspect good --word-pairs pairs
2 name OTHER too: inspect good --no-align
2 leave OTHER out: inspect good good --analogies pairs
2 no tokenizer: neighbors good dog
2 Name one with --tokenizer: export good -o NEW.vec
2 does not tell the format: export run -o NEW
2 Give --to with -o to compress, or --compare: compress run
2 --to and -o belong together: compress run --to int8
1 Cannot write: compress run --to int8 -o full/file/out
1 holds no: compress full --compare
2 damaged: compress damaged --to int8 -o NEW
2 --greedy samples nothing: generate run hello --greedy --min-p 0.1
2 is a saved TokenEmbedding, which has no transformer blocks: evaluate table --text long.txt
2 bare has no tokenizer. Name one with --tokenizer.: evaluate run bare --text long.txt --window 32
2 leave out models and sizes: plan --checkpoint run gpt2
2 give --checkpoint: plan gpt2 --tokenizer large.json
2 nothing to add: vocab add run -o NEW
2 contains none of the new tokens: vocab add run otterly --train-on other.txt -o NEW
2 --donor has no effect: vocab add run otterly --donor run -o NEW
2 no token 'otterly': vocab remove run otterly -o NEW
2 An ID needs quotation marks: "#304": vocab remove run -o NEW
2 : vocab compare empty.json empty.json
"""
"""Code, a part of what is said, and the command, with files of `place`."""


def test_what_an_option_or_a_file_says_wrong_ends_with_a_sentence_and_leaves_nothing(place, tmp_path, capsys) -> None:
    before = sorted(place.rglob("*"))
    for line in REFUSALS.strip().splitlines():
        said, _, command = line.replace("PLACE", str(place)).rpartition(": ")
        words = [place / word if (place / word.split("/")[0]).exists() else word for word in command.split()]
        found = run(*(str(word).replace("NEW", str(tmp_path / "new")) for word in words))
        shown = capsys.readouterr()
        assert (found, said[2:] in shown.err, "Traceback" in shown.err) == (int(said[0]), True, False), (line, shown)
        assert sorted(tmp_path.iterdir()) == [], line
    assert sorted(place.rglob("*")) == before
