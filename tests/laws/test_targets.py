"""Whatever writes a file or a folder: what must be new appears in one step, and nothing else is deleted or replaced."""

import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Thread

import pytest
import torch
from commands import leave_out_answers, run
from covering import covering, looped, some
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.analysis import write_atlas
from embedlayer.checkpoints import write_vectors
from embedlayer.compress import compress_table, export_onnx
from embedlayer.core.errors import EmbedLayerError
from embedlayer.heads import DraftMap, save_draft_tokens
from embedlayer.io import files
from embedlayer.tokenization import save_tokenizer
from embedlayer.training import ParallelContext
from embedlayer.vocab import edit_vocabulary
from embedlayer.vocab.receipt import last_receipt

pytestmark = pytest.mark.usefixtures("system", "short_page")

GPT2 = {"model_type": "gpt2", "vocab_size": 20, "n_positions": 9, "n_embd": 8}
TEXT = "the cat sat on the mat and the dog sat on the cat . " * 300


@pytest.fixture
def short_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exported page contains takes seconds, and is tested elsewhere: here it is only written."""
    leave_out_answers(monkeypatch)


@dataclass(frozen=True)
class Sources:
    """What is written somewhere else: a text, a layer with its tokenizer, its int8 and q8_0 tables, a checkpoint."""

    folder: Path
    table: el.TokenEmbedding
    tokenizer: object

    def __getattr__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "text").write_text(TEXT)
    tokenizer = el.train_tokenizer(TEXT, "bpe", vocab_size=270)
    torch.manual_seed(0)
    table = el.TokenEmbedding(270, 32)
    table.save_pretrained(folder / "layer", tokenizer=tokenizer)
    compress_table(table, "q8_0").save_pretrained(folder / "q8_0", tokenizer=tokenizer)
    assert run("vocab", "add", folder / "layer", "zebra", "-o", folder / "edited") == 0
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(GPT2))
    weights = {"wte.weight": torch.randn(20, 8), "wpe.weight": torch.randn(9, 8)}
    save_file(weights, folder / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    from gguf_models import write_file

    write_file(folder / "model.gguf", tokenizer=("gpt2", tokenizer))
    return Sources(folder, table, tokenizer)


class Refused(Exception):
    """A command that ended with the exit code 1."""


def command(*words: object) -> None:
    if code := run(*words):
        assert code == 1
        raise Refused


Write = Callable[[Sources, Path], object]

NEW_FILES: dict[str, tuple[str, Write]] = {
    "vocab suggest": (".txt", lambda s, out: command("vocab", "suggest", s.layer, s.text, "--count", 2, "-o", out)),
    "explore --export": (".html", lambda s, out: command("explore", s.layer, "--export", out)),
    **{
        f"export {suffix}": (suffix, lambda s, out: command("export", s.layer, "-o", out))
        for suffix in (".npy", ".vec", ".bin", ".npy.gz")
    },
    "export glove": (".txt", lambda s, out: command("export", s.layer, "-o", out, "--format", "glove")),
    "export .parquet": (".parquet", lambda s, out: command("export", s.layer, "-o", out)),
    "export .onnx": (".onnx", lambda s, out: command("export", s.q8_0, "-o", out)),
    "vocab add GGUF": (".gguf", lambda s, out: command("vocab", "add", s.folder / "model.gguf", "zebra", "-o", out)),
}
"""Commands that write a new file, with the end of its name."""

BESIDE = {"export .npy": ".tokens.json", "export .npy.gz": ".tokens.json", "vocab add GGUF": ".gguf.receipt"}
"""End of the name of the second file."""

FILES: dict[str, tuple[str, Write]] = {
    "save_tokenizer": (".json", lambda s, out: save_tokenizer(s.tokenizer, out)),
    "ParallelContext.save": (".safetensors", lambda s, out: ParallelContext().save(out, {"a": torch.ones(3)})),
    "DraftMap.save": (".safetensors", lambda s, out: DraftMap.between(s.tokenizer, s.tokenizer).save(out)),
    "save_draft_tokens": (".pt", lambda s, out: save_draft_tokens(out, [1, 2], 9)),
    "write_vectors": (".vec", lambda s, out: write_vectors(out, ["a"], torch.ones(1, 2))),
    "write_vectors .npy": (".npy", lambda s, out: write_vectors(out, ["a"], torch.ones(1, 2))),
    "write_atlas": (".parquet", lambda s, out: write_atlas(out, s.table, s.tokenizer, num_neighbors=2)),
    "export_onnx": (".onnx", lambda s, out: export_onnx(compress_table(s.table, "q8_0"), out)),
    "Receipt.save": (".receipt", lambda s, out: last_receipt(s.edited).save(out)),
}
"""Functions that write a file and replace an existing one."""

NEW_FOLDERS: dict[str, Write] = {
    "vocab add": lambda s, out: command("vocab", "add", s.layer, "zebra", "-o", out),
    "vocab remove": lambda s, out: command("vocab", "remove", s.layer, "#269", "-o", out),
    "vocab trim": lambda s, out: command("vocab", "trim", s.layer, s.text, "-o", out),
    "vocab transplant": lambda s, out: command("vocab", "transplant", s.layer, s.edited, "-o", out),
    "compress": lambda s, out: command("compress", s.layer, "--to", "int8", "-o", out),
    "edit_vocabulary": lambda s, out: edit_vocabulary(s.layer, add=["zebra"], out=out),
    "write_into": lambda s, out: el.load(s.checkpoint).write_into(s.checkpoint, out),
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


def with_appearing(names: Iterable[str], kinds: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize over the product; always run are each kind on each system, and what appears meanwhile, by name."""
    whole = list(product(names, kinds, SYSTEMS))
    appears = {(name, "appears", SYSTEMS[number % 3]) for number, name in enumerate(names)}
    return pytest.mark.parametrize(
        ("name", "kind", "system"), some(covering(whole, [(1, 2)]) | appears, whole), indirect=["system"]
    )


def error_of(write: Write, sources: Sources, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Write, and return the error; "" if there is none."""
    capsys.readouterr()
    try:
        write(sources, target)
    except Refused:
        return capsys.readouterr().err
    except EmbedLayerError as error:
        return f"{type(error).__name__}: {error}\n"
    return ""


def appear(monkeypatch: pytest.MonkeyPatch, target: Path, make: Callable[[], object]) -> None:
    """Call `make` just before what was written gets the name `target`."""

    def before(name: str) -> Callable[[Path, Path], object]:
        operation = getattr(files, name)

        def patched(partial: Path, path: Path) -> object:
            if path == target:
                make()
            return operation(partial, path)

        return patched

    for name in ("name_new_file", "name_new_folder", "exchange"):
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


@with_appearing(NEW_FILES, KINDS)
def test_a_new_file_appears_in_one_step_and_replaces_nothing(
    name: str, kind: str, sources: Sources, tmp_path: Path, free_mode: tuple[int, int], monkeypatch, capsys
) -> None:
    end, write = NEW_FILES[name]
    beside = BESIDE.get(name)
    stem = "out" if kind != "long name" else "x" * (250 - len(beside or end))
    target = tmp_path / f"{stem}{end}"
    prepare(kind, target)
    written = read_pipe(target) if kind == "pipe" else lambda: 0
    if kind == "appears":
        appear(monkeypatch, target, lambda: target.write_text("mine"))
    error = error_of(write, sources, target, capsys)
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


@looped("name, kind", FILES, [kind for kind in KINDS if kind != "appears"])
def test_a_file_that_may_be_replaced_keeps_its_place_and_permissions(
    name: str, kind: str, sources: Sources, tmp_path: Path, free_mode: tuple[int, int], capsys
) -> None:
    end, write = FILES[name]
    longest = ".tokens.json" if end == ".npy" else end
    target = tmp_path / f"{'out' if kind != 'long name' else 'x' * (250 - len(longest))}{end}"
    prepare(kind, target)
    written = read_pipe(target) if kind == "pipe" else lambda: 0
    error = error_of(write, sources, target, capsys)
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


@with_appearing(NEW_FOLDERS, FOLDER_KINDS)
def test_a_new_folder_appears_in_one_step_and_replaces_nothing(
    name: str, kind: str, sources: Sources, tmp_path: Path, free_mode: tuple[int, int], monkeypatch, capsys
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
    error = error_of(NEW_FOLDERS[name], sources, target, capsys)
    check_clean(tmp_path)
    if kind in ("existing", "file", "appears", "pipe"):
        said = {"existing": "is not empty. Choose", "appears": "appeared while this was computed"}
        said["file"] = "exists. Remove it" if name.startswith("vocab") else "is a file, not a folder. Choose"
        said["pipe"] = "is a device or a pipe"
        assert error.startswith(f"FileError: {target} {said[kind]}")
        assert error.count("\n") == 1
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


def build(sources: Sources, out: Path) -> object:
    return el.TokenCorpus.build([sources.text], sources.tokenizer, out)


@looped("kind", ["replaced", "file appears", "folder appears", "link", "long name"])
def test_a_corpus_is_replaced_whole_or_not_at_all(kind: str, sources: Sources, tmp_path: Path, monkeypatch, capsys):
    target = tmp_path / ("corpus" if kind != "long name" else "x" * 250)
    if kind == "link":
        target.symlink_to("real")
        build(sources, tmp_path / "real")
    elif kind != "folder appears":
        build(sources, target)
        target.chmod(0o700)
        (target / "ids.bin").chmod(0o600)

    def make() -> None:
        target.mkdir(exist_ok=True)
        (target / "photo").write_text("mine")

    if kind.endswith("appears"):
        appear(monkeypatch, target, make)
    inode = (target / "ids.bin").stat().st_ino if target.exists() else 0
    error = error_of(build, sources, target, capsys)
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
