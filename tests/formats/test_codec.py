import pytest
import torch

from embedlayer.formats.codec import E2M1, E4M3, E8M0, Codec, shifted, signed, unpack, unsigned


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
