"""Position schemes of a user that rotate queries and keys: in pairs of channels, and otherwise."""

import torch

from embedlayer import Position


class DecayingRotation(Position):
    """Queries grow and keys shrink with the position, in each pair at another rate; the last channel stays (xPos)."""

    head_dim = 7

    def rotate(self, q, k, positions):
        p = positions.unsqueeze(-1)
        angle, size = p * torch.tensor([1.0, 0.3, 0.01]), 1.01 ** (p * torch.tensor([1.0, 2.0, 3.0]))
        cos, sin = angle.cos(), angle.sin()

        def rotated(x, factor):
            a, b, rest = x[..., 0:6:2], x[..., 1:6:2], x[..., 6:]
            pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1) * factor.unsqueeze(-1)
            return torch.cat([pairs.flatten(-2), rest], -1)

        return rotated(q, size), rotated(k, 1 / size)


class MixingRotation(Position):
    """A rotation that mixes all channels."""

    head_dim = 6

    def rotate(self, q, k, positions):
        skew = torch.arange(36.0).view(6, 6).tril(-1) / 36
        turned = torch.linalg.matrix_exp((skew - skew.T) * positions[:, None, None])
        return tuple((x.unsqueeze(-2) @ turned).squeeze(-2) for x in (q, k))
