"""Columns of the user's own for the map: read from a file, shown as colours and as filters.

A file has one line per token and a header. A column named `id` (a token's ID) or `token` (a token's text) says which
row of the table a line belongs to; every other column becomes a `UserColumn`. Rows without a line have no value. The
texts of a file are either all entries of the vocabulary (`Ġdog`) or all readable texts (` dog`).
"""

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import FileError, SizeError, require
from embedlayer.explorer.answers import OwnColumn
from embedlayer.explorer.tokens import Params, to_bytes
from embedlayer.io.files import MOST_BYTES, require_file
from embedlayer.opening.opened_model import OpenedModel

DELIMITERS = {".csv": ",", ".tsv": "\t"}  # the character between two values of a text file, by the file's suffix

Cell = str | int | float | None
"""A value of a file: `None` where there is none."""


@dataclass(frozen=True)
class UserColumn:
    """A value for each row of a table: numbers, or texts as groups."""

    name: str
    values: Float[Tensor, " V"]
    groups: tuple[str, ...] | None = None


@dataclass(frozen=True)
class UserColumns:
    """The columns of a file."""

    columns: tuple[UserColumn, ...] = ()
    rows: int = 0
    left_out: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def read_user_columns(path: Path | str, source: OpenedModel) -> UserColumns:
    """Read columns for the rows of a source's table from a file."""
    path = Path(path)
    names, columns = _read_parquet(path) if path.suffix == ".parquet" else _read_text(path)
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise FileError(f"{path}: the column {repeated[0]!r} occurs twice.")
    cells = dict(zip(names, columns, strict=True))
    keys: dict[str, list[Any]] = {name: cells.pop(name) for name in ("id", "token") if name in cells}
    if not keys:
        raise FileError(f"{path} needs a column named id or token; found {', '.join(map(repr, names)) or 'none'}.")
    if not cells:
        raise FileError(f"{path} has no column beside {' and '.join(keys)}, so there is nothing to show.")
    rows_of_lines = _rows_of(keys, source, path)
    rows = [row for row in rows_of_lines if row is not None]
    plain = {name: column for name, column in cells.items() if all(isinstance(each, Cell) for each in column)}
    known = [row is not None for row in rows_of_lines]
    made = tuple(
        _column(name, list(compress(column, known)), rows, source.table.vocab_size) for name, column in plain.items()
    )
    unknown = tuple(str(text) for text, row in zip(keys.get("token", []), rows_of_lines, strict=False) if row is None)
    return UserColumns(made, len(rows), tuple(name for name in cells if name not in plain), unknown)


def add_user_columns(source: OpenedModel, columns: UserColumns) -> None:
    """Give a source its user's columns, before it is served or exported."""
    source.once("user_columns", lambda: columns)


def columns(source: OpenedModel, params: Params) -> list[OwnColumn]:
    return [
        {"name": each.name, "groups": None if each.groups is None else list(each.groups)}
        for each in _columns_of(source)
    ]


def column(source: OpenedModel, params: Params) -> bytes:
    """Return the values of the column with the name in the parameter `name`, as the bytes of float32 `(V,)`."""
    name = params.get("name", "")
    for each in _columns_of(source):
        if each.name == name:
            return to_bytes(each.values)
    raise SizeError(f"{source.title} has no column {name!r}: pass a file with it, embedlayer explore --columns FILE.")


def exported_columns(source: OpenedModel) -> list[Params]:
    """Return the requests for values of columns that an exported page stores: all of them."""
    return [{"name": each.name} for each in _columns_of(source)]


def _columns_of(source: OpenedModel) -> tuple[UserColumn, ...]:
    """Return the columns that `add_user_columns` gave a source."""
    return source.once("user_columns", UserColumns).columns


def _read_text(path: Path) -> tuple[list[str], list[list[Cell]]]:
    """Read names and columns of a text file; a column has numbers if every value is one, and `None` for no value."""
    if path.suffix not in DELIMITERS:
        raise FileError(f"{path}: columns are read from a {', '.join(DELIMITERS)} or .parquet file.")
    require_file(path, most=MOST_BYTES)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=DELIMITERS[path.suffix], strict=True)
            names = next(reader, [])
            lines = [(reader.line_num, line) for line in reader if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    for number, line in lines:
        if len(line) != len(names):
            raise FileError(f"{path}, line {number}: {len(line)} values, and the header has {len(names)}.")
    texts = [[line[place] for _, line in lines] for place in range(len(names))]
    return names, [[*part] if name == "token" else _parsed(part) for name, part in zip(names, texts, strict=True)]


def _parsed(texts: list[str]) -> list[Cell]:
    """Return the values of a column of a text file: numbers if every one is a number, `None` for an empty text."""
    try:
        if not any("_" in text for text in texts):  # `1_000` is a number to Python alone
            return [float(text) if text else None for text in texts]
    except ValueError:
        pass
    return [text or None for text in texts]


def _read_parquet(path: Path) -> tuple[list[str], list[list[Any]]]:
    """Read names and columns of a parquet file; booleans become the texts "true" and "false"."""
    require_file(path)
    parquet, arrow = require("pyarrow.parquet", extra="parquet"), require("pyarrow", extra="parquet")
    try:
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    return table.column_names, [
        [str(each).lower() if isinstance(each, bool) else each for each in column.to_pylist()]
        for column in table.columns
    ]


def _rows_of(keys: Mapping[str, list[Any]], source: OpenedModel, path: Path) -> list[int | None]:
    """Return the row of the table for each line of a file; `None` for a line about a token that the table lacks."""
    rows: list[int | None]
    if "id" in keys:
        rows = [_checked_id(key, source.table.vocab_size, path) for key in keys["id"]]
        _check_texts([row for row in rows if row is not None], keys.get("token", []), source, path)
    else:
        rows = _rows_of_texts([str(key) for key in keys["token"]], source, path)
    repeated = [row for row, count in Counter(rows).items() if row is not None and count > 1]
    if repeated:
        raise SizeError(f"{path}: two lines are about row {repeated[0]}, {source.token_texts[repeated[0]]!r}.")
    return rows


def _checked_id(key: Any, vocab_size: int, path: Path) -> int:
    """Return a value of the column `id` as a row number; raise a `SizeError` if it is none of the table."""
    if not isinstance(key, int | float) or not 0 <= key < vocab_size or int(key) != key:
        raise SizeError(f"{path}: id is a row of the table, 0..{vocab_size - 1}; found {key!r}.")
    return int(key)


def _entries(source: OpenedModel) -> dict[str, list[int]]:
    """Return the row of each entry of the vocabulary, in a list; no entries without a tokenizer."""
    if source.text_tokenizer is None:
        return {}
    return {text: [row] for text, row in source.text_tokenizer.get_vocab(with_added_tokens=True).items()}


def _readable(source: OpenedModel) -> dict[str, list[int]]:
    """Return the rows of each readable text."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(source.token_texts):
        if text:
            rows.setdefault(text, []).append(row)
    return rows


def _check_texts(rows: list[int], texts: list[Any], source: OpenedModel, path: Path) -> None:
    """Raise a `SizeError` if a text of the column `token` of a file is not that of the row in its column `id`."""
    entries, readable = _entries(source), _readable(source)
    for row, text in zip(rows, texts, strict=False):
        if text and row not in entries.get(text, []) + readable.get(text, []):
            raise SizeError(
                f"{path}: row {row} of {source.title} is the token {source.token_texts[row]!r}, not {text!r}."
            )


def _rows_of_texts(texts: list[str], source: OpenedModel, path: Path) -> list[int | None]:
    """Return the rows that the column `token` stands for; `None` for a text that no token has."""
    entries, by_text = _entries(source), _readable(source)
    if sum(text in entries for text in texts) >= sum(text in by_text for text in texts):
        by_text = entries
    if texts and not any(text in by_text for text in texts):
        raise SizeError(
            f"{path}: no token of {source.title} is {texts[0]!r}. For rows without a token use a column id."
        )
    for text in texts:
        rows = by_text.get(text, [])
        if len(rows) > 1:
            raise SizeError(f"{path}: {text!r} is the text of rows {rows[0]} and {rows[1]}. Use a column id instead.")
    return [by_text[text][0] if text in by_text else None for text in texts]


def _column(name: str, cells: Sequence[Cell], rows: Iterable[int], vocab_size: int) -> UserColumn:
    """Return a column with one value per row of the table."""
    values = torch.full((vocab_size,), math.nan)
    places = torch.tensor(list(rows), dtype=torch.long)
    if not any(isinstance(each, str) for each in cells):
        values[places] = torch.tensor([math.nan if each is None else float(each) for each in cells])
        return UserColumn(name, values)
    texts = ["" if each is None else str(each) for each in cells]
    counts = Counter(text for text in texts if text)
    groups = tuple(text for text, _ in counts.most_common())
    index = {text: float(place) for place, text in enumerate(groups)}
    values[places] = torch.tensor([index.get(text, math.nan) for text in texts])
    return UserColumn(name, values, groups)
