"""Write a whole table into a copy of a checkpoint folder or GGUF file, in the form in which that stores its rows."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, VocabularyError
from embedlayer.families.left_out_files import left_out_message
from embedlayer.io.files import named_path
from embedlayer.opening.path_kinds import OWN_FOLDERS, PathKind, path_kind
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.ids import missing_rows_message, table_size
from embedlayer.tokenization.tokenizer_calls import fingerprint
from embedlayer.vocab.edit import ModelEdit, TokenMap
from embedlayer.vocab.map import RowMap, RowTensor
from embedlayer.vocab.targets.apply_rows import token_sources, unchanged_rows, written_rows
from embedlayer.vocab.targets.checkpoint import apply_to_checkpoint
from embedlayer.vocab.targets.folder import edited_copy
from embedlayer.vocab.targets.gguf import write_into_gguf


def write_into(
    table: TokenTable,
    tokenizer: Tokenizer,
    original: Path | str,
    out: Path | str,
    *,
    head: Tensor | LookupTable | None = None,
) -> int:
    """Write a copy of a checkpoint folder or GGUF file with the rows of a table and the tokens of a tokenizer.

    The rows are stored as in `original`: in floating point, in the blocks of GGUF, or in the codes of another library.
    A row that equals the row of the same token in `original`, in the dtype of the table, keeps its bytes. The others
    are quantised as the library does, with the scales that all rows share if there are any. All other tensors keep
    their bytes, and configurations name the same tokens as before. The copy appears complete or not at all.

    Args:
        table: The table.
        tokenizer: Its tokenizer.
        original: The folder or file to copy, which does not change.
        out: The new folder or file.
        head: Rows of an untied head, `(V, D)`, or the table that has them; `None` for a tied one or none.

    Returns:
        The number of rows of the table that keep their bytes.

    Raises:
        CheckpointError: `original` is damaged or has no token table; the width differs; one of the two models has an
            untied head and the other has not; a new token needs another row or number than that of table and head,
            such as a bias; a number does not fit the scale that all rows share; or no function quantises to the format.
        TokenizerError: A GGUF file has no tokenizer that is known here, or cannot describe the new one.
        VocabularyError: A configuration or the metadata names a token that the tokenizer lacks, or the folder has no
            tokenizer.
        FileError: `original` cannot be read, or `out` cannot be written.
        MissingExtraError: A GGUF file needs the extra `gguf`.

    Warns:
        EmbedLayerWarning: Files are left out, or as for an edit of the vocabulary. In a GGUF file: the table is written
            in another type, or text around added tokens gets an extra space when it is decoded from the new file.
    """
    source, kind = Path(original), path_kind(Path(original))
    if kind is PathKind.GGUF:
        return write_into_gguf(table, tokenizer, source, named_path(out), head=head)
    if kind in OWN_FOLDERS:
        raise CheckpointError(f"{source} is a folder of embedlayer: a table is written into that of a checkpoint.")
    rows = _WrittenRows(table, tokenizer, source, head)
    with edited_copy(source, out) as (partial, _):
        result = apply_to_checkpoint(source, partial, rows.resolve)
        if head is not None and "head" not in rows.written:
            raise CheckpointError(f"{source} has no head of its own, and the model of the table has one.")
        if result.left_out:
            warnings.warn(left_out_message(result.left_out), EmbedLayerWarning, stacklevel=2)
    return int(rows.unchanged["table"].sum())


class _WrittenRows:
    """The rows that an edit writes into a folder, for `ModelEdit.written`."""

    def __init__(
        self, table: TokenTable, tokenizer: Tokenizer, folder: Path, head: Tensor | LookupTable | None
    ) -> None:
        self.table, self.tokenizer, self.folder, self.head = table, tokenizer, folder, head
        self.row_map: RowMap
        self.written: dict[str, Tensor] = {}
        self.unchanged: dict[str, Tensor] = {}

    def resolve(self, tokenizers: Iterable[Tokenizer | None], num_rows: int, _: bool) -> ModelEdit:
        """Return the edit of the folder; see `ResolveEdit`."""
        (old,), new, size = tokenizers, self.tokenizer, self.table.vocab_size
        if old is None:
            raise VocabularyError(f"{self.folder} has no tokenizer, so the tokens of its rows are not known.")
        if (message := missing_rows_message(new, size)) is not None:
            raise VocabularyError(message)
        self.row_map = RowMap(token_sources(old, new, num_rows, size), num_rows)
        if fingerprint(old) == fingerprint(new):
            return ModelEdit(self.row_map, written=self.rows_of)
        sources = tuple(self.row_map.sources[: table_size(new)].tolist())
        tokens = TokenMap(sources, min(table_size(old), num_rows), tokenizer=new, old_tokenizer=old)
        return ModelEdit(self.row_map, tokenizer=new, tokens=tokens, written=self.rows_of)

    def rows_of(self, rows: RowTensor) -> Tensor | None:
        """Return all new rows of a tensor; `None` if they are moved with their tokens, such as a bias."""
        end = rows.end or ""
        if rows.parameter and end in self.written and rows.state_of is not None:  # a second copy of the same rows
            new = rows.state_of(self.written[end])
            return written_rows(replace(rows, encode=None), new, self.row_map.sources, self.unchanged[end])
        source = {"table": self.table, "head": self.head}.get(end) if rows.local.dim() == 2 else None
        if source is None:
            if end == "head" and rows.local.dim() == 2:
                raise CheckpointError(f"{self.folder} has an untied head, and the model of the table has none.")
            if len(self.row_map.initialised):
                raise CheckpointError(f"{self.folder} has more values for each token: edit its vocabulary first.")
            return None
        if end in self.written:
            raise CheckpointError(f"{self.folder} has several tables of tokens, and one is written.")
        numbers = rows.local[:1] if rows.decode is None else rows.decode(rows.local[:1])
        width = source.embed_dim if isinstance(source, LookupTable) else source.shape[1]
        if width != numbers.shape[1]:
            raise CheckpointError(f"Rows of {self.folder} have {numbers.shape[1]:,} numbers, not {width:,}.")
        self.unchanged[end] = unchanged_rows(rows, source, self.row_map.sources)
        self.written[end] = written_rows(rows, source, self.row_map.sources, self.unchanged[end])
        return self.written[end]
