"""Checkpoint folders with a table that another library quantises: the files that this library itself opens."""

import warnings
from pathlib import Path

from tokenizers import Tokenizer

from embedlayer.checkpoints.layer import load
from embedlayer.checkpoints.reader import CONFIG, SCHEMES, WEIGHT, Checkpoint
from embedlayer.checkpoints.writer import weight_names
from embedlayer.compress.transformers_models import copy_other_files, copy_tensors
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.families.left_out_files import not_copied_message
from embedlayer.formats.compressed_tensors import METHOD
from embedlayer.formats.stored import StoredModule
from embedlayer.io.files import JsonObject, check_new_folder, new_folder, write_json
from embedlayer.io.safetensors_files import INDEX
from embedlayer.saving import TOKENIZER
from embedlayer.tables.stored_embedding import StoredEmbedding
from embedlayer.tokenization.read import save_tokenizer

OPENED_BY = {
    "MLX": "mlx_lm.load({folder!r})",
    "compressed-tensors": (
        "transformers' from_pretrained({folder!r}, quantization_config=CompressedTensorsConfig(dequantize=True))"
    ),
}
"""How a library opens such a folder, by `StoredFormat.library`. Without `dequantize` transformers would start with
random rows: it has no look-up in packed rows."""


def write_checkpoint(
    table: StoredEmbedding, checkpoint_dir: Path | str, out_dir: Path | str, *, tokenizer: Tokenizer | None = None
) -> tuple[str, ...]:
    """Write a copy of a checkpoint folder with its table in the codes of another library, for programs of this library.

    The tensors of the table get the names that the library gives them, and the configuration states their format. Equal
    copies of the table, such as that of a tied head, are left out, and so are files that belong to the old table, such
    as other forms of the weights. All other tensors and files keep their bytes. The folder appears complete or not at
    all.

    Args:
        table: The table, as `StoredEmbedding.from_table` or `compress_table(..., "mlx-int4")` returns it.
        checkpoint_dir: Folder with safetensors files and `config.json`; it does not change.
        out_dir: A folder that does not exist or is empty.
        tokenizer: Tokenizer to write if the folder has none.

    Returns:
        The paths of the files that are left out, sorted; that of a folder ends in a slash.

    Raises:
        CheckpointError: The table of the folder is no single tensor called `.weight` or is not known, the folder is
            damaged, or its configuration states a quantisation of another library.
        FileError: `checkpoint_dir` is no checkpoint, or `out_dir` is not empty or cannot be written.

    Warns:
        EmbedLayerWarning: Files are left out.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=16, n_embd=64, n_layer=1, n_head=2))
        >>> model.save_pretrained("gpt2")
        >>> table = compress_table(load("gpt2").table, "ct-int4-g32")
        >>> write_checkpoint(table, "gpt2", "gpt2-int4")
        ()
        >>> load("gpt2-int4").table.stored_type
        'compressed-tensors (group_size 32, scale_dtype F32, is_symmetric True, bits 4)'
    """
    check_new_folder(out_dir)
    source = Path(checkpoint_dir)
    checkpoint, stored = Checkpoint.open(source), table.stored_rows
    layer = load(source)
    names = weight_names(layer, layer.tensor_names)
    weights = names.get("table", names.get("table.weight", ()))  # the one that was read, then equal copies
    if not weights or checkpoint.gguf is not None or not weights[0].endswith(WEIGHT):
        raise CheckpointError(f"The table of {source} is not the weight of one module in a safetensors file.")
    if (inner := checkpoint.matrix_info(weights[0]).file.parent) != source:
        raise CheckpointError(f"The weights of {source} are in the folder {inner.name}: compress {inner}.")
    module, shape = weights[0].removesuffix(WEIGHT), checkpoint.matrix_info(weights[0]).shape
    if shape != stored.shape:
        raise SizeError(f"{weights[0]} of {source} is {list(shape)}, and the table {list(stored.shape)}.")
    settings = stored.format.settings_with(checkpoint.quantisation or {}, module)
    experts = next((name for name in checkpoint.names if ".experts." in name), None)
    if experts is not None and stored.format.library == METHOD:
        raise CheckpointError(f"{source}: choose mlx-int4 or int4, as transformers opens no {experts} beside {METHOD}.")
    parts = stored.format.write(stored, StoredModule(module, {}, checkpoint.read, {}, {}))
    new = {f"{module}.{rest}": part for rest, part in parts.items()}
    stored_names = {
        name for each in weights if checkpoint.stored(each) for name in checkpoint.module_tensors(each).values()
    }
    old = {*weights, *stored_names}
    first = next(file for file, header in checkpoint.headers.items() if old & header.tensors.keys())
    with new_folder(out_dir) as partial:
        files: dict[str, str] = {}
        size = 0
        for file, header in checkpoint.headers.items():
            others = [info for name, info in header.tensors.items() if name not in old]
            more = new if file == first else {}
            copy_tensors(source / file, partial / file, others, header.metadata, more)
            files |= dict.fromkeys([*(info.name for info in others), *more], file)
            size += sum(info.nbytes for info in others) + sum(part.nbytes for part in more.values())
        written = [*checkpoint.headers, INDEX, CONFIG]
        left_out = copy_other_files(source, partial, written=written, num_rows=table.vocab_size)
        if (source / INDEX).is_file():
            write_json(partial / INDEX, {"metadata": {"total_size": size}, "weight_map": files})
        write_json(partial / CONFIG, _configured(checkpoint.config, settings))
        if tokenizer is not None and checkpoint.tokenizer_file() is None:
            save_tokenizer(tokenizer, partial / TOKENIZER)
    if left_out:
        warnings.warn(not_copied_message(left_out), EmbedLayerWarning, stacklevel=2)
    return tuple(left_out)


def _configured(config: JsonObject, settings: JsonObject) -> JsonObject:
    """Return a configuration with other quantisation settings, where the old ones are, or else beside `model_type`.

    Settings without a method are MLX's, which mlx-lm writes under both keys.
    """
    nested = config.get("text_config")
    schemes = dict.fromkeys(SCHEMES if "quant_method" not in settings else SCHEMES[:1], settings)
    if isinstance(nested, dict) and nested.keys() & {*SCHEMES} and not config.keys() & {*SCHEMES}:
        return {**config, "text_config": {**nested, **schemes}}
    return {**config, **schemes}
