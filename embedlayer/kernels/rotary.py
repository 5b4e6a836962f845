"""Kernels that rotate channel pairs of queries or keys; `embedlayer.positions.rotation.apply_rotary` defines them."""

from typing import Any

from embedlayer.kernels.numbers import kernel, multiply_add, narrow, widen


@kernel
def rotate_half_split(
    start: int, stop: int, x: Any, x_strides: Any, cos: Any, sin: Any, angle_strides: Any, out: Any, sizes: Any
) -> None:
    """Rotate the half-split pairs of the vectors `start` to `stop - 1`; channels beyond the pairs are copied.

    The result equals that of `rotate_channels` to the bit, so it does not depend on the size of a call. Vectors are
    counted by sequence, head and token. Memory of `x`, `cos` and `sin` is one-dimensional.

    Args:
        start: First vector.
        stop: Last vector + 1.
        x: Queries or keys.
        x_strides: Numbers from one sequence, head and token to the next in `x`.
        cos: Cosine of each pair's angle.
        sin: Sine of the same angles.
        angle_strides: Numbers from one sequence and token to the next in `cos` and `sin`; 0 for equal sequences.
        out: Result, `(N, K)` for N vectors.
        sizes: Heads, tokens and pairs: `(H, T, half)`.
    """
    heads, tokens, half = sizes
    for n in range(start, stop):
        sequence, head, token = n // (heads * tokens), n // tokens % heads, n % tokens
        place = sequence * x_strides[0] + head * x_strides[1] + token * x_strides[2]
        a, b = x[place : place + half], x[place + half : place + 2 * half]
        place = sequence * angle_strides[0] + token * angle_strides[1]
        c, s = cos[place : place + half], sin[place : place + half]
        to_a, to_b = out[n, :half], out[n, half : 2 * half]
        for i in range(half):
            first, second = widen(a[i]), widen(b[i])
            to_a[i] = narrow(multiply_add(-second, s[i], first * c[i]), a[i])
            to_b[i] = narrow(multiply_add(first, s[i], second * c[i]), a[i])
        place = sequence * x_strides[0] + head * x_strides[1] + token * x_strides[2]
        for i in range(2 * half, out.shape[1]):
            out[n, i] = x[place + i]


@kernel
def rotate_interleaved(
    start: int, stop: int, x: Any, x_strides: Any, cos: Any, sin: Any, angle_strides: Any, out: Any, sizes: Any
) -> None:
    """Rotate the interleaved pairs of the vectors `start` to `stop - 1`; arguments as in `rotate_half_split`."""
    heads, tokens, half = sizes
    for n in range(start, stop):
        sequence, head, token = n // (heads * tokens), n // tokens % heads, n % tokens
        place = sequence * x_strides[0] + head * x_strides[1] + token * x_strides[2]
        pairs = x[place : place + 2 * half]
        place = sequence * angle_strides[0] + token * angle_strides[1]
        c, s = cos[place : place + half], sin[place : place + half]
        to = out[n, : 2 * half]
        for i in range(half):
            first, second = widen(pairs[2 * i]), widen(pairs[2 * i + 1])
            to[2 * i] = narrow(multiply_add(-second, s[i], first * c[i]), pairs[0])
            to[2 * i + 1] = narrow(multiply_add(first, s[i], second * c[i]), pairs[0])
        place = sequence * x_strides[0] + head * x_strides[1] + token * x_strides[2]
        for i in range(2 * half, out.shape[1]):
            out[n, i] = x[place + i]
