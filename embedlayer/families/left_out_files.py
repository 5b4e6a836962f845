"""Which files of a folder hold values by token ID or row in a form that no edit of its vocabulary can move.

Pickles are not loaded, and other formats state the same weights again. An edited copy of the folder leaves such files
out, by name. Second copies in safetensors are no matter of names: their headers say what they hold.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from embedlayer.io.locks import LOCK
from embedlayer.io.partials import PARTIAL

CONFIG = "config.json"


class FileRule(NamedTuple):
    """Kind of files that an edited copy of a folder leaves out."""

    patterns: tuple[str, ...]  # of names, as `fnmatch` reads them; with a slash at the end, of whole folders
    what: str  # what the files hold
    consequence: str  # for the edited folder, and what to do instead, as sentences
    needless: tuple[str, ...] = ()  # files beside it that are of no use without it, and are left out with it


LEFT_OUT = (
    FileRule(
        (
            *("optimizer*.pt", "optimizer*.bin", "rank*-optimizer.pt", "optimizer_[0-9]*/", "distrib_optim.pt"),
            *("global_step*/", "pytorch_model_fsdp*/", "iter_[0-9]*/", "*.distcp"),
        ),
        "state of an optimizer",
        "A resume from the new folder would start from zero moments and at the start of the learning-rate schedule. To "
        "keep the moments, load the model and its optimizer from the old folder, call edit_vocabulary(model, ..., "
        "optimizer=optimizer), and save both.",
        ("latest",),
    ),
    FileRule(("checkpoint-[0-9]*/",), "earlier checkpoints with the old token IDs", "Edit each of them by itself."),
    FileRule(
        ("adapter_model.bin", "adapter*.pt", "adapter*.pth"),
        "an adapter as a pickle, which is not loaded",
        "Merge it into the weights before the edit.",
        ("adapter_config.json",),
    ),
    FileRule(
        (
            *("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.ckpt.*", "*.ckpt-*"),
            *("*.pkl", "*.pickle", "tf_model*.h5", "tf_model*.h5.index.json", "*.msgpack", "*.msgpack.index.json"),
            *("rust_model.ot", "saved_model/", "original/", "metal/", "*.onnx", "*.onnx_data*", "*.ort", "onnx/"),
            *("openvino*", "openvino/", "*.gguf", "*.tflite", "*.mlmodel", "*.mlpackage/", "coreml/", "*.engine"),
            *("*.npz", "model.bin", "vocabulary.json", "vocabulary.txt", "shared_vocabulary.*"),
        ),
        "the same weights or vocabulary in another form",
        "Write them again from the new folder.",
    ),
)
"""The files that an edit leaves out. For a file, the first rule that fits counts."""

WITHOUT_ROWS = (
    *("scheduler*.pt", "scheduler*.bin", "scaler*.pt", "rng_state*.pth", "random_states_*.pkl", "training_args.bin"),
    *("colbert_linear.pt", "sparse_linear.pt", "model_head.pkl"),  # the last is the classifier of SetFit
)
"""Pickles that have no value by token, and are copied."""


def files_left_out(folder: Path) -> dict[str, FileRule]:
    """Return the files of a folder that an edit of its vocabulary leaves out, with their rules.

    They are relative paths, sorted; that of a folder ends in a slash. Files that are needless without another one have
    its rule. A folder inside with a `config.json` of its own is another model or module: nothing in it is left out,
    unless a rule fits its name (`checkpoint-500/`), so that it is left out as a whole.
    """
    return dict(sorted(_left_out_in(folder, "")))


def _left_out_in(folder: Path, start: str) -> Iterator[tuple[str, FileRule]]:
    """Yield what `files_left_out` returns, in any order; `start` is the path of `folder` in the whole folder."""
    names = {f"{entry.name}/" if entry.is_dir() else entry.name: entry for entry in folder.iterdir()}
    for name, entry in names.items():
        fitting = [rule for rule in LEFT_OUT if _fits(name, rule.patterns) and not _fits(name, WITHOUT_ROWS)]
        for rule in fitting[:1]:
            yield start + name, rule
            yield from ((start + other, rule) for other in rule.needless if other in names)
        if not fitting and name.endswith("/") and not (entry / CONFIG).exists():
            yield from _left_out_in(entry, start + name)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name, which ends in a slash if it is a folder's, fits one of the patterns."""
    return any(name.endswith("/") == pattern.endswith("/") and fnmatchcase(name, pattern) for pattern in patterns)


def is_left_out(file: str, left_out: Iterable[str]) -> bool:
    return any(file.startswith(path) if path.endswith("/") else file == path for path in left_out)


def files_to_copy(source: Path, target: Path, left_out: Iterable[str]) -> Iterator[str]:
    """Create the folders inside `source` in `target` too, and yield the paths of the files, relative and sorted.

    Paths in `left_out`, as `files_left_out` returns them, are skipped, and so are locks and what a process has not
    finished to write. Links to folders are followed, except to one that the link is in.
    """
    left_out = tuple(left_out)
    for entry in sorted(source.iterdir()):
        is_folder = entry.is_dir()
        is_loop = is_folder and entry.is_symlink() and entry.resolve() in (source.resolve(), *source.resolve().parents)
        name = f"{entry.name}/" if is_folder else entry.name
        if is_left_out(name, left_out) or is_loop or entry.name == LOCK or entry.name.endswith(PARTIAL):
            continue
        if is_folder:
            (target / name).mkdir(parents=True, exist_ok=True)
            inside = [path.removeprefix(name) for path in left_out if path.startswith(name)]
            yield from (name + path for path in files_to_copy(entry, target / name, inside))
        elif entry.is_file():
            yield name


def other_safetensors(folder: Path, left_out: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the safetensors files of a folder, relative to it, sorted, without those of `left_out`."""
    for file in sorted(folder.rglob("*.safetensors")):
        path = file.relative_to(folder)
        inner = [folder / parent for parent in path.parents if parent != Path()]
        if not is_left_out(path.as_posix(), left_out) and not any((parent / CONFIG).exists() for parent in inner):
            yield path.as_posix()


def left_out_message(left_out: Mapping[str, FileRule]) -> str:
    """Return what an edit leaves out and why, as the text of a warning."""
    parts = [f"{names}. {rule.consequence}" for rule, names in _shown_by_rule(left_out)]
    return "Left out of the new folder, because their values by token cannot be edited: " + "\nAlso ".join(parts)


def not_copied_message(left_out: Mapping[str, FileRule]) -> str:
    """Return what a copy with a compressed table leaves out, and what it holds, as the text of a warning."""
    return f"Left out of the new folder: {'; '.join(names for _, names in _shown_by_rule(left_out))}."


def _shown_by_rule(left_out: Mapping[str, FileRule]) -> Iterator[tuple[FileRule, str]]:
    """Yield each rule, and the names of its files with what they hold as text."""
    for rule in dict.fromkeys(left_out.values()):
        yield rule, f"{shown_files(name for name, other in left_out.items() if other == rule)} ({rule.what})"


def shown_files(names: Iterable[str]) -> str:
    """Return at most six names of files as text, and the number of the others; there must be at least one."""
    first, *others = [*names]
    rest = len(others) - 5
    return ", ".join([first, *others[:5]]) + (f" and {rest} more" if rest > 0 else "")
