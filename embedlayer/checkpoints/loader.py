"""`embedlayer.load`: the two ends of a checkpoint, by the data of `families.py`.

The layer is built on the meta device, so nothing is allocated that is not read; then each of its keys is given the
tensor that the family names.
"""

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.families import (
    HEAD_NAMES,
    TABLE_NAMES,
    Alibi,
    FalconPositions,
    Family,
    Head,
    Learned,
    LogitScaleRule,
    Names,
    Norm,
    Relative,
    Rotary,
    Sinusoids,
    family_of,
)
from embedlayer.checkpoints.families import Linear as LinearData
from embedlayer.checkpoints.layer import EmbeddingLayer, Origin, ReadTensor, TransformedHead
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.derived import Derived
from embedlayer.errors import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import Position
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.rotary_config import has_layer_types, layer_types
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.pretrained import assign, is_description
from embedlayer.tables.dense import TokenEmbedding

ROWS_AT_ONCE = 8192
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
MOST = {
    **dict.fromkeys(HEADS, 1 << 16),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim"), 1 << 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1 << 16),
}
"""Sizes from which something is computed that no tensor of the file bounds: beyond these a configuration is damaged."""

TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.txt",),
)
"""Files that `load_tokenizer` reads, from the one to prefer on."""


def load(
    source: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> EmbeddingLayer:
    """The embedding layer of a checkpoint: table, positions, scale, norms and head, and nothing else of the model.

    Args:
        source: A folder in Hugging Face's layout, a safetensors file, an index of several, a folder that
            `save_pretrained` wrote, or a name on the hub such as `"openai-community/gpt2"` (the `hf` extra; only its
            cache is asked if `HF_HUB_OFFLINE` is set).
        dtype: Type of all tensors; by default that of the table in the checkpoint.
        device: Where to put them. On the CPU, in their own type, they stay mapped to the file until they are written.
        revision: Branch, tag or commit on the hub.

    Returns:
        A layer that can be trained. `print(layer.report())` says what was read.

    Raises:
        FileError: There is nothing of that name, or a file cannot be read.
        CheckpointError: A file is damaged, a pickle, or lacks a tensor that its family needs; or tensors and
            configuration disagree.
        SizeError: `dtype` is none that rows can be looked up in.
        MissingExtraError: The hub needs `pip install 'embedlayer[hf]'`.

    Warns:
        EmbedLayerWarning: The family is not known and the table was found by its name, rows hold NaN or infinity, or
            the configuration contradicts the tensors in a way that can be resolved.

    Example:
        >>> from embedlayer.io.safetensors_files import save_tensors
        >>> from embedlayer.io.files import write_json
        >>> save_tensors("model.safetensors", {"wte.weight": torch.randn(100, 8), "wpe.weight": torch.randn(16, 8)})
        >>> write_json("config.json", {"model_type": "gpt2", "vocab_size": 100, "n_embd": 8})
        >>> layer = load(".")
        >>> layer.input(torch.tensor([[1, 2, 3]])).shape, layer.head.tied
        (torch.Size([1, 3, 8]), True)
    """
    if dtype is not None and dtype not in DTYPES:
        raise SizeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, not {dtype}.")
    checkpoint = Checkpoint.open(source, revision=revision)
    if is_description(checkpoint.config):
        layer = _saved(checkpoint, dtype, device)
    else:
        layer = _Loader(checkpoint, dtype, device).layer()
    layer._find_tokenizer = partial(_tokenizer_file, checkpoint)
    for note in layer.origin.notes:
        warnings.warn(f"{checkpoint.name}: {note}", EmbedLayerWarning, stacklevel=2)
    return layer


def _saved(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str) -> EmbeddingLayer:
    """What `EmbeddingLayer.save_pretrained` wrote."""
    config = checkpoint.file(CONFIG)
    assert config is not None
    layer = EmbeddingLayer.read_pretrained(config.parent, device=device)
    if dtype is not None:
        layer = layer.to(dtype)
    read = tuple(
        ReadTensor(key, key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for key, tensor in layer.state_dict().items()
    )
    layer.origin = Origin(checkpoint.name, read, sum(tensor.nbytes for tensor in read))
    return layer


def _tokenizer_file(checkpoint: Checkpoint) -> Path | None:
    for names in TOKENIZERS:
        found = [checkpoint.file(name) for name in names]
        if all(found):
            return found[0]
    return None


class _Loader:
    """One loading: what was read so far, for which key of the layer, and what there is to say about it."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str) -> None:
        self.checkpoint = checkpoint
        self.config = _text_config(checkpoint.config)
        self.dtype = dtype
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        self.read: list[ReadTensor] = []
        self.notes: list[str] = []
        self.nonfinite: dict[str, int] = {}
        self.family = self._family()
        rotary = "rope_parameters" in self.config
        defaults = {key: value for key, value in self.family.defaults if not (rotary and "rope" in key)}
        self.config = {**defaults, **self.config}
        self.width = 0
        for key, most in MOST.items():
            if self._whole_or_none(key) is not None:
                self._at_most(key, most)

    def _family(self) -> Family:
        model_type = "StaticEmbedding" if self.checkpoint.is_static_embedding else self.config.get("model_type")
        family = family_of(model_type)
        if family is not None:
            return family
        self.notes.append(
            f"the family {model_type!r} is not known, so the table was looked for by its name. Scale, positions, norms "
            f"and what the head does beyond its product are not read."
            if model_type
            else "there is no config.json that names a family, so the table was looked for by its name. Scale, "
            "positions and norms are not read."
        )
        return Family("unknown", (), TABLE_NAMES, head=Head(HEAD_NAMES))

    def layer(self) -> EmbeddingLayer:
        """Read everything and put it together.

        Raises:
            CheckpointError: Something is missing or does not fit.
        """
        try:
            return self._layer()
        except SizeError as error:
            raise CheckpointError(f"{self.checkpoint.name}: the configuration cannot be built. {error}") from error

    def _layer(self) -> EmbeddingLayer:
        family = self.family
        weight = self._table()
        pad = self._whole_or_none("pad_token_id")
        with torch.device("meta"):
            table = TokenEmbedding(
                weight.shape[0],
                weight.shape[1],
                padding_idx=self._padding_idx(weight, pad),
                scale=self._scale(weight.shape[1]),
                round_scale=family.scale == "sqrt_dim_rounded",
                dtype=weight.dtype,
            )
            projection = self._projection()
            types = self._types()
            norm = self._layer_norm("norm", family.norm, table.embed_dim)
            self.width = table.embed_dim if projection is None else projection.out_features
            schemes = self._positions(pad)
            layer = EmbeddingLayer(
                table,
                schemes.pop(""),
                self._head(table),
                family=family.name,
                recipe=[step for step in family.recipe if step != "project" or projection is not None],
                numbering=family.numbering,
                padding_id=pad,
                first_position_id=self._offset(pad) if family.numbering == "ids" else 0,
                types=types,
                norm=norm,
                projection=projection,
                other_positions=schemes,
                tensor_names=self.names,
            )
        assign(layer, self.tensors, source=Path(self.checkpoint.name))
        for module in layer.modules():
            if isinstance(module, Derived):
                module.derive(self.device)
        layer.origin = Origin(
            self.checkpoint.name,
            tuple(self.read),
            self.checkpoint.bytes_read,
            self.nonfinite,
            tuple(self.notes),
        )
        return layer

    # Reading

    def _read(self, key: str, name: str, *, aliases: Names = ()) -> Tensor:
        """A tensor for the key of the layer's state."""
        info = self.checkpoint.info(name)
        tensor = self.checkpoint.read(name, dtype=self.dtype, device=self.device)
        self.read.append(ReadTensor(key, name, info.shape, info.dtype, info.nbytes))
        self.tensors[key] = tensor
        self.names[key] = (name, *aliases)
        return tensor

    def _find(self, names: Names, what: str) -> str:
        found = self.checkpoint.find(*names)
        if not found:
            raise CheckpointError(
                f"{self.checkpoint.name} is of family {self.family.name} but has no {what}: "
                f"no tensor is called {' or '.join(names)}."
            )
        return found[0]

    def _need(self, key: str, names: Names, what: str, shape: tuple[int | None, ...]) -> Tensor:
        """A tensor that the family must have, of this shape (`None` for any size)."""
        name = self._find(names, what)
        found = self.checkpoint.info(name).shape
        if len(found) != len(shape) or any(size not in (None, there) for size, there in zip(shape, found, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(f"{name} has shape {list(found)} where [{wanted}] belongs to the {what}.")
        return self._read(key, name)

    # The table

    def _table(self) -> Tensor:
        rule = self.family.head
        candidates = [name for name in self.checkpoint.find(*self.family.table) if self._is_table(name)]
        if not candidates and rule is not None and self._is_tied(rule):
            candidates = [name for name in self.checkpoint.find(*rule.weight) if self._is_table(name)]
        if not candidates:
            raise CheckpointError(
                f"{self.checkpoint.name} has no table of token rows: no tensor with rows and columns is called "
                f"{' or '.join(self.family.table)}."
            )
        name, *others = candidates
        info = self.checkpoint.info(name)
        if self.dtype is None and info.torch_dtype not in DTYPES:
            raise CheckpointError(
                f"The table {name} is stored as {info.dtype}: without scales those are no vectors. "
                f"If its numbers are meant as they are, give a dtype, such as load(..., dtype=torch.float32)."
            )
        if 0 in info.shape:
            raise CheckpointError(f"The table {name} is empty: its shape is {list(info.shape)}.")
        weight = self._read("table.weight", name, aliases=tuple(o for o in others if self._same(name, o)))
        self.dtype = weight.dtype
        weight = self._folded(weight)
        self._compare_sizes(name, *weight.shape)
        self._count_nonfinite("table", weight)
        return weight

    def _is_table(self, name: str) -> bool:
        return len(self.checkpoint.info(name).shape) == 2

    def _same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same bits; neither is copied."""
        one, two = self.checkpoint.info(name), self.checkpoint.info(other)
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            return False
        return torch.equal(self.checkpoint.read(name).view(torch.uint8), self.checkpoint.read(other).view(torch.uint8))

    def _folded(self, rows: Tensor) -> Tensor:
        """model2vec's vocabulary: `rows[mapping] * weights`, where those are stored; the table as it is otherwise."""
        if self.family.name not in ("model2vec", "static_embedding"):
            return rows
        mapping, weights = (self.checkpoint.find(name) for name in ("mapping", "weights"))
        if not mapping and not weights:
            return rows
        self.names.clear()
        if mapping:
            index = self.checkpoint.read(mapping[0], dtype=torch.int64, device=self.device)
            if index.dim() != 1 or not ((index >= 0) & (index < rows.shape[0])).all():
                raise CheckpointError(f"{mapping[0]} names rows that the table of {rows.shape[0]} rows does not have.")
            rows = rows.index_select(0, index)
        if weights:
            factors = self.checkpoint.read(weights[0], device=self.device)
            if factors.shape != rows.shape[:1]:
                raise CheckpointError(f"{weights[0]} has shape {list(factors.shape)} for {rows.shape[0]} tokens.")
            wide = torch.promote_types(rows.dtype, torch.float32)
            rows = (rows.to(wide) * factors[:, None]).to(rows.dtype)
        self.tensors["table.weight"] = rows
        return rows

    def _compare_sizes(self, name: str, vocab_size: int, width: int) -> None:
        stated = self._whole_or_none("vocab_size")
        if stated is not None and stated != vocab_size and self.names:
            raise CheckpointError(
                f"{name} has {vocab_size:,} rows and the configuration says vocab_size {stated:,}: "
                f"they do not belong together, or one of them was changed alone."
            )
        key = next((key for key in self.family.width if self.config.get(key) is not None), None)
        if key is not None and self.config[key] != width:
            raise CheckpointError(
                f"{name} has rows of width {width:,} and the configuration says {key} {self.config[key]}: "
                f"they do not belong together."
            )

    def _count_nonfinite(self, part: str, rows: Tensor) -> None:
        chunks = (rows[start : start + ROWS_AT_ONCE] for start in range(0, rows.shape[0], ROWS_AT_ONCE))
        count = sum(int((~chunk.isfinite().all(-1)).sum()) for chunk in chunks)
        if count:
            self.nonfinite[part] = count
            self.notes.append(f"{count:,} of {rows.shape[0]:,} rows of the {part} hold NaN or infinity.")

    def _padding_idx(self, weight: Tensor, pad: int | None) -> int | None:
        """The padding token, where its row is zero as this library keeps it; an ordinary row otherwise."""
        if pad is None or not 0 <= pad < weight.shape[0] or weight[pad].any():
            return None
        rule = self.family.head
        biases = self.checkpoint.find(*rule.bias) if rule is not None else []
        return None if biases and self.checkpoint.read(biases[0]).flatten()[pad : pad + 1].any() else pad

    def _scale(self, width: int) -> float | None:
        rule = self.family.scale
        if rule is None or (rule == "sqrt_dim_if_scale_embedding" and not self.config.get("scale_embedding")):
            return None
        return self._number("embedding_multiplier") if rule == "embedding_multiplier" else math.sqrt(width)

    # The rest of the way in

    def _types(self) -> TokenEmbedding | Any:
        names = self.family.types
        if names == "table" or not names:
            return names or None
        assert isinstance(names, tuple)
        rows = self._need("types.weight", names, "table of token types", (None, self.tensors["table.weight"].shape[1]))
        return TokenEmbedding(*rows.shape, dtype=rows.dtype)

    def _layer_norm(self, key: str, rule: Norm | None, width: int) -> nn.LayerNorm | None:
        if rule is None:
            return None
        self._need(f"{key}.weight", rule.weight, "LayerNorm", (width,))
        self._need(f"{key}.bias", rule.bias, "LayerNorm", (width,))
        return nn.LayerNorm(width, eps=self._number(rule.eps_key, rule.eps))

    def _linear(self, key: str, rule: LinearData, sizes: tuple[int | None, int | None]) -> nn.Linear:
        """A projection, `(out, in)`."""
        weight = self._need(f"{key}.weight", rule.weight, "projection", sizes)
        if rule.bias:
            self._need(f"{key}.bias", rule.bias, "projection", (weight.shape[0],))
        return nn.Linear(weight.shape[1], weight.shape[0], bias=bool(rule.bias))

    def _projection(self) -> nn.Linear | None:
        rule = self.family.projection
        if rule is None:
            return None
        hidden = self._whole_or_none("hidden_size")
        width = self.tensors["table.weight"].shape[1]
        if not self.checkpoint.find(*rule.weight) and hidden == width:
            return None
        return self._linear("projection", rule, (hidden, width))

    def _offset(self, pad: int | None) -> int:
        """Rows before position 0: what transformers calls the first position."""
        if pad is None:
            raise CheckpointError(f"Positions of {self.family.name} begin after pad_token_id, which is missing.")
        return pad + 1

    def _positions(self, pad: int | None) -> dict[str, Position]:
        """The schemes by kind of layer; under the empty name, that of the first block."""
        rule = self.family.position
        if isinstance(rule, FalconPositions) and self.config.get("alibi"):
            heads = self._heads()
            return {"": AlibiBias(heads, scale=(self.width // heads) ** -0.5)}
        if isinstance(rule, Learned):
            width = self.width if "project" in self.family.recipe[: self.family.recipe.index("position")] else None
            width = width or self.tensors["table.weight"].shape[1]
            rows = self._need("position.weight", rule.names, "table of positions", (None, width)).shape[0]
            offset = self._offset(pad) if rule.offset == "padding" else int(rule.offset)
            return {"": LearnedPositionalEmbedding(rows - offset, width, offset=offset)}
        if isinstance(rule, Sinusoids):
            return {"": self._sinusoids(pad)}
        if isinstance(rule, Rotary | FalconPositions):
            return self._rotary(rule.base)
        if isinstance(rule, Alibi):
            return {"": AlibiBias(self._heads(), max_bias=self._alibi_bias_max())}
        if isinstance(rule, Relative):
            return self._relative(rule)
        return {"": Position()}

    def _alibi_bias_max(self) -> float:
        attention = self.config.get("attn_config")
        found = attention.get("alibi_bias_max", 8) if isinstance(attention, dict) else 8
        return self._positive(found, "attn_config.alibi_bias_max")

    def _sinusoids(self, pad: int | None) -> Position:
        return SinusoidalPositionalEmbedding(
            self._at_most("max_position_embeddings", 1 << 20),
            self.width,
            layout="concatenated",
            endpoint=True,
            offset=self._offset(pad),
            padding_idx=pad,
        )

    def _rotary(self, base: float) -> dict[str, Position]:
        kinds = list(dict.fromkeys(layer_types(self.config))) if has_layer_types(self.config) else [None]
        made = {kind: RotaryEmbedding.from_config(self.config, kind, default_base=base) for kind in kinds}
        return {"": made[kinds[0]]} | {str(kind): made[kind] for kind in kinds if kind is not None}

    def _relative(self, rule: Relative) -> dict[str, Position]:
        sides = {"": (rule.encoder, "position", True), "decoder": (rule.decoder, "other_positions.decoder", False)}
        found = {kind: side for kind, side in sides.items() if self.checkpoint.find(*side[0])}
        schemes: dict[str, Position] = {}
        for kind, (names, key, both) in found.items():
            buckets = self._whole("relative_attention_num_buckets")
            self._need(f"{key}.weight", names, "relative bias", (buckets, self._heads()))
            schemes[kind] = RelativePositionBias(
                self._heads(),
                num_buckets=buckets,
                max_distance=self._at_most("relative_attention_max_distance", 1 << 20, 128),
                bidirectional=both,
            )
        return {"": Position(), **schemes}

    def _heads(self) -> int:
        key = next((key for key in HEADS if self.config.get(key) is not None), HEADS[0])
        return self._whole(key)

    # The way out

    def _is_tied(self, rule: Head) -> bool:
        return rule.tied == "always" or bool(self.config.get("tie_word_embeddings", rule.tied))

    def _head(self, table: TokenEmbedding) -> OutputHead | TransformedHead | None:
        rule = self.family.head
        if rule is None or self._lacks_transform(rule):
            return None
        has_dense = rule.dense is not None and bool(self.checkpoint.find(*rule.dense.weight))
        key = "head.output" if has_dense else "head"
        weight = self._free_rows(rule, f"{key}.weight")
        if weight is None and not self._is_tied(rule):
            return None
        rows = table.vocab_size if weight is None else weight.shape[0]
        narrow = table.embed_dim if weight is None else weight.shape[1]
        bias = bool(rule.bias) and self._bias(rule.bias, f"{key}.bias", rows)
        softcap = self.config.get(rule.softcap) if rule.softcap is not None else None
        options: dict[str, Any] = {
            "bias": bias,
            "softcap": None if softcap is None else self._number(str(rule.softcap)),
            "logit_scale": self._logit_scale(rule.logit_scale, table.embed_dim),
        }
        if weight is None:
            output = OutputHead(table, **options)
        else:
            output = OutputHead(vocab_size=rows, embed_dim=narrow, **options)
        if not has_dense:
            return output
        assert rule.dense is not None
        dense = self._linear("head.dense", rule.dense, (narrow, self.width))
        activation = self._activation(rule.activation)
        norm = self._layer_norm("head.norm", rule.norm, narrow)
        return TransformedHead(output, dense=dense, activation=activation, norm=norm)

    def _lacks_transform(self, rule: Head) -> bool:
        """Whether what stands before the product is missing, so that this is a model without a head."""
        if rule.dense is None or self.checkpoint.find(*rule.dense.weight):
            return False
        return not (rule.dense_optional and self.width == self.tensors["table.weight"].shape[1])

    def _free_rows(self, rule: Head, key: str) -> Tensor | None:
        """The head's own rows; `None` where they are the table's or are not there."""
        found = [name for name in self.checkpoint.find(*rule.weight) if self._is_table(name)]
        table, *aliases = self.names.get("table.weight", ("",))
        found = [name for name in found if name != table and name not in aliases]
        if not found:
            return None
        if self._is_tied(rule):
            if self._same(table, found[0]):
                self.names["table.weight"] += (found[0],)
                return None
            if rule.tied != "always":
                self.notes.append(
                    f"the configuration ties the head to the table, but {found[0]} and {table} hold other numbers: "
                    f"the head is read as a free one."
                )
        weight = self._read(key, found[0])
        self._count_nonfinite("head", weight)
        return weight

    def _bias(self, names: Names, key: str, rows: int) -> bool:
        found = self.checkpoint.find(*names)
        if not found:
            return False
        self._need(key, names, "bias of the head", (rows,))
        self.names[key] = tuple(name for name in found if self.checkpoint.info(name).shape == (rows,))
        return True

    def _activation(self, word: str | None) -> str | None:
        if word != "hidden_act":
            return word
        found = self.config.get(word, "gelu")
        if not isinstance(found, str):
            raise CheckpointError(f"hidden_act must be the name of an activation, not {found!r}.")
        return found

    def _logit_scale(self, rule: LogitScaleRule | None, width: int) -> float:
        if rule == "logit_scale":
            return self._number("logit_scale")
        if rule == "1/logits_scaling":
            return 1 / self._number("logits_scaling")
        if rule == "sqrt_dim_if_tied":
            scaled = self.config.get("scale_decoder_outputs", self.config.get("tie_word_embeddings") is not False)
            return width**-0.5 if scaled else 1.0
        return 1.0

    # The configuration

    def _number(self, key: str, default: float | None = None) -> float:
        return self._positive(self.config.get(key, default), key)

    def _positive(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"The configuration's {key} must be a positive number, not {value!r}.")
        return float(value)

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._whole_or_none(key)
        value = default if value is None else value
        if value is None or value < 1:
            raise CheckpointError(f"The configuration's {key} must be a whole number of at least 1, not {value!r}.")
        return value

    def _at_most(self, key: str, most: int, default: int | None = None) -> int:
        value = self._whole(key, default)
        if value > most:
            raise CheckpointError(f"The configuration's {key} {value:,} is beyond all models: it is damaged.")
        return value

    def _whole_or_none(self, key: str) -> int | None:
        value = self.config.get(key)
        if value is not None and type(value) is not int:
            raise CheckpointError(f"The configuration's {key} must be a whole number, not {value!r}.")
        return value


def _text_config(config: JsonObject) -> JsonObject:
    """The part of a configuration that is about text; a model of several parts keeps it in `text_config`."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings", "model_type") if key in config}
    return {**outer, **text}
