"""Text files of any size as one memory-mapped array of token IDs."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from embedlayer.core.errors import EmbedLayerWarning, FileError, SizeError, TextError, TokenIdError
from embedlayer.data.corpus_files import INDEX_FILE, TOKENIZER, concatenate_shards, read_shards, write_shard_tables
from embedlayer.data.memmap import ConcatenatedArray, IdArray
from embedlayer.data.text_chunks import encode_chunks, split_text
from embedlayer.data.text_files import READ_BYTES, decoded, find_text_files, opened
from embedlayer.io.files import create_folder, recover_folder, replace_folder
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint, pure_tokenizer

Progress = Callable[[int, int], None]


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
        cls, sources: Sequence[str | Path], tokenizer: object, path: str | Path, *, on_progress: Progress | None = None
    ) -> "TokenCorpus":
        """Encode text files into a corpus in the folder `path`, and open it.

        The folder is written atomically, with the tokenizer. Memory use hardly grows with the size of the files.

        Args:
            sources: Files, folders, and `"-"` for standard input, as for `find_text_files`. Each file is a document.
            tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
            path: A new or empty folder, or a corpus without shards, which is replaced.
            on_progress: Called with the number of bytes read so far and the total, 0 if unknown.

        Raises:
            FileError: A source cannot be read, or `path` cannot be written or holds other files.
            TextError: A source is not plain text (see `find_text_files`), or no source has text.
            TokenizerError: `tokenizer` is no tokenizer, or cannot encode a text.

        Warns:
            EmbedLayerWarning: A source without text is left out, a `.txt` has JSON lines, or the IDs next to a cut may
                differ from those of the whole text.
        """
        tokenizer, path = as_tokenizer(tokenizer), Path(path)
        files = find_text_files(sources)
        create_folder(path.parent)
        with replace_folder(path) as folder:
            _check_replaceable(path)  # after what is there is noted, which is what will be replaced
            with (folder / "ids.bin").open("wb") as file:
                writer = CorpusWriter(tokenizer, lambda ids: file.write(ids.tobytes()))
                total = 0 if "-" in files else sum(Path(source).stat().st_size for source in files)
                report = on_progress or ignore_progress
                for source in files:
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
            TextError: The text gives no token, or has lone surrogates, which UTF-8 cannot encode.
            TokenizerError: `tokenizer` is no tokenizer, or cannot encode the text.

        Warns:
            EmbedLayerWarning: The IDs next to a cut may differ from those of the whole text.

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
        parts: list[IdArray] = []
        writer = CorpusWriter(as_tokenizer(tokenizer), parts.append)
        slices = (text[at : at + READ_BYTES] for at in range(0, len(text), READ_BYTES))
        require_text(writer.add_document(slices), ["the text"])
        digest = fingerprint(writer.tokenizer)
        return cls(np.concatenate(parts), *writer.tables(), vocab_size=writer.vocab_size, tokenizer_fingerprint=digest)

    @classmethod
    def open(cls, path: str | Path) -> "TokenCorpus":
        """Open the corpus in a folder that `build` or `build_in_shards` wrote; its token IDs are memory-mapped.

        Raises:
            FileError: There is no corpus at `path`, or a file cannot be read or mapped.
            CheckpointError: A file is missing, truncated, of another format version or does not fit the others; a shard
                is not built yet; or no shard has text.
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
        tokenizer: Encodes the documents.
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

        The bytes from offset `begin` up to `end` are read, and `before` are the last characters before them. After each
        encoded text chunk, `report` is called with the number of bytes read so far, earlier sources included.

        Returns:
            Whether the text has any token. A document without tokens is not recorded.

        Raises:
            FileError: The source cannot be read or decompressed.
            TextError: The source is not plain text.
            TokenizerError: The tokenizer cannot encode the text.
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

        `after_chunk` is called after each encoded text chunk, to report progress. `before` are the last characters
        before `texts` if they are the rest of a document.

        Returns:
            Whether the text has any token. A document without tokens is not recorded; its bytes count in `num_bytes`.
        """
        started = False
        for chunk, ids in encode_chunks(split_text(texts, self.tokenizer), self.tokenizer, before=before):
            self.num_bytes += len(chunk.encode())
            if len(ids):
                if not started:
                    if self.num_tokens and self.separator is not None:
                        self.write(np.array([self.separator], dtype=self.dtype))
                        self.num_tokens += 1
                        self.token_ends[-1] += 1
                    self.documents.append(self.num_tokens)
                    started = True
                self.write(ids.astype(self.dtype))
                self.num_tokens += len(ids)
                self.token_ends.append(self.num_tokens)
                self.byte_ends.append(self.num_bytes)
            elif self.byte_ends:
                self.byte_ends[-1] = self.num_bytes
            after_chunk()
        return started

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

    `has_text` is the number of tokens or documents, or whether there are any.

    Raises:
        TextError: There are none.
    """
    if not has_text:
        raise TextError(f"There is no text in {', '.join(map(str, sources))}. Pass a file with at least one word.")


def warn_left_out(source: str | Path) -> None:
    """Warn that a source is left out of the corpus because it has no text."""
    warnings.warn(f"{source} is left out: it has no text.", EmbedLayerWarning, stacklevel=3)


def _check_replaceable(path: Path) -> None:
    """Raise a `FileError` unless nothing, an empty folder, or a corpus without shards is at `path`."""
    names = {file.name for file in path.iterdir()} if recover_folder(path).is_dir() else set()
    if names and not {INDEX_FILE, "ids.bin"} <= names:
        raise FileError(f"The folder {path} holds other files than a corpus. Choose a new folder for the corpus.")
    if path.exists() and not path.is_dir():
        raise FileError(f"{path} is a file, not a folder. Choose a new folder.")
