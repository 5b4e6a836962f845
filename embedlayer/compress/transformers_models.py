"""Models of transformers with a table that transformers cannot store: the table put in, saved and loaded.

`save_model` writes two things into one folder: the table (or the embedding layer that contains it), as our
`save_pretrained` does, but with its weights in `table.safetensors`; and in the folder `model` the configuration and all
other tensors of the model. No class of transformers opens either of them, so none can fill in random rows. `load_model`
puts both together.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.patching import patch
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.core.computed_buffers import recompute_all_buffers
from embedlayer.core.errors import CheckpointError, SizeError, require, transformers_errors
from embedlayer.core.formatting import a_or_an
from embedlayer.core.own_attributes import REPLACED, remove_own_attribute, set_own_attribute
from embedlayer.families.left_out_files import FileRule, files_left_out, files_to_copy, other_safetensors
from embedlayer.heads.adapted_rows import ChildReference
from embedlayer.heads.output import OutputHead
from embedlayer.integrations.peft import PeftReference
from embedlayer.io.files import (
    check_new_folder,
    create_folder,
    named_path,
    new_folder,
    read_json,
    recover_folder,
    write_json,
)
from embedlayer.io.json_fields import parse_json
from embedlayer.io.partials import temporary_folder
from embedlayer.io.safetensors_files import (
    DTYPE_NAMES,
    INDEX,
    TensorInfo,
    copy_bytes,
    encode_header,
    load_tensors,
    read_header,
    save_tensors,
    write_tensor,
)
from embedlayer.models.causal import attention_options, missing_tensors
from embedlayer.opening.path_kinds import BLOCKS
from embedlayer.saving import WEIGHTS, Pretrained, build, describe, hide_weights
from embedlayer.tables.bag import Bag
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=nn.Module)

TENSORS = "blocks.safetensors"
"""File of the tensors of the blocks; transformers looks for no file of this name."""

TABLE = "embedlayer.table"
"""Key of the metadata of that file: a JSON list of the names that the table had in the model."""

DENSE = "table.weight"
"""Name of the rows in an embedding layer with a dense table."""

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
"""Files of a model of sentence-transformers: its modules, and its class and prompts."""

OF_THE_OLD_TABLE = (
    FileRule(("*.receipt",), "receipts of edits of its vocabulary", "They stay in the folder of the model."),
    FileRule(
        ("run.json", "checkpoint.safetensors", "best.json", "metrics.jsonl", "report.html", "corpus/", "tables/"),
        "the training of the run",
        "Resume the run in its own folder.",
    ),
)
"""Files beside a table that belong to it alone: a copy with a compressed table leaves them out."""

COPY_OF_TABLE = FileRule((), "a tensor with a row for each token", "Compress the table in this file by itself.")


def with_table(model: Model, table: TokenTable) -> Model:
    """Return a copy of a patched model of transformers with another table; see `replace_table`."""
    root = _table_of(model)
    if (table.vocab_size, table.embed_dim) != (root.vocab_size, root.embed_dim):
        found, needed = f"{table.vocab_size} x {table.embed_dim}", f"{root.vocab_size} x {root.embed_dim}"
        raise SizeError(f"The table is {found}, the model needs {needed}.")
    look_ups, heads = _users_of(root, model)
    if partial_head := next((name for name, head in heads.items() if head.is_partial), None):
        raise CheckpointError(f"A {type(model).__name__} multiplies the rows of {partial_head} itself.")
    replaced = {id(part) for part in (*look_ups.values(), *heads.values())}
    for name, part in model.named_modules():
        if id(part) not in replaced and any(each is _rows(root) for each in part._parameters.values()):
            raise CheckpointError(f"{name} uses the weight of the table, and is no look-up and no LM head.")
    new = {id(part): _for_look_up(part, table) for part in look_ups.values()}
    # deepcopy keeps every object in its memo, so only tied heads and the parents of heads and look-ups are copied
    shared = [
        *(part for part in model.modules() if not any(id(each) in replaced for each in part.modules())),
        *model.parameters(),
        *model.buffers(),
    ]
    other = copy.deepcopy(model, {id(each): each for each in shared} | new)
    references: list[ChildReference] = [PeftReference(other, name) for name in look_ups]
    for name in heads:
        head = cast(OutputHead, other.get_submodule(name))
        _tie(head, cast(TokenTable, references[0].module))
        head.follow_references(references, PeftReference(other, name))
    tables, has_blocks = {id(each) for each in new.values()}, hasattr(model, "get_input_embeddings")
    for part in other.modules():
        if not isinstance(part, Pretrained) and not tables.isdisjoint(map(id, part.modules())):
            _set_saving(part, table, has_blocks)
    return other


def _tie(head: OutputHead, table: TokenTable) -> None:
    """Let a tied head of a patched model read another table, in place."""
    if isinstance(table, DenseTable):  # as in a patched model, so that its logits are deferred
        head.set_table(None)
        head.weight = cast(nn.Parameter, table.weight)
    else:
        head._parameters.pop("weight", None)
        remove_own_attribute(head, REPLACED)
        head.set_table(table)


def _set_saving(module: nn.Module, table: TokenTable, has_blocks: bool) -> None:
    """Let the methods by which other libraries save a module raise an error if they cannot store the table in it."""
    for name in ("save_pretrained", "save"):  # of transformers and of sentence-transformers
        own = vars(module).get(name)
        if isinstance(own, partial) and own.func is _refuse_to_save:  # the table before was not dense
            remove_own_attribute(module, name)
        if not isinstance(table, DenseTable) and hasattr(module, name):
            set_own_attribute(module, name, partial(_refuse_to_save, type(table).__name__, has_blocks))


def _table_of(model: Any) -> TokenTable:
    """Return the table of the input embeddings of a patched model of transformers, or else that of its bags."""
    bags = {part.table: name for name, part in model.named_modules() if isinstance(part, Bag)}
    root = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else next(iter(bags), None)
    if len(bags) > 1 and root in bags:
        raise CheckpointError(f"{a_or_an(model)} has several tables: pass {' or '.join(bags.values())}.")
    if not isinstance(root, TokenTable):
        raise CheckpointError(f"The input embeddings are {a_or_an(root)}: call embedlayer.patch before adapters.")
    return root


def _users_of(table: TokenTable, model: nn.Module) -> tuple[dict[str, TokenTable], dict[str, OutputHead]]:
    """Return the look-ups in a model that share the rows of `table`, and the LM heads tied to them, by name."""
    places, rows = list(model.named_modules(remove_duplicate=False)), _rows(table)
    look_ups: dict[str, TokenTable] = {}
    for name, part in places:
        is_inside = name.startswith(tuple(f"{each}." for each in look_ups))  # the factor of a factorized table
        if isinstance(part, TokenTable) and _rows(part) is rows and not is_inside:
            look_ups[name] = part
    tied = {id(part) for part in look_ups.values()}
    heads = {
        name: part
        for name, part in places
        if isinstance(part, OutputHead)
        and (id(part.own_table) in tied or part._parameters.get("weight", table) is rows)
    }
    return look_ups, heads


def _rows(table: TokenTable) -> Tensor | None:
    """Return the first saved tensor of a table, by which look-ups of the same rows are found; `None` if it has none."""
    return next(iter(table.state_dict(keep_vars=True).values()), None)


def _for_look_up(look_up: TokenTable, table: TokenTable) -> TokenTable:
    """Return a table with the rows of `table` and the scale of a look-up, which it can replace.

    A dense table that has this scale is returned itself; any other result is a new table that shares the rows.
    """
    factors = [1.0 if each.factor is None else float(each.factor) for each in (look_up, table)]
    if factors[0] == factors[1] and isinstance(table, DenseTable):
        return table
    arguments = describe(table)
    if factors[0] != factors[1]:
        if "scale" not in arguments:
            raise SizeError(f"The model scales its rows by {factors[0]:g}, and {a_or_an(table)} has no scale.")
        is_rounded = isinstance(look_up.factor, Tensor)
        arguments["scale"] = look_up.scale if is_rounded and "round_scale" in arguments else factors[0]
        if "round_scale" in arguments:
            arguments["round_scale"] = is_rounded
    with torch.device("meta"):
        shared: TokenTable = build(arguments)
    shared.load_state_dict(table.state_dict(), assign=True)
    if isinstance(shared, PackedRows) and isinstance(table, PackedRows):
        shared.replace_rows(table.stored_rows)  # the same buffers, by which an edit recognises that rows are shared
    for own, other in zip(shared.parameters(), table.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    recompute_all_buffers(shared, table.device)
    return shared.train(table.training)


def _refuse_to_save(kind: str, has_blocks: bool, *arguments: Any, **options: Any) -> NoReturn:
    """Raise the `CheckpointError` of saving a model whose table other libraries cannot store."""
    # it takes the arguments of the method that saves, and uses none
    if not has_blocks:
        raise CheckpointError(f"sentence-transformers cannot store {a_or_an(kind)}: use table.save_pretrained(folder).")
    raise CheckpointError(f"transformers cannot store {a_or_an(kind)}: embedlayer.compress.save_model(model, folder).")


# Files


def save_model(model: nn.Module, directory: Path | str, *, tokenizer: Any = None) -> None:
    """Save a patched model of transformers with any table, for `load_model`; the folder appears complete or not at all.

    `open_model`, and with it `embedlayer neighbors`, `inspect` and `export`, open the table and the tokenizer.

    Args:
        model: A model of transformers after `patch` or `replace_table`.
        directory: The folder, which must not exist or must be empty.
        tokenizer: Tokenizer to save, or `None`.

    Raises:
        CheckpointError: The model is not patched, is no model of transformers, or its table could not be
            loaded again.
        FileError: The folder is not empty, or cannot be written.
        TokenizerError: `tokenizer` is no tokenizer.
    """
    table, target, whole = _table_of(model), named_path(directory), cast(Any, model)
    if not hasattr(model, "get_input_embeddings"):
        _refuse_to_save(type(table).__name__, False)
    check_new_folder(target)
    look_ups, heads = _users_of(table, model)
    skipped = (*(f"{name}." for name in look_ups), *(f"{name}.weight" for name in heads))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(skipped)}
    first = {tensor.data_ptr(): name for name, tensor in reversed(tensors.items())}  # other names of tied tensors
    tensors = {name: tensor for name, tensor in tensors.items() if first[tensor.data_ptr()] == name}
    config = copy.deepcopy(whole.config)
    config.architectures, config.dtype = [type(model).__name__], whole.dtype
    with new_folder(target) as partial_folder:
        table.save_pretrained(partial_folder, tokenizer=tokenizer)
        hide_weights(partial_folder)
        rest = create_folder(partial_folder / BLOCKS)
        config.save_pretrained(rest)
        if getattr(model, "generation_config", None) is not None:
            whole.generation_config.save_pretrained(rest)
        metadata = {TABLE: json.dumps([f"{name}.weight" for name in (*look_ups, *heads)])}
        save_tensors(rest / TENSORS, tensors, metadata)


def copy_blocks(layer: EmbeddingLayer | None, source: Path, target: Path) -> dict[str, FileRule] | None:
    """Copy what the embedding layer of a checkpoint lacks of the model into the folder `model` of `target`.

    These are all tensors but those of the table and those that the layer stores bit for bit, and what
    `copy_other_files` copies. `layer` is as it was loaded from `source`, with its own table; `None` if `source` has
    only a table, as `save_model` writes it. `source` may also be a folder that this function or `save_model` wrote,
    whose blocks are copied. The result has the files that are left out; it is `None` if there are no blocks, or they
    are not known (see `tensors_beside`), and nothing is copied.
    """
    if (source / BLOCKS).is_dir():
        shutil.copytree(source / BLOCKS, target / BLOCKS)
        return copy_other_files(source, target, written=[f"{BLOCKS}/", WEIGHTS, *os.listdir(target)])
    others = tensors_beside(layer, source)
    if layer is None or others is None or not any(others.values()):
        return None
    rest, table = create_folder(target / BLOCKS), json.dumps(_names_of_table(layer))
    for number, (file, infos) in enumerate(others.items()):
        metadata = {"format": "pt", **({} if number else {TABLE: table})}
        copy_tensors(source / file, rest / f"blocks-{Path(file).name}", infos, metadata)
    return copy_other_files(source, rest, written=[*others, INDEX], num_rows=layer.table.vocab_size)


def tensors_beside(layer: EmbeddingLayer | None, source: Path) -> dict[str, list[TensorInfo]] | None:
    """Return the tensors of a checkpoint that are neither its table nor stored bit for bit in its layer, by file.

    The result is `None` if they are not known: `source` is no folder with a `config.json`, or the layer has no dense
    table.
    """
    if layer is None or not (source / "config.json").is_file() or not layer.tensor_names.get(DENSE):
        return None
    checkpoint, state = Checkpoint.open(source), layer.state_dict()
    names_in_layer = {
        name
        for key, names in layer.tensor_names.items()
        for name in names
        if key != DENSE and key in state and checkpoint.stores(name, state[key])
    }
    names_in_layer.update(_names_of_table(layer))
    return {
        file: [info for name, info in header.tensors.items() if name not in names_in_layer]
        for file, header in checkpoint.headers.items()
    }


def _names_of_table(layer: EmbeddingLayer) -> list[str]:
    """Return the names of a dense table and of its equal copies in the checkpoint of a layer."""
    return [*layer.tensor_names[DENSE], *layer.load_record.unread_copies]


def copy_tensors(
    source: Path,
    target: Path,
    tensors: Iterable[TensorInfo],
    metadata: Mapping[str, str],
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a safetensors file with some tensors of another one, byte for byte, and `more` tensors after them."""
    copied, new = {info.name: info for info in tensors}, more or {}
    entries = {name: (info.dtype, info.shape, info.nbytes) for name, info in copied.items()}
    added = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes) for name, tensor in new.items()}
    with source.open("rb") as old, target.open("wb") as file:
        file.write(encode_header(entries | added, metadata))
        for info in copied.values():
            copy_bytes(old, file, info)
        for tensor in new.values():
            write_tensor(file, tensor)


def copy_other_files(
    source: Path, target: Path, *, written: Iterable[str] = (), num_rows: int = 0
) -> dict[str, FileRule]:
    """Copy the files and folders of a folder, except those that belong to its old table.

    Left out is what an edit of the vocabulary leaves out (`families.left_out_files`), what `OF_THE_OLD_TABLE` names,
    and other safetensors files with a tensor of `num_rows` rows. Paths in `written` are written otherwise; those of
    folders end in a slash.
    """
    written = [*written]
    left_out = files_left_out(source)
    for rule in OF_THE_OLD_TABLE:
        found = (path for pattern in rule.patterns for path in source.glob(pattern.removesuffix("/")))
        left_out |= {f"{path.name}/" if path.is_dir() else path.name: rule for path in found}
    for path in other_safetensors(source, [*left_out, *written]):
        shapes = [info.shape for info in read_header(source / path).tensors.values()]
        if any(shape[:1] == (num_rows,) for shape in shapes):
            left_out |= dict.fromkeys((path, f"{path}.index.json"), COPY_OF_TABLE)
    for path in files_to_copy(source, target, [*left_out, *written]):
        shutil.copyfile(source / path, target / path)
    return {path: left_out[path] for path in sorted(left_out) if path not in written and (source / path).exists()}


def load_model(directory: Path | str, *, device: torch.device | str = "cpu") -> nn.Module:
    """Load what `save_model` or `embedlayer compress` wrote as a patched model of transformers with its table.

    A model of sentence-transformers is loaded with all its modules, of which the first has the patched model. No pickle
    is loaded and no code of the folder is run.

    Args:
        directory: The folder.
        device: Device of the model.

    Returns:
        The model, in evaluation mode.

    Raises:
        FileError: A file of the table is missing.
        CheckpointError: The folder has no such model, transformers does not have its class, or a file is damaged or
            lacks a tensor.
        MissingExtraError: transformers is not installed, or sentence-transformers for a model of it: `pip install
            'embedlayer[recipes]'`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = patch(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=16, n_embd=32, n_layer=1, n_head=2)))
        >>> small = replace_table(model, compress_table(model.get_input_embeddings(), "int8"))
        >>> save_model(small, "small")
        >>> type(load_model("small").get_input_embeddings()).__name__
        'QuantizedEmbedding'
    """
    folder = recover_folder(directory)
    rest = folder / BLOCKS
    files = sorted(rest.glob("*.safetensors"))
    if not files or not (rest / "config.json").is_file():
        raise CheckpointError(f"{folder} has no folder {BLOCKS}, as embedlayer.compress.save_model writes it.")
    transformers = require("transformers", extra="hf")
    layer = Pretrained.from_pretrained(folder)
    table = layer if isinstance(layer, TokenTable) else getattr(layer, "table", None)
    if not isinstance(table, TokenTable):
        raise CheckpointError(f"{folder} holds {a_or_an(layer)}, which has no table of tokens.")
    tensors: dict[str, Tensor] = {}
    if isinstance(layer, EmbeddingLayer):  # the others than those of its table, by their names in the checkpoint
        state = layer.state_dict()
        tensors = {name: state[key] for key, names in layer.tensor_names.items() if key in state for name in names}
    for file in files:
        stored, metadata = load_tensors(file)
        rows = torch.zeros(1, 1, dtype=table.rows(0, 1).dtype).expand(table.vocab_size, table.embed_dim)
        names = parse_json(metadata.get(TABLE, "[]"), f"The names of the table in {file}")
        tensors |= stored | dict.fromkeys(filter(lambda name: isinstance(name, str), names), rows)
    library = require("sentence_transformers", extra="recipes") if (rest / MODULES).is_file() else None
    modules: Any = None
    model_class: Any
    with transformers_errors(f"load {rest}"):
        if library is not None:
            modules, name = _sentence_transformer(library, transformers, rest, files)
            inner = modules[0].get_submodule(name)
            model_class, config = type(inner), inner.config
            setattr(modules[0], name, None)  # its memory is free before the model is loaded with all tensors
            del inner
        else:
            config = transformers.AutoConfig.from_pretrained(rest, local_files_only=True, trust_remote_code=False)
            model_class = getattr(transformers, (config.architectures or [""])[0], None)
        is_known = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        if not is_known:
            raise CheckpointError(f"{rest / 'config.json'} names no model class of transformers in architectures.")
        options = attention_options(config)
        model, loaded = model_class.from_pretrained(
            None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True, **options
        )
    patch(model)
    count, names = missing_tensors(loaded)
    if count:
        raise CheckpointError(f"{folder} lacks tensors of {a_or_an(model)}: {names}.")
    model = with_table(model, table)
    if modules is not None:
        setattr(modules[0], name, model)
        model = modules
    return cast(nn.Module, model.to(device).eval())


def _sentence_transformer(
    library: Any, transformers: Any, folder: Path, blocks: Sequence[Path]
) -> tuple[nn.Module, str]:
    """Open a model of sentence-transformers from a folder whose weights have names that only this library reads."""
    kind = read_json(folder / SETTINGS).get("model_type") if (folder / SETTINGS).is_file() else None
    names = [f"model-{number:05d}-of-{len(blocks):05d}.safetensors" for number in range(1, len(blocks) + 1)]
    files = dict(zip(names, blocks, strict=True))
    places = {name: file for file, path in files.items() for name in read_header(path).tensors}
    with temporary_folder() as linked:
        for path in [*folder.iterdir()]:
            if path not in blocks:
                (linked / path.name).symlink_to(path.resolve())
        for file, path in files.items():
            (linked / file).symlink_to(path.resolve())
        write_json(linked / INDEX, {"metadata": {}, "weight_map": places})
        logs, verbosity = transformers.logging, transformers.logging.get_verbosity()
        logs.set_verbosity_error()  # else it lists the tensors that are in the layer
        try:
            opened_by = getattr(library, str(kind), library.SentenceTransformer)
            model: Any = opened_by(str(linked), device="cpu", local_files_only=True, trust_remote_code=False)
        finally:
            logs.set_verbosity(verbosity)
    parts = [name for name, part in model[0].named_children() if isinstance(part, transformers.PreTrainedModel)]
    if len(parts) != 1:
        raise CheckpointError(f"The first module of {folder} is {a_or_an(model[0])}, without a model of transformers.")
    return model, parts[0]
