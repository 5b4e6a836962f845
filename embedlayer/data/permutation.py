"""A random permutation of any length in constant memory: each element is computed when it is needed."""

import numpy as np
import numpy.typing as npt
import torch

from embedlayer.core.numbers import GOLDEN, mix_

ROUNDS = 12

Indices = npt.NDArray[np.int64]


class RandomPermutation:
    """Random permutation of `0..count - 1` that is never stored: `permutation(indices)` computes its elements there.

    An index is written with two digits, `left * width + right`, where `width` is about the square root of `count`: a
    Feistel network, in which each round adds a hash of one digit to the other digit. A round can be inverted, so
    different indices have different results. A result of `count` or more is permuted again until it is smaller (cycle
    walking).

    Reference: Black and Rogaway, Ciphers with arbitrary finite domains, 2002. We differ in the hash, SplitMix64, which
    mixes well but is not a cipher.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.width = max(int(np.ceil(np.sqrt(count))), 1)
        self.height = -(-count // self.width)
        self.keys = torch.randint(2**62, (ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Return the elements of the permutation at `indices`, as an int64 array of the shape of `indices`.

        The indices must be from 0 to `count - 1`, which is not checked.
        """
        elements = self._permute_once(indices)
        while (beyond := elements >= self.count).any():
            elements[beyond] = self._permute_once(elements[beyond])
        return elements

    def _permute_once(self, indices: Indices) -> Indices:
        """Apply all rounds of the Feistel network once to each index.

        The results are different numbers in `0..width * height - 1`, so some may be `count` or more.
        """
        left, right = np.divmod(indices.astype(np.uint64), np.uint64(self.width))
        for number, key in enumerate(self.keys):
            # SplitMix64, starting at the key, which is below 2**63; its products are meant to overflow
            hashed = mix_((right if number % 2 else left).view(np.int64) * GOLDEN + int(key)).view(np.uint64)
            if number % 2:
                left = (left + hashed % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + hashed % np.uint64(self.width)) % np.uint64(self.width)
        return (left * np.uint64(self.width) + right).astype(np.int64)
