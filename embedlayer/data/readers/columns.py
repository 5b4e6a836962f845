"""Parquet and Arrow: a column is the text of the documents."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from embedlayer.core.errors import FileError, TextError, require
from embedlayer.data.readers.documents import (
    TOOLS_FIELD,
    TOOLS_REFUSED,
    Document,
    Reader,
    RowOptions,
    chosen_field,
    document_of,
)
from embedlayer.data.text_formats import TEXT_FORMATS, source_name
from embedlayer.io.files import require_file

COLUMN_FORMATS = tuple(each for each in TEXT_FORMATS if each.has_columns)
"""The formats of files with columns."""

_MAGIC_BYTES = 1 << 12
_BATCH_ROWS = 256
_BATCH_BYTES = 1 << 20
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream."""


class Columns(Reader):
    """Reader of a Parquet file, an Arrow file or an Arrow stream.

    A place in it stands for a row: `place * rows // size`. At most one record batch of an Arrow file, or one page of a
    Parquet file, is in memory.
    """

    def __init__(self, source: str | Path, options: RowOptions) -> None:
        super().__init__(source)
        self.options = options
        self.arrow = require("pyarrow", extra="parquet")
        require_file(source)
        path = Path(source)
        self.size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_MAGIC_BYTES)
        kind = next((each.name for each in COLUMN_FORMATS if each.matches(path, start)), "")
        if not kind:
            raise FileError(f"Cannot read {source_name(source)}: it is no Parquet and no Arrow file, or is damaged.")
        self.is_parquet, self.is_stream = "Parquet" in kind, "stream" in kind
        self.column: int | None = None
        with self._damage_named(lambda: 0), self._opened() as file:
            schema = file.schema_arrow if self.is_parquet else file.schema
            if self.is_parquet:
                self.rows = int(file.metadata.num_rows)
            else:  # the record batches are mapped, and their data is not read
                with self._opened(mapped=True) as batches:
                    self.rows = sum(batch.num_rows for batch in self._all_batches(batches))
        types = {name: _kind_of_column(self.arrow, kind) for name, kind in zip(schema.names, schema.types, strict=True)}
        self.field, self.has_weights = chosen_field(lambda: source_name(source), types, options)
        if types[self.field] is None:
            column = schema.field(self.field).type
            raise TextError(f"{source_name(source)} has a column {self.field!r} of type {column}, and not of texts.")
        if (count := schema.names.count(self.field)) > 1:
            raise TextError(f"{source_name(source)} has {count} columns {self.field!r}: write it with one.")
        if self.has_weights and TOOLS_FIELD in schema.names:
            raise TextError(f"{source_name(source)} has a column {TOOLS_REFUSED}")
        self.column = schema.names.index(self.field)

    def cut(self, place: int, size: int, tokenizer: Tokenizer) -> int:
        """Return `place` itself: each place stands for a row."""
        return place

    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Document]:
        """Yield the documents of the rows between two places."""
        first = begin * self.rows // max(self.size, 1)
        last = self.rows if end is None else end * self.rows // max(self.size, 1)
        number = first
        for batch in self._batches(first, last):
            for value in self._values(batch, number):
                yield document_of(
                    partial(self._record, number), {self.field: value}, self.field, self.has_weights, self.options
                )
                number += 1
            self.position = number * self.size // max(self.rows, 1) - begin
        self.position = (self.size if end is None else end) - begin

    def _record(self, number: int) -> str:
        """Return how an error names a row."""
        return f"{source_name(self.source)}, row {number} (counted from 0),"

    def _values(self, batch: Any, number: int) -> list[Any]:
        """Return the values of a column; `number` is that of its first row, for the error."""
        try:
            return list(batch.to_pylist())
        except UnicodeDecodeError:
            for row, value in enumerate(batch):
                try:
                    value.as_py()
                except UnicodeDecodeError as error:
                    raise TextError(f"{self._record(number + row)} has a text that is not UTF-8: {error}.") from error
            raise

    def _batches(self, first: int, last: int) -> Iterator[Any]:
        """Yield the column of the rows from `first` up to `last`, in arrays of up to `_BATCH_ROWS` rows."""
        if first >= last:
            return
        passed = 0
        with self._damage_named(lambda: passed), self._opened() as file:
            for batch in self._record_batches(file):
                low, high = max(first - passed, 0), min(last - passed, len(batch))
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * len(batch) // max(batch.nbytes, 1)))
                for start in range(low, high, rows):
                    yield batch.slice(start, min(rows, high - start))
                passed += len(batch)
                if passed >= last:
                    return
        raise FileError(f"Cannot read {self._record(passed)} which is missing: the file has {self.rows} rows.")

    @contextmanager
    def _opened(self, *, mapped: bool = False) -> Iterator[Any]:
        """Context manager: open the file, and yield a reader of pyarrow; of an Arrow file, of the column alone."""
        if self.is_parquet:
            parquet = require("pyarrow.parquet", extra="parquet")
            with parquet.ParquetFile(self.source, buffer_size=_BATCH_BYTES, pre_buffer=False) as file:
                yield file
            return
        ipc = require("pyarrow.ipc", extra="parquet")
        with (self.arrow.memory_map if mapped else self.arrow.OSFile)(str(self.source)) as opened:
            if self.is_stream:
                yield _Streams(ipc, opened)
            else:
                options = None if self.column is None else ipc.IpcReadOptions(included_fields=[self.column])
                with ipc.open_file(opened, options=options) as file:
                    yield file

    def _all_batches(self, file: Any) -> Iterator[Any]:
        """Yield the record batches of an Arrow stream or file, one after another."""
        return iter(file) if self.is_stream else map(file.get_batch, range(file.num_record_batches))

    def _record_batches(self, file: Any) -> Iterator[Any]:
        """Yield the column, one record batch after another."""
        if self.is_parquet:
            yield from (batch.column(0) for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[self.field]))
            return
        arrow = self.arrow
        kinds = {"string": arrow.binary(), "large_string": arrow.large_binary()}
        for batch in self._all_batches(file):
            checked = column = batch.column(batch.schema.get_field_index(self.field))
            if (as_bytes := kinds.get(str(column.type))) is not None:
                checked = arrow.Array.from_buffers(as_bytes, len(column), column.buffers(), -1, column.offset)
            checked.validate(full=True)  # that offsets are inside the buffers, which pyarrow does not check itself
            yield column

    @contextmanager
    def _damage_named(self, row: Callable[[], int]) -> Iterator[None]:
        """Context manager: turn what pyarrow raises for a damaged file in the block into a `FileError`."""
        try:
            yield
        except (FileError, TextError):
            raise
        except (OSError, self.arrow.ArrowException) as error:
            raise FileError(f"Cannot read {source_name(self.source)}, row {row()} or after: {error}") from error


class _Streams:
    """The record batches of an Arrow stream, or of several, one behind the other in a file."""

    def __init__(self, ipc: Any, file: Any) -> None:
        self._ipc, self._file = ipc, file
        self._first = ipc.open_stream(file)
        self.schema = self._first.schema

    def __iter__(self) -> Iterator[Any]:
        # a stream without an end mark would read as if the missing rows did not exist
        start, stream = 0, self._first
        while True:
            yield from stream
            end = self._file.tell()
            self._file.seek(start)
            mark = _END_MARK if self._file.read(4) == _END_MARK[:4] else _END_MARK[4:]  # before Arrow 0.15
            self._file.seek(end - len(mark))
            if self._file.read(len(mark)) != mark:
                raise self._ipc.lib.ArrowInvalid("the stream has no end mark, so rows may be missing")
            if end == self._file.size():
                return
            start, stream = end, self._ipc.open_stream(self._file)
            if stream.schema != self.schema:
                raise self._ipc.lib.ArrowInvalid(f"a stream that follows at byte {end} has another schema")


def _kind_of_column(arrow: Any, column: Any) -> list[Any] | str | None:
    """Return an empty value of the kind that a column has: a text, a list for chats, or `None` for any other kind."""
    kinds = arrow.types
    if kinds.is_dictionary(column):
        column = column.value_type
    if str(column) in ("string", "large_string", "string_view"):
        return ""
    is_list = kinds.is_list(column) or kinds.is_large_list(column)
    return [] if is_list and kinds.is_struct(column.value_type) else None
