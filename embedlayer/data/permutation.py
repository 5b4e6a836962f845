"""A random permutation of any length in constant memory: each element is computed when it is needed."""

import numpy as np
import numpy.typing as npt
import torch

from embedlayer.core.numbers import GOLDEN, mix_

ROUNDS = 12

Indices = npt.NDArray[np.int64]


class RandomPermutation:
    """Random permutation of `0..count - 1` that is never stored: `permutation(indices)` computes its elements there.

    A Feistel network over `left * width + right` with cycle walking (Black and Rogaway, 2002), and a plain hash.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.width = max(int(np.ceil(np.sqrt(count))), 1)
        self.height = -(-count // self.width)
        self.keys = torch.randint(2**62, (ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Return the elements of the permutation at `indices`, as an int64 array of the shape of `indices`."""
        elements = self._permute_once(indices)
        while (beyond := elements >= self.count).any():
            elements[beyond] = self._permute_once(elements[beyond])
        return elements

    def _permute_once(self, indices: Indices) -> Indices:
        """Apply all rounds of the Feistel network once to each index."""
        left, right = np.divmod(indices.astype(np.uint64), np.uint64(self.width))
        for number, key in enumerate(self.keys):
            # SplitMix64, starting at the key, which is below 2**63; its products are meant to overflow
            hashed = mix_((right if number % 2 else left).view(np.int64) * GOLDEN + int(key)).view(np.uint64)
            if number % 2:
                left = (left + hashed % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + hashed % np.uint64(self.width)) % np.uint64(self.width)
        return (left * np.uint64(self.width) + right).astype(np.int64)
