"""A random permutation of any length in constant memory: each element is computed when it is needed."""

import numpy as np
import numpy.typing as npt
import torch

from embedlayer.core.numbers import GOLDEN, mix_

ROUNDS = 12

Indices = npt.NDArray[np.int64]


class RandomPermutation:
    """Random permutation of `0..count - 1` that is never stored: `permutation(indices)` computes its elements there.

    An index is written with two digits, `left * width + right`, where `width` is about the square root of `count`.
    Each round adds a hash of one digit to the other digit. A round can be inverted, so different indices have
    different results. A result of `count` or more is permuted again until it is smaller.

    Args:
        count: Number of elements.
        generator: Source of the random keys. How many numbers are drawn does not depend on `count`.

    Example:
        >>> permutation = RandomPermutation(10**12, torch.Generator().manual_seed(0))
        >>> permutation(np.arange(3)).tolist()
        [23408838395, 319519362077, 886107380074]

    Reference: Black and Rogaway, Ciphers with arbitrary finite domains, 2002: a Feistel network with cycle walking.
    Different here: the hash is SplitMix64, which mixes well but is not a cipher.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.width = max(int(np.ceil(np.sqrt(count))), 1)
        self.height = -(-count // self.width)
        self.keys = torch.randint(2**62, (ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Return the elements of the permutation at `indices`, as an int64 array of the shape of `indices`.

        The indices are from 0 to `count - 1`; this is not checked.
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
            if number % 2:
                left = (left + _hash(right, key) % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + _hash(left, key) % np.uint64(self.width)) % np.uint64(self.width)
        return (left * np.uint64(self.width) + right).astype(np.int64)


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Hash each number to 64 bits with SplitMix64, starting at `key`, which is below `2**63`.

    Its products are meant to overflow.
    """
    return mix_(numbers.view(np.int64) * GOLDEN + int(key)).view(np.uint64)
