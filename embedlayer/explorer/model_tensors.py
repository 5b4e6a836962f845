"""Tensors of a model by name: which one is the token table, its share of all, and its rows inside and outside."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.tensors import is_in_block
from embedlayer.explorer.answers import LookedUpRow, ModelPart, ModelTensor, ModelTensors
from embedlayer.explorer.example_tokens import examples
from embedlayer.explorer.pipeline_steps import Model, packed, trace_text
from embedlayer.explorer.text_ids import Vocabulary, shown_tokens, vocabulary_of
from embedlayer.explorer.tiny_layer import WORDS, tiny_layer
from embedlayer.explorer.tokens import Params
from embedlayer.families import GGUF_TENSORS, HUGGING_FACE_TENSORS, META_TENSORS
from embedlayer.families.configurations import text_part
from embedlayer.families.final_norms import FINAL_NORMS, final_norm_module
from embedlayer.io.safetensors_files import DTYPES
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import TABLE_ONLY, OpenedModel
from embedlayer.opening.path_kinds import OWN_FOLDERS, path_kind
from embedlayer.positions.position import Position
from embedlayer.saving import FLOATS

SHOWN_ROWS = 8

GPT2_SIZES = {"V": 50257, "D": 768, "T": 1024, "blocks": 12}
"""Sizes of GPT-2 small: tokens, width, positions, blocks."""

_PARTS: Mapping[str, ModelPart] = {
    "table": "table",
    "position": "position",
    "other_positions": "position",
    "blocks": "blocks",
    "final_norm": "norm",
    "head": "head",
    "bias": "blocks",  # on the scores of attention
}
"""Part of a tensor by the first name of its key in our layer; all others belong to the input."""

_BUFFER = re.compile(
    r"(.*\.)?(attn\.masked_bias|inv_freq|rope\.freqs|rope_freqs\.weight|final_logits_bias|e_score_correction_bias)"
)
"""Names of tensors in files that are no parameters: no optimiser learns them."""


class _TensorInfo(NamedTuple):
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    is_float: bool


def answer(source: OpenedModel, params: Params) -> ModelTensors:
    """Return the tensors of a model, each with its part, and rows of the table inside the model and outside of it."""
    layer = params.get("layer", "")
    if layer == "gpt2":
        return _answer("GPT-2 small", _gpt2_tensors(), is_tied=True)
    if layer == "tiny":
        model = tiny_layer("learned", tied=True)
        return _of_model(OpenedModel("tiny layer", model.table, model=model), WORDS, list(range(len(WORDS.names))))
    if source.model is None:
        why = TABLE_ONLY.format(source.title, source.table_only) if source.table_only else (
            f"{source.title} is a table by itself: the model that it belongs to is not here."
        )  # fmt: skip
        return _answer(source.title, [], refused=why)
    rows = [*range(source.table.vocab_size)[:SHOWN_ROWS]]
    return source.once(
        "tensors", lambda: _of_model(source, vocabulary_of(source), examples(source, {})["words"][:SHOWN_ROWS] or rows)
    )


def exported_requests(source: OpenedModel) -> list[dict[str, str]]:
    """Return the parameters of the requests whose answers an exported page stores: each of the three models."""
    return [{}, {"layer": "tiny"}, {"layer": "gpt2"}]


def _of_model(source: OpenedModel, vocabulary: Vocabulary, ids: list[int]) -> ModelTensors:
    """Return what `answer` returns for a source with a model; `ids` are the tokens of which rows are shown."""
    model, has_files = source.model, source.source and Path(source.source).exists()
    assert model is not None
    checkpoint = Checkpoint.open(Path(source.source)) if has_files else None  # of one on the hub, some files are here
    if checkpoint is None:  # a tied head has no tensor
        own = model.state_dict().items()
        stored = [_TensorInfo(name, tuple(each.shape), each.nbytes, each.dtype in FLOATS) for name, each in own]
    else:  # tensors of GGUF files count as numbers, not codes
        of_numbers, infos = checkpoint.gguf is not None, {name: checkpoint.info(name) for name in checkpoint.names}
        stored = [
            _TensorInfo(name, tuple(info.shape), info.nbytes, of_numbers or DTYPES.get(info.dtype) in FLOATS)
            for name, info in infos.items()
        ]
    parts = _parts(source, checkpoint, [each.name for each in stored])
    is_tied = bool(source.head is not None and source.head.tied)
    is_packed = _is_own(source) or (checkpoint is not None and checkpoint.quantisation is not None)
    is_packed = is_packed and not all(each.is_float for each in stored)
    read = model.tensor_names if isinstance(model, EmbeddingLayer) else {}  # a checkpoint may have copies
    first = [name for key, names in read.items() for name in names[:1] if key.startswith("table.")]
    table = next((name for name in first if name in parts), "")
    stored.sort(key=lambda each: (each.name != table, parts[each.name] != "table", each.name))
    tensors = _grouped(stored, parts, is_tied=is_tied, in_bytes=is_packed)
    num_rows = getattr(source.table, "num_rows", source.table.vocab_size)  # with spare ones
    table_rows = _rows_in_file(checkpoint, parts, torch.tensor(ids), (num_rows, source.table.embed_dim))
    rows = _rows(source, table_rows, vocabulary, ids)
    return {**_answer(source.title, tensors, is_tied=is_tied, rows=rows), "is_file": table_rows is not None,
            "unit": "bytes" if is_packed else "parameters"}  # fmt: skip


def _answer(
    title: str,
    tensors: list[ModelTensor],
    *,
    refused: str = "",
    is_tied: bool = False,
    rows: list[LookedUpRow] | None = None,
) -> ModelTensors:
    """Return an answer with sizes in parameters that are not read from files."""
    return {
        "title": title,
        "refused": refused,
        "unit": "parameters",
        "is_tied": is_tied,
        "is_file": False,
        "tensors": tensors,
        "rows": rows or [],
    }


def _is_own(source: OpenedModel) -> bool:
    """Return whether the tensors have the names of our layers: in memory, and in folders that this library wrote."""
    return not source.source or path_kind(Path(source.source)) in OWN_FOLDERS


def _parts(source: OpenedModel, checkpoint: Checkpoint | None, names: list[str]) -> dict[str, ModelPart]:
    """Return the part of each tensor: where our layer uses it, else whether it is one of a block or the final norm."""
    keys = _module_keys(source, names)
    parts: dict[str, ModelPart] = {}
    for name in names:
        key = keys.get(_module(name))
        if key == "norm" and isinstance(source.model, DecoderLM):
            parts[name] = "norm"
        elif key is not None:
            parts[name] = _PARTS.get(key, "input")
        else:
            parts[name] = "blocks" if is_in_block(name) else "other"
    table = next((name for name, part in parts.items() if part == "table"), "")
    norm = _final_norm(checkpoint, table, names)
    return parts | {name: "norm" for name in names if norm and _module(name) == norm}


def _module_keys(source: OpenedModel, names: list[str]) -> dict[str, str]:
    """Return the first name of the key in our layer for the modules of tensors that the layer knows."""
    model = source.model
    if _is_own(source):
        return {_module(name): _first_name(model, name) for name in names}
    if isinstance(model, EmbeddingLayer):
        pairs = [(name, key) for key, own in model.tensor_names.items() for name in own]
    else:
        layouts = (HUGGING_FACE_TENSORS, META_TENSORS, GGUF_TENSORS)
        pairs = [(theirs, ours) for layout in layouts for ours, theirs in layout.items() if "{}" not in ours]
    return {_module(name): _first_name(model, key) for name, key in pairs}


def _first_name(model: object, key: str) -> str:
    """Return the first name of a key in our layer; that of a position scheme is `bias` if it is one on the scores."""
    first, _, rest = key.partition(".")
    scheme = getattr(model, first, None)
    if first == "other_positions":
        scheme = cast(nn.ModuleDict, scheme)[rest.partition(".")[0]]
    return "bias" if isinstance(scheme, Position) and scheme.hook == "bias" else first


def _module(name: str) -> str:
    """Return the name of the module of a tensor; of one with a name alone, that name."""
    return name.rpartition(".")[0] or name


def _final_norm(checkpoint: Checkpoint | None, table: str, names: list[str]) -> str | None:
    """Return the module of the norm between the last block and the head, if its place in a checkpoint is known."""
    if checkpoint is None:
        return None
    if checkpoint.gguf is not None:
        return _module(GGUF_TENSORS["norm.weight"])
    spec = FINAL_NORMS.get(str(text_part(checkpoint.config).get("model_type")))
    return None if spec is None else final_norm_module(str(spec.name), table, names)


def _grouped(
    stored: list[_TensorInfo], parts: Mapping[str, ModelPart], *, is_tied: bool, in_bytes: bool
) -> list[ModelTensor]:
    """Return the tensors in the order of their names, those of all blocks with one name and shape as one entry."""
    tensors: dict[tuple[str, tuple[int, ...], ModelPart], ModelTensor] = {}
    for each in stored:
        part = parts[each.name]
        is_mask = each.name.endswith("attn.bias") and len(each.shape) == 4  # of GPT-2
        if is_mask or _BUFFER.fullmatch(each.name) or not (each.is_float or in_bytes):
            part = "buffer"
        has_rows = (part == "table" and not in_bytes) or (part == "head" and is_tied)
        is_copy = has_rows and each is not stored[0] and each.shape == stored[0].shape
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.name) if part in ("blocks", "buffer") else each.name
        numbers = each.nbytes if in_bytes else torch.Size(each.shape).numel()
        entry = tensors.setdefault(
            (name, each.shape, part),
            {"name": name, "count": 0, "shape": list(each.shape), "size": 0, "part": part, "is_copy": is_copy},
        )
        entry["count"] += 1
        entry["size"] += numbers
    return sorted(tensors.values(), key=lambda each: each["name"])


def _rows(
    source: OpenedModel, in_file: torch.Tensor | None, vocabulary: Vocabulary, ids: list[int]
) -> list[LookedUpRow]:
    """Return rows of some tokens: as the model's first step computes them, and as the table's tensor has them."""
    codes = source.model.codes if isinstance(source.model, EmbeddingLayer) else None
    if codes is not None and source.table is codes.rows:
        return []
    table, asked = source.table, torch.tensor(ids, device=source.table.device)
    with torch.no_grad():
        inside = trace_text(cast(Model, source.model), asked).steps[0].vectors.detach().float().cpu()
        outside = torch.cat([table.rows(row, row + 1) for row in ids]) if in_file is None else in_file
    outside = outside.detach().float().cpu()
    difference = (inside - outside).abs().amax(-1)
    return [
        {"token": token, "inside": packed(first), "outside": packed(second), "difference": float(most) if most == most
         else None}
        for token, first, second, most in zip(shown_tokens(vocabulary, ids), inside, outside, difference, strict=True)
    ]  # fmt: skip


def _rows_in_file(
    checkpoint: Checkpoint | None, parts: Mapping[str, ModelPart], ids: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor | None:
    """Read rows of the table's tensor from its file; `None` if no tensor, or not one alone, has them as numbers."""
    if checkpoint is None or checkpoint.gguf is not None:
        return None
    tensors = [checkpoint.info(name) for name, part in parts.items() if part == "table"]
    are_rows = all(tuple(each.shape) == shape and DTYPES.get(each.dtype) in FLOATS for each in tensors)
    return tensors[0].read_rows(ids) if tensors and are_rows else None


def _gpt2_tensors() -> list[ModelTensor]:
    """Return the tensors of GPT-2 small, named as in its checkpoint on the hub, from its sizes."""
    tokens, width, positions, blocks = GPT2_SIZES.values()
    norm = {"weight": [width], "bias": [width]}
    of_block = {
        "attn.c_attn": {"weight": [width, 3 * width], "bias": [3 * width]},
        "attn.c_proj": {"weight": [width, width], "bias": [width]},
        "ln_1": norm,
        "ln_2": norm,
        "mlp.c_fc": {"weight": [width, 4 * width], "bias": [4 * width]},
        "mlp.c_proj": {"weight": [4 * width, width], "bias": [width]},
    }
    listed: list[tuple[str, int, list[int], ModelPart]] = [
        (f"h.*.{module}.{name}", blocks, shape, "blocks")
        for module, tensors in of_block.items()
        for name, shape in tensors.items()
    ]
    listed += [(f"ln_f.{name}", 1, shape, "norm") for name, shape in norm.items()]
    listed += [("wpe.weight", 1, [positions, width], "position"), ("wte.weight", 1, [tokens, width], "table")]
    return [
        {"name": name, "count": count, "shape": shape, "size": count * torch.Size(shape).numel(),
         "part": part, "is_copy": False}
        for name, count, shape, part in sorted(listed)
    ]  # fmt: skip
