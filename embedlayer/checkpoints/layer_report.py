"""Description of an embedding layer and of what was read to load it, as data and as text."""

import json
from dataclasses import asdict, dataclass

from embedlayer.checkpoints.reading.layer import LoadRecord
from embedlayer.io.files import JsonObject


@dataclass(frozen=True, kw_only=True)
class LayerReport(LoadRecord):
    """Description of a layer and of the tensors that were read to load it; `print` shows it as text.

    The attributes of `LoadRecord` come first.

    Attributes:
        family: Name of the model family, or `"unknown"`.
        vocab_size: Number of rows of the table, V.
        embed_dim: Width of a row.
        width: Width of the vectors that the first block receives, D.
        dtype: Dtype in which the rows are stored; for quantised rows the name of their type, such as `"Q4_K"`.
        device: Device of the rows.
        scale: Factor on looked-up rows, as the family defines it; `None` for none.
        embed_scale: `scale` rounded to the dtype of the rows, for families that round the factor (Gemma), else `None`.
        padding_idx: Padding row of the table, or `None`; see `LookupTable`.
        recipe: Steps of the input embedding after look-up and scale.
        positions: Position schemes by kind of layer; the key `""` has that of the first block.
        head: `"tied"`, `"untied"`, or `None` without a head.
        logit_scale: Factor on the logits, or `None` without a head.
        softcap: Cap on the logits, or `None`.
        tokenizer: Number of rows that the tokenizer's IDs need; the error message if the tokenizer cannot be read;
            `None` if there is no tokenizer.
        per_layer: Rows, blocks and width of the per-layer table; `None` for a layer without one.
        streams: Number of rows of each stream of codes; empty for a layer without them.
        parameters: Number of numbers in the parameters of the layer, head included, frozen ones too; a shared one
            counts once.
    """

    family: str
    vocab_size: int
    embed_dim: int
    width: int
    dtype: str
    device: str
    scale: float | None
    embed_scale: float | None
    padding_idx: int | None
    recipe: tuple[str, ...]
    positions: dict[str, str]
    head: str | None
    logit_scale: float | None
    softcap: float | None
    tokenizer: int | str | None
    per_layer: tuple[int, int, int] | None
    streams: tuple[int, ...]
    parameters: int

    def to_json(self) -> JsonObject:
        """Return all fields, with those of `LoadRecord`, as a dictionary of JSON values."""
        content: JsonObject = json.loads(json.dumps(asdict(self)))
        return content

    def __str__(self) -> str:
        scale = "none" if self.scale is None else f"{self.scale:.6g}"
        if self.embed_scale is not None:
            scale += f", rounded to {self.embed_scale:.6g}"
        options = [f"logit scale {self.logit_scale:g}"] if self.logit_scale not in (None, 1.0) else []
        options += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        lines = {
            "family": self.family,
            "table": f"{self.vocab_size:,} x {self.embed_dim:,} {self.dtype} on {self.device}",
            "scale": scale,
            "padding": "none" if self.padding_idx is None else f"row {self.padding_idx}",
            "input": " -> ".join(("look-up", *self.recipe)) + f" -> width {self.width:,}",
            "positions": "; ".join(f"{kind}: {scheme}" if kind else scheme for kind, scheme in self.positions.items()),
            "head": ", ".join([self.head or "none", *options]),
            "tokenizer": "none" if self.tokenizer is None else str(self.tokenizer),
            "parameters": f"{self.parameters:,}",
            "read": f"{self.bytes_read:,} bytes, {len(self.tensors)} tensors",
        }
        if self.per_layer is not None:
            rows, blocks, width = self.per_layer
            lines["per layer"] = f"{rows:,} rows, a vector of width {width:,} for each of {blocks:,} blocks"
        if self.streams:
            same = len({*self.streams}) == 1
            sizes = f"{self.streams[0]:,} rows each" if same else f"rows {', '.join(map(str, self.streams))}"
            lines["streams"] = f"{len(self.streams)} streams of codes, {sizes}"
        text = [self.source, *(f"  {name:<11}{value}" for name, value in lines.items())]
        text += [f"    {t.key} = {t.name} {t.dtype} {list(t.shape)}" for t in self.tensors]
        text += [f"  {count:,} rows of the {of} contain NaN or infinity" for of, count in self.nonfinite_rows.items()]
        text += [f"  other table: {sentence}" for sentence in self.other_tables]
        return "\n".join([*text, *(f"  note: {note}" for note in self.notes)])
