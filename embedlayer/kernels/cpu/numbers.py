"""Numbers in kernels: bfloat16 as uint16, conversion of scalars, and an exponential that is computed for many at once.

numba widens integers in expressions to 64 bits, so each is converted back before its bits are read as a number.

numba notices a change of a kernel's own file and compiles it again, but no change of this one: after one, delete
`embedlayer/kernels/__pycache__`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from embedlayer.kernels.kernel import Kernel, KernelFunction


def _compiled(function: Callable[..., Any], fastmath: Any) -> Any:
    """Return what numba compiles at the first call."""
    from numba import njit

    is_kernel = function.__code__.co_varnames[:2] == ("start", "stop")
    options: Any = {"error_model": "numpy", "no_cpython_wrapper": not is_kernel, "no_cfunc_wrapper": True}
    return njit(cache=is_kernel, nogil=True, fastmath=fastmath, **options)(function)


kernel = partial(Kernel, numba_function=partial(_compiled, fastmath={"contract"}))
"""Decorator of a kernel. Products and sums may be contracted; infinities and NaN keep their meaning."""

exact = partial(Kernel, numba_function=partial(_compiled, fastmath=False))
"""Decorator of a kernel whose products and sums are rounded one by one."""

reduction = partial(Kernel, numba_function=partial(_compiled, fastmath={"contract", "reassoc", "nsz"}))
"""Decorator of a kernel whose sums may be added in any order, as vector instructions need it."""

reordering = partial(Kernel, numba_function=partial(_compiled, fastmath={"contract", "reassoc"}))
"""Decorator of a function whose sums may be added in any order, which is the same at every call."""


def _intrinsic(emit: Callable[..., Any]) -> Any:
    from numba.extending import intrinsic

    return intrinsic(emit)


def _overloaded(choose: Callable[..., Any]) -> Any:
    from numba.extending import overload

    overload(choose)(choose)  # the function itself is the name by which numba knows it
    return choose


emitted = partial(KernelFunction, numba_function=_intrinsic)
"""Decorator of a function that gets types of arguments, and returns a signature and what emits the instructions."""

by_type = partial(KernelFunction, numba_function=_overloaded)
"""Decorator of a function that gets the types of a kernel function's arguments, and returns its implementation."""


@by_type
def widen(x) -> Any:
    """Return a stored number as the number to compute with: float32 for the bits of a bfloat16, else `x` itself."""
    if x.name == "uint16":
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@kernel
def half(bits: Any) -> Any:
    """Return the float16 number with these bits, uint16, as float32; NumPy's float16 fits no kernel."""
    bits = np.uint32(bits)
    fraction, exponent = np.uint32(bits & np.uint32(0x3FF)), np.uint32((bits >> np.uint32(10)) & np.uint32(31))
    power = np.uint32(255) if exponent == 31 else np.uint32(exponent + np.uint32(112))
    normal = np.uint32(np.uint32(power << np.uint32(23)) | np.uint32(fraction << np.uint32(13))).view(np.float32)
    size = normal if exponent > 0 else np.float32(fraction) * np.float32(2.0**-24)
    return -size if bits >> np.uint32(15) else size


@by_type
def narrow(number, like) -> Any:
    """Return a computed number as it is stored in an array with an element `like`: the inverse of `widen`.

    For uint16, float32 is rounded to bfloat16: to the nearest, ties to even; NaN stays NaN.
    """
    if like.name == "uint16":

        def round_to_bfloat16(number, like):
            bits = np.float32(number).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            kept = rounded if number == number else np.uint32(bits | np.uint32(0x400000))
            return np.uint16(kept >> np.uint32(16))

        return round_to_bfloat16
    if like.name == "float32":
        return lambda number, like: np.float32(number)
    return lambda number, like: np.float64(number)


@by_type
def rounded(number, like) -> Any:
    """Return a float32 number rounded to the type of `like`, as float32.

    The types are float32; uint16 for bfloat16, as in `narrow`; and int16 for float16, to the nearest, ties to even.
    """
    if like.name == "uint16":
        return lambda number, like: widen(narrow(number, like))
    if like.name == "int16":
        return lambda number, like: _to_float16(number)
    return lambda number, like: number


@exact
def _to_float16(number: Any) -> Any:
    """Return the float16 number nearest to a float32 one, ties to even, as float32.

    Adding and subtracting a number whose last bit is that of the result rounds a number to it: below 2^-14 all float16
    numbers have the same last bit, above it is 2^-10 of the power of two.
    """
    bits = np.float32(number).view(np.uint32)
    power = max(np.uint32(bits & np.uint32(0x7F800000)).view(np.float32), np.float32(2.0**-14))
    bound, size = power * np.float32(1.5 * 2.0**13), np.uint32(bits & np.uint32(0x7FFFFFFF)).view(np.float32)
    nearest = (size + bound) - bound
    nearest = nearest if size < np.float32(65520) else (size if size != size else np.float32(np.inf))
    return np.uint32(np.float32(nearest).view(np.uint32) | np.uint32(bits & np.uint32(0x80000000))).view(np.float32)


@by_type
def narrow_at_random(number, like, key, column) -> Any:
    """Return `narrow(number, like)`, but round to bfloat16 at random where `key` is not 0.

    `embedlayer.row_sparse.stochastic_rounding.round_rows` defines the bits.
    """
    if like.name != "uint16":
        return lambda number, like, key, column: narrow(number, like)

    def round_at_random(number, like, key, column):
        if key == 0:
            return narrow(number, like)
        h = np.uint32(np.uint32(key) + np.uint32(np.uint32(column) * np.uint32(0x9E3779B9)))
        h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
        h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
        bits = np.float32(number).view(np.uint32)
        rounded = np.uint32(bits + np.uint32(h >> np.uint32(16)))
        finite = np.uint32(bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        return np.uint16(np.uint32(rounded >> np.uint32(16))) if finite else narrow(number, like)

    return round_at_random


@kernel
def row_key(seed: int, step: int, row: int) -> Any:
    """Return a hash of seed, step and row, which is not 0; for a negative seed, 0.

    `embedlayer.row_sparse.stochastic_rounding.round_rows` defines it.
    """
    if seed < 0:
        return np.uint32(0)
    z = np.uint64(row) * np.uint64(0xD1B54A32D192ED03) + np.uint64(step) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint32(np.uint32(z ^ (z >> np.uint64(31))) | np.uint32(1))


@by_type
def as_computed(number, like) -> Any:
    """Return a scalar argument in the type that is computed with for arrays with an element `like`.

    Without it the float64 of a Python float would widen all float32 arithmetic.
    """
    if like.name == "float64":
        return lambda number, like: np.float64(number)
    return lambda number, like: np.float32(number)


@emitted
def multiply_add(context, a, b, c) -> Any:
    """Return `a * b + c` with one rounding, as torch's `addcmul` computes it, for numbers of one type."""
    return a(a, b, c), lambda context, builder, signature, arguments: builder.fma(*arguments)


@by_type
def exp(x) -> Any:
    """Return e to the power of `x`, for `x` up to 0; float32 is computed without a call, within 1 ulp.

    Below -87.3 the float32 result is 0. NaN stays NaN.
    """
    if x.name != "float32":
        return lambda x: math.exp(x)

    def exp_float32(x):
        power = np.rint(x * np.float32(1.44269504))
        r = x - power * np.float32(0.693359375)
        r = r - power * np.float32(-2.12194440e-4)
        y = np.float32(1.9875691500e-4)
        y = y * r + np.float32(1.3981999507e-3)
        y = y * r + np.float32(8.3334519073e-3)
        y = y * r + np.float32(4.1665795894e-2)
        y = y * r + np.float32(1.6666665459e-1)
        y = y * r + np.float32(5.0000001201e-1)
        y = (y * (r * r) + r) + np.float32(1)
        scale = np.int32((np.int32(max(power, np.float32(-126))) + np.int32(127)) << np.int32(23))
        result = y * scale.view(np.float32)
        return np.float32(0) if x < np.float32(-87.33) else result

    return exp_float32


@by_type
def empty_computed(count, like) -> Any:
    """Allocate `count` numbers of the type that is computed with for arrays with an element `like`."""
    if like.name == "float64":
        return lambda count, like: np.empty(count, np.float64)
    return lambda count, like: np.empty(count, np.float32)


@by_type
def log(x) -> Any:
    """Return the natural logarithm of `x`; a float32 above 1.2e-38 is computed without a call, within 1 ulp or 6e-8.

    All float32 numbers below that, 0 included, give -inf. NaN stays NaN.
    """
    if x.name != "float32":
        return lambda x: math.log(x)

    def log_float32(x):
        bits = np.int32(np.float32(x).view(np.int32) - np.int32(0x3F3504F3))
        power = np.int32(bits >> np.int32(23))
        m = np.int32(np.int32(bits & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1)
        y = np.float32(7.0376836292e-2)
        y = y * m + np.float32(-1.1514610310e-1)
        y = y * m + np.float32(1.1676998740e-1)
        y = y * m + np.float32(-1.2420140846e-1)
        y = y * m + np.float32(1.4249322787e-1)
        y = y * m + np.float32(-1.6668057665e-1)
        y = y * m + np.float32(2.0000714765e-1)
        y = y * m + np.float32(-2.4999993993e-1)
        y = y * m + np.float32(3.3333331174e-1)
        square = m * m
        scale = np.float32(power)
        y = y * (m * square) + scale * np.float32(-2.12194440e-4) - np.float32(0.5) * square
        result = (m + y) + scale * np.float32(0.693359375)
        result = result if x > np.float32(1.1754944e-38) else np.float32(-np.inf)
        return result if x == x else x

    return log_float32


@kernel
def prefetch(row: Any) -> None:
    """Load a row that is read soon into the cache. The processor foresees accesses in a row, but not the next row."""
    for i in range(0, len(row), 64 // row.itemsize):
        _emit_prefetch(row, i)


@emitted
def _emit_prefetch(context, array, index) -> Any:
    """Emit LLVM's prefetch instruction for the address of `array[index]`."""
    from llvmlite import ir
    from numba import types
    from numba.np.arrayobj import make_array

    def emit(context, builder, signature, arguments):
        data = make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [address.type], ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        )
        builder.call(function, [address, number(0), number(3), number(1)])  # read, keep in all caches, data
        return context.get_dummy_value()

    return types.none(array, index), emit


@emitted
def word_at(context, array, index) -> Any:
    """Return the eight bytes of a uint8 array from `index` on as one uint64, the first byte lowest."""
    from llvmlite import ir
    from numba import types
    from numba.np.arrayobj import make_array

    def emit(context, builder, signature, arguments):
        data = make_array(array)(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(address, align=1)

    return types.uint64(array, index), emit
