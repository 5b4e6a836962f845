"""All windows of a corpus: cut when a batch is made, beside the notebook's list of tensors.

Both start from token IDs in hand and are timed over the same work: making the loader and going through it once, in
order. The notebook's way keeps two int64 tensors for each window, so the settings stay at sizes where these fit in
memory; both ways cost in proportion to the number of windows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.windows import create_dataloader

Generator = torch.Generator | None
Loader = DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """Sizes of a corpus and its windows; GPT-2's vocabulary, the notebook's batch."""

    tokens: int
    stride: int
    shuffle: bool
    batch_size: int = 8
    max_length: int = 256
    vocab_size: int = 50_257


SETTINGS = (
    Setting(tokens=20_000, stride=1, shuffle=False),
    Setting(tokens=20_000, stride=1, shuffle=True),
    Setting(tokens=1_000_000, stride=128, shuffle=False),
    Setting(tokens=1_000_000, stride=128, shuffle=True),
    Setting(tokens=1_000_000, stride=256, shuffle=False),
)


class NotebookDataset(Dataset[tuple[Tensor, Tensor]]):
    """GPTDatasetV1 of the notebook, from IDs in hand."""

    def __init__(self, token_ids: list[int], max_length: int, stride: int) -> None:
        self.input_ids = []
        self.target_ids = []
        for i in range(0, len(token_ids) - max_length, stride):
            self.input_ids.append(torch.tensor(token_ids[i : i + max_length]))
            self.target_ids.append(torch.tensor(token_ids[i + 1 : i + max_length + 1]))

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        return self.input_ids[idx], self.target_ids[idx]


def ours(ids: npt.NDArray[np.uint16], setting: Setting, generator: Generator = None) -> Loader:
    size = len(ids)
    corpus = TokenCorpus(
        ids,
        np.zeros(1, np.int64),
        np.array([[size, size]]),
        vocab_size=setting.vocab_size,
        tokenizer_fingerprint="synthetic",
    )
    return create_dataloader(
        corpus,
        batch_size=setting.batch_size,
        max_length=setting.max_length,
        stride=setting.stride,
        shuffle=setting.shuffle,
        generator=generator,
    )


def notebook(token_ids: list[int], setting: Setting, generator: Generator = None) -> Loader:
    dataset = NotebookDataset(token_ids, setting.max_length, setting.stride)
    return DataLoader(
        dataset, batch_size=setting.batch_size, shuffle=setting.shuffle, drop_last=True, generator=generator
    )


def go_through(loader: Loader) -> int:
    return sum(1 for _ in loader)


def check_same_batches(ids: npt.NDArray[np.uint16], token_ids: list[int], setting: Setting) -> None:
    mine = iter(ours(ids, setting, torch.Generator().manual_seed(1)))
    for inputs, targets in notebook(token_ids, setting, torch.Generator().manual_seed(1)):
        our_inputs, our_targets = next(mine)
        if not (torch.equal(inputs, our_inputs) and torch.equal(targets, our_targets)):
            raise AssertionError(f"The batches differ: {setting}")
    if next(mine, None) is not None:
        raise AssertionError(f"The notebook has fewer batches: {setting}")


def measure(setting: Setting) -> list[Row]:
    ids = np.random.default_rng(0).integers(0, setting.vocab_size, setting.tokens).astype(np.uint16)
    token_ids = ids.tolist()
    check_same_batches(ids, token_ids, setting)
    times = time_alternately(
        {
            "embedlayer": lambda: go_through(ours(ids, setting)),
            "notebook": lambda: go_through(notebook(token_ids, setting)),
            "notebook, list only": lambda: NotebookDataset(token_ids, setting.max_length, setting.stride),
        },
        rounds=3,
    )
    windows = len(range(0, setting.tokens - setting.max_length, setting.stride))
    fastest = float(times["embedlayer"]["time_ms"])
    return [
        {
            "competitor": name,
            "tokens": setting.tokens,
            "stride": setting.stride,
            "shuffle": setting.shuffle,
            "batch_size": setting.batch_size,
            "max_length": setting.max_length,
            "windows": windows,
            "dtype": "int64",
            **spread,
            "times_ours": round(float(spread["time_ms"]) / fastest, 1),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    torch.set_num_threads(1)
    return [row for setting in SETTINGS for row in measure(setting)]


CASE = Case("Making a loader and going through its windows once", run)
