"""Every path that a command reads: what is missing, unreadable or something else is said in one sentence."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click
import pytest
from commands import leaf_commands, run

from embedlayer import DecoderLM, RotaryEmbedding, TokenCorpus, TokenEmbedding, train_tokenizer
from embedlayer.cli.options import InputPath, OutputPath
from embedlayer.core.errors import FileError
from embedlayer.opening import PathKind, path_kind

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


def inputs_of(command: click.Command) -> dict[str, InputPath]:
    return {param.name: param.type for param in command.params if isinstance(param.type, InputPath)}


INPUTS = {name: inputs_of(command) for name, command in leaf_commands()}
CASES = [
    (line, name, INPUTS[line.removesuffix(" OTHER")][name])
    for line, template in COMMANDS.items()
    for name in INPUTS[line.removesuffix(" OTHER")]
    if f"{{{name}}}" in template
]
FOLDER_CASES = [case for case in CASES if PathKind.FOLDER in case[2].kinds and PathKind.TEXT not in case[2].kinds]


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
            is_output = param.name in ("output", "export_to")
            assert not is_output or isinstance(param.type, OutputPath), f"{name} {param.name}: use OutputPath"
            assert is_output or not isinstance(param.type, click.Path), f"{name} {param.name}: use InputPath"
            if is_output:
                with pytest.raises(FileError, match="The name of the file or folder is empty"):
                    param.type.convert("", None, None)
    with_inputs = {name for name, inputs in INPUTS.items() if inputs}
    assert with_inputs == {line.removesuffix(" OTHER") for line in COMMANDS}
    assert {(line.removesuffix(" OTHER"), name) for line, name, _ in CASES} == {
        (command, name) for command, inputs in INPUTS.items() for name in inputs
    }


@pytest.mark.parametrize(("line", "name", "kind"), CASES, ids=[f"{line}: {name}" for line, name, _ in CASES])
def test_a_path_that_is_something_else_ends_with_a_sentence_and_a_code(
    line, name, kind, there, tmp_path, capsys
) -> None:
    for what, path in there.items():
        found = path_kind(path)
        is_sealed = "unreadable" in what
        if found in kind.kinds and not is_sealed:
            continue  # what the command takes: its own tests
        with as_nobody() if is_sealed else nullcontext():
            code = run(*command_line(line, there, tmp_path / "out", **{name: path}))
        said = capsys.readouterr().err
        assert code == 1, f"{what}: {said}"
        assert said.startswith(f"FileError: {path} "), f"{what}: {said}"
        assert said.endswith(".\n"), f"{what}: {said}"
        assert said.count("\n") == 1, f"{what}: {said}"
        wanted = {"missing": "does not exist", "through": "does not exist", "unreadable": "cannot be read"}
        expected = next((sentence for word, sentence in wanted.items() if word in what), "takes")
        assert expected in said, f"{what}: {said}"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "name", "kind"), FOLDER_CASES, ids=[f"{line}: {name}" for line, name, _ in FOLDER_CASES]
)
def test_a_folder_without_what_is_looked_for_ends_with_a_sentence_and_a_code(
    line, name, kind, there, tmp_path, capsys
) -> None:
    """What a folder holds is for the loader to judge: it says so without a traceback."""
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
    assert [path_kind(tmp_path / name) for name in ("cut.md", "odd.md", "weights")] == [
        PathKind.TEXT,
        PathKind.TEXT,
        PathKind.BINARY,
    ]
