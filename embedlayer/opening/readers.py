"""Open whatever the user names: a run, a checkpoint, a saved layer, a file of vectors, or a name on the hub.

`open_model` reads the path and returns one record, `OpenedModel`. Every command, the explorer and the analysis use it.
Importing this module imports no torch: what a kind of source needs is imported in the function that reads it.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, SizeError, TokenizerError
from embedlayer.core.formatting import a_or_an, command_line
from embedlayer.families import UNKNOWN
from embedlayer.io.files import read_json, recover_folder
from embedlayer.opening.opened_model import TABLE_ONLY, OpenedModel
from embedlayer.opening.path_kinds import BLOCKS, CONFIG, OWN_FOLDERS, TOKENIZER, PathKind, folder_of, path_kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.tables.table import TokenTable
    from embedlayer.training.run_directory import RunDirectory

Parts: TypeAlias = Literal["table", "layer", "model"]
"""What `open_model` reads of a source: the table, the embedding layer, or all that it has."""

CLASSES_WITH_TABLE = {
    "decoder_lm": "DecoderLM",
    "embedding_layer": "EmbeddingLayer",
    "transformer_embedding": "TransformerEmbedding",
}
"""Layers of which the table can be read alone: class names by kind identifier in `config.json`."""

REQUESTED = 'It was opened with parts="{}": leave parts out.'
"""Why an opened source lacks what it has on disk; `{}` stands for the value of `parts`."""


def open_model(
    source: Path | str, tokenizer: Path | str | None = None, *, parts: Parts = "model", device: str = "cpu"
) -> OpenedModel:
    """Open a table with the model, tokenizer and run that belong to it.

    | `source` | result |
    |---|---|
    | folder that `embedlayer train` wrote | the decoder, with its run |
    | folder that `save_pretrained` wrote | the layer, model or table |
    | checkpoint folder, safetensors file or index | a LLaMA-type decoder, else the embedding layer, else the table |
    | GGUF file | the same; the decoder only if its blocks are not quantised |
    | word2vec, GloVe, fastText, NumPy or projector file | the table, with a token for each row |
    | `owner/name` on the hub | the embedding layer; only shards with its tensors are downloaded |

    The table alone is read if the model family is unknown, or if anything else of the embedding layer cannot be read.

    Args:
        source: Folder, file, or name on the hub.
        tokenizer: File or folder of the tokenizer to use; `None` for the one that belongs to the table.
        parts: What to read of the source: `"model"` all that the table above lists; `"layer"` no transformer blocks of
            a checkpoint; `"table"` the table alone, without the rest of a layer or model. With the last two, a
            tokenizer is read when `tokenizer` of the result is first used, with its errors and warnings.
        device: Where to put the tensors. The table of a file of vectors is on the CPU.

    Raises:
        FileError: The path does not exist, cannot be read, or holds a run that has saved no model yet. A path that does
            not look like `owner/name` is never sent to the hub.
        CheckpointError: The source is damaged, or has no token table.
        TokenizerError: `tokenizer`, or that of a saved layer, is damaged or has IDs outside the table.
        MissingExtraError: The source needs the extra `hf` (hub), `gguf` (GGUF) or `spm` (a `.model` tokenizer).

    Warns:
        EmbedLayerWarning: Only the table of a checkpoint can be read; rows contain NaN or infinity; a checkpoint's
            tokenizer cannot be read or has IDs outside the table; or a warning of `load` or `read_vectors`.

    Example:
        >>> from embedlayer.checkpoints.vector_files import write_vectors
        >>> write_vectors("cats.txt", ["cat", "dog"], torch.eye(2), format="word2vec")
        >>> open_model("cats.txt").encode("dog cat")
        [1, 0]
    """
    if parts not in get_args(Parts):
        raise SizeError(f"parts must be one of {', '.join(get_args(Parts))}, not {parts!r}.")
    path = recover_folder(source)
    kind = path_kind(path)
    if kind is PathKind.VECTORS:
        from embedlayer.checkpoints.vector_files import read_vectors
        from embedlayer.tables.dense import TokenEmbedding

        tokens, rows = read_vectors(path, nonfinite="keep")
        table = TokenEmbedding.from_pretrained(rows)
        opened = OpenedModel(_title(path), table, source=path, kind="file of vectors", tokens=tokens)
    elif kind in OWN_FOLDERS:
        opened = _open_saved(path, parts, device)
    elif kind is PathKind.MISSING or parts != "model":
        opened = _open_layer(source if kind is PathKind.MISSING else path, parts, device)
    else:
        opened = _open_checkpoint(path, device)
    if tokenizer is not None:
        from embedlayer.tokenization.ids import require_rows
        from embedlayer.tokenization.read import load_tokenizer

        opened.tokenizer, opened.tokens = load_tokenizer(tokenizer), None
        require_rows(opened.tokenizer, opened.table.vocab_size, tokenizer)
    elif parts == "model":
        _ = opened.tokenizer  # with its errors and warnings
    return opened


def _open_saved(path: Path, parts: Parts, device: str) -> OpenedModel:
    """Open a folder that this library wrote: a training run, or a folder of `save_pretrained`."""
    from embedlayer.saving import part_from_pretrained

    if not (path / CONFIG).exists():
        go_on = command_line("train", "--resume", "-o", path)
        raise FileError(f"{path}: its run is not finished: continue it with {go_on}")
    class_name = CLASSES_WITH_TABLE.get(str(read_json(path / CONFIG).get("kind"))) if parts == "table" else None
    table_only = "" if class_name is None else REQUESTED.format(parts)
    if class_name is None:
        class_name, table, model = _saved_layer(path, device)
    else:
        table, model = _token_table(path, part_from_pretrained(path, "table", device=device).eval()), None
    is_decoder = class_name == "DecoderLM"
    blocks = f"The blocks of {path} are those of a model of transformers: load it with embedlayer.compress.load_model."
    return OpenedModel(
        _title(path),
        table,
        source=path,
        kind="trained run" if is_decoder and path_kind(path) is PathKind.RUN else f"saved {class_name}",
        model=model,
        tokenizer=lambda: _saved_tokenizer(path, table),
        run=(lambda: _run_in(path)) if is_decoder else None,
        table_only=table_only,
        no_decoder=blocks if (path / BLOCKS / CONFIG).exists() else table_only if is_decoder else "",
    )


def _saved_layer(path: Path, device: str) -> "tuple[str, TokenTable, Any]":
    """Read all of a saved layer, in evaluation mode; return the name of its class, its table, and the layer.

    The third result is `None` unless the layer is a decoder, an embedding layer or an input embedding.
    """
    from embedlayer.saving import Pretrained
    from embedlayer.tables.table import TokenTable

    layer: Any = Pretrained.from_pretrained(path, device=device).eval()
    if isinstance(layer, TokenTable):
        return type(layer).__name__, layer, None
    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.inputs.embedding import TransformerEmbedding
    from embedlayer.inputs.ngram import NgramEmbedding
    from embedlayer.models.decoder import DecoderLM

    table = None if isinstance(layer, NgramEmbedding) else getattr(layer, "table", None)
    name = "DecoderLM" if isinstance(layer, DecoderLM) else type(layer).__name__
    is_model = isinstance(layer, DecoderLM | EmbeddingLayer | TransformerEmbedding)
    return name, _token_table(path, table, layer), layer if is_model else None


def _token_table(path: Path, table: object, layer: object = None) -> "TokenTable":
    """Return the table of tokens of a layer; raise a `CheckpointError` if it has none."""
    from embedlayer.tables.table import TokenTable

    if not isinstance(table, TokenTable):
        raise CheckpointError(
            f"{path} holds {a_or_an(table if layer is None else layer)}, which has no table of tokens."
        )
    return table


def _saved_tokenizer(path: Path, table: "TokenTable") -> "Tokenizer | None":
    """Read the tokenizer of a saved layer; return `None` if there is none."""
    from embedlayer.tokenization.ids import require_rows
    from embedlayer.tokenization.read import load_tokenizer

    if not (path / TOKENIZER).exists():
        return None
    tokenizer = load_tokenizer(path / TOKENIZER)
    require_rows(tokenizer, table.vocab_size, path)
    return tokenizer


def _run_in(path: Path) -> "RunDirectory":
    from embedlayer.training.run_directory import RunDirectory

    return RunDirectory(path)


def _open_checkpoint(path: Path, device: str) -> OpenedModel:
    """Open a local checkpoint: as a whole decoder if `load_llama` can read it, else its embedding layer alone.

    In the second case, `no_decoder` of the result is the message of the error of `load_llama`; or if only the table can
    be read, the reason for that.
    """
    from embedlayer.models.llama import load_llama

    try:
        model = load_llama(path, device=device)
    except (CheckpointError, FileError) as error:
        opened = _open_layer(path, "model", device)
        opened.no_decoder = opened.no_decoder or str(error)
        return opened
    config = folder_of(path) / CONFIG
    is_file = path_kind(path) is PathKind.GGUF
    family = read_json(config).get("model_type") if config.exists() and not is_file else None
    kind = "GGUF file" if is_file else f"checkpoint of family {family}" if family else "checkpoint"
    opened = OpenedModel(_title(path), model.table, source=path, kind=kind, model=model)
    opened.tokenizer = lambda: _tokenizer_of(opened, None)
    return opened


def _open_layer(source: Path | str, parts: Parts, device: str) -> OpenedModel:
    """Open the embedding layer of a checkpoint, and no transformer blocks, from a local path or from the hub.

    If it cannot be read but its table can, the result has the table alone, and a warning says why. If the table cannot
    be read either, the first error is raised. With `parts="table"`, only the table is read, without a warning.
    """
    from embedlayer.checkpoints.layer import load

    is_here = Path(source).exists()
    source = source if is_here else str(source)
    table_only = REQUESTED.format(parts) if parts == "table" else ""
    try:  # from the hub, the table of per-layer inputs would be downloaded too
        layer = load(source, device=device, table_only=bool(table_only), per_layer=is_here)
    except CheckpointError as error:
        if table_only:
            raise
        try:
            layer = load(source, device=device, table_only=True)
        except CheckpointError:
            raise error from None
        table_only = str(error).removesuffix(error.advice).rstrip()  # it is read already
        warnings.warn(TABLE_ONLY.format(source, table_only), EmbedLayerWarning, stacklevel=3)
    noun = "GGUF file" if path_kind(Path(source)) is PathKind.GGUF else "checkpoint"
    download = f"Only the embedding layer of {source} is read from the hub: download the model."
    requested = REQUESTED.format(parts) if parts != "model" else ""
    opened = OpenedModel(
        _title(Path(source)) if is_here else str(source),
        layer.table,
        source=source,
        kind=noun if layer.family == UNKNOWN.name else f"{noun} of family {layer.family}",
        model=None if table_only else layer,
        table_only=table_only,
        no_decoder=table_only or (requested if is_here else download),
    )
    opened.tokenizer = lambda: _tokenizer_of(opened, layer if noun == "checkpoint" else None)
    return opened


def _tokenizer_of(opened: OpenedModel, layer: "EmbeddingLayer | None") -> "Tokenizer | None":
    """Read the tokenizer of a checkpoint; return `None` if there is none, or if it cannot be read.

    For a path, `no_tokenizer` of `opened` is then the reason. `layer` has the tokenizer of the same checkpoint; if it
    is `None` or has none, the folder is searched, or the GGUF file.
    """
    from embedlayer.tokenization.ids import missing_rows_message
    from embedlayer.tokenization.read import load_tokenizer, tokenizer_file

    path = Path(opened.source)
    kind = path_kind(path)
    try:  # what needs no text is still possible without a tokenizer
        tokenizer = None if layer is None else layer.tokenizer
        if tokenizer is None and kind is not PathKind.MISSING:
            tokenizer = load_tokenizer(path if kind is PathKind.GGUF else folder_of(path))
            mismatch = missing_rows_message(tokenizer, opened.table.vocab_size, path)
            if mismatch is not None:
                warnings.warn(mismatch, EmbedLayerWarning, stacklevel=2)
        return tokenizer
    except (FileError, TokenizerError, CheckpointError) as error:
        opened.no_tokenizer = str(error)
    is_stored = kind is PathKind.MISSING  # a model on the hub, where the error is that of a file
    if kind not in (PathKind.GGUF, PathKind.MISSING):
        try:
            is_stored = tokenizer_file(folder_of(path)) is not None  # it may be one that is not read
        except TokenizerError:  # several
            is_stored = True
    if is_stored:
        warnings.warn(
            f"{opened.no_tokenizer} Rows are named by their numbers, and what needs text is refused.",
            EmbedLayerWarning,
            stacklevel=2,
        )
    return None


def _title(path: Path) -> str:
    """Return the name of a path; `parent/name` if the name is only `model`, `checkpoint` or `run`."""
    place = path.resolve()
    return f"{place.parent.name}/{place.name}" if place.name in {"model", "checkpoint", "run"} else place.name
