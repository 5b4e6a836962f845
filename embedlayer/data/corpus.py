"""Text files of any size, and files of rows, as one memory-mapped array of token IDs."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from embedlayer.core.errors import EmbedLayerWarning, FileError, SizeError, TextError, TokenIdError
from embedlayer.data.corpus_files import (
    IDS_FILE,
    INDEX_FILE,
    TOKENIZER,
    WEIGHTS_FILE,
    concatenate_shards,
    read_shards,
    write_shard_tables,
)
from embedlayer.data.memmap import ConcatenatedArray, IdArray
from embedlayer.data.readers.documents import Document, Reader, RowOptions
from embedlayer.data.readers.sources import find_sources
from embedlayer.data.text_chunks import TextChunk, document_chunks, encode_ahead
from embedlayer.data.text_files import READ_BYTES, saved_standard_input
from embedlayer.data.text_formats import source_name
from embedlayer.io.files import create_folder, named_path, recover_folder, replace_folder
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint, pure_tokenizer

Progress = Callable[[int, int], None]

_FEWEST_BYTES, _MOST_BYTES = 512, 1 << 14


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
        token_weights: Weight of each token as a target in the loss, `(N,)` uint8: 1 for the tokens of an assistant in
            chats and for all tokens of other texts, else 0. `None`: all are 1.
    """

    ids: IdArray | ConcatenatedArray
    documents: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    _: KW_ONLY
    vocab_size: int
    tokenizer_fingerprint: str
    token_weights: IdArray | ConcatenatedArray | None = None

    @classmethod
    def build(
        cls,
        sources: Sequence[str | Path],
        tokenizer: object,
        path: str | Path,
        *,
        text_field: str | None = None,
        chat_template: str | Path | None = None,
        on_progress: Progress | None = None,
    ) -> "TokenCorpus":
        """Encode text files, and files of rows, into a corpus in the folder `path`, and open it.

        The folder is written atomically, with the tokenizer. Memory use hardly grows with the size of the files.

        Args:
            sources: Files, folders, and `"-"` for standard input, as for `find_sources`. Each text file is a document,
                and so is each row of the other files.
            tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
            path: A new or empty folder, or a corpus without shards, which is replaced.
            text_field: Name of the field of a row that is the document; `None`: `text`, else `messages`, a chat.
            chat_template: Folder of the tokenizer whose chat template renders chats, or a file in it; `None`: the
                template of `tokenizer`, if it is one of transformers. Of chats, only the tokens of the assistant have
                the weight 1 in `token_weights`.
            on_progress: Called with the number of bytes read so far and the total.

        Raises:
            SizeError: There is a `text_field`, and no source has rows.
            FileError: A source cannot be read, or `path` cannot be written or holds other files.
            TextError: A source or a record is not what it should be (see `find_sources`), or no source has text.
            TokenizerError: `tokenizer` is no tokenizer, or cannot encode a text; or there are chats, and no chat
                template with `{% generation %}`.
            MissingExtraError: A source needs `pip install 'embedlayer[parquet]'`, or chats `'embedlayer[hf]'`.

        Warns:
            EmbedLayerWarning: A source or a row without text is left out, a `.txt` has JSON lines, or the IDs next to a
                cut may differ from those of the whole text.
        """
        backend, path = as_tokenizer(tokenizer), named_path(path)
        create_folder(path.parent)
        with saved_standard_input(sources, path.parent) as readable:
            options = RowOptions(text_field, chat_template or tokenizer)
            readers = find_sources(readable, options)
            with replace_folder(path) as folder:
                # after what is there is noted, which is what will be replaced
                names = {file.name for file in path.iterdir()} if recover_folder(path).is_dir() else {*()}
                if (names and not {INDEX_FILE, IDS_FILE} <= names) or (path.exists() and not path.is_dir()):
                    raise FileError(f"{path} is neither a corpus nor an empty folder. Choose a new folder.")
                total = sum(Path(reader.source).stat().st_size for reader in readers)
                report = on_progress or ignore_progress
                has_weights = any(reader.has_weights for reader in readers)
                with corpus_writer(folder, backend, has_weights=has_weights) as writer:
                    for reader in readers:
                        if not writer.add_source(reader, lambda read: report(read, total)):
                            warn_left_out(reader.source)
                require_text(writer.num_tokens, sources)
                write_shard_tables(folder, *writer.tables(), writer.index())
                save_tokenizer(backend, folder / TOKENIZER)
                if has_weights:
                    options.chat_template.save(folder)
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
            raise TextError(f"The text has {text[error.start]!a}, half of a surrogate pair.") from error
        parts: list[IdArray] = []
        writer = CorpusWriter(as_tokenizer(tokenizer), parts.append)
        slices = (text[at : at + READ_BYTES] for at in range(0, len(text), READ_BYTES))
        require_text(writer.add_documents([Document(slices)]), ["the text"])
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
        ids, documents, blocks, weights = concatenate_shards(shards)
        return cls(
            ids,
            documents,
            blocks,
            vocab_size=index["vocab_size"],
            tokenizer_fingerprint=index["tokenizer"],
            token_weights=weights,
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

        Example:
            >>> TokenCorpus.from_text("aab", tokenizer).counts(257)[97:99].tolist()
            [2, 1]
        """
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, len(self.ids), 1 << 20):
            ids = np.asarray(self.ids[start : start + (1 << 20)])
            largest = int(ids.max())  # before bincount, which allocates as many numbers as the largest ID says
            if largest >= size:
                place = start + int(ids.argmax())
                raise TokenIdError(f"token id {largest} at token {place} of the corpus is outside 0..{size - 1}.")
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
            TextError: The corpus is a single text chunk: it is small, or one line without a place to divide it.
        """
        if not 0 < validation_fraction < 1:
            raise SizeError(f"validation_fraction is {validation_fraction}; it must be between 0 and 1, such as 0.1.")
        if len(self.blocks) < 2:
            raise TextError(f"A corpus of {self.num_tokens} tokens is one chunk: too small for a validation part.")
        wanted = self.num_tokens * (1 - validation_fraction)
        last = int(np.abs(self.blocks[:-1, 0] - wanted).argmin())
        cut = int(self.blocks[last, 0])
        before, after = self.blocks[: last + 1], self.blocks[last + 1 :] - self.blocks[last]
        starts = np.unique(np.maximum(self.documents - cut, 0)[np.searchsorted(self.documents, cut, "right") - 1 :])
        weights = (None, None) if self.token_weights is None else (self.token_weights[:cut], self.token_weights[cut:])
        first = self.documents[self.documents < cut]
        return (
            replace(self, ids=self.ids[:cut], documents=first, blocks=before, token_weights=weights[0]),
            replace(self, ids=self.ids[cut:], documents=starts, blocks=after, token_weights=weights[1]),
        )


class CorpusWriter:
    """Encode documents one after another, pass their IDs to a function, and record what a `TokenCorpus` needs.

    Recorded are the start of each document and the numbers of tokens and bytes; see `tables` and `index`. `write` gets
    the IDs of each text chunk and the ID that separates two documents, as uint16 or uint32; `write_weights` gets the
    weights of the same tokens, uint8, which are not recorded. The separator in front of a chat has the weight 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        write: Callable[[IdArray], object],
        write_weights: Callable[[IdArray], object] | None = None,
    ) -> None:
        self.tokenizer = pure_tokenizer(tokenizer)
        self.write, self.write_weights = write, write_weights
        self.vocab_size = table_size(tokenizer)
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        self.separator = end_of_text_id(tokenizer)
        self.documents, self.token_ends, self.byte_ends = array("q"), array("q"), array("q")
        self.num_tokens = self.num_bytes = self.bytes_read = 0
        self.starts_with_chat = False

    def add_source(
        self, reader: Reader, report: Callable[[int], object], *, begin: int = 0, end: int | None = None
    ) -> int:
        """Encode the documents of a source between two places, and pass their IDs to `write`."""
        count = 0

        def counted() -> Iterator[Document]:
            nonlocal count
            for document in reader.documents(begin, end):
                count += 1
                yield document

        recorded = self.add_documents(
            counted(), lambda: report(self.bytes_read + reader.position), are_rows=reader.has_rows
        )
        self.bytes_read += reader.position
        if reader.has_rows and 0 < recorded < count:
            warnings.warn(
                f"{count - recorded} of {count} rows of {source_name(reader.source)} are left out: they have no text.",
                EmbedLayerWarning,
                stacklevel=2,
            )
        return recorded

    def add_documents(
        self, documents: Iterable[Document], after_chunk: Callable[[], object] = lambda: None, *, are_rows: bool = False
    ) -> int:
        """Encode documents, and pass their IDs to `write`.

        Return the number of documents with a token. A document without one is not recorded, and its bytes count in
        `num_bytes`. `are_rows`: the documents may be short, so several of them share an entry of `blocks`.
        """
        recorded, starts_document = len(self.documents), False
        for chunk, ids, encoding in encode_ahead(self._chunks(documents), self.tokenizer):
            self.num_bytes += len(chunk.text.encode())
            starts_document = starts_document or chunk.starts_document
            if len(ids):
                weights = None if self.write_weights is None else token_weights(encoding, len(ids), chunk.weighted)
                if starts_document:
                    if self.num_tokens and self.separator is not None:
                        self._write([self.separator], None if weights is None else [chunk.weighted is None])
                        self.token_ends[-1] += 1
                    self.starts_with_chat = self.starts_with_chat or (not self.documents and chunk.weighted is not None)
                    self.documents.append(self.num_tokens)
                    starts_document = False
                self._write(ids, weights)
                self._end_block(may_extend=are_rows)
            elif self.byte_ends:
                self.byte_ends[-1] = self.num_bytes
            after_chunk()
        return len(self.documents) - recorded

    def _chunks(self, documents: Iterable[Document]) -> Iterator[TextChunk]:
        for document in documents:
            if isinstance(document.text, str) and document.weighted is not None:
                yield TextChunk(document.text, "", True, document.weighted)
            else:
                yield from document_chunks(document.text, self.tokenizer, before=document.before)

    def _write(self, ids: npt.ArrayLike, weights: npt.ArrayLike | None) -> None:
        """Write token IDs, and their weights if these are recorded."""
        array = np.asarray(ids).astype(self.dtype)
        self.write(array)
        if self.write_weights is not None:
            self.write_weights(np.asarray(weights, dtype=np.uint8))
        self.num_tokens += len(array)

    def _end_block(self, *, may_extend: bool) -> None:
        """Record that a block ends here; `may_extend`: it may be the last one, which then becomes longer."""
        if may_extend and self.byte_ends:
            begin = self.byte_ends[-2] if len(self.byte_ends) > 1 else 0
            if self.byte_ends[-1] - begin < min(max(begin // 64, _FEWEST_BYTES), _MOST_BYTES):
                self.token_ends[-1], self.byte_ends[-1] = self.num_tokens, self.num_bytes
                return
        self.token_ends.append(self.num_tokens)
        self.byte_ends.append(self.num_bytes)

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
            **({} if self.write_weights is None else {"has_weights": True}),
        }


@contextmanager
def corpus_writer(folder: Path, tokenizer: Tokenizer, *, has_weights: bool) -> Iterator[CorpusWriter]:
    """Context manager: yield a `CorpusWriter` that writes `ids.bin`, and `weights.bin` if requested, into a folder."""
    with (folder / IDS_FILE).open("wb") as ids, ExitStack() as stack:
        write_weights = None
        if has_weights:
            weights = stack.enter_context((folder / WEIGHTS_FILE).open("wb"))
            write_weights = lambda values: weights.write(values.tobytes())  # noqa: E731
        yield CorpusWriter(tokenizer, lambda values: ids.write(values.tobytes()), write_weights)


def token_weights(encoding: Encoding, count: int, weighted: Sequence[tuple[int, int]] | None) -> IdArray:
    """Return the weights of the last `count` tokens of an encoding, `(count,)` uint8: 1 for trained ones.

    The weight is 1 for tokens that overlap one of the ranges in `weighted`, as in the assistant mask of transformers;
    for all tokens if that is `None`.
    """
    if weighted is None:
        return np.ones(count, dtype=np.uint8)
    if not weighted:
        return np.zeros(count, dtype=np.uint8)
    starts, stops = np.array(weighted).T
    first, last = np.array(encoding.offsets).reshape(-1, 2).T
    nearest = np.searchsorted(stops, first, side="right")  # the first range that ends after the token begins
    weights: IdArray = np.where(nearest < len(stops), last > starts[np.minimum(nearest, len(stops) - 1)], 0)
    return weights.astype(np.uint8)


def ignore_progress(read: int, total: int) -> None:
    """Do nothing with a report of progress; it takes the place of an `on_progress` that is `None`."""


def require_text(has_text: bool | int, sources: Sequence[str | Path]) -> None:
    """Raise an error if the sources of a corpus gave no token."""
    if not has_text:
        raise TextError(f"There is no text in {', '.join(map(source_name, sources))}: pass a file with words.")


def warn_left_out(source: str | Path) -> None:
    """Warn that a source is left out of the corpus because it has no text."""
    warnings.warn(f"{source_name(source)} is left out: it has no text.", EmbedLayerWarning, stacklevel=3)
