"""Build a corpus in shards, by several processes or hosts, with the token IDs of an unsharded build.

The bytes of all sources, in order, are split evenly between the shards. A boundary inside a text file moves forward to
the first position where a cut changes no ID (see `data.text_chunks`), and inside a file of rows to the next row. Both
neighbours find this position from the bytes around it alone. So no shard waits for another, and the result does not
depend on the process, the time, or the number of interruptions.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from embedlayer.core.errors import CheckpointError, FileError, SizeError
from embedlayer.data.corpus import (
    Progress,
    TokenCorpus,
    corpus_writer,
    ignore_progress,
    require_text,
    warn_left_out,
)
from embedlayer.data.corpus_files import (
    PLAN_FILE,
    PLAN_VERSION,
    TOKENIZER,
    WEIGHTS_FILE,
    file_digest,
    missing_shards,
    plan_digest,
    read_index,
    read_offsets,
    read_plan,
    shard_folder,
    write_shard_tables,
)
from embedlayer.data.process_pool import Report, run_jobs, usable_cores
from embedlayer.data.readers.chats import TOKENIZER_CONFIG, ChatTemplate
from embedlayer.data.readers.documents import RowOptions
from embedlayer.data.readers.sources import find_sources, reader_of
from embedlayer.io.files import (
    JsonObject,
    create_folder,
    named_path,
    new_file,
    remove_partials,
    replace_folder,
    visible_names,
    write_json,
)
from embedlayer.io.locks import LOCK, FileLock
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint


def build_in_shards(
    sources: Sequence[str | Path],
    tokenizer: object,
    path: str | Path,
    *,
    shards: int,
    workers: int | None = None,
    text_field: str | None = None,
    chat_template: str | Path | None = None,
    on_progress: Progress | None = None,
) -> TokenCorpus:
    """Encode texts in parallel processes into `shards` shards in the folder `path`, and open them as one corpus.

    IDs and documents equal those of `TokenCorpus.build` for the same sources, for any number of shards and workers.
    There is one exception: a stretch of a million characters in which no cut of the text leaves the IDs unchanged. Both
    functions cut it anyway, with a warning, and the IDs next to the cut may differ. The text chunks that the corpus
    counts in `TokenCorpus.blocks` end at other positions than those of `TokenCorpus.build`, but their numbers of tokens
    and bytes are exact.

    Each shard is written atomically. A build that was interrupted continues when it is called again with the same
    arguments, and gives the same bytes as an uninterrupted build.

    A source is identified by its size and a digest: of all bytes up to 1 MiB, of 64 blocks of 16 KiB in a larger
    file. Both are checked when a build starts or continues, and when a shard starts to read the source. A change
    that keeps the size of a large file and lies between the blocks is not noticed.

    The processes are spawned: a script calls this function inside an `if __name__ == "__main__":` block.

    Args:
        sources: Files and folders, as for `find_sources`; each text file is a document, and each row of other files. A
            compressed file, `.gz` or `.zst`, is not split between shards.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers; it is saved in the folder.
        path: A new or empty folder, or a folder in which this build was started.
        shards: Number of shards, at least 1.
        workers: Largest number of processes at a time; by default one for each core. 1: this process builds all.
        text_field: Name of the field of a row that is the document; `None`: `text`, else `messages`, a chat.
        chat_template: Folder of the tokenizer whose chat template renders chats, as in `TokenCorpus.build`; it is saved
            in the folder.
        on_progress: Called with the number of bytes read so far and the total.

    Raises:
        FileError: A source cannot be read, is standard input, or has changed since the build started; `path` cannot be
            written, holds other files or another build, or is locked by another process; or a process was killed.
        TextError: A source or a record is not what it should be (see `find_sources`), or no source has text.
        CheckpointError: The plan or a shard in the folder is damaged, or its tokenizer was changed.
        TokenizerError: `tokenizer` is no tokenizer or cannot encode a text, or the one in the folder is damaged.
        MissingExtraError: A source needs `pip install 'embedlayer[parquet]'`, or chats `'embedlayer[hf]'`.

    Warns:
        EmbedLayerWarning: A source or a row without text is left out, a `.txt` has JSON lines, or the IDs next to a cut
            may differ.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> _ = Path("dogs.txt").write_text("I love dogs. " * 100)
        >>> tokenizer = train_tokenizer((), kind="byte")
        >>> build_in_shards(["dogs.txt"], tokenizer, "dogs", shards=3, workers=1)
        TokenCorpus(1300 tokens, 1300 bytes, 1 documents)
    """
    workers = usable_cores() if workers is None else workers
    folder = _planned(sources, tokenizer, named_path(path), shards, RowOptions(text_field, chat_template or tokenizer))
    planned = read_plan(folder)["sources"]
    total, report = sum(size for _, size, _ in planned), on_progress or ignore_progress
    with FileLock(folder / LOCK, f"The corpus folder {folder}"):
        missing = missing_shards(folder)
        built = set(range(shards)).difference(missing)
        done = {number: read_index(shard_folder(folder, number)).get("bytes_read", 0) for number in built}

        def progress(number: int, read: int) -> None:  # bytes that shard `number` has read so far
            done[number] = read
            report(min(sum(done.values()), total), total)

        if workers == 1 or len(missing) < 2:
            build = shard_builder(str(folder))
            for number in missing:
                build(number, lambda read: progress(number, read))  # noqa: B023
        else:
            on_interrupted = partial(_remove_partials_of, folder)
            run_jobs(shard_builder, str(folder), missing, workers, on_progress=progress, on_interrupted=on_interrupted)
        report(total, total)
    names = [name for name, _, _ in planned]
    numbers = np.concatenate([read_offsets(shard_folder(folder, number) / "sources.npy") for number in range(shards)])
    require_text(len(numbers), sources)
    for number in np.setdiff1d(np.arange(len(names)), numbers):
        warn_left_out(names[number])
    return TokenCorpus.open(folder)


def build_shard(
    sources: Sequence[str | Path],
    tokenizer: object,
    path: str | Path,
    *,
    shards: int,
    only: int,
    text_field: str | None = None,
    chat_template: str | Path | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Build one shard of `build_in_shards` in this process, so that several hosts can each build some of the shards.

    The hosts need the same sources and the same folder, for instance on a shared disk. When all shards are built,
    `TokenCorpus.open(path)` reads the corpus; before, it raises an error with the missing shards. An existing shard is
    not built again.

    Args:
        sources: As for `build_in_shards`. All hosts pass the same arguments but `only`.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        path: Folder of all shards.
        shards: Number of all shards.
        only: Number of the shard to build, from 0 to `shards - 1`.
        text_field: As for `build_in_shards`.
        chat_template: As for `build_in_shards`.
        on_progress: Called with the number of bytes read so far and the approximate total of this shard.

    Raises:
        FileError: As for `build_in_shards`.
        CheckpointError: The plan in the folder is damaged, or its tokenizer was changed.
        TextError: A source or a record is not what it should be, or there is none.
        TokenizerError: `tokenizer` is no tokenizer or cannot encode a text, or the one in the folder is damaged.
    """
    if not 0 <= only < shards:
        raise SizeError(f"Shard {only} of {shards} does not exist: shards are counted from 0 to {shards - 1}.")
    folder = _planned(sources, tokenizer, named_path(path), shards, RowOptions(text_field, chat_template or tokenizer))
    total = sum(size for _, size, _ in read_plan(folder)["sources"]) // shards
    report = on_progress or ignore_progress
    if not shard_folder(folder, only).exists():
        shard_builder(str(folder))(only, lambda read: report(min(read, total), total))
    report(total, total)


def shard_builder(corpus: str) -> Callable[[int, Report], None]:
    """Read the plan and the tokenizer in a corpus folder, and return a function that builds one shard of the plan.

    The function is `build(number, report)`; `report` is called with the number of bytes read so far. Each worker
    process calls `shard_builder` once.
    """
    path = Path(corpus)
    plan, tokenizer = read_plan(path), load_tokenizer(path / TOKENIZER)
    if fingerprint(tokenizer) != plan["tokenizer"]:
        raise CheckpointError(f"{path / TOKENIZER} is not the tokenizer of {path / PLAN_FILE}. Build in a new folder.")
    if "chat_template" in plan and ChatTemplate.of(path).digest != plan["chat_template"]:
        raise CheckpointError(f"{path / TOKENIZER_CONFIG} is not that of {path / PLAN_FILE}. Build in a new folder.")

    def build(number: int, report: Report) -> None:
        target = shard_folder(path, number)
        with _shard_lock(path, number):
            remove_partials(target)  # of a build that was killed
            with replace_folder(target) as folder:
                _write_shard(folder, plan, number, tokenizer, path, report)

    return build


def _shard_lock(path: Path, number: int) -> FileLock:
    """Return the lock, not yet acquired, for building shard `number` of the corpus in folder `path`."""
    folder = shard_folder(path, number)
    return FileLock(folder.with_name(f".{folder.name}{LOCK}"), f"Shard {number} of the corpus {path}")


def _remove_partials_of(path: Path, number: int) -> None:
    """Delete the temporary files that a killed worker left of shard `number` of the corpus in folder `path`.

    Nothing is deleted if another process has the lock of the shard, because that process builds it now.
    """
    with suppress(FileError), _shard_lock(path, number):
        remove_partials(shard_folder(path, number))


def _write_shard(
    folder: Path, plan: JsonObject, number: int, tokenizer: Tokenizer, chat_template: Path, report: Report
) -> None:
    """Encode the ranges of the sources that belong to one shard, and write the files of the shard."""
    places: list[int] = []
    starts_document, start = False, 0
    total = sum(size for _, size, _ in plan["sources"])
    low, high = (total * end // plan["shards"] for end in (number, number + 1))  # bytes of all sources, in order
    options = RowOptions(plan.get("text_field"), chat_template)
    with corpus_writer(folder, tokenizer, has_weights="chat_template" in plan) as writer:
        separators = [] if writer.separator is None else [writer.separator]
        writer.write(np.array(separators, writer.dtype))
        if writer.write_weights is not None:
            writer.write_weights(np.ones(len(separators), np.uint8))  # set below: the first document is not known yet
        for place, (source, size, digest) in enumerate(plan["sources"]):
            # the range of the source in this shard: by bytes first, then moved to places where it may be cut
            begin, end = max(low - start, 0), min(high - start, size)
            start += size
            if begin >= end:
                continue
            _check_unchanged(source, [size, digest], file_digest(source))
            reader = reader_of(Path(source), options)
            begin, end = (reader.cut(at, size, tokenizer) for at in (begin, end))
            if begin < end and writer.add_source(reader, report, begin=begin, end=end):
                starts_document = starts_document if places else reader.has_rows
                places.append(place)
    if writer.starts_with_chat and separators:
        with (folder / WEIGHTS_FILE).open("r+b") as weights:
            weights.write(b"\0")
    more = {"separators": len(separators), "bytes_read": writer.bytes_read, "plan": plan_digest(plan)}
    more |= {"starts_document": True} if starts_document else {}
    np.save(folder / "sources.npy", np.array(places, dtype=np.int64), allow_pickle=False)
    write_shard_tables(folder, *writer.tables(), {**writer.index(), **more})
    report(writer.bytes_read)


# Planning


def _planned(sources: Sequence[str | Path], tokenizer: object, path: Path, shards: int, options: RowOptions) -> Path:
    """Create the corpus folder with the plan and tokenizer of a build, or check that the plan there is the same one."""
    if shards < 1:
        raise SizeError(f"shards is {shards}; it must be 1 or more.")
    tokenizer = as_tokenizer(tokenizer)
    if "-" in map(str, sources):
        raise FileError("Standard input can be read only once. Save it to a file to build it in shards.")
    readers = [
        reader
        for reader in find_sources(sources, options)
        if path.resolve() not in Path(reader.source).resolve().parents
    ]
    files = [reader.source for reader in readers]
    for source in files:
        if not Path(source).is_file():
            raise FileError(f"{source} can be read only once, from its start. Save it to a file to build it in shards.")
        if str(source).encode(errors="replace").decode() != str(source):
            raise FileError(f"The name {str(source)!a} is not UTF-8, and the plan of a corpus is. Rename the file.")
    plan: JsonObject = {
        "format_version": PLAN_VERSION,
        "shards": shards,
        "tokenizer": fingerprint(tokenizer),
        "sources": [[str(source), *file_digest(str(source))] for source in files],
    }
    if options.text_field is not None:
        plan["text_field"] = options.text_field
    if has_weights := any(reader.has_weights for reader in readers):
        plan["chat_template"] = options.chat_template.digest
    create_folder(path)
    others = visible_names(path)
    if not (path / PLAN_FILE).exists():  # requested after looking: another host may have written it meanwhile
        if others:
            raise FileError(f"The folder {path} holds other files than this corpus. Choose a new folder for it.")
        try:
            with new_file(path / PLAN_FILE) as file:
                write_json(file, plan)
        except FileError:
            if not (path / PLAN_FILE).exists():  # else another process has just written it
                raise
    _check_same(path, read_plan(path), plan)
    if not (path / TOKENIZER).exists():
        save_tokenizer(tokenizer, path / TOKENIZER)
    if has_weights and not (path / TOKENIZER_CONFIG).exists():
        options.chat_template.save(path)
    return path


def _check_same(path: Path, started: JsonObject, requested: JsonObject) -> None:
    """Raise a `FileError` if the plan of a build in a folder differs from the plan for the arguments of this call."""
    if started == requested:
        return
    for key in ("format_version", "shards", "tokenizer", "text_field", "chat_template"):
        if started.get(key) != requested.get(key):
            what = f"{key.replace('_', ' ')} {started.get(key)}, not {requested.get(key)}"
            break
    else:
        old, new = ({name: facts for name, *facts in plan["sources"]} for plan in (started, requested))
        for name in [name for name in old if name in new]:
            _check_unchanged(name, old[name], new[name])
        surplus = [f"{name}, which was not passed" for name in old if name not in new]
        absent = [f"no {name}" for name in new if name not in old]
        what = [*surplus, *absent, "the same sources in another order"][0]
    raise FileError(f"The corpus in {path} was started with other arguments: it has {what}. Choose a new folder.")


def _check_unchanged(source: str, planned: list[Any], current: list[Any]) -> None:
    """Raise a `FileError` if the size or the digest of a source differs from those in the plan."""
    if current != planned:
        (had, _), (has, _) = planned, current
        how = f"it has {has} bytes and had {had}" if has != had else f"it has {has} bytes as before, but other ones"
        raise FileError(f"{source} was changed since this corpus was started: {how}. Build in a new folder.")
