import itertools

import pytest
import torch

from embedlayer.formats.codec import E2M1, E4M3, E8M0, Codec, pack, rounding_range, shifted, signed, unpack, unsigned


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_codes_are_a_stream_of_bits_with_the_low_bits_first(bits, count):
    nbytes = -(-count * bits // 8)
    codes = torch.randint(256, (3, nbytes), dtype=torch.uint8)
    for row, unpacked in zip(codes, unpack(codes, bits, count), strict=True):
        number = int.from_bytes(bytes(row.tolist()), "little")
        assert unpacked.tolist() == [number >> bits * place & (1 << bits) - 1 for place in range(count)]


def test_levels_of_integers():
    assert unsigned(3).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert shifted(3).tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert torch.equal(signed(8), torch.arange(256).to(torch.uint8).view(torch.int8).float())


def test_levels_of_small_floats_are_those_of_their_definitions():
    fp4 = [0.5 * code if code < 2 else (1 + code % 2 / 2) * 2.0 ** (code // 2 - 1) for code in range(8)]
    assert E2M1.tolist() == fp4 + [-number for number in fp4]
    fraction, exponent = torch.arange(127) % 8, torch.arange(127) // 8
    fp8 = torch.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    assert torch.equal(E4M3[:127], fp8)
    assert torch.equal(E4M3[128:255], -fp8)
    assert E4M3[[127, 255]].isnan().all()
    assert E8M0[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert E8M0[255].isnan()


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16, torch.float16])
def test_product_and_sum_are_each_rounded(rounding):
    codes = torch.randint(256, (5, 12), dtype=torch.uint8)
    scale, bias = torch.randn(2, 5, 3).to(rounding)
    zero = torch.randint(-128, 128, (5, 3), dtype=torch.int8)
    codec = Codec(codes, 8, signed(8), scale, 5, 12, rounding, zero=zero, bias=bias)
    numbers = codes.view(torch.int8).to(rounding) - zero.to(rounding).repeat_interleave(5, 1)[:, :12]
    expected = numbers * scale.repeat_interleave(5, 1)[:, :12] + bias.repeat_interleave(5, 1)[:, :12]
    assert torch.equal(codec.decode(), expected)
    assert codec.decode().dtype == rounding


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint32])
def test_packed_codes_are_unpacked(bits: int, dtype: torch.dtype) -> None:
    for rows, count in itertools.product((0, 1, 5), (1, 7, 8, 33, 64)):
        codes = torch.randint(0, 2**bits, (rows, count), dtype=torch.uint8)
        packed = pack(codes.T.contiguous().T, bits, dtype)
        assert (packed.dtype, packed.shape) == (dtype, (rows, -(-count * bits // (8 * dtype.itemsize))))
        assert torch.equal(unpack(packed.view(torch.uint8), bits, count), codes)


def test_the_range_of_levels_ends_half_a_step_further() -> None:
    assert rounding_range(E4M3) == (-464, 464)
    assert rounding_range(E2M1) == (-7, 7)
    assert rounding_range(signed(4)) == (-8.5, 7.5)
