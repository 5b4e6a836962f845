"""Triton kernels that compute rotary angles, and rotate channel pairs of queries and keys in one launch.

`embedlayer.positions.rotary.rotation.rotate_channels` defines the rotation, and
`embedlayer.positions.rotary.embedding.rotary_angles` the angles. The two channels of a pair are `DISTANCE` apart: 1 in
the interleaved layout, and in the half-split one half of the channels that are split. So pair p has the channels
`a = p + p // DISTANCE * DISTANCE` and `a + DISTANCE`.

A program rotates the same heads of consecutive tokens, of queries or of keys, and holds the angles of these tokens in
registers. No two programs write to the same memory, and none writes what is read, so the results do not depend on
their order. These kernels share arguments:

- `cos`, `sin`: tables for each rotated channel, `(rows, 2 * PAIRS)`, float32, contiguous; the sine of the first channel
  of each pair is negated.
- `PAIRS`, `DISTANCE`, `OWN`: see `embedlayer.positions.rotary.rotation.RotaryLayout`.
- `BLOCK`: `PAIRS` rounded up to a power of 2, and `TILE`: pairs of all tokens of a program.
"""

import torch
import triton
import triton.language as tl

from embedlayer.kernels.gpu.launch import Arguments, Grid, Launch, Variant

STRIDES = tuple(f"{name}_{axis}" for name in ("q", "k", "q_out", "k_out") for axis in ("batch", "head", "token"))
INTEGERS = (*STRIDES, "q_heads", "k_heads", "span", "tokens", "length", "angle_length")

RADIANS = tl.constexpr(2.0**-52 * 3.141592653589793)
"""Radians of a phase unit, of which a rotation has 2^53."""


@triton.jit
def _pairs(x, at, channel, mask, DISTANCE: tl.constexpr):
    """Load both channels of each pair, in float32: `(tokens, BLOCK)` each.

    `at` is the place of each token, `channel` that of the first channel of each pair, and of all channels where
    `DISTANCE` is 1.
    """
    if DISTANCE == 1:
        both = tl.load(x + at + channel, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2)))
    else:
        a = tl.load(x + at + channel, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + at + DISTANCE + channel, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _rotate_heads(
    x, out, x_batch, x_head, x_token, out_batch, out_head, out_token, cos, sin, factor, first, span, heads, n, tokens,
    length, angle_length, WIDTH: tl.constexpr, PAIRS: tl.constexpr, DISTANCE: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr, INVERSE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads `first` to `first + span - 1` of the tokens `n`, of queries or of keys."""
    is_token = (n < tokens)[:, None]
    sequence, t = (n // length).to(tl.int64)[:, None], (n % length).to(tl.int64)[:, None]
    if DISTANCE == 1:
        channel = tl.arange(0, 2 * BLOCK)[None, :]
        mask = is_token & (channel < 2 * PAIRS)
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        channel = pair if DISTANCE == PAIRS else pair + pair // DISTANCE * DISTANCE
        mask = is_token & (pair < PAIRS)
    row = sequence * angle_length + t
    if OWN or DISTANCE == 1:
        c, c_b = _pairs(cos, row * (2 * PAIRS), channel, mask, DISTANCE)
        s, s_b = _pairs(sin, row * (2 * PAIRS), channel, mask, DISTANCE)
    else:
        c = tl.load(cos + row * (2 * PAIRS) + channel, mask=mask, other=0.0)
        s = tl.load(sin + row * (2 * PAIRS) + channel, mask=mask, other=0.0)
    if factor is not None:
        times = tl.load(factor + row, mask=is_token, other=0.0)
        c, s = c * times, s * times
        if OWN:
            c_b, s_b = c_b * times, s_b * times
    if not OWN:
        c_b, s_b = c, -s
    if INVERSE:
        s, s_b = s_b, s
    at = sequence * x_batch * UNIT + t * x_token * UNIT
    to = sequence * out_batch * UNIT + t * out_token * UNIT
    for head in range(first, tl.minimum(first + span, heads)):
        x_at = at + tl.cast(head, tl.int64) * x_head * UNIT
        out_at = to + tl.cast(head, tl.int64) * out_head * UNIT
        a, b = _pairs(x, x_at + FIRST, channel, mask, DISTANCE)
        new_a, new_b = a * c + b * s, b * c_b + a * s_b
        if DISTANCE == 1:
            both = tl.reshape(tl.join(new_a, new_b), (new_a.shape[0], 2 * BLOCK))
            tl.store(out + out_at + FIRST + channel, both.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out + out_at + FIRST + channel, new_a.to(out.dtype.element_ty), mask=mask)
            tl.store(out + out_at + (FIRST + DISTANCE) + channel, new_b.to(out.dtype.element_ty), mask=mask)
        for start in range(0, WIDTH - 2 * PAIRS, channel.shape[1]):
            other = start + tl.arange(0, channel.shape[1])[None, :]
            is_rest = is_token & (other < WIDTH - 2 * PAIRS)
            other += 0 if FIRST > 0 else 2 * PAIRS
            rest = tl.load(x + x_at + other, mask=is_rest, other=0.0).to(tl.float32)
            if factor is not None:
                rest = rest * times
            tl.store(out + out_at + other, rest.to(out.dtype.element_ty), mask=is_rest)


@triton.jit(do_not_specialize=INTEGERS)
def rotate(
    q, k, q_out, k_out, cos, sin, factor, q_batch, q_head, q_token, k_batch, k_head, k_token,
    q_out_batch, q_out_head, q_out_token, k_out_batch, k_out_head, k_out_token, q_heads, k_heads, span, tokens, length,
    angle_length, WIDTH: tl.constexpr, PAIRS: tl.constexpr, DISTANCE: tl.constexpr, FIRST: tl.constexpr,
    OWN: tl.constexpr, INVERSE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys, `(B, H, T, K)` and `(B, G, T, K)`, by the angles of their tokens.

    Strides count units of `UNIT` numbers, of which Triton knows that they are that many; channels are adjacent. The
    other `WIDTH - 2 * PAIRS` channels are copied; they are the first ones if `FIRST` is not 0.

    - `q`, `k`: queries, or what is rotated alone, and keys, or `None`; `q_out`, `k_out`: the results.
    - `factor`: factor of each query, `(rows,)`, or `None`.
    - `q_heads`, `k_heads`: H and G, which is 0 without keys; `span`: number of heads that a program rotates.
    - `tokens`, `length`: B times T, and T; `angle_length`: T, or 0 where all sequences have the same angles.
    - `WIDTH`, `FIRST`: width of a head, K, and its first rotated channel.
    - `INVERSE`: whether to multiply by the transposed matrix of each pair, which is the backward pass.
    """
    TOKENS: tl.constexpr = TILE // BLOCK if BLOCK < TILE else 1
    q_groups = (q_heads + span - 1) // span
    groups = q_groups + (k_heads + span - 1) // span
    group = tl.program_id(0) % groups
    n = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)
    if group < q_groups:
        _rotate_heads(
            q, q_out, q_batch, q_head, q_token, q_out_batch, q_out_head, q_out_token, cos, sin, factor, group * span,
            span, q_heads, n, tokens, length, angle_length,
            WIDTH, PAIRS, DISTANCE, FIRST, OWN, INVERSE, UNIT, BLOCK,
        )  # fmt: skip
    elif k is not None:
        _rotate_heads(
            k, k_out, k_batch, k_head, k_token, k_out_batch, k_out_head, k_out_token, cos, sin, None,
            (group - q_groups) * span, span, k_heads, n, tokens, length, angle_length,
            WIDTH, PAIRS, DISTANCE, FIRST, OWN, INVERSE, UNIT, BLOCK,
        )  # fmt: skip


@triton.jit
def _cos_sin(phase):
    """Return cosine and sine of an angle in units of 2^-53 rotations, int64, in float32.

    The angle is reduced to an eighth of a rotation around 0 in integers, so the errors are those of the polynomials and
    of float32: 1e-7. Those of the definition are larger, as it rounds the whole angle to float32.

    Reference: Moshier, Cephes, single/sinf.c (the coefficients).
    """
    quarter = ((phase + (1 << 50)) >> 51) & 3
    rest = ((phase + (1 << 50)) & ((1 << 51) - 1)) - (1 << 50)
    x = (rest.to(tl.float64) * RADIANS).to(tl.float32)
    y = x * x
    sine = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 + y * -1.9515295891e-4))
    cosine = 1.0 + y * (-0.5 + y * (4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5)))
    is_odd = (quarter & 1) == 1
    c, s = tl.where(is_odd, sine, cosine), tl.where(is_odd, cosine, sine)
    return tl.where(((quarter + 1) & 2) == 2, -c, c), tl.where((quarter & 2) == 2, -s, s)


@triton.jit(do_not_specialize=("tokens",))
def angle_tables(
    positions, increments, axis, cos, sin, tokens, scale,
    PAIRS: tl.constexpr, DISTANCE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the tables of cosines and sines of positions.

    - `positions`: position of each token, `(tokens,)`, or on several axes `(A, tokens)`.
    - `increments`: phase of each pair per position, in units of 2^-53 rotations, int64, `(PAIRS,)`.
    - `axis`: axis of each pair, or of each channel with `OWN`; `None` for a single axis.
    - `scale`: factor on cosines and sines. There is a row of both for each token.
    """
    TOKENS: tl.constexpr = TILE // BLOCK if BLOCK < TILE else 1
    n = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = tl.arange(0, 2 * BLOCK)[None, :]
    is_channel = channel < 2 * PAIRS
    pair = channel // (2 * DISTANCE) * DISTANCE + channel % DISTANCE
    mask = (n < tokens) & is_channel
    increment = tl.load(increments + pair, mask=is_channel, other=0)
    if axis is None:
        position = tl.load(positions + n, mask=n < tokens, other=0).to(tl.int64)
    else:
        of_axis = tl.load(axis + (channel if OWN else pair), mask=is_channel, other=0)
        position = tl.load(positions + of_axis * tokens + n, mask=mask, other=0).to(tl.int64)
    c, s = _cos_sin(position * increment)
    s = tl.where(channel % (2 * DISTANCE) < DISTANCE, -s, s)
    at = n.to(tl.int64) * (2 * PAIRS) + channel
    tl.store(cos + at, c * scale, mask=mask)
    tl.store(sin + at, s * scale, mask=mask)


def _tiles(a: Arguments) -> int:
    """Return the number of programs along the tokens."""
    tokens: int = a["tokens"]
    return -(-tokens // max(1, int(a["TILE"]) // int(a["BLOCK"])))


def _tiles_by_heads(a: Arguments) -> Grid:
    return (_tiles(a) * sum(-(-a[name] // a["span"]) for name in ("q_heads", "k_heads")),)


FLAGS = {"OWN": False, "INVERSE": False, "UNIT": 8}
HALF_SPLIT = {**FLAGS, "factor": None, "WIDTH": 128, "PAIRS": 64, "DISTANCE": 64, "BLOCK": 64, "FIRST": 0}
WITHOUT_KEYS = {"k": None, "k_out": None}

LAUNCHES = {
    "rotate": Launch(
        rotate,
        grid=_tiles_by_heads,
        types={
            **dict.fromkeys(("q", "k", "q_out", "k_out"), "*z"),
            **dict.fromkeys(("cos", "sin", "factor"), "*fp32"),
            **dict.fromkeys(INTEGERS, "i32"),
        },
        blocks={"TILE": 1024},
        wide=("q", "k", "q_out", "k_out", "cos", "sin"),
        reads=("q", "k", "cos", "sin", "factor"),
        writes=("q_out", "k_out"),
        variants={
            "half-split": Variant(HALF_SPLIT),
            "half-split, backward": Variant({**HALF_SPLIT, "INVERSE": True}),
            "interleaved": Variant({**HALF_SPLIT, "DISTANCE": 1}),
            "interleaved, backward": Variant({**HALF_SPLIT, "DISTANCE": 1, "INVERSE": True}),
            "alone": Variant({**HALF_SPLIT, **WITHOUT_KEYS}),
            "an angle for each channel": Variant({**HALF_SPLIT, "OWN": True}),
            "pairs within two axes": Variant({**HALF_SPLIT, "DISTANCE": 32}),
            "last channels, query factors": Variant(
                {**FLAGS, "WIDTH": 192, "PAIRS": 32, "DISTANCE": 1, "FIRST": 128, "BLOCK": 32}
            ),
            "any strides": Variant({**HALF_SPLIT, "UNIT": 1}),
        },
    ),
    "angle_tables": Launch(
        angle_tables,
        grid=lambda a: (_tiles(a),),
        types={
            **dict.fromkeys(("positions", "increments", "axis"), "*i64"),
            **dict.fromkeys(("cos", "sin"), "*fp32"),
            "tokens": "i32",
            "scale": "fp32",
        },
        blocks={"TILE": 512},
        wide=("cos", "sin"),
        reads=("positions", "increments", "axis"),
        writes=("cos", "sin"),
        variants={
            "half-split": Variant({"axis": None, "PAIRS": 64, "DISTANCE": 64, "OWN": False, "BLOCK": 64}),
            "interleaved": Variant({"axis": None, "PAIRS": 64, "DISTANCE": 1, "OWN": False, "BLOCK": 64}),
            "several axes": Variant({"PAIRS": 64, "DISTANCE": 64, "OWN": False, "BLOCK": 64}),
            "an axis for each channel": Variant({"PAIRS": 64, "DISTANCE": 64, "OWN": True, "BLOCK": 64}),
        },
        dtypes=(torch.float32,),
    ),
}
"""How each kernel is launched."""
