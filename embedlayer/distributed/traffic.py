"""What one rank sends to the others in a training step: formulas that a test holds against what is sent."""

from dataclasses import dataclass

from embedlayer.errors import SizeError

ID_BYTES = 8
SCORES = 3  # logsumexp, the target's logit, the sum of the logits
SCORE_BYTES = 4


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that each of N ranks sends in one step of a model whose table and head are divided among them.

    Args:
        embed_dim: Width of a vector, D.
        ranks: N.
        tokens: Of all ranks, T; each has T / N.
        distinct: Different tokens among those of one rank, U; at most T / N.
        decoder_parameters: Numbers that every rank has, P.
        number_bytes: Of a vector's and a gradient's numbers, b.

    Raises:
        SizeError: A size is below 1.

    Example:
        >>> step = StepTraffic(embed_dim=768, ranks=8, tokens=65536, distinct=3000)
        >>> round(step.look_up / 1e6, 1), round(step.loss / 1e6, 1), step.optimizer
        (16.1, 354.2, 0)
    """

    embed_dim: int
    ranks: int
    tokens: int
    distinct: int
    decoder_parameters: int = 0
    number_bytes: int = 4

    def __post_init__(self) -> None:
        for name in ("embed_dim", "ranks", "tokens", "distinct", "number_bytes"):
            if getattr(self, name) < 1:
                raise SizeError(f"{name} must be at least 1, not {getattr(self, name)}.")

    @property
    def look_up(self) -> int:
        """`(N - 1)/N * U * (8 + 2 D b)`: each different ID once, its row back, and the row's gradient."""
        row = self.embed_dim * self.number_bytes
        return self._to_others(self.distinct * (ID_BYTES + 2 * row))

    @property
    def loss(self) -> int:
        """`(N - 1)/N * T * (8 + 2 D b + 24)`: hidden states and targets to all, three scores home, their gradients."""
        vector = self.embed_dim * self.number_bytes
        return self._to_others(self.tokens * (ID_BYTES + 2 * vector + 2 * SCORES * SCORE_BYTES))

    @property
    def optimizer(self) -> int:
        """Nothing: a rank has the gradients of its rows, and the norm to clip by is one number."""
        return 0

    @property
    def decoder(self) -> int:
        """`2 (N - 1)/N * P b`: the gradients of what every rank has, summed around a ring."""
        return self._to_others(2 * self.decoder_parameters * self.number_bytes)

    @property
    def total(self) -> int:
        """All of it."""
        return self.look_up + self.loss + self.optimizer + self.decoder

    def as_dict(self) -> dict[str, int]:
        """The parts by name, in bytes."""
        return {name: getattr(self, name) for name in ("look_up", "loss", "optimizer", "decoder", "total")}

    def _to_others(self, size: int) -> int:
        return size * (self.ranks - 1) // self.ranks
