"""A corpus built by several processes or hosts, each for itself: the IDs are those that one process gives.

The bytes of all sources, one after the other, are divided evenly between the parts. Where a division falls into a
file, it moves on to the first place where a cut changes no ID (see `embedlayer.data.corpus`). Both neighbours find
that place from the bytes around it alone, so no part waits for another, and what is built does not depend on who
built it, when, or after how many interruptions.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from embedlayer.data.corpus import (
    ANCHOR_CHARS,
    CONTEXT_CHARS,
    CUT,
    CorpusWriter,
    Progress,
    TokenCorpus,
    checked,
    decoded,
    find_text_files,
    is_harmless,
    not_utf8,
    opened,
    warn_left_out,
)
from embedlayer.data.corpus_files import (
    PLAN_FILE,
    PLAN_VERSION,
    missing_shards,
    plan_digest,
    read_index,
    read_offsets,
    read_plan,
    shard_folder,
    write_shard_tables,
)
from embedlayer.data.process_pool import Report, run_jobs
from embedlayer.data.tokenizer import as_tokenizer, fingerprint, load_tokenizer, save_tokenizer
from embedlayer.errors import CheckpointError, FileError, SizeError, TextError
from embedlayer.io.files import JsonObject, create_folder, remove_partials, replace_folder, write_json
from embedlayer.io.locks import LOCK, FileLock

TOKENIZER = "tokenizer.json"
_PIECES_OF_A_SOURCE, _BYTES_OF_A_PIECE = 64, 1 << 14
_BYTES_OF_A_CHAR = 4


def build_in_shards(
    sources: Sequence[str | Path],
    tokenizer: object,
    path: str | Path,
    *,
    shards: int,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> TokenCorpus:
    """Encode texts in parallel processes into the folder `path` of `shards` parts, which is read as one array.

    IDs and documents are those of `TokenCorpus.build` for the same sources, for any number of shards and workers;
    only where a text has no harmless place to cut for a million characters, of which both warn, they may differ.
    `blocks`, at whose ends `split` cuts, are as exact but fall elsewhere.

    Each part appears complete or not at all. A build that was stopped goes on when it is called again with the same
    arguments, and ends with the same bytes as one that was not.

    A source is known by its size and a digest of its bytes: of all up to 1 MiB, of a larger file of 64 pieces of
    16 KiB, evenly from the first byte to the last. It is looked at when a build begins or goes on, and when a part
    begins to read it. An edit that keeps the size of a large file and falls between the pieces is not seen.

    Args:
        sources: Files and folders, as for `find_text_files`; each file is a document. A file that ends in `.gz` is not
            split between shards.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers; it is kept in the folder.
        path: A new or empty folder, or one in which this build was begun.
        shards: Parts, 1 or more.
        workers: Processes at a time; by default one for each core. With 1 everything is done in this process.
        on_progress: Called with the bytes read so far and the bytes in all.

    Raises:
        FileError: A source cannot be read or is seen to be changed since the build began; `path` cannot be written,
            holds something else, the build of another plan, or is being built by another process; or a process was
            killed.
        TextError: A source is not UTF-8, or there is no text at all.
        SizeError: `shards` or `workers` is below 1.

    Example:
        >>> from embedlayer.data.tokenizer import train_tokenizer
        >>> _ = Path("dogs.txt").write_text("I love dogs. " * 100)
        >>> tokenizer = train_tokenizer((), kind="byte")
        >>> build_in_shards(["dogs.txt"], tokenizer, "dogs", shards=3, workers=1)
        TokenCorpus(1300 tokens, 1300 bytes, 1 documents)
    """
    workers = _cores() if workers is None else workers
    if workers < 1:
        raise SizeError(f"workers is {workers}; it must be 1 or more.")
    folder = _planned(sources, tokenizer, Path(path), shards)
    with FileLock(folder / LOCK, f"The corpus folder {folder}"):
        _build_missing(folder, shards, workers, on_progress)
    _check_not_empty(sources, folder, shards)
    return TokenCorpus.open(folder)


def _build_missing(folder: Path, shards: int, workers: int, on_progress: Progress | None) -> None:
    """Build the parts that are not there yet, in at most `workers` processes."""
    plan = read_plan(folder)
    total = sum(size for _, size, _ in plan["sources"])
    done = {number: _bytes_read(part) for number, part in _built(folder, shards)}

    def progress(number: int, read: int) -> None:
        done[number] = read
        if on_progress is not None:
            on_progress(min(sum(done.values()), total), total)

    missing = missing_shards(folder)
    if workers == 1 or len(missing) < 2:
        build = part_builder(str(folder))
        for number in missing:
            build(number, lambda read: progress(number, read))  # noqa: B023
    else:
        run_jobs(
            part_builder,
            str(folder),
            missing,
            workers,
            on_progress=progress,
            on_interrupted=lambda number: _clear_away(folder, number),
        )
    if on_progress is not None:
        on_progress(total, total)


def _check_not_empty(sources: Sequence[str | Path], folder: Path, shards: int) -> None:
    """Refuse a corpus without any text, and name the sources without."""
    plan = read_plan(folder)
    found = np.concatenate([read_offsets(part / "sources.npy") for _, part in _built(folder, shards)])
    if not len(found):
        raise TextError(f"There is no text in {', '.join(map(str, sources))}. Give a file with at least one word.")
    for number in np.setdiff1d(np.arange(len(plan["sources"])), found):
        warn_left_out(plan["sources"][number][0])


def build_shard(
    sources: Sequence[str | Path],
    tokenizer: object,
    path: str | Path,
    *,
    shards: int,
    only: int,
    on_progress: Progress | None = None,
) -> None:
    """Build one part of what `build_in_shards` builds, in this process: each of several hosts can build its own.

    The hosts see the same sources and the same folder, on a shared disk for instance. When all parts are there,
    `TokenCorpus.open(path)` reads them; until then it says which are missing. A part that is there is not built again.

    Args:
        sources: As for `build_in_shards`; the same for all parts, and so are `tokenizer`, `path` and `shards`.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        path: The folder of all parts.
        shards: Parts in all.
        only: The part to build, from 0 to `shards - 1`.
        on_progress: Called with the bytes read so far and the bytes of this part, about.

    Raises:
        FileError: As for `build_in_shards`.
        CheckpointError: The tokenizer in the folder was changed.
        TextError: A source is not UTF-8.
        SizeError: There is no such part.
    """
    if not 0 <= only < shards:
        raise SizeError(f"Part {only} of {shards} does not exist: parts are counted from 0 to {shards - 1}.")
    folder = _planned(sources, tokenizer, Path(path), shards)
    total = sum(size for _, size, _ in read_plan(folder)["sources"]) // shards

    def report(read: int) -> None:
        if on_progress is not None:
            on_progress(min(read, total), total)

    if not shard_folder(folder, only).exists():
        part_builder(str(folder))(only, report)
    report(total)


def part_builder(folder: str) -> Callable[[int, Report], None]:
    """What builds a part of the plan in `folder`, called with its number; all that a worker process needs."""
    path = Path(folder)
    plan, tokenizer = read_plan(path), load_tokenizer(path / TOKENIZER)
    _check_tokenizer(path, plan, tokenizer)

    def build(number: int, report: Report) -> None:
        target = shard_folder(path, number)
        with _lock_of_part(path, number):
            remove_partials(target)  # of a build that was killed
            with replace_folder(target) as partial:
                _write_part(partial, plan, number, tokenizer, report)

    return build


def _lock_of_part(path: Path, number: int) -> FileLock:
    folder = shard_folder(path, number)
    return FileLock(folder.with_name(f".{folder.name}{LOCK}"), f"Part {number} of the corpus {path}")


def _clear_away(path: Path, number: int) -> None:
    """Remove what a worker that was killed has left of a part, unless another process builds that now."""
    with suppress(FileError), _lock_of_part(path, number):
        remove_partials(shard_folder(path, number))


def _write_part(folder: Path, plan: JsonObject, number: int, tokenizer: Tokenizer, report: Report) -> None:
    found: list[int] = []
    read_before = 0
    with (folder / "ids.bin").open("wb") as file:
        writer = CorpusWriter(tokenizer, lambda ids: file.write(ids.tobytes()))
        marks = [] if writer.separator is None else [writer.separator]
        file.write(np.array(marks, writer.dtype).tobytes())
        for share in _shares(plan, number, tokenizer):
            with opened(share.source, share.begin, share.end) as (read, position):
                text = decoded(share.source, read, offset=share.begin)
                if writer.add_document(
                    text,
                    lambda: report(read_before + position()),  # noqa: B023
                    before=share.before,
                ):
                    found.append(share.number)
                read_before += position()
    index = {**writer.index(), "marks": len(marks), "bytes_read": read_before, "plan": plan_digest(plan)}
    np.save(folder / "sources.npy", np.array(found, dtype=np.int64), allow_pickle=False)
    write_shard_tables(folder, *writer.tables(), index)
    report(read_before)


# Planning


def _planned(sources: Sequence[str | Path], tokenizer: object, path: Path, shards: int) -> Path:
    """The folder with the plan for these arguments in it: written now, or found and the same."""
    if shards < 1:
        raise SizeError(f"shards is {shards}; it must be 1 or more.")
    tokenizer = as_tokenizer(tokenizer)
    found = [source for source in find_text_files(sources) if path.resolve() not in Path(source).resolve().parents]
    for source in found:
        if not Path(source).is_file():
            name = "Standard input" if str(source) == "-" else str(source)
            raise FileError(f"{name} can be read only once, from its start. Keep it in a file to build it in shards.")
        if str(source).encode(errors="replace").decode() != str(source):
            raise FileError(f"The name {str(source)!a} is not UTF-8, and the plan of a corpus is. Rename the file.")
    plan: JsonObject = {
        "format_version": PLAN_VERSION,
        "shards": shards,
        "tokenizer": fingerprint(tokenizer),
        "sources": [[str(source), *_size_and_digest(str(source))] for source in found],
    }
    create_folder(path)
    others = [file.name for file in path.iterdir() if not file.name.startswith(".")]  # hidden: what a host is writing
    if not (path / PLAN_FILE).exists():  # asked after looking: another host may have written it meanwhile
        if others:
            raise FileError(f"The folder {path} holds something other than this corpus. Choose a new folder for it.")
        write_json(path / PLAN_FILE, plan)
    _check_same(path, read_plan(path), plan)
    if not (path / TOKENIZER).exists():
        save_tokenizer(tokenizer, path / TOKENIZER)
    return path


def _check_same(path: Path, begun: JsonObject, asked: JsonObject) -> None:
    if begun == asked:
        return
    for key in ("format_version", "shards", "tokenizer"):
        if begun.get(key) != asked[key]:
            what = f"{key.replace('_', ' ')} {begun.get(key)}, not {asked[key]}"
            break
    else:
        old, new = ({name: facts for name, *facts in plan["sources"]} for plan in (begun, asked))
        what = "the same sources in another order"
        for name in {**old, **new}:
            if name not in new:
                what = f"{name}, which was not given"
                break
            if name not in old:
                what = f"no {name}"
                break
            _check_unchanged(name, old[name], new[name])
    raise FileError(
        f"The corpus in {path} was begun with other arguments: it has {what}. Give the arguments it was begun with, or "
        f"choose a new folder."
    )


def _size_and_digest(source: str) -> list[Any]:
    """What a file is known by: its size, and a digest of its bytes or, where they are many, of some pieces."""
    try:
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            count = min(-(-size // _BYTES_OF_A_PIECE), _PIECES_OF_A_SOURCE)
            digest = hashlib.sha256()
            for number in range(count):
                file.seek((size - _BYTES_OF_A_PIECE) * number // max(count - 1, 1))
                digest.update(file.read(_BYTES_OF_A_PIECE))
    except OSError as error:
        raise FileError(f"Cannot read {source}: {error.strerror or error}.") from error
    return [size, digest.hexdigest()[:16]]


def _check_unchanged(source: str, planned: list[Any], found: list[Any]) -> None:
    if found != planned:
        (had, _), (has, _) = planned, found
        how = f"it has {has} bytes and had {had}" if has != had else f"it has {has} bytes as before, but other ones"
        raise FileError(
            f"{source} was changed since this corpus was begun: {how}. Restore it, or build in a new folder."
        )


def _check_tokenizer(path: Path, plan: JsonObject, tokenizer: Tokenizer) -> None:
    if fingerprint(tokenizer) != plan["tokenizer"]:
        raise CheckpointError(
            f"{path / TOKENIZER} is not the tokenizer that {path / PLAN_FILE} names. Build in a new folder."
        )


def _built(path: Path, shards: int) -> Iterator[tuple[int, Path]]:
    folders = ((number, shard_folder(path, number)) for number in range(shards))
    return ((number, folder) for number, folder in folders if folder.exists())


def _bytes_read(folder: Path) -> int:
    """Bytes of the sources that a part stands for."""
    read: int = read_index(folder).get("bytes_read", 0)
    return read


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


# Dividing


class _Share(NamedTuple):
    """What a part has of one source: bytes `begin` up to `end`, and the characters before them."""

    number: int
    source: str
    begin: int
    end: int
    before: str


def _shares(plan: JsonObject, part: int, tokenizer: Tokenizer) -> Iterator[_Share]:
    """What a part is made of. A compressed source belongs to the part in which its first byte falls."""
    total = sum(size for _, size, _ in plan["sources"])
    low, high = (total * number // plan["shards"] for number in (part, part + 1))
    start = 0
    for number, (source, size, digest) in enumerate(plan["sources"]):
        begin, end = max(low - start, 0), min(high - start, size)
        if source.endswith(".gz"):
            begin, end = (0, size) if low <= start < high else (0, 0)
        if begin < end:
            _check_unchanged(source, [size, digest], _size_and_digest(source))
            begin, end = (first_cut(source, place, size, tokenizer) for place in (begin, end))
        if begin < end:
            yield _Share(number, source, begin, end, _text_before(source, begin, ANCHOR_CHARS))
        start += size


def first_cut(source: str, place: int, size: int, tokenizer: Tokenizer) -> int:
    """The first byte at or after `place` where a cut changes no ID; `size`, the end of the file, if there is none.

    Whether a cut is harmless depends on the characters around it alone, so `first_cut` never decreases with `place`.
    """
    if place in (0, size):
        return place
    place = _next_character(source, place)
    text = _text_before(source, place, CONTEXT_CHARS)
    at, offset = len(text), place - len(text.encode())  # first character not looked at, byte of the first in `text`
    with opened(source, place, size) as (read, _):
        chunks = decoded(source, read, offset=place)
        ended = False
        while not ended:
            chunk = next(chunks, "")
            ended, text = not chunk, text + chunk
            last = len(text) if ended else len(text) - CONTEXT_CHARS
            for match in CUT.finditer(text, at, last + 1):
                if is_harmless(text, match.start(), tokenizer):
                    return offset + len(text[: match.start()].encode())
            at = max(at, last + 1)
            passed = max(0, at - CONTEXT_CHARS)
            offset += len(text[:passed].encode())
            text, at = text[passed:], at - passed
    return size


def _text_before(source: str, place: int, count: int) -> str:
    """The last `count` characters before byte `place` of a file, or as many as there are."""
    begin = _next_character(source, max(0, place - _BYTES_OF_A_CHAR * (count + 1)))
    raw = _bytes_of(source, begin, place)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise TextError(not_utf8(source, begin + error.start, raw[error.start], raw)) from error
    return (text if begin else text.removeprefix("\ufeff"))[-count:]


def _next_character(source: str, place: int) -> int:
    """`place`, or where it falls into a character the byte behind it."""
    following = _bytes_of(source, place, place + _BYTES_OF_A_CHAR - 1)
    return place + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def _bytes_of(source: str, begin: int, end: int) -> bytes:
    with opened(source, begin, end) as (read, _):
        return checked(source, read, end - begin)
