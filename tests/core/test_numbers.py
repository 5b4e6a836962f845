"""Random numbers that are a function of a seed and a place."""

import torch

from embedlayer.core.numbers import random_words


def test_words_are_those_of_splitmix64() -> None:
    def expected(seed: int, count: int) -> list[int]:
        numbers, limit = [], 1 << 64
        for place in range(count):
            z = (seed + place * 0x9E3779B97F4A7C15) % limit
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % limit
            z = (z ^ z >> 27) * 0x94D049BB133111EB % limit
            numbers.append(z ^ z >> 31)
        return numbers

    for seed in (0, -1, -(1 << 63), 123456789012345):
        assert [each % (1 << 64) for each in random_words(seed, 0, 50).tolist()] == expected(seed, 50)
        assert torch.equal(random_words(seed, 7, 20), random_words(seed, 0, 27)[7:])
