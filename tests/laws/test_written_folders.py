"""Whatever writes a file or folder: what must be new appears in one step, nothing is written over, a copy keeps all.

Every command with an output and every exported function with a path is in a list here, also those that only read.
"""

import importlib
import inspect
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import leaf_commands, leave_out_answers, run
from covering import cases, covering, looped, some
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.compress import compress_table, export_onnx, load_model, save_model, write_checkpoint
from embedlayer.core.errors import EmbedLayerError
from embedlayer.data import build_in_shards, build_shard, export_token_ids, map_token_files
from embedlayer.heads import DraftMap, save_draft_tokens
from embedlayer.io import files
from embedlayer.tables import DeltaEmbedding, MappedEmbedding
from embedlayer.tokenization import save_tokenizer
from embedlayer.training import ParallelContext

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 60
SIZES = "--steps 1 --dim 16 --heads 2 --layers 1 --length 8 --batch-size 2 --tokenizer byte".split()
LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
LLAMA |= {"intermediate_size": 32, "max_position_embeddings": 32, "tie_word_embeddings": True}


def contents(folder: Path) -> dict[str, bytes | None]:
    """Each file of a folder with its bytes, and each folder in it, hidden ones too."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths}


def llama(folder: Path, tokenizer: Any) -> Path:
    """The folder of a checkpoint, with random numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> SimpleNamespace:
    """What the commands and functions read."""
    root = tmp_path_factory.mktemp("there")
    (root / "text.txt").write_text(TEXT)
    (root / "rows.txt").write_text("2 2\na 1 2\nb 3 4\n")
    tokenizer = el.train_tokenizer((), "byte")
    checkpoint = llama(root / "llama", tokenizer)
    shutil.copytree(checkpoint, root / "damaged")
    (root / "damaged" / "model.safetensors").write_bytes(b"\xff" * 64)
    (root / "damaged.txt").write_bytes(b"\0\xff" * 64)
    assert run("train", root / "text.txt", "-o", root / "run", *SIZES) == 0
    el.vocab.add_tokens(checkpoint, ["otter"], out=root / "edited")
    el.TokenCorpus.build([root / "text.txt"], tokenizer, root / "corpus")
    np.save(root / "ids.npy", np.arange(200, dtype=np.uint16) % 200)
    table, merged = el.TokenEmbedding(270, 32), el.train_tokenizer(TEXT, "bpe", vocab_size=270)
    table.save_pretrained(root / "layer", tokenizer=merged)
    compress_table(table, "q8_0").save_pretrained(root / "q8_0", tokenizer=merged)
    from gguf_models import write_file

    write_file(root / "model.gguf", tokenizer=("gpt2", merged))
    (root / "long.txt").write_text(TEXT * 5)
    places = {"layer": root / "layer", "edited": root / "edited", "text": root / "long.txt"}
    return SimpleNamespace(root=root, tokenizer=tokenizer, checkpoint=checkpoint, **places)


# Commands

COMMANDS = {
    "train": f"{{text}} -o {{out}} {' '.join(SIZES)}",
    "corpus build": "{text} -o {out} --workers 1",
    "corpus export": "{root}/corpus -o {out}.npy",
    "corpus export OTHER": "{root}/corpus -o {out}.bin",
    "explore": "{source} --export {out}",
    "export": "{source} -o {out} --format projector",
    "export OTHER": "{source} -o {out}/x.tsv",
    "export NPY": "{source} -o {out}.npy",
    "export INTO": "{source} -o {out} --into {root}/llama",
    "compress": "{source} --to int8 -o {out}",
    "compress OTHER": "{source} --to mlx-int4 -o {out}",
    "vocab add": "{source} otter -o {out}",
    "vocab remove": "{source} a -o {out}",
    "vocab trim": "{source} {text} -o {out}",
    "vocab transplant": "{source} {root}/run -o {out}",
    "vocab suggest": "{source} {text} -o {out}",
    "positions extend": "{source} --to 8 -o {out}",
    "demo": "-o {out} --steps 0",
}
"""Each command that writes where the user says, with a source that ends it with an error when it is read."""


def line(name: str, there: SimpleNamespace, out: object) -> list[str]:
    words = f"{name.rstrip('ABCDEFGHIJKLMNOPQRSTUVWXYZ')} {COMMANDS[name]}".split()
    places = {"root": there.root, "source": there.root / "damaged", "text": there.root / "damaged.txt", "out": out}
    return [word.format(**places) for word in words]


def test_every_command_that_writes_is_listed() -> None:
    writes = {"-o", "--output", "--export"}
    writing = {name for name, each in leaf_commands() if any(writes & {*param.opts} for param in each.params)}
    assert writing == {name.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ ") for name in COMMANDS}


def fill(folder: Path) -> Path:
    """A folder with files of somebody else, which have the names that commands write."""
    folder.mkdir()
    names = ["checkpoint.safetensors", "best.json", "report.html", "tensors.tsv", "model.safetensors", "run.bin"]
    for name in [*names, "tables/rows", "corpus/a.txt", "config.json", "python-reference.txt"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return folder


@looped("name", COMMANDS)
def test_a_command_refuses_an_empty_name_before_it_reads(name, there, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    words = [word for word in line(name, there, "") if word not in (".npy", ".bin", "/x.tsv")]
    words = words if "" in words else [*words[: words.index("-o") + 1], "", *words[words.index("-o") + 1 :]]
    assert run(*words) == 1
    assert "FileError: The name of the file or folder is empty" in capsys.readouterr().err
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@looped("name", COMMANDS)
def test_a_command_writes_nothing_over_and_says_so_before_it_reads(name, there, tmp_path, capsys) -> None:
    out = fill(tmp_path / "out")
    for other in ("out.npy", "out.tokens.json", "out.bin", "out.idx"):
        (tmp_path / other).write_text("mine")
    before = contents(tmp_path)
    assert run(*line(name, there, out)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"FileError: {out}"), said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("names", [["out.tokens.json"], ["out.idx"]])
def test_a_file_beside_the_output_is_not_replaced(names, there, tmp_path, capsys) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    for command in ("export NPY", "corpus export OTHER"):
        if (names == ["out.idx"]) == (command != "export NPY"):
            assert run(*line(command, there, tmp_path / "out")) == 1
            assert f"{names[0]} exists" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("is_there", [False, True])
@looped("name", [name for name in COMMANDS if not name.startswith("corpus export")])
def test_a_command_that_fails_leaves_its_target_as_it_was(name, is_there, there, tmp_path) -> None:
    out = tmp_path / "out"
    if is_there and name not in ("explore", "vocab suggest", "export NPY"):
        out.mkdir()
    before = contents(tmp_path)
    assert run(*line(name, there, out)) in (1, 2)
    assert contents(tmp_path) == before


FAILURES = {
    "a probe that is no token": ["--probe", "the cat sat"],
    "a width that heads do not divide": ["--dim", "15"],
    "mapped tables and a text that is too short": ["--value-embedding", "--mapped", "--length", "100000"],
}


@cases("failure, is_mapped", FAILURES, [False, True])
def test_a_run_that_cannot_start_leaves_the_run_that_it_would_replace(failure, is_mapped, there, tmp_path) -> None:
    mapped = ["--value-embedding", "--mapped"] if is_mapped else []
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert run("train", text, "-o", tmp_path / "run", *SIZES, *mapped) == 0
    before = contents(tmp_path)
    text.write_text(TEXT.replace("cat", "cow"))
    assert run("train", text, "-o", tmp_path / "run", "--overwrite", *SIZES, *FAILURES[failure]) in (1, 2)
    text.write_text(TEXT)
    assert contents(tmp_path) == before
    assert run("train", text, "-o", tmp_path / "new", *SIZES, *FAILURES[failure]) in (1, 2)
    assert contents(tmp_path) == before


@looped("name", ["checkpoint.safetensors", "best.json", "tables/rows", "corpus/a.txt", "notes.txt"])
def test_a_run_begins_in_no_folder_with_a_single_file_of_somebody_else(name, there, tmp_path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    for command in (["train", there.root / "text.txt", *SIZES], ["demo", "--steps", 1]):
        assert run(*command, "-o", tmp_path) == 1
        assert contents(tmp_path) == before


def test_overwrite_replaces_what_a_run_writes_and_nothing_else(there, tmp_path, capsys) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    assert run("train", there.root / "text.txt", "-o", tmp_path, *SIZES) == 1
    assert run("train", there.root / "text.txt", "-o", tmp_path, *SIZES, "--overwrite") == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "mine").write_text("mine")
    before = contents(tmp_path)
    assert run("train", there.root / "text.txt", "-o", tmp_path, *SIZES, "--overwrite") == 1
    assert "tables holds other files than mapped tables" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_corpus_in_the_folder_of_a_run_is_not_replaced_by_a_run_on_it(there, tmp_path, capsys) -> None:
    assert run("corpus", "build", there.root / "text.txt", "-o", tmp_path / "corpus", "--workers", 1) == 0
    before = contents(tmp_path)
    for more in ([], ["--overwrite"]):
        assert run("train", tmp_path / "corpus", "-o", tmp_path, *SIZES, *more) == 1
        assert contents(tmp_path) == before
    assert "which a new run replaces" in capsys.readouterr().err


def test_a_demo_replaces_no_run_on_another_text(there) -> None:
    before = contents(there.root / "run")
    assert run("demo", "-o", there.root / "run", "--steps", 1) == 1
    assert contents(there.root / "run") == before


def test_a_report_replaces_the_report_of_its_run_only(there, tmp_path) -> None:
    shutil.copytree(there.root / "run", tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "run")
    assert run("report", tmp_path / "run") == 0
    after = contents(tmp_path / "run")
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {"report.html"}


# Functions

Write = Callable[[SimpleNamespace, Any], object]


def live() -> torch.nn.Module:
    from decoders import gpt2

    return gpt2()


def delta_rows() -> torch.nn.Module:
    model = el.DecoderLM(el.TokenEmbedding(50, 8), "rotary", num_layers=1, num_heads=2)
    el.vocab.train_only_rows(model, [3])
    return model


def receipt(there: SimpleNamespace) -> el.vocab.Receipt:
    return el.vocab.last_receipt(there.root / "edited")


def start_run(there: SimpleNamespace, out: Any) -> None:
    trainer, _ = el.RunDirectory(there.root / "run").open()
    el.RunDirectory(out).start(trainer, there.tokenizer, validation_fraction=0.1)


NEW: dict[str, Write] = {
    "EmbeddingLayer.write_into": lambda there, out: el.load(there.checkpoint).write_into(there.checkpoint, out),
    "MappedEmbedding.create": lambda there, out: MappedEmbedding.create(out, 5, 2).close(),
    "RunDirectory.__init__": start_run,
    "TokenCorpus.build": lambda there, out: el.TokenCorpus.build([there.root / "text.txt"], there.tokenizer, out),
    "add_tokens": lambda there, out: el.vocab.add_tokens(there.checkpoint, ["otter"], out=out),
    "build_in_shards": lambda there, out: build_in_shards(
        [there.root / "text.txt"], there.tokenizer, out, shards=1, workers=1
    ),
    "build_shard": lambda there, out: build_shard([there.root / "text.txt"], there.tokenizer, out, shards=1, only=0),
    "edit_vocabulary": lambda there, out: el.vocab.edit_vocabulary(there.checkpoint, add=["otter"], out=out),
    "map_token_files": lambda there, out: map_token_files([there.root / "ids.npy"], there.tokenizer, out),
    "remove_tokens": lambda there, out: el.vocab.remove_tokens(there.checkpoint, ["a"], out=out),
    "save_model": lambda there, out: save_model(live(), out),
    "transplant": lambda there, out: el.vocab.transplant(there.checkpoint, there.tokenizer, out=out),
    "trim_vocabulary": lambda there, out: el.vocab.trim_vocabulary(
        there.checkpoint, [there.root / "text.txt"], out=out
    ),
    "write_checkpoint": lambda there, out: write_checkpoint(
        compress_table(el.load(there.checkpoint).table, "mlx-int4"), there.checkpoint, out
    ),
    "write_into": lambda there, out: el.vocab.write_into(
        el.load(there.checkpoint).table, there.tokenizer, there.checkpoint, out
    ),
}
"""Functions that write a new folder."""

IN_FOLDER: dict[str, Write] = {
    "DeltaEmbedding.save_adapter": lambda there, out: DeltaEmbedding(el.TokenEmbedding(9, 4), [3]).save_adapter(out),
    "EmbeddingLayer.save_pretrained": lambda there, out: el.EmbeddingLayer(el.TokenEmbedding(9, 4)).save_pretrained(
        out
    ),
    "Pretrained.save_pretrained": lambda there, out: el.TokenEmbedding(9, 4).save_pretrained(out),
    "save_adapter": lambda there, out: el.vocab.save_adapter(delta_rows(), out),
}
"""Functions that replace single files in a folder, as `save_pretrained` of transformers does."""

FILE: dict[str, tuple[str, Write]] = {
    "DraftMap.save": ("safetensors", lambda there, out: DraftMap.between(there.tokenizer, there.tokenizer).save(out)),
    "ParallelContext.save": ("safetensors", lambda there, out: ParallelContext().save(out, {"x": torch.ones(1)})),
    "Receipt.save": ("receipt", lambda there, out: receipt(there).save(out)),
    "export_onnx": ("onnx", lambda there, out: export_onnx(compress_table(el.TokenEmbedding(9, 32), "q8_0"), out)),
    "export_token_ids": ("npy", lambda there, out: export_token_ids(there.root / "corpus", out)),
    "save_draft_tokens": ("safetensors", lambda there, out: save_draft_tokens(out, (1, 3), 9)),
    "save_tokenizer": ("json", lambda there, out: save_tokenizer(there.tokenizer, out)),
    "write_atlas": (
        "parquet",
        lambda there, out: el.analysis.write_atlas(out, el.TokenEmbedding(257, 4), there.tokenizer, num_neighbors=2),
    ),
    "write_vectors": ("npy", lambda there, out: el.checkpoints.write_vectors(out, ["a", "b"], torch.eye(2), "npy")),
}
"""Functions that write a file, and replace an old one."""

READING = {
    *("DeltaEmbedding.from_pretrained", "DraftMap.load", "EmbeddingLayer.from_pretrained"),
    *("MappedEmbedding.open", "MappedEmbedding.resume", "OpenedModel.__init__", "ParallelContext.load"),
    *("Pretrained.from_pretrained", "Receipt.load", "TokenCorpus.open", "DenseTable.from_pretrained"),
    *("TokenVectors.evaluate_word_analogies", "TokenVectors.evaluate_word_pairs", "create_dataloader"),
    *("create_dataloader_v1", "evaluate_positions", "evaluate_text", "evaluate_word_analogies", "evaluate_word_pairs"),
    *("find_text_files", "last_receipt", "load", "load_adapter", "load_draft_tokens"),
    *("load_llama", "load_model", "load_tokenizer", "loss_curve", "loss_curves", "merge_adapter", "open_model"),
    *("path_kind", "read_text_chunks", "read_vectors", "suggest_removals", "suggest_tokens", "used_tokens"),
}
"""Functions with a path that write nothing there."""


def functions_with_paths() -> Iterator[str]:
    """The exported functions and methods that have a path, or the options of an edit with `out`, as an argument."""
    root = Path(el.__file__).parent
    for stub in root.rglob("__init__.pyi"):
        package = importlib.import_module(".".join(["embedlayer", *stub.relative_to(root).parent.parts]))
        for value in (getattr(package, name) for name in package.__all__):
            members = [each for _, each in inspect.getmembers(value)] if inspect.isclass(value) else [value]
            for function in map(inspect.unwrap, filter(inspect.isroutine, members)):
                name = getattr(function, "__name__", "_")
                if (name.startswith("_") and name != "__init__") or not is_ours(function):
                    continue
                annotations = [str(each.annotation) for each in inspect.signature(function).parameters.values()]
                if any("Path" in each or "EditOptions" in each for each in annotations):
                    yield function.__qualname__


def is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("embedlayer.")


def test_every_function_that_writes_is_listed() -> None:
    assert {*functions_with_paths()} == {*NEW, *IN_FOLDER, *FILE, *READING}


@looped("name", [*NEW, *IN_FOLDER, *FILE])
def test_a_function_refuses_an_empty_name(name, there, tmp_path, monkeypatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    write = {**NEW, **IN_FOLDER, **{key: value for key, (_, value) in FILE.items()}}[name]
    with pytest.raises(el.FileError, match="The name of the file or folder is empty"):
        write(there, "")
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@looped("name", NEW)
def test_a_function_writes_nothing_over(name, there, tmp_path) -> None:
    out = fill(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(el.FileError, match=str(out)):
        NEW[name](there, out)
    assert contents(tmp_path) == before


@looped("name", IN_FOLDER)
def test_a_function_that_saves_into_a_folder_keeps_the_other_files(name, there, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "rows").write_text("mine")
    before = contents(tmp_path)
    for _ in range(2):
        IN_FOLDER[name](there, tmp_path)
    assert before.items() <= contents(tmp_path).items()


# What is at a target


class Refused(Exception):
    """A command that ended with the exit code 1."""


def command(*words: object) -> None:
    if code := run(*words):
        assert code == 1
        raise Refused


NEW_FILES: dict[str, tuple[str, Write]] = {
    "vocab suggest": (".txt", lambda s, out: command("vocab", "suggest", s.layer, s.text, "--count", 2, "-o", out)),
    "explore --export": (".html", lambda s, out: command("explore", s.layer, "--export", out)),
    **{
        f"export {suffix}": (suffix, lambda s, out: command("export", s.layer, "-o", out))
        for suffix in (".npy", ".vec", ".bin", ".npy.gz")
    },
    "export glove": (".txt", lambda s, out: command("export", s.layer, "-o", out, "--format", "glove")),
    "export .parquet": (".parquet", lambda s, out: command("export", s.layer, "-o", out)),
    "export .onnx": (".onnx", lambda s, out: command("export", s.root / "q8_0", "-o", out)),
    "vocab add GGUF": (".gguf", lambda s, out: command("vocab", "add", s.root / "model.gguf", "zebra", "-o", out)),
}
"""Commands that write a new file, with the end of its name."""

BESIDE = {"export .npy": ".tokens.json", "export .npy.gz": ".tokens.json", "vocab add GGUF": ".gguf.receipt"}
"""End of the name of the second file."""

REPLACED: dict[str, tuple[str, Write]] = {
    **{name: (f".{end}", write) for name, (end, write) in FILE.items() if name != "export_token_ids"},
    "write_vectors .vec": (".vec", lambda s, out: el.checkpoints.write_vectors(out, ["a"], torch.ones(1, 2))),
}

NEW_FOLDERS: dict[str, Write] = {
    "vocab add": lambda s, out: command("vocab", "add", s.layer, "zebra", "-o", out),
    "vocab remove": lambda s, out: command("vocab", "remove", s.layer, "#269", "-o", out),
    "vocab trim": lambda s, out: command("vocab", "trim", s.layer, s.text, "-o", out),
    "vocab transplant": lambda s, out: command("vocab", "transplant", s.layer, s.edited, "-o", out),
    "compress": lambda s, out: command("compress", s.layer, "--to", "int8", "-o", out),
    **{name: NEW[name] for name in ("edit_vocabulary", "EmbeddingLayer.write_into")},
}
"""Commands and functions that write a new folder."""


KINDS = ("free", "existing", "appears", "pipe", "device", "link to nothing", "link to a file", "long name")
FOLDER_KINDS = (
    "free",
    "existing",
    "file",
    "appears",
    "empty",
    "link to nothing",
    "link to a folder",
    "pipe",
    "long name",
)


SYSTEMS = ("Linux", "macOS", "POSIX")
on_systems = pytest.mark.usefixtures("system", "short_page")


@pytest.fixture
def short_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exported page contains takes seconds, and is tested elsewhere: here it is only written."""
    leave_out_answers(monkeypatch)


def with_appearing(names: Iterable[str], kinds: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize over the product; always run are each kind on each system, and what appears meanwhile, by name."""
    whole = list(product(names, kinds, SYSTEMS))
    appears = {(name, "appears", SYSTEMS[number % 3]) for number, name in enumerate(names)}
    return pytest.mark.parametrize(
        ("name", "kind", "system"), some(covering(whole, [(1, 2)]) | appears, whole), indirect=["system"]
    )


def error_of(write: Write, there: SimpleNamespace, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Write, and return the error; "" if there is none."""
    capsys.readouterr()
    try:
        write(there, target)
    except Refused:
        return capsys.readouterr().err
    except EmbedLayerError as error:
        return f"{type(error).__name__}: {error}\n"
    return ""


def appear(monkeypatch: pytest.MonkeyPatch, target: Path, make: Callable[[], object]) -> None:
    """Call `make` just before what was written gets the name `target`."""

    def before(name: str) -> Callable[..., object]:
        operation = getattr(files, name)

        def patched(partial: Path, path: Path, *flags: int) -> object:
            if path == target:
                make()
            return operation(partial, path, *flags)

        return patched

    for name in ("name_new_file", "name_new_folder", "rename"):
        monkeypatch.setattr(files, name, before(name))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_device(path: Path) -> None:
    """Make a device like /dev/null."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device")


def read_pipe(path: Path) -> Callable[[], int]:
    """Make a pipe that a thread reads; return a function that waits for it and tells how many bytes there were."""
    os.mkfifo(path)
    found: list[int] = []
    thread = Thread(target=lambda: found.append(len(path.read_bytes())), daemon=True)
    thread.start()

    def end() -> int:
        for _ in range(2):  # the first ends a thread that no writer has come to
            thread.join(0.05)
            if thread.is_alive():
                os.close(os.open(path, os.O_WRONLY))
        thread.join(60)
        return found[0]

    return end


def prepare(kind: str, target: Path) -> None:
    """Make what is at a target before the write, but for what appears and pipes."""
    if kind == "existing":
        target.write_text("mine")
        target.chmod(0o600)
    elif kind == "device":
        make_device(target)
    elif kind.startswith("link"):
        (target.parent / "real").mkdir()
        target.symlink_to("real/file")
        if kind == "link to a file":
            (target.parent / "real" / "file").write_text("mine")


def check_clean(folder: Path) -> None:
    """Nothing that is hidden is left of a write."""
    assert [path.name for path in folder.rglob(".*")] == []


@pytest.fixture
def free_mode(tmp_path: Path) -> tuple[int, int]:
    """The permissions of a new file and of a new folder."""
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    modes = mode(tmp_path / "plain"), mode(tmp_path / "folder")
    (tmp_path / "plain").unlink()
    (tmp_path / "folder").rmdir()
    return modes


@on_systems
@with_appearing(NEW_FILES, KINDS)
def test_a_new_file_appears_in_one_step_and_replaces_nothing(
    name: str, kind: str, there: SimpleNamespace, tmp_path: Path, free_mode: tuple[int, int], monkeypatch, capsys
) -> None:
    end, write = NEW_FILES[name]
    beside = BESIDE.get(name)
    stem = "out" if kind != "long name" else "x" * (250 - len(beside or end))
    target = tmp_path / f"{stem}{end}"
    prepare(kind, target)
    written = read_pipe(target) if kind == "pipe" else lambda: 0
    if kind == "appears":
        appear(monkeypatch, target, lambda: target.write_text("mine"))
    error = error_of(write, there, target, capsys)
    num_bytes = written()
    check_clean(tmp_path)
    if kind in ("free", "long name", "link to nothing"):
        assert error == ""
        assert target.is_symlink() == (kind == "link to nothing")
        assert target.stat().st_size > 0
        assert mode(target) == free_mode[0]
        assert beside is None or (tmp_path / f"{stem}{beside}").exists()
    elif kind in ("pipe", "device"):
        assert stat.S_ISFIFO(target.stat().st_mode) if kind == "pipe" else target.is_char_device()
        assert os.listdir(tmp_path) == [target.name]
        if beside is None:
            assert (error, num_bytes > 0) == ("", kind == "pipe")
        else:
            several = "is a device or a pipe, and several files are written. Choose another name."
            assert f"{target} {'is a device or a pipe. Choose a new' if end == '.gguf' else several}" in error
    else:
        assert target.read_text() == "mine"
        assert f"{target} {'appeared while' if kind == 'appears' else 'exists. Remove it, or'}" in error
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "real") == [target.name]


@on_systems
@looped("name, kind", REPLACED, [kind for kind in KINDS if kind != "appears"])
def test_a_file_that_may_be_replaced_keeps_its_place_and_permissions(
    name: str, kind: str, there: SimpleNamespace, tmp_path: Path, free_mode: tuple[int, int], capsys
) -> None:
    end, write = REPLACED[name]
    longest = ".tokens.json" if end == ".npy" else end
    target = tmp_path / f"{'out' if kind != 'long name' else 'x' * (250 - len(longest))}{end}"
    prepare(kind, target)
    written = read_pipe(target) if kind == "pipe" else lambda: 0
    error = error_of(write, there, target, capsys)
    num_bytes = written()
    check_clean(tmp_path)
    if kind in ("pipe", "device"):
        assert stat.S_ISFIFO(target.stat().st_mode) if kind == "pipe" else target.is_char_device()
        assert os.listdir(tmp_path) == [target.name]
        if end == ".npy":
            assert "name a file" in error
        else:
            assert (error, num_bytes > 0) == ("", kind == "pipe")
        return
    assert error == ""
    assert target.is_symlink() == kind.startswith("link")
    assert target.read_bytes() != b"mine"
    assert mode(target) == (0o600 if kind == "existing" else free_mode[0])


@on_systems
@with_appearing(NEW_FOLDERS, FOLDER_KINDS)
def test_a_new_folder_appears_in_one_step_and_replaces_nothing(
    name: str, kind: str, there: SimpleNamespace, tmp_path: Path, free_mode: tuple[int, int], monkeypatch, capsys
) -> None:
    target = tmp_path / ("out" if kind != "long name" else "x" * 250)
    if kind == "existing":
        target.mkdir()
        (target / "photo").write_text("mine")
    elif kind == "file":
        target.write_text("mine")
    elif kind == "empty":
        target.mkdir(0o700)
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind.startswith("link"):
        target.symlink_to("real")
        if kind == "link to a folder":
            (tmp_path / "real").mkdir(0o700)
    elif kind == "appears":

        def make() -> None:
            target.mkdir()
            (target / "photo").write_text("mine")

        appear(monkeypatch, target, make)
    error = error_of(NEW_FOLDERS[name], there, target, capsys)
    check_clean(tmp_path)
    if kind in ("existing", "file", "appears", "pipe"):
        said = {"existing": "is not empty. Choose", "appears": "appeared while this was computed"}
        said["file"] = "exists. Remove it" if name.startswith("vocab") else "is a file, not a folder. Choose"
        said["pipe"] = "is a device or a pipe"
        *_, line_of_error = error.splitlines()  # kernels may have been compiled, which is said
        assert line_of_error.startswith(f"FileError: {target} {said[kind]}")
        assert (
            stat.S_ISFIFO(target.stat().st_mode)
            if kind == "pipe"
            else b"mine" in (target.read_bytes() if kind == "file" else (target / "photo").read_bytes())
        )
        assert os.listdir(tmp_path) == [target.name]
        return
    assert error == ""
    assert target.is_symlink() == kind.startswith("link")
    assert (target / "config.json").exists()
    assert mode(target) == (0o700 if kind in ("empty", "link to a folder") else free_mode[1])


def build(there: SimpleNamespace, out: Path) -> object:
    return el.TokenCorpus.build([there.text], there.tokenizer, out)


@on_systems
@looped("kind", ["replaced", "file appears", "folder appears", "link", "long name"])
def test_a_corpus_is_replaced_whole_or_not_at_all(
    kind: str, there: SimpleNamespace, tmp_path: Path, monkeypatch, capsys
):
    target = tmp_path / ("corpus" if kind != "long name" else "x" * 250)
    if kind == "link":
        target.symlink_to("real")
        build(there, tmp_path / "real")
    elif kind != "folder appears":
        build(there, target)
        target.chmod(0o700)
        (target / "ids.bin").chmod(0o600)

    def make() -> None:
        target.mkdir(exist_ok=True)
        (target / "photo").write_text("mine")

    if kind.endswith("appears"):
        appear(monkeypatch, target, make)
    inode = (target / "ids.bin").stat().st_ino if target.exists() else 0
    error = error_of(build, there, target, capsys)
    check_clean(tmp_path)
    if kind.endswith("appears"):
        assert f"{target} {'has changed' if kind == 'file appears' else 'appeared'} while this was computed" in error
        assert (target / "photo").read_text() == "mine"
        assert not inode or (target / "ids.bin").stat().st_ino == inode
        return
    assert error == ""
    assert len(el.TokenCorpus.open(target)) > 0
    assert (target / "ids.bin").stat().st_ino != inode
    assert target.is_symlink() == (kind == "link")
    assert kind == "link" or (mode(target), mode(target / "ids.bin")) == (0o700, 0o600)


# Copies


def add_other_files(folder: Path) -> set[str]:
    """Add files of all kinds to a folder; the paths of those that belong to the old table."""
    texts = ["README.md", "custom.py", "notes.bin", "training_args.bin", "model_head.pkl", "colbert_linear.pt"]
    texts += ["sub/notes.txt", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"]
    left_out = ["pytorch_model.bin", "sub/optimizer.pt", "onnx/model.onnx", "checkpoint-500/model.safetensors"]
    for name in [*texts, *left_out]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith(".json") else name)
    (folder / "3_Normalize").mkdir()
    (folder.parent / f"{folder.name} elsewhere").mkdir()
    (folder.parent / f"{folder.name} elsewhere" / "linked.txt").write_text("linked")
    (folder / "link").symlink_to(folder.parent / f"{folder.name} elsewhere", target_is_directory=True)
    (folder / "link" / "loop").symlink_to(folder.parent / f"{folder.name} elsewhere", target_is_directory=True)
    save_file({"summary.weight": torch.ones(1, 8)}, folder / "value_head.safetensors")
    return {"pytorch_model.bin", "sub/optimizer.pt", "onnx/", "checkpoint-500/"}


def gpt2_folder(folder: Path, tokenizer: Any) -> Path:
    """A checkpoint whose blocks `compress` copies: its layer has the table and positions alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=256)
    config.eos_token_id = 256
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    return folder


def saved_layer(folder: Path, tokenizer: Any) -> Path:
    model = el.DecoderLM(el.TokenEmbedding(257, 64), "rotary", num_layers=1, num_heads=2)
    model.save_pretrained(folder, tokenizer=tokenizer)
    return folder


def trained_run(folder: Path, tokenizer: Any) -> Path:
    text = folder.with_name("text of the run.txt")
    text.write_text(TEXT)
    assert run("train", text, "-o", folder, *SIZES, "--dim", 64) == 0
    return folder


SOURCES = {"checkpoint": llama, "checkpoint with blocks": gpt2_folder, "saved layer": saved_layer, "run": trained_run}
ALL, CHECKPOINTS = (*SOURCES,), ("checkpoint", "checkpoint with blocks")
COPYING: dict[str, tuple[tuple[str, ...], str]] = {
    "compress int8": (ALL, "compress {source} --to int8 -o {out} --json"),
    "compress mlx-int4": (CHECKPOINTS, "compress {source} --to mlx-int4 -o {out} --json"),
    "vocab add": (ALL, "vocab add {source} otter -o {out} --json"),
    "vocab transplant": (ALL, "vocab transplant {source} {root}/edited -o {out} --json"),
    "export into": (CHECKPOINTS, "export {source} --into {source} -o {out} --json"),
    "positions extend": (("checkpoint",), "positions extend {source} --to 64 --original 16 -o {out} --json"),
}
CASES = [(name, source) for name, (sources, _) in COPYING.items() for source in sources]
BY_DESIGN = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "run.json"}
BY_DESIGN |= {"checkpoint.safetensors", "report.html", "corpus/ids.bin", "corpus/index.json", "corpus/tokenizer.json"}
"""Files of the models themselves whose bytes or names a copy may change."""


@looped("name, source", CASES)
def test_a_copy_keeps_each_file_or_names_it(name, source, there, tmp_path, capsys) -> None:
    folder = SOURCES[source](tmp_path / "source", there.tokenizer)
    left_out = add_other_files(folder)
    before = contents(folder)
    capsys.readouterr()
    assert run(*COPYING[name][1].format(root=there.root, source=folder, out=tmp_path / "out").split()) == 0
    shown, said = capsys.readouterr()
    named = json.loads(shown).get("left_out", []) if name.startswith("compress") else [*left_out]
    if name.startswith("compress"):
        assert left_out <= {*named}
        assert said.count("Left out of the new folder") == 1
    elif not name.startswith("positions"):
        assert said.count("Left out of the new folder") == 1
        assert all(each in said for each in left_out)
    assert contents(folder) == before
    after = contents(tmp_path / "out")
    for path in folder.rglob("*"):
        each = path.relative_to(folder).as_posix()
        copies = [after[place] for place in (each, f"model/{each}") if place in after]
        if path.is_dir():
            is_named = any(f"{each}/".startswith(other) for other in named if other.endswith("/"))
            assert copies or is_named or each in ("corpus", "link/loop"), each
        elif each not in BY_DESIGN and not any(each == other or each.startswith(other) for other in named):
            assert path.read_bytes() in copies, each
    assert after[next(place for place in ("link/linked.txt", "model/link/linked.txt") if place in after)] == b"linked"


def test_other_tensors_of_tokens_are_named_and_other_tensors_copied(there, tmp_path, capsys) -> None:
    folder = llama(tmp_path / "source", there.tokenizer)
    save_file({"tok_embeddings.weight": torch.ones(257, 64)}, folder / "second.safetensors")
    save_file({"weight": torch.ones(3, 4)}, folder / "projector.safetensors")
    for kind in ("int8", "mlx-int4"):
        capsys.readouterr()
        assert run("compress", folder, "--to", kind, "-o", tmp_path / kind, "--json") == 0
        shown, said = capsys.readouterr()
        assert json.loads(shown)["left_out"] == ["second.safetensors"]
        assert "second.safetensors (a tensor with a row for each token)" in said
        assert (tmp_path / kind / "projector.safetensors").read_bytes() == (
            folder / "projector.safetensors"
        ).read_bytes()


def test_a_run_and_receipts_are_named_when_its_table_is_compressed(there, tmp_path, capsys) -> None:
    el.vocab.add_tokens(there.root / "run", ["otter"], out=tmp_path / "edited")
    capsys.readouterr()
    assert run("compress", tmp_path / "edited", "--to", "int8", "-o", tmp_path / "small", "--json") == 0
    named = json.loads(capsys.readouterr().out)["left_out"]
    assert {"run.json", "corpus/", "vocabulary-1.receipt"} <= {*named}
    assert {path.name for path in (tmp_path / "small").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_a_model_of_sentence_transformers_is_compressed_with_all_its_modules(there, tmp_path) -> None:
    pytest.importorskip("sentence_transformers", reason="the recipes extra is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    BertModel(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path / "bert")
    fast = PreTrainedTokenizerFast(tokenizer_object=there.tokenizer, pad_token="<|endoftext|>", model_max_length=32)
    fast.save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(16, "cls"), Dense(16, 8), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "q: "})
    model.save(str(tmp_path / "source"))
    assert run("compress", tmp_path / "source", "--to", "int8", "-o", tmp_path / "small") == 0
    small = load_model(tmp_path / "small")
    assert [type(part) for part in small] == [type(part) for part in modules]
    assert small.prompts["query"] == "q: "
    assert small[1].pooling_mode == model[1].pooling_mode == "cls"
    assert torch.equal(small[2].linear.weight, model[2].linear.weight)
    table = small[0].auto_model.get_input_embeddings()
    assert isinstance(table, el.QuantizedEmbedding)
    with torch.no_grad():
        model[0].auto_model.get_input_embeddings().weight.copy_(table.rows(0, 257))
    texts = ["the otter", "a table of vectors"]
    assert np.allclose(small.encode(texts), model.encode(texts), atol=1e-5)
