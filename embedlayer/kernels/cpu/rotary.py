"""Kernels that rotate channel pairs of queries or keys; `positions.rotary.rotation.apply_rotary` defines them."""

from typing import Any

from embedlayer.kernels.cpu.numbers import kernel, multiply_add, narrow, widen


@kernel
def rotate_half_split(
    start: int, stop: int, x: Any, x_strides: Any, cos: Any, sin: Any, angle_strides: Any, out: Any, sizes: Any
) -> None:
    """Rotate the half-split pairs of the vectors `start` to `stop - 1`; channels beyond the pairs are copied.

    The result equals that of `rotate_channels` to the bit, so it does not depend on the size of a call. Sequences,
    heads and tokens are three dimensions, in any order; vectors are counted along the last of them first. Memory of
    `x`, `cos` and `sin` is one-dimensional.

    - `x`: queries or keys.
    - `x_strides`: numbers from one vector of `x` to the next along each dimension.
    - `cos`: cosine of each pair's angle.
    - `sin`: sine of the same angles.
    - `angle_strides`: the same for `cos` and `sin`; 0 along a dimension whose vectors have the same angles.
    - `out`: result, `(N, K)` for N vectors.
    - `sizes`: sizes of the second and of the third dimension, and the number of pairs.
    """
    middle, inner, half = sizes
    for n in range(start, stop):
        i, j, k = n // (middle * inner), n // inner % middle, n % inner
        first_x = i * x_strides[0] + j * x_strides[1] + k * x_strides[2]
        first_angle = i * angle_strides[0] + j * angle_strides[1] + k * angle_strides[2]
        a, b = x[first_x : first_x + half], x[first_x + half : first_x + 2 * half]
        c, s = cos[first_angle : first_angle + half], sin[first_angle : first_angle + half]
        to_a, to_b = out[n, :half], out[n, half : 2 * half]
        for pair in range(half):
            first, second = widen(a[pair]), widen(b[pair])
            to_a[pair] = narrow(multiply_add(-second, s[pair], first * c[pair]), a[pair])
            to_b[pair] = narrow(multiply_add(first, s[pair], second * c[pair]), a[pair])
        for channel in range(2 * half, out.shape[1]):
            out[n, channel] = x[first_x + channel]


@kernel
def rotate_interleaved(
    start: int, stop: int, x: Any, x_strides: Any, cos: Any, sin: Any, angle_strides: Any, out: Any, sizes: Any
) -> None:
    """Rotate the interleaved pairs of the vectors `start` to `stop - 1`; arguments as in `rotate_half_split`."""
    middle, inner, half = sizes
    for n in range(start, stop):
        i, j, k = n // (middle * inner), n // inner % middle, n % inner
        first_x = i * x_strides[0] + j * x_strides[1] + k * x_strides[2]
        first_angle = i * angle_strides[0] + j * angle_strides[1] + k * angle_strides[2]
        pairs = x[first_x : first_x + 2 * half]
        c, s = cos[first_angle : first_angle + half], sin[first_angle : first_angle + half]
        to = out[n, : 2 * half]
        for pair in range(half):
            first, second = widen(pairs[2 * pair]), widen(pairs[2 * pair + 1])
            to[2 * pair] = narrow(multiply_add(-second, s[pair], first * c[pair]), pairs[0])
            to[2 * pair + 1] = narrow(multiply_add(first, s[pair], second * c[pair]), pairs[0])
        for channel in range(2 * half, out.shape[1]):
            out[n, channel] = x[first_x + channel]
