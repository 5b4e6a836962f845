"""Predict time and memory of each hot path on GPUs, from counted bytes, FLOPs and launches; nothing is measured.

A matrix product takes its FLOPs by the card's rate of products, or its bytes by the bandwidth if that is longer. One
that adds to sums also takes the time to read and write these. Any other kernel takes its bytes by the bandwidth. A call
takes as long as its kernels one after another, or as the host needs to launch them. The time of a wait, what stays in a
cache between two kernels, and the network between ranks are left out.
"""

from dataclasses import dataclass

import torch

from benchmarks.harness import Case, Row
from benchmarks.hot_paths import PATHS, HotPath, loss_path
from benchmarks.operator_counter import Launch, OperatorCounter

LAUNCH_SECONDS = 6e-6
"""Time in which the host launches a kernel from Python: 5 to 8 microseconds."""


@dataclass(frozen=True)
class Card:
    """A GPU, by the figures of its maker, and how much of them is reached.

    Attributes:
        name: Name of the card.
        bandwidth: Bytes of memory per second.
        tensor_flops: Rate of dense products of bfloat16 or float16 numbers with float32 sums, per second.
        float32_flops: Rate of float32 products without TF32, per second.
        products: Fraction of these rates that products reach.
        copies: Fraction of the bandwidth that kernels reach.
    """

    name: str
    bandwidth: float
    tensor_flops: float
    float32_flops: float
    products: float = 0.736
    copies: float = 0.9

    @property
    def column(self) -> str:
        """Name of the column of its times."""
        return f"{self.name.lower().replace(' ', '_')}_ms"

    def seconds(self, launch: Launch) -> float:
        """Return the time of a kernel."""
        is_half = launch.dtype in (torch.bfloat16, torch.float16)
        rate = self.products * (self.tensor_flops if is_half else self.float32_flops)
        bandwidth = self.copies * self.bandwidth
        return max(launch.flops / rate, (launch.bytes - launch.sum_bytes) / bandwidth) + launch.sum_bytes / bandwidth

    def milliseconds(self, count: OperatorCounter) -> float:
        """Return the time of a call."""
        return 1000 * max(sum(map(self.seconds, count.launches)), LAUNCH_SECONDS * len(count.launches))


CARDS = [
    Card("A100", 2.039e12, 312e12, 19.5e12),
    Card("H100", 3.35e12, 989.4e12, 67e12),
    Card("H200", 4.8e12, 989.4e12, 67e12),
    Card("B200", 8e12, 2250e12, 80e12, products=0.61),
    Card("RTX 4090", 1.008e12, 165.2e12, 82.6e12),
]
"""A100 (80 GB) and H100 are the SXM models. The fraction of products was published for the H100 (30.6 TFLOP in 42 ms),
and for the B200 (25.8 TFLOP and a softmax in 18.8 ms); for the other cards that of the H100 is taken. One H100 that we
measured reached 0.80 with products alone and 0.90 with copies; with 0.736 predicted losses are within 5 % of its."""

PUBLISHED_SIZE = 151_936
"""Vocabulary of Qwen2.5, of which times of other libraries were published."""

PUBLISHED = [
    loss_path("loss, plain", vocab_size=PUBLISHED_SIZE, impl="plain"),
    loss_path("loss", vocab_size=PUBLISHED_SIZE),
    loss_path("loss in chunks of 1,024", vocab_size=PUBLISHED_SIZE, chunk_bytes=1024 * PUBLISHED_SIZE * 2, chunks=8),
]


def prediction(path: HotPath) -> Row:
    """Return the counts of a path, the memory that it adds at its peak, and its time on each card."""
    count = path.count()
    return {
        "call": path.name,
        "setting": path.setting,
        "kernels": len(count.launches),
        "waits": len(count.waits),
        "moved_gb": count.bytes / 1e9,
        "added_gib": count.memory.peak / 2**30,
        **{card.column: card.milliseconds(count) for card in CARDS},
    }


def run() -> list[Row]:
    return [prediction(path) for path in [*PUBLISHED, *PATHS]]


CASE = Case("Predicted, not measured: calls on GPUs", run)
