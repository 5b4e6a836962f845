"""K streams of codes of a model, such as those of a sound codec: their rows at the input, their heads, and delays.

With delays, stream k begins some steps later, so that a step predicts a token by those of other streams. IDs are
`(..., T, K)`, the streams last, as `StreamTable` takes them. MusicGen's are `(B * K, T)`:
`ids.view(B, K, T).mT` and `ids.mT.reshape(B * K, T)` convert them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.index_checks import as_ids, check_integer_ids
from embedlayer.core.shapes import IdsLike
from embedlayer.heads.prediction import build_head
from embedlayer.heads.streams import StreamHead
from embedlayer.io.files import JsonObject
from embedlayer.saving import Pretrained, build, describe
from embedlayer.tables.streams import StreamTable, require_stream
from embedlayer.tables.table import TokenTable


class CodeStreams(Pretrained):
    """Streams of codes of a model: the step `"codes"` of its input embedding, and the heads that predict codes.

    Without `placeholders`, the step computes `table(codes) + x`; with them, `table(codes)` for a token whose ID is one
    of them, and `x` for all others.

    Args:
        table: Rows of all streams; streams are the last dimension of `codes`, `(..., T, K)`.
        head: Heads that read the last hidden states of the model; `None` for none. A tied one is tied to `table.rows`.
        depth_head: Heads that read the hidden states of a depth decoder, one for each stream; `None` for none.
        placeholders: Token IDs in whose place the codes are; `None` if they are added to every token.
        delays: How many steps later each stream is written, K numbers, as `delay_streams` takes them; `None` for no
            delays, or if they are not known.
        text_stream: Stream of the tokens of a text; `None` for none.
        more_rows: Rows of each other stream beyond its codes, to which the heads have no rows.
        head_stream: Stream that the first of `head` predicts; the others predict those after it.
        depth_stream: The same of `depth_head`.

    Example:
        >>> streams = CodeStreams(StreamTable(TokenEmbedding(20, 8), (8, 12)), placeholders=[5])
        >>> x, ids = torch.zeros(1, 2, 8), torch.tensor([[5, 3]])
        >>> streams(x, ids, torch.tensor([[[7, 11], [0, 0]]]))[0, 1].any()
        tensor(False)

    Reference: transformers/models/moshi, csm and higgs_audio_v2.
    """

    def __init__(
        self,
        table: StreamTable,
        *,
        head: StreamHead | None = None,
        depth_head: StreamHead | None = None,
        placeholders: Sequence[int] | None = None,
        delays: Sequence[int] | None = None,
        text_stream: int | None = None,
        more_rows: int = 0,
        head_stream: int = 0,
        depth_stream: int = 0,
    ) -> None:
        super().__init__()
        if delays is not None and (len(delays) != table.num_streams or min(delays) < 0):
            raise SizeError(f"{table.num_streams} streams have as many delays of at least 0, not {list(delays)}.")
        if text_stream is not None:
            require_stream(text_stream, table.num_streams)
        self.table = table
        self.head = head
        self.depth_head = depth_head
        self.placeholders = None if placeholders is None else tuple(placeholders)
        self.delays = None if delays is None else tuple(delays)
        self.text_stream = text_stream
        self.more_rows, self.head_stream, self.depth_stream = more_rows, head_stream, depth_stream

    @property
    def rows(self) -> TokenTable:
        """Return the rows of all streams, one stream after another."""
        return self.table.token_table

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON; a tied head lacks its table."""
        heads = {name: getattr(self, name) for name in ("head", "depth_head")}
        return {
            "table": describe(self.table),
            **{name: None if head is None else {"tied": head.tied, **describe(head)} for name, head in heads.items()},
            "placeholders": None if self.placeholders is None else list(self.placeholders),
            "delays": None if self.delays is None else list(self.delays),
            "text_stream": self.text_stream,
            "more_rows": self.more_rows,
            "head_stream": self.head_stream,
            "depth_stream": self.depth_stream,
        }

    @classmethod
    def from_config(cls: type["CodeStreams"], config: JsonObject) -> "CodeStreams":
        """Build the streams that `config` describes, with initial weights; a tied head is tied to the new table."""
        table = build(config["table"])
        if not isinstance(table, StreamTable):
            raise CheckpointError(f"The rows of streams are those of a StreamTable, not of {a_or_an(table)}.")
        heads: dict[str, Any] = {}
        for name in ("head", "depth_head"):
            options = dict(config.get(name) or {})
            if options.pop("tied", False):
                options.pop("kind")
                output = build_head({"tied": True, **options["output"]}, table.token_table)
                heads[name] = StreamHead.construct(**{**options, "output": output})
            else:
                heads[name] = build(options) if options else None
            if not isinstance(heads[name], StreamHead | None):
                raise CheckpointError(f"The heads of streams are those of a StreamHead, not of {a_or_an(heads[name])}.")
        return cls.construct(**{**config, "table": table, **heads})

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        ids: Int[Tensor, "*batch T"],
        codes: Int[Tensor, "*batch T K"],
    ) -> Float[Tensor, "*batch T D"]:
        """Return `x` with the sums of the rows of codes added, or in the place of some tokens; see the class.

        Args:
            x: Vectors of the tokens.
            ids: Token IDs.
            codes: IDs of each stream. Where a token is no placeholder they are not read, but must be in their range.

        Raises:
            ShapeError: The codes are not those of K streams of these tokens.
            TokenIdError: A code is outside its stream.
        """
        if codes.shape[:-1] != ids.shape:
            raise ShapeError(f"Codes {tuple(codes.shape)} must be {(*ids.shape, self.table.num_streams)}.")
        sums: Tensor = self.table(codes)
        if self.placeholders is None:
            return sums + x
        placeholders = torch.tensor(self.placeholders, device=ids.device)
        return torch.where(torch.isin(ids, placeholders).unsqueeze(-1), sums, x)


class StreamLookup:
    """The look-up of K streams as the first step of an input embedding, whose IDs are those of the first stream."""

    def __init__(self, table: StreamTable, ids: Int[Tensor, "*batch K"], streams: int | None = None) -> None:
        if ids.dim() < 2:
            raise ShapeError(f"IDs of streams are (..., T, {table.num_streams}), streams last, not {tuple(ids.shape)}.")
        self.table, self.ids, self.streams = table, ids, streams
        self.first = ids[..., 0]

    def __call__(self, ids: Int[Tensor, "*batch T"]) -> Float[Tensor, "*batch T D"]:
        """Return the sums of the rows of all streams; `ids` are `first`."""
        vectors: Tensor = self.table(self.ids, streams=self.streams)
        return vectors


def delay_streams(
    ids: IdsLike, delays: Sequence[int], pad: int, *, bos: int | None = None
) -> Int[Tensor, "*batch T_delayed K"]:
    """Delay stream k by `delays[k]` steps: `out[..., t + delays[k], k] = ids[..., t, k]`, and other places are filled.

    Args:
        ids: IDs of K streams, `(..., T, K)`.
        delays: Steps by which each stream is delayed, K numbers from 0 on: `(0, 1, 2, 3)` for MusicGen with four
            streams, `(0, 0, 1, 1, ...)` for its stereo streams, `(0, 1, 1, ...)` for Moshi, `(0, 8, 9, ..., 15)` for
            Dia.
        pad: ID after the end of a stream.
        bos: ID before the beginning of a stream; `None` for `pad`.

    Returns:
        Delayed IDs, `(..., T + max(delays), K)`.

    Raises:
        ShapeError: The IDs are not integers; they are no `(..., T, K)`, or streams have different lengths.

    Example:
        >>> delay_streams([[1, 2], [3, 4]], (0, 1), 9)
        tensor([[1, 9],
                [3, 2],
                [9, 4]])

    Reference: transformers, `build_delay_pattern_mask` of MusicGen and `apply_audio_delay` of Dia, whose streams are as
    long before the delay as afterwards.
    """
    ids = _streams_of(ids, delays)
    length = ids.shape[-2]
    out = ids.new_full((*ids.shape[:-2], length + max(delays), ids.shape[-1]), pad)
    for k, delay in enumerate(delays):
        out[..., :delay, k] = pad if bos is None else bos
        out[..., delay : delay + length, k] = ids[..., k]
    return out


def undelay_streams(ids: IdsLike, delays: Sequence[int]) -> Int[Tensor, "*batch T K"]:
    """Undo `delay_streams`: `out[..., t, k] = ids[..., t + delays[k], k]`, with `max(delays)` steps less.

    Example:
        >>> undelay_streams([[1, 9], [3, 2], [9, 4]], (0, 1))
        tensor([[1, 2],
                [3, 4]])
    """
    ids = _streams_of(ids, delays)
    length = ids.shape[-2] - max(delays)
    if length < 0:
        raise ShapeError(f"Streams with delays up to {max(delays)} have as many steps; found {ids.shape[-2]}.")
    return torch.stack([ids[..., delay : delay + length, k] for k, delay in enumerate(delays)], -1)


def _streams_of(ids: IdsLike, delays: Sequence[int]) -> Tensor:
    """Return IDs `(..., T, K)` as a tensor, after a check that they and K delays fit; see `delay_streams`."""
    ids = as_ids(ids, beside=torch.empty(0))
    check_integer_ids(ids)
    if len(delays) != ids.shape[-1] or min(delays) < 0:
        raise SizeError(f"{ids.shape[-1]} streams, the last axis, have as many delays from 0 on, not {list(delays)}.")
    return ids
