"""A table with what belongs to it, out of whatever a person names."""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from embedlayer.checkpoints.formats import SUFFIXES, TENSORS, read_vectors
from embedlayer.checkpoints.loader import load
from embedlayer.errors import CheckpointError, EmbedLayerError, EmbedLayerWarning, FileError, TokenizerError
from embedlayer.files import read_json, restored
from embedlayer.models.decoder import DecoderLM
from embedlayer.models.llama import load_llama
from embedlayer.pretrained import CONFIG, TOKENIZER, Pretrained, is_description
from embedlayer.short_repr import short_repr
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.table import TokenTable
from embedlayer.text.corpus import TokenCorpus
from embedlayer.text.tokenizer import load_tokenizer, require_rows, tokens_without_rows
from embedlayer.training.run_directory import RunDirectory, load_run
from embedlayer.weight_files import open_weights


@dataclass(frozen=True)
class OpenedTable:
    """A table as it was found.

    Attributes:
        source: Where.
        kind: What it is, for people: `"trained run"`, `"checkpoint of family gpt2"`, `"file of vectors"`.
        table: The table.
        layer: The model or layer that it is a part of, itself if it was saved alone; `None` for a file of vectors.
        tokenizer: Text to IDs, if it is known.
        tokens: The token of each row, where a file of vectors names them and no tokenizer was given.
        run: The folder of the run that trained it, also where only the model of one is left.
    """

    __repr__ = short_repr

    source: Path | str
    kind: str
    table: TokenTable
    layer: nn.Module | None = None
    tokenizer: Tokenizer | None = None
    tokens: list[str] | None = None
    run: RunDirectory | None = None

    @property
    def dtype(self) -> str:
        """Type of the rows."""
        return str(self.table.rows(0, 1).dtype).removeprefix("torch.")

    @cached_property
    def vocabulary(self) -> Tokenizer | None:
        """Names of the rows: the tokenizer, or one that has each token as a whole; of equal ones the first."""
        if self.tokens is None:
            return self.tokenizer
        ids: dict[str, int] = {}
        for row, token in enumerate(self.tokens):
            ids.setdefault(token, row)
        return Tokenizer(models.WordLevel(ids, unk_token=""))

    @cached_property
    def counts(self) -> Int[Tensor, " V"] | None:
        """How often each token stands in the text of a run."""
        return None if self.run is None else counts_of(self.run, self.table.vocab_size)

    @cached_property
    def before(self) -> TokenTable | None:
        """The table that a run began with."""
        return None if self.run is None or not self.run.contains_run else self.run.initial_model().table

    @property
    def head(self) -> Float[Tensor, "V D"] | None:
        """The rows of a head that is not tied, for the tokens of the table, if it has them all."""
        head = getattr(self.layer, "head", None)
        if head is None or head.tied or len(head.weight) < self.table.vocab_size:
            return None
        rows: Tensor = head.weight.detach()[: self.table.vocab_size]
        return rows


def open_table(source: Path | str, tokenizer_from: Path | None = None) -> OpenedTable:
    """Read a table from whatever holds one.

    | at `source` | read by |
    |---|---|
    | word2vec, GloVe, fastText, NumPy or projector files | `read_vectors` |
    | a folder that `embedlayer train` or `save_pretrained` wrote | `Pretrained.read_pretrained` |
    | a LLaMA-type checkpoint in Meta's layout | `load_llama` |
    | another checkpoint, safetensors; a name on the hub | `load` |

    Args:
        source: A folder, a file, or a name on the hub; the projector's folder counts by its `tensors.tsv`.
        tokenizer_from: Use this tokenizer instead of the one beside the table.

    Raises:
        FileError: There is nothing, or it cannot be read.
        CheckpointError: It is damaged, of another kind, or has no table.
        TokenizerError: The tokenizer is damaged, or `tokenizer_from` or that of a saved layer has IDs without a row.

    Warns:
        EmbedLayerWarning: Rows hold NaN or infinity.
    """
    path = restored(source)
    given = None if tokenizer_from is None else load_tokenizer(tokenizer_from)
    if is_file_of_vectors(path):
        tokens, rows = read_vectors(path, errors="replace", nonfinite="keep")
        table = TokenEmbedding.from_pretrained(rows)
        opened = OpenedTable(path, "file of vectors", table, None, given, tokens if given is None else None)
    else:
        opened = _saved(path, given) if is_ours(path) else _checkpoint(source, given)
    if opened.tokenizer is not None and (given is not None or is_ours(path)):
        # the tokenizer of a checkpoint may have more tokens than rows: its layer warns
        require_rows(opened.tokenizer, opened.table.vocab_size, source if given is None else tokenizer_from)
    return opened


def is_file_of_vectors(path: Path) -> bool:
    """Whether a file is one of word vectors, by its name, or a folder the projector's."""
    if path.is_dir():
        return (path / TENSORS).exists()
    return Path(path.name.removesuffix(".gz")).suffix in SUFFIXES and not path.name.startswith("pytorch_model")


def is_ours(path: Path) -> bool:
    """Whether this library wrote a folder: a layer, or a run, if only its beginning."""
    config = path / CONFIG
    return RunDirectory(path).contains_run or (config.exists() and is_description(read_json(config)))


def counts_of(run: RunDirectory, vocab_size: int) -> Int[Tensor, " V"] | None:
    """How often each token stands in the text of a run, if that is still there."""
    return torch.from_numpy(TokenCorpus.open(run.corpus).counts(vocab_size)) if restored(run.corpus).exists() else None


def _saved(path: Path, tokenizer: Tokenizer | None) -> OpenedTable:
    if not (path / CONFIG).exists():
        load_run(path)  # says what is missing
    layer = Pretrained.read_pretrained(path).eval()
    table = layer if isinstance(layer, TokenTable) else getattr(layer, "table", None)
    if not isinstance(table, TokenTable):
        raise CheckpointError(f"{path} holds a {type(layer).__name__}, which has no table of tokens.")
    if tokenizer is None and (path / TOKENIZER).exists():
        tokenizer = load_tokenizer(path / TOKENIZER)
    run = RunDirectory(path) if isinstance(layer, DecoderLM) else None
    kind = f"saved {type(layer).__name__}" if run is None or not run.contains_run else "trained run"
    return OpenedTable(path, kind, table, layer, tokenizer, run=run)


def _checkpoint(source: Path | str, tokenizer: Tokenizer | None) -> OpenedTable:
    if not Path(source).exists():
        layer = load(str(source))  # a name on the hub, or an error that says what was looked for
        return OpenedTable(str(source), _kind(layer.family), layer.table, layer, tokenizer or layer.tokenizer)
    path = Path(source)
    if _is_metas(path):
        with suppress(CheckpointError):  # one that does not state its sizes still has a table
            model = load_llama(path)
            return OpenedTable(path, "checkpoint", model.table, model, tokenizer or _beside(path, model.table))
    layer = load(path)
    tokenizer = tokenizer or layer.tokenizer or _beside(path, layer.table)
    return OpenedTable(path, _kind(layer.family), layer.table, layer, tokenizer)


def _kind(family: str) -> str:
    return "checkpoint" if family == "unknown" else f"checkpoint of family {family}"


def _is_metas(path: Path) -> bool:
    """Whether a whole LLaMA-type model stands there in Meta's layout, whose configuration names no family."""
    try:
        return "layers.0.attention.wq.weight" in open_weights(path).names
    except EmbedLayerError:
        return False


def _beside(path: Path, table: TokenTable) -> Tokenizer | None:
    """Return the tokenizer in the same folder, whatever it is called, if there is exactly one."""
    try:
        tokenizer = load_tokenizer(path if path.is_dir() else path.parent)
    except (TokenizerError, FileError, CheckpointError):
        return None
    mismatch = tokens_without_rows(tokenizer, table.vocab_size, path)
    if mismatch is not None:
        warnings.warn(mismatch, EmbedLayerWarning, stacklevel=4)
    return tokenizer
