"""A table with its tokenizer, out of whatever a person names: what `inspect` and `export` read."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from embedlayer.tables.table import TokenTable

VECTOR_FILES = (".txt", ".vec", ".bin", ".npy", ".tsv")


@dataclass(frozen=True)
class OpenedTable:
    """A table as it was found.

    Attributes:
        source: Where.
        kind: What it is, for people: `"trained run"`, `"checkpoint of family gpt2"`, `"file of vectors"`.
        table: The table, or its rows.
        dtype: Type of the rows.
        tokenizer: Its tokenizer, if there is one.
        counts: How often each token stands in the text of a run, `(V,)`.
        before: The table that a run began with.
        head: The rows of a head that is not tied to the table.
    """

    source: Path
    kind: str
    table: "TokenTable | Tensor"
    dtype: str
    tokenizer: "Tokenizer | None" = None
    counts: "Tensor | None" = None
    before: "TokenTable | None" = None
    head: "Tensor | None" = None


def open_table(path: Path, tokenizer_from: Path | None = None) -> OpenedTable:
    """Read a table from a run, a checkpoint, a layer that was saved, or a file of word vectors.

    Args:
        path: A folder or a file; the projector's folder counts by its `tensors.tsv`.
        tokenizer_from: Use this tokenizer instead of the one beside the table.

    Raises:
        FileError: There is nothing, or it cannot be read.
        CheckpointError: It is damaged or of another kind.
        TokenizerError: The tokenizer is damaged.
    """
    from embedlayer.text.tokenizer import load_tokenizer

    given = None if tokenizer_from is None else load_tokenizer(tokenizer_from)
    if _is_file_of_vectors(path):
        return _file_of_vectors(path, given)
    return _saved(path, given) if _is_ours(path) else _checkpoint(path, given)


def _is_file_of_vectors(path: Path) -> bool:
    if path.is_dir():
        return (path / "tensors.tsv").exists()
    return Path(path.name.removesuffix(".gz")).suffix in VECTOR_FILES and not path.name.startswith("pytorch_model")


def _is_ours(path: Path) -> bool:
    from embedlayer.files import read_json
    from embedlayer.training.run_directory import RunDirectory

    config = path / "config.json"
    if config.exists():
        return "format_version" in read_json(config)
    return RunDirectory(path).holds_a_run


def _file_of_vectors(path: Path, tokenizer: "Tokenizer | None") -> OpenedTable:
    from tokenizers import Tokenizer, models

    from embedlayer.checkpoints.formats import read_vectors

    tokens, rows = read_vectors(path)
    if tokenizer is None:
        ids: dict[str, int] = {}
        for row, token in enumerate(tokens):
            ids.setdefault(token, row)
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=""))
    return OpenedTable(path, "file of vectors", rows, "float32", tokenizer)


def _saved(path: Path, tokenizer: "Tokenizer | None") -> OpenedTable:
    from embedlayer.errors import CheckpointError
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.pretrained import TOKENIZER, Pretrained
    from embedlayer.tables.table import TokenTable
    from embedlayer.text.tokenizer import load_tokenizer
    from embedlayer.training.run_directory import RunDirectory, load_run

    run = RunDirectory(path)
    if not (path / "config.json").exists():
        load_run(path)  # says what is missing
    layer = Pretrained.read_pretrained(path)
    table = layer if isinstance(layer, TokenTable) else getattr(layer, "table", None)
    if not isinstance(table, TokenTable):
        raise CheckpointError(f"{path} holds a {type(layer).__name__}, which has no table of tokens.")
    if tokenizer is None and (path / TOKENIZER).exists():
        tokenizer = load_tokenizer(path / TOKENIZER)
    dtype = _dtype(table)
    if not (run.holds_a_run and isinstance(layer, DecoderLM)):
        return OpenedTable(
            path, f"saved {type(layer).__name__}", table, dtype, tokenizer, head=_free_head(layer, table)
        )
    counts, before, head = _counts(run, table), run.beginning().table, _free_head(layer, table)
    return OpenedTable(path, "trained run", table, dtype, tokenizer, counts, before, head)


def _counts(run: "RunDirectory", table: "TokenTable") -> "Tensor | None":
    import torch

    from embedlayer.text.corpus import TokenCorpus

    if not run.corpus.exists():
        return None
    return torch.from_numpy(TokenCorpus.open(run.corpus).counts(table.vocab_size))


def _checkpoint(path: Path, tokenizer: "Tokenizer | None") -> OpenedTable:
    from embedlayer.checkpoints.loader import load

    layer = load(path)
    if tokenizer is None:
        tokenizer = layer.tokenizer or _tokenizer_beside(path)
    kind = "checkpoint" if layer.family == "unknown" else f"checkpoint of family {layer.family}"
    head = _free_head(layer, layer.table)
    return OpenedTable(path, kind, layer.table, _dtype(layer.table), tokenizer, head=head)


def _free_head(layer: object, table: "TokenTable") -> "Tensor | None":
    """The rows of a layer's own head for the tokens of the table, if it has one and has them all."""
    head = getattr(layer, "head", None)
    if head is None or head.tied or len(head.weight) < table.vocab_size:
        return None
    rows: Tensor = head.weight.detach()[: table.vocab_size]
    return rows


def _tokenizer_beside(path: Path) -> "Tokenizer | None":
    """A tokenizer that does not bear its usual name, such as llama2.c's, if there is exactly one."""
    from embedlayer.errors import FileError, TokenizerError
    from embedlayer.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(path if path.is_dir() else path.parent)
    except (TokenizerError, FileError):
        return None


def _dtype(table: "TokenTable") -> str:
    return str(table.rows(0, 1).dtype).removeprefix("torch.")


if TYPE_CHECKING:
    from embedlayer.training.run_directory import RunDirectory
