"""Encode text files of any size into one memory-mapped array of token IDs.

How a long text is split. A text is encoded in chunks, and the IDs of the chunks must equal the IDs of the whole text.
Which cuts are safe depends on the tokenizer: GPT-2 joins a space to the next word, LLaMA and T5 put a space before
every text, other tokenizers join line breaks to the full stop before them. So each cut is tried with the tokenizer
itself. A cut between `left` and `right` is safe if, for 128 characters on either side,

    encode(left + right) == encode(left) + encode(anchor + right)[len(encode(anchor)):]

where the anchor is the last 16 characters of `left`. A tokenizer may change the start of a text; this change then
affects the anchor, whose IDs are discarded. Limit: the IDs may change if a tokenizer depends on text further away.
Where no cut is safe within a million characters (one endless word), the text is cut anyway, with a warning.
"""

import codecs
import gzip
import re
import sys
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from embedlayer.command_name import command_line
from embedlayer.data.corpus_files import (
    INDEX_FILE,
    PLAN_FILE,
    TOKENIZER,
    concatenate_shards,
    is_corpus,
    read_shards,
    write_shard_tables,
)
from embedlayer.data.memmap import ConcatenatedArray
from embedlayer.data.memmap import IdArray as IdArray
from embedlayer.data.process_pool import usable_cores
from embedlayer.data.text_formats import DATASET, TextFormat, format_of_text, is_other, not_text, refuse_json_lines
from embedlayer.errors import EmbedLayerWarning, FileError, SizeError, TextError, TokenIdError
from embedlayer.forks import BackgroundThread, Job
from embedlayer.io.files import create_folder, file_errors, recover_folder, replace_folder, require_file
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, encode_batch, fingerprint, pure_tokenizer

Progress = Callable[[int, int], None]
_Read = Callable[[int], bytes]

_READ_BYTES = 1 << 16
_FEWEST_CHARS, _MOST_CHARS = 512, 1 << 14
_ENDLESS_CHARS = 1 << 20
CONTEXT_CHARS, ANCHOR_CHARS = 128, 16
_FEWEST_CHUNKS, _CHUNKS_PER_CORE = 32, 4
_TRIES = 8
_CUTS = (  # best first
    re.compile(r"(?<=[^\W_])(?= [^\W_])"),  # a single space between two words
    re.compile(r"(?<=\S)(?=\s)"),  # any white space
    re.compile(r"(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)"),  # a word beside a mark
)
CUT = re.compile("|".join(pattern.pattern for pattern in _CUTS))


def find_text_files(paths: Sequence[str | Path]) -> list[str | Path]:
    """Return the text files that `paths` name: files themselves, and all text files in folders and their subfolders.

    `"-"`, for standard input, is returned as it is. The files of a folder are sorted. Hidden files in folders are left
    out, and so are corpora and binary files: those with a zero byte in their first 64 KiB (decompressed, for a `.gz`).
    Files of the formats in `embedlayer.data.text_formats` are left out with a warning. They are refused if they are
    passed by name, or have more bytes than the text files of the folder.

    Raises:
        FileError: A path does not exist or cannot be read.
        TextError: A file is not plain text, a folder holds no text file or mostly files of other formats, or `paths` is
            empty.
    """
    found: list[str | Path] = []
    for given in paths:
        path = Path(given)
        if str(given) == "-":
            found.append("-")
        elif path.is_dir():
            found += _texts_below(path)
        elif path.exists():
            _check_start(path)
            found.append(path)
        else:
            raise FileError(f"There is no file or folder {path}. Check the path, or pass - for standard input.")
    if not found:
        raise TextError("No text was passed. Name files or folders, or - for standard input.")
    return found


def read_text_chunks(source: str | Path, *, tokenizer: object = None) -> Iterator[str]:
    """Yield a text in chunks of some thousand characters; their concatenation is the text.

    Args:
        source: A UTF-8 file, gzipped if it ends in `.gz`, or `"-"` for standard input. Line ends are kept; a
            byte-order mark at the start is left out.
        tokenizer: The chunks are cut such that their IDs are the IDs of the whole text. `None`: cut between words.

    Raises:
        FileError: The file cannot be read.
        TextError: The file is not plain text.
    """
    with opened(source) as (read, _):
        checker = None if tokenizer is None else pure_tokenizer(as_tokenizer(tokenizer))
        yield from split_text(decoded(source, read), checker)


def encode_chunks(chunks: Iterable[str], tokenizer: object, *, before: str = "") -> Iterator[tuple[str, IdArray]]:
    """Encode a text chunk by chunk, and yield each chunk with its token IDs, `(N,)` int64.

    The concatenated IDs are those of the whole text. No special tokens are added at the start or the end of the text.

    Args:
        chunks: Chunks from `read_text_chunks` for this tokenizer.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        before: The last characters before the first chunk, if the chunks do not start at the start of the text.
    """
    for batch, encodings in _encode_ahead(iter(chunks), before[-ANCHOR_CHARS:], as_tokenizer(tokenizer)):
        for chunk, whole, start in zip(batch, encodings, encodings[len(batch) :], strict=False):
            yield chunk, np.array(whole.ids[len(start) :], dtype=np.int64)


def _encode_ahead(
    chunks: Iterator[str], anchor: str, tokenizer: Tokenizer
) -> Iterator[tuple[list[str], list[Encoding]]]:
    """Yield batches of chunks with the encodings of each chunk behind its anchor, followed by those of the anchors.

    A thread encodes a batch while the caller uses the one before and the next one is cut.

    Args:
        chunks: Chunks of a text.
        anchor: Anchor of the first chunk: the last characters before it.
        tokenizer: The tokenizer.
    """
    tokenizer = pure_tokenizer(tokenizer)
    size = max(_FEWEST_CHUNKS, _CHUNKS_PER_CORE * usable_cores())
    with BackgroundThread("embedlayer-encode") as thread:
        begun: list[tuple[list[str], Job[list[Encoding]]]] = []
        while batch := list(islice(chunks, size)):
            anchors = [anchor, *(chunk[-ANCHOR_CHARS:] for chunk in batch)]
            anchor = anchors.pop()
            texts = [start + chunk for start, chunk in zip(anchors, batch, strict=True)]
            begun.append((batch, thread.submit(partial(encode_batch, tokenizer, texts + anchors))))
            if len(begun) > 1:
                batch, job = begun.pop(0)
                yield batch, job.result()
        for batch, job in begun:
            yield batch, job.result()


@dataclass(eq=False, repr=False)
class TokenCorpus:
    """Token IDs of one or more documents in a single array, usually memory-mapped.

    Documents are separated by the tokenizer's end-of-text token, if it has one. On disk a corpus is a folder with
    `ids.bin` (little-endian), `documents.npy`, `blocks.npy`, `index.json` and `tokenizer.json`, or a folder of shards.

    Attributes:
        ids: All token IDs, `(N,)`, uint16 if the vocabulary has at most 65,536 entries, else uint32. Memory-mapped,
            except after `from_text`. A `ConcatenatedArray` if the corpus has several shards.
        documents: Index in `ids` of the first token of each document, int64.
        blocks: Number of tokens and of UTF-8 bytes up to the end of each text chunk, `(chunks, 2)` int64.
        vocab_size: Number of rows that a table needs for these IDs.
        tokenizer_fingerprint: `fingerprint` of the tokenizer.
    """

    ids: IdArray | ConcatenatedArray
    documents: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    _: KW_ONLY
    vocab_size: int
    tokenizer_fingerprint: str

    @classmethod
    def build(
        cls,
        sources: Sequence[str | Path],
        tokenizer: object,
        path: str | Path,
        *,
        on_progress: Progress | None = None,
    ) -> "TokenCorpus":
        """Encode text files into a corpus in the folder `path`, and open it.

        The folder is written atomically, with the tokenizer. Memory use does not depend on the size of the files.

        Args:
            sources: Files, folders, and `"-"` for standard input, as for `find_text_files`. Each file is a document.
            tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
            path: A new or empty folder, or a corpus, which is replaced.
            on_progress: Called with the number of bytes read so far and the total, 0 if unknown.

        Raises:
            FileError: A source cannot be read, or `path` cannot be written or holds other files.
            TextError: A source is not UTF-8, or no source has text.
        """
        tokenizer, path = as_tokenizer(tokenizer), Path(path)
        found = find_text_files(sources)
        create_folder(path.parent)
        with replace_folder(path) as folder:
            _check_replaceable(path)  # after what is there is noted, which is what will be replaced
            with (folder / "ids.bin").open("wb") as file:
                writer = CorpusWriter(tokenizer, lambda ids: file.write(ids.tobytes()))
                total = 0 if "-" in found else sum(Path(source).stat().st_size for source in found)
                report = on_progress or ignore_progress
                for source in found:
                    if not writer.add_source(source, lambda read: report(read, total)):
                        warn_left_out(source)
            require_text(writer.num_tokens, sources)
            write_shard_tables(folder, *writer.tables(), writer.index())
            save_tokenizer(tokenizer, folder / TOKENIZER)
        return cls.open(path)

    @classmethod
    def from_text(cls, text: str, tokenizer: object) -> "TokenCorpus":
        """Encode a string into a corpus in memory.

        Raises:
            TextError: The text is empty, or has lone surrogates, which UTF-8 cannot encode.

        Example:
            >>> from embedlayer.tokenization.train import train_tokenizer
            >>> corpus = TokenCorpus.from_text("Hello", train_tokenizer((), kind="byte"))
            >>> corpus.ids
            array([ 72, 101, 108, 108, 111], dtype=uint16)
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"The text cannot be encoded: character {error.object[error.start]!r} is half of a surrogate pair. "
                f"Decode the bytes it came from with errors='strict' or 'replace'."
            ) from error
        kept: list[IdArray] = []
        writer = CorpusWriter(as_tokenizer(tokenizer), kept.append)
        slices = (text[at : at + _READ_BYTES] for at in range(0, len(text), _READ_BYTES))
        require_text(writer.add_document(slices), ["the text"])
        digest = fingerprint(writer.tokenizer)
        return cls(np.concatenate(kept), *writer.tables(), vocab_size=writer.vocab_size, tokenizer_fingerprint=digest)

    @classmethod
    def open(cls, path: str | Path) -> "TokenCorpus":
        """Open the corpus in a folder that `build` or `build_in_shards` wrote; its token IDs are memory-mapped.

        Raises:
            FileError: There is no corpus at `path`.
            CheckpointError: A file is missing, truncated, or does not fit the others, or a shard is not built yet.
        """
        shards = read_shards(Path(path))
        index = shards[0].metadata
        return cls(
            *concatenate_shards(shards), vocab_size=index["vocab_size"], tokenizer_fingerprint=index["tokenizer"]
        )

    @property
    def num_tokens(self) -> int:
        """Number of token IDs, N."""
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes of the encoded text, the denominator of bits per byte."""
        return int(self.blocks[-1, 1])

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return f"TokenCorpus({self.num_tokens} tokens, {self.num_bytes} bytes, {len(self.documents)} documents)"

    def counts(self, size: int) -> npt.NDArray[np.int64]:
        """Count how often each ID from 0 to `size - 1` occurs in the corpus; memory use does not depend on its length.

        Args:
            size: Number of rows of the table, V. `vocab_size` is large enough for every ID.

        Returns:
            The counts by ID, `(size,)` int64.

        Raises:
            TokenIdError: The corpus holds an ID that is not below `size`.
            SizeError: `size` is below 1.

        Example:
            >>> TokenCorpus.from_text("aab", tokenizer).counts(257)[97:99].tolist()
            [2, 1]
        """
        if size < 1:
            raise SizeError(f"size is {size}; it must be 1 or more: the corpus was encoded for {self.vocab_size} IDs.")
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, len(self.ids), 1 << 20):
            ids = np.asarray(self.ids[start : start + (1 << 20)])
            largest = int(ids.max())  # before bincount, which allocates as many numbers as the largest ID says
            if largest >= size:
                raise TokenIdError(
                    f"token id {largest} at token {start + int(ids.argmax())} of the corpus is outside 0..{size - 1}, "
                    f"the {size} IDs to be counted. The corpus was encoded for {self.vocab_size}: call "
                    f"counts({self.vocab_size}), or build the corpus again if it should have no such ID."
                )
            counts += np.bincount(ids, minlength=size)
        return counts

    def split(self, validation_fraction: float) -> tuple["TokenCorpus", "TokenCorpus"]:
        """Split the corpus into its first part, for training, and its last part, for validation; no ID is copied.

        The split is at the end of the text chunk nearest to the requested fraction, so `num_bytes` of both is exact.

        Args:
            validation_fraction: Requested share of the tokens in the validation part, above 0 and below 1.

        Returns:
            The training part and the validation part.

        Raises:
            SizeError: `validation_fraction` is not between 0 and 1.
            TextError: The corpus is a single text chunk: it is small, or one line without a place to divide it.
        """
        if not 0 < validation_fraction < 1:
            raise SizeError(f"validation_fraction is {validation_fraction}; it must be between 0 and 1, such as 0.1.")
        if len(self.blocks) < 2:
            raise TextError(
                f"A corpus of {self.num_tokens} tokens ({self.num_bytes} bytes) is too small for a validation "
                f"part: it is a single text chunk. Pass a text of a few thousand characters, in lines: a text is "
                f"divided where no token can cross, such as at the end of a line (fold -w 80 TEXT breaks long ones)."
            )
        wanted = self.num_tokens * (1 - validation_fraction)
        last = int(np.abs(self.blocks[:-1, 0] - wanted).argmin())
        cut = int(self.blocks[last, 0])
        before, after = self.blocks[: last + 1], self.blocks[last + 1 :] - self.blocks[last]
        starts = np.unique(np.maximum(self.documents - cut, 0)[np.searchsorted(self.documents, cut, "right") - 1 :])
        return (
            replace(self, ids=self.ids[:cut], documents=self.documents[self.documents < cut], blocks=before),
            replace(self, ids=self.ids[cut:], documents=starts, blocks=after),
        )


class CorpusWriter:
    """Encode documents one after another, pass their IDs to a function, and record what a `TokenCorpus` needs.

    Recorded are the start of each document and the numbers of tokens and bytes; see `tables` and `index`.

    Args:
        tokenizer: The tokenizer.
        write: Called with the IDs of each text chunk, and with the ID that separates two documents. The arrays are
            uint16 or uint32.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[IdArray], object]) -> None:
        self.tokenizer = pure_tokenizer(tokenizer)
        self.write = write
        self.vocab_size = table_size(tokenizer)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self.separator = end_of_text_id(tokenizer)
        self.documents, self.token_ends, self.byte_ends = array("q"), array("q"), array("q")
        self.num_tokens = self.num_bytes = self.bytes_read = 0

    def add_source(
        self,
        source: str | Path,
        report: Callable[[int], object],
        *,
        begin: int = 0,
        end: int | None = None,
        before: str = "",
    ) -> bool:
        """Read a text file, or the rest of a text file, encode it as a document, and pass its IDs to `write`.

        Args:
            source: A file, or `"-"` for standard input.
            report: Called after each encoded text chunk with the number of bytes read so far, earlier sources included.
            begin: Offset of the first byte to read.
            end: Offset of the byte before which reading stops; `None` for the end of the file.
            before: The last characters before `begin`.

        Returns:
            Whether the text has any token. A document without tokens is not recorded.

        Raises:
            FileError: The source cannot be read or decompressed.
            TextError: The text is not UTF-8.
        """
        with opened(source, begin, end) as (read, position):
            texts = decoded(source, read, offset=begin)
            has_text = self.add_document(texts, lambda: report(self.bytes_read + position()), before=before)
            self.bytes_read += position()
        return has_text

    def add_document(
        self, texts: Iterable[str], after_chunk: Callable[[], object] = lambda: None, *, before: str = ""
    ) -> bool:
        """Encode a document, or the rest of a document, and pass its IDs to `write`.

        Args:
            texts: The text, in strings of any length.
            after_chunk: Called without arguments after each encoded text chunk, to report progress.
            before: The last characters before `texts` if they are the rest of a document.

        Returns:
            Whether the text has any token. A document without tokens is not recorded.
        """
        started = False
        for chunk, ids in encode_chunks(split_text(texts, self.tokenizer), self.tokenizer, before=before):
            self.num_bytes += len(chunk.encode())
            if len(ids):
                if not started:
                    self._start_document()
                    started = True
                self.write(ids.astype(self.dtype))
                self.num_tokens += len(ids)
                self.token_ends.append(self.num_tokens)
                self.byte_ends.append(self.num_bytes)
            elif self.byte_ends:
                self.byte_ends[-1] = self.num_bytes
            after_chunk()
        return started

    def _start_document(self) -> None:
        """Record that a document starts here. If there is an earlier document, write the separator first."""
        if self.num_tokens and self.separator is not None:
            self.write(np.array([self.separator], dtype=self.dtype))
            self.num_tokens += 1
            self.token_ends[-1] += 1
        self.documents.append(self.num_tokens)

    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the arrays `documents` and `blocks` of a `TokenCorpus` for the documents so far.

        `documents`, `(documents,)` int64, has the index of each document's first token. `blocks`, `(chunks, 2)` int64,
        has the numbers of tokens and of UTF-8 bytes up to the end of each text chunk.
        """
        blocks = np.stack([np.array(ends, dtype=np.int64) for ends in (self.token_ends, self.byte_ends)], axis=1)
        return np.array(self.documents, dtype=np.int64), blocks

    def index(self) -> dict[str, Any]:
        """Return the fields of `index.json` that the writer knows: dtype, sizes, and the tokenizer's fingerprint."""
        return {
            "dtype": self.dtype.name,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "vocab_size": self.vocab_size,
            "tokenizer": fingerprint(self.tokenizer),
        }


def ignore_progress(read: int, total: int) -> None:
    """Do nothing with a report of progress; it takes the place of an `on_progress` that is `None`."""


def require_text(has_text: bool | int, sources: Sequence[str | Path]) -> None:
    """Raise an error if the sources of a corpus gave no token.

    Args:
        has_text: Whether there is any token, or the number of tokens.
        sources: Names of the sources, for the error message.

    Raises:
        TextError: There is no token.
    """
    if not has_text:
        raise TextError(f"There is no text in {', '.join(map(str, sources))}. Pass a file with at least one word.")


def warn_left_out(source: str | Path) -> None:
    """Warn that a source is left out of the corpus because it has no text."""
    warnings.warn(f"{source} is left out: it has no text.", EmbedLayerWarning, stacklevel=3)


# Cutting


def split_text(texts: Iterable[str], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Split a text into chunks, such that the IDs of the chunks, concatenated, are the IDs of the whole text.

    The first chunks have up to 512 characters, later ones up to 16384, so that a short text has several chunks too.
    Where no cut is safe within a million characters, the text is cut anyway, with a warning.

    Args:
        texts: The text, in strings of any length.
        tokenizer: Tokenizer with which each cut is checked. `None`: cuts are not checked, and IDs may change.
    """
    rest, done, wanted = "", 0, _FEWEST_CHARS
    for text in texts:
        rest += text
        while len(rest) >= wanted + CONTEXT_CHARS:
            cut = _find_cut(rest, wanted, tokenizer)
            if cut is None and wanted < _ENDLESS_CHARS:
                wanted *= 2
                continue
            if cut is None:
                cut = wanted
                warnings.warn(
                    f"No safe position for a cut was found in {wanted} characters from character {done} on. Cut at "
                    f"{done + cut}: the IDs next to it may differ from those of the uncut text.",
                    EmbedLayerWarning,
                    stacklevel=2,
                )
            yield rest[:cut]
            rest, done = rest[cut:], done + cut
            wanted = min(max(done // 64, _FEWEST_CHARS), _MOST_CHARS)
    if rest:
        yield rest


def _find_cut(text: str, end: int, tokenizer: Tokenizer | None) -> int | None:
    """Return an index between `end / 2` and `end` at which a text can be cut safely; `None` if none is found.

    Cuts between two words are tried first, then those at white space and at punctuation; of each kind, the last ones.

    Args:
        text: The text, with at least 128 characters after `end`.
        end: Largest index.
        tokenizer: Tokenizer with which a cut is checked; `None`: the first one tried is returned.
    """
    for pattern in _CUTS:
        for place in _last_places(pattern, text, end):
            if tokenizer is None or is_safe_cut(text, place, tokenizer):
                return place
    return None


def _last_places(pattern: re.Pattern[str], text: str, end: int) -> list[int]:
    """Return where an empty pattern matches last between `end / 2` and `end`: at most `_TRIES` places, the last first.

    Args:
        pattern: One of `_CUTS`.
        text: The text.
        end: Largest index.
    """
    width = _FEWEST_CHARS
    while True:
        start = max(end // 2, end - width)
        places = [match.start() for match in pattern.finditer(text, start, end + 1)]
        if len(places) >= _TRIES or start == end // 2:
            return places[: -_TRIES - 1 : -1]
        width *= _TRIES


def is_safe_cut(text: str, place: int, tokenizer: Tokenizer) -> bool:
    """Return whether the IDs of a text stay the same if it is cut in two at `place`.

    Only the 128 characters on either side of the cut are encoded and compared.

    Args:
        text: The text.
        place: Index of the first character after the cut.
        tokenizer: The tokenizer.
    """

    def ids_of(part: str) -> list[int]:
        """Return the token IDs of a string, without special tokens."""
        return encode(tokenizer, part).ids

    left, right = text[max(0, place - CONTEXT_CHARS) : place], text[place : place + CONTEXT_CHARS]
    anchor = left[-ANCHOR_CHARS:]
    return ids_of(left + right) == ids_of(left) + ids_of(anchor + right)[len(ids_of(anchor)) :]


# Reading


def _texts_below(folder: Path) -> list[Path]:
    """Return the text files in a folder and its subfolders, sorted; see `find_text_files` for what is left out.

    Raises:
        TextError: There is no text file, the folder is a corpus or a data set, or its files of the formats in
            `embedlayer.data.text_formats` are larger than its text files.

    Warns:
        EmbedLayerWarning: Files of these formats are left out.
    """
    if is_corpus(folder):
        raise TextError(
            f"The folder {folder} is a corpus of token IDs, and not text. Train on it, without other files: "
            f"{command_line('train', folder, '-o', 'RUN')}; in Python, open it with TokenCorpus.open."
        )
    if DATASET.matches(folder, b""):
        raise TextError(is_other(folder, DATASET))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    corpora = {file.parent for file in files if file.name in (PLAN_FILE, INDEX_FILE) and is_corpus(file.parent)}
    visible = [
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(folder).parts) and corpora.isdisjoint(file.parents)
    ]
    texts: list[Path] = []
    others: dict[Path, TextFormat] = {}
    for file in visible:
        start = _start_of(file)
        found = format_of_text(file, start)
        if found is not None:
            others[file] = found
        elif b"\0" not in start:
            texts.append(file)
    if others and _sizes(others) >= _sizes(texts):
        first, found = next(iter(others.items()))
        raise TextError(
            f"The folder {folder} holds {len(others)} files that are not plain text, with more bytes than its "
            f"{len(texts)} files of text. Convert them, or name the files of text alone. {is_other(first, found)}"
        )
    if others:
        first, found = next(iter(others.items()))
        warnings.warn(
            f"{len(others)} files in {folder} are left out, which are not plain text: {first} is {found.name}"
            f"{', ...' if len(others) > 1 else ''}. Passed by its name, a file is refused with a command that converts "
            f"it.",
            EmbedLayerWarning,
            stacklevel=3,
        )
    if not texts:
        raise TextError(f"The folder {folder} has no text files ({len(visible)} files are binary). Name files.")
    return texts


def _start_of(file: Path) -> bytes:
    """Return the first 64 KiB of a file, decompressed if its name ends in `.gz`.

    They are empty for a file that cannot be read: reading its text raises the error later.
    """
    try:
        with opened(file) as (read, _):
            return checked(file, read)
    except FileError:
        return b""


def _check_start(file: Path) -> None:
    """Read the first 64 KiB of a file, decompressed if its name ends in `.gz`, and check that they are plain text.

    A file that cannot be read is left to what reads all of its text.

    Raises:
        TextError: They are not plain text.
    """
    with suppress(FileError), opened(file) as (read, _):
        next(decoded(file, read), "")


def _sizes(files: Iterable[Path]) -> int:
    """Return the number of bytes of files."""
    return sum(file.stat().st_size for file in files)


@contextmanager
def opened(source: str | Path, begin: int = 0, end: int | None = None) -> Iterator[tuple[_Read, Callable[[], int]]]:
    """Context manager: open a source of text and yield two functions, `read` and `position`.

    `read(size)` returns at most `size` bytes of the text, decompressed if the name ends in `.gz`; empty bytes mean the
    end. `position()` returns how many bytes of the file were read, compressed ones for a `.gz`; 0 for standard input.
    It is counted from `begin` if `end` applies, else from the start of the file.

    Args:
        source: A file, or `"-"` for standard input.
        begin: Offset of the first byte to read. It must be 0 for a `.gz`, and is ignored for standard input.
        end: Offset of the byte before which reading stops; `None` for the end of the file. It is ignored for a `.gz`
            and for standard input, which are read to their end.

    Raises:
        FileError: The file cannot be opened.
    """
    if str(source) == "-":
        yield sys.stdin.buffer.read, lambda: 0
        return
    require_file(source)
    with file_errors(f"read {source}"):
        file = open(source, "rb")  # noqa: SIM115  closed below; errors of the block inside are not ours to explain
        file.seek(begin)
    with file:
        if str(source).endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield unzipped.read, file.tell
        elif end is None:
            yield file.read, file.tell
        else:
            yield lambda size: file.read(min(size, end - file.tell())), lambda: file.tell() - begin


def checked(source: str | Path, read: _Read, size: int = _READ_BYTES) -> bytes:
    """Return `read(size)`, and turn an error in it into a `FileError`.

    Args:
        source: Path of the text, for the error message.
        read: Function of `opened` that returns at most `size` bytes; empty bytes mean the end of the text.
        size: Largest number of bytes to read.

    Raises:
        FileError: The source cannot be read or decompressed.
    """
    try:
        return read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"Cannot read {source}: {error}. The file is damaged or not gzipped.") from error
    except OSError as error:
        raise FileError(f"Cannot read {source}: {error.strerror or error}.") from error


def decoded(source: str | Path, read: _Read, *, offset: int = 0) -> Iterator[str]:
    """Read UTF-8 text block by block and yield it as strings. Line ends are kept; a byte-order mark is left out.

    Args:
        source: Path, for error messages.
        read: Function of `opened` that returns at most as many bytes as its argument says.
        offset: Offset of the first byte in the file. At 0 the text may start with a byte-order mark.

    Raises:
        FileError: The source cannot be read or decompressed.
        TextError: The source is not plain text; see `embedlayer.data.text_formats`.
    """
    rest, block, begins = b"", checked(source, read), not offset
    if begins and block.startswith(codecs.BOM_UTF8):
        offset, block = len(codecs.BOM_UTF8), block[len(codecs.BOM_UTF8) :] or checked(source, read)
    start = block
    if begins:
        refuse_json_lines(source, start)
    while block or rest:
        raw = rest + block
        try:
            text, used = codecs.utf_8_decode(raw, "strict", not block)
        except UnicodeDecodeError as error:
            raise TextError(not_text(source, start, offset + error.start, raw[error.start])) from error
        if "\0" in text:
            raise TextError(not_text(source, start, offset + raw.index(b"\0"), 0))
        yield text
        offset, rest, block = offset + used, raw[used:], checked(source, read)


def _check_replaceable(path: Path) -> None:
    """Raise an error unless a corpus may be written to `path`: nothing, an empty folder or a corpus is there.

    Raises:
        FileError: `path` is a file, or a folder with other files.
    """
    names = {file.name for file in path.iterdir()} if recover_folder(path).is_dir() else set()
    if names and not {INDEX_FILE, "ids.bin"} <= names:
        raise FileError(f"The folder {path} holds other files than a corpus. Choose a new folder for the corpus.")
    if path.exists() and not path.is_dir():
        raise FileError(f"{path} is a file, not a folder. Choose a new folder.")
