"""Delays of streams: stream k of K begins some steps later, so that a step predicts a token by those of other streams.

IDs are `(..., T, K)`, the streams last, as `StreamTable` takes them. MusicGen's are `(B * K, T)`:
`ids.view(B, K, T).mT` and `ids.mT.reshape(B * K, T)` convert them.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from jaxtyping import Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import as_ids, check_integer_ids
from embedlayer.core.shapes import IdsLike


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
        SizeError: The number of delays is not K, or one is negative or no whole number.

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

    Raises:
        ShapeError: As in `delay_streams`, or there are fewer than `max(delays)` steps.
        SizeError: As in `delay_streams`.

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
    if ids.dim() < 2:
        raise ShapeError(f"IDs of K streams are (..., T, K), the streams last; found {tuple(ids.shape)}.")
    if len(delays) != ids.shape[-1] or not len(delays):
        raise SizeError(f"There is one delay for each stream: found {len(delays)} delays and {ids.shape[-1]} streams.")
    for k, delay in enumerate(delays):
        if not isinstance(delay, Integral) or delay < 0:
            raise SizeError(f"A delay is a whole number of steps from 0 on; found {delay} of stream {k}.")
    return ids
