"""Cut token IDs into batches of sliding windows, directly from the (memory-mapped) array."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Shaped
from tokenizers import Encoding
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import ShapeError, SizeError, TextError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.memmap import ConcatenatedArray, IdArray, MemmapSlice
from embedlayer.data.permutation import Indices, RandomPermutation
from embedlayer.data.text_chunks import read_text_chunks
from embedlayer.tokenization.train import raise_if_path

Batch = tuple[Shaped[Tensor, "B T"], ...]
"""Inputs and targets, int64; the mask of documents, int64, if requested; and the weights of the targets in the loss,
float32, if the corpus has token weights."""
Window = tuple[Shaped[Tensor, " T"], ...]

TokenIds = TokenCorpus | IdArray | ConcatenatedArray | Tensor | Sequence[int] | Encoding
"""Token IDs of one text: a corpus, an array, a tensor, a list, or a tokenizer's encoding."""

_GATHER_BYTES = 1 << 17


class TokenWindows(Dataset[Window]):
    """Dataset of sliding windows: `inputs = ids[s : s + T]`, `targets = ids[s + 1 : s + T + 1]`, `s = i * stride`.

    The number of windows is `len(range(0, len(ids) - max_length, stride))`. With `documents`, a window also has the
    mask of its documents, 1, 2, 3, ... from its first one, for the `attention_mask` of a model; a target in another
    document than its input is -100, and ignored. Of a corpus with token weights, a window also has those of its
    targets, float32: `(inputs, targets, documents, token_weights)`.

    Args:
        ids: A `TokenCorpus`, or token IDs in one dimension: an array, a tensor, a list, or an encoding by a
            tokenizer. An array is not copied. The worker processes of a `DataLoader` map a memory-mapped array again.
        max_length: Tokens in a window, T.
        stride: Tokens from the start of one window to the start of the next.
        documents: Whether windows know the documents of a `TokenCorpus`.

    Raises:
        TextError: The IDs are too few for one window and its target, or are text; or they are no `TokenCorpus`, which
            `documents` needs.

    Example:
        >>> TokenWindows(np.arange(10), max_length=4, stride=4)[1]
        (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8]))
    """

    def __init__(self, ids: TokenIds, max_length: int, stride: int, *, documents: bool = False) -> None:
        self.ids = _as_array(ids)
        self.token_weights = ids.token_weights if isinstance(ids, TokenCorpus) else None
        self.document_starts: Indices | None = None
        if documents:
            if not isinstance(ids, TokenCorpus):
                raise TextError(f"documents=True needs a TokenCorpus, which knows its documents; found {type(ids)}.")
            self.document_starts = ids.documents
        self.max_length, self.stride = max_length, stride
        if min(max_length, stride) < 1:
            raise SizeError(f"max_length and stride must be 1 or more; found {max_length} and {stride}.")
        if len(self.ids) <= max_length:
            raise TextError(f"The text has {len(self.ids)} tokens, and a window with its last target {max_length + 1}.")

    def __len__(self) -> int:
        return len(range(0, len(self.ids) - self.max_length, self.stride))

    def __getitem__(self, index: int) -> Window:
        return tuple(rows[0] for rows in self.batch([range(len(self))[index]]))

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        return list(zip(*self.batch(indices), strict=True))

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Batch:
        """Return the inputs and the targets of the windows with these indices, `(B, T)` int64 each.

        With `documents` their mask follows, int64; and of a corpus with token weights those of the targets, float32.

        Args:
            indices: Numbers of the windows, from 0 to `len(self) - 1`.
        """
        starts = np.asarray(indices, dtype=np.int64) * self.stride
        rows = _windows(self.ids, starts, self.max_length + 1).astype(np.int64)
        batch = [rows[:, :-1].copy(), rows[:, 1:].copy()]
        if self.document_starts is not None:
            places = starts[:, None] + np.arange(self.max_length + 1)
            numbers = np.searchsorted(self.document_starts, places, side="right")
            batch.append(numbers[:, :-1] - numbers[:, :1] + 1)
            batch[1][numbers[:, 1:] != numbers[:, :-1]] = IGNORED
        if self.token_weights is not None:
            batch.append(_windows(self.token_weights, starts + 1, self.max_length).astype(np.float32))
        return tuple(map(torch.from_numpy, batch))

    def __getstate__(self) -> dict[str, Any]:
        arrays = {"ids": self.ids, "token_weights": self.token_weights}
        return self.__dict__ | {
            name: array if array is None or isinstance(array, ConcatenatedArray) else MemmapSlice.of(array) or array
            for name, array in arrays.items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            (name, value.open() if isinstance(value, MemmapSlice) else value) for name, value in state.items()
        )


def create_dataloader(
    text_or_corpus: str | Path | TokenIds,
    tokenizer: object = None,
    *,
    batch_size: int = 4,
    max_length: int = 256,
    stride: int = 128,
    shuffle: bool = True,
    drop_last: bool = True,
    num_workers: int = 0,
    generator: torch.Generator | None = None,
    documents: bool = False,
) -> DataLoader[Any]:
    """Return a `DataLoader` of sliding windows, which yields batches `(inputs, targets)`, `(B, T)` int64 each.

    The targets of a window are its inputs one token later. With `documents` the mask of the documents follows them, and
    of a corpus with token weights those of the targets, float32, as `loss` takes them; see `TokenWindows`.

    Args:
        text_or_corpus: A text itself as `str`, the `Path` of a UTF-8 text file, a `TokenCorpus`, or token IDs as
            `TokenWindows` takes them.
        tokenizer: A `tokenizers.Tokenizer` or a fast tokenizer of transformers; needed for a text only.
        batch_size: Windows in a batch, B.
        max_length: Tokens in a window, T.
        stride: Tokens from the start of one window to the start of the next.
        shuffle: Whether each pass has a new random order.
        drop_last: Whether a last batch with fewer than `batch_size` windows is left out.
        num_workers: Number of processes that cut batches; with 0 this process does. The batches are equal.
        generator: Source of the random order; by default torch's global generator.
        documents: Whether no token is predicted from another document of a `TokenCorpus`. A text is one document.

    Raises:
        TextError: The text is empty, not plain text, shorter than one window and its target, or a path as `str`; or it
            has fewer than `batch_size` windows, and `drop_last` leaves them all out; or there are only token IDs, and
            `documents` needs a corpus.
        TokenizerError: A text is passed without a tokenizer, or with one that cannot encode it.
        FileError: A text file cannot be read.

    Warns:
        EmbedLayerWarning: The IDs next to a cut of a text may differ from those of the whole text, or a `.txt` has JSON
            lines.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> loader = create_dataloader(
        ...     "I love dogs.", train_tokenizer((), kind="byte"), batch_size=2, max_length=4, stride=4, shuffle=False
        ... )
        >>> inputs, targets = next(iter(loader))
        >>> bytes(inputs[1].tolist()), bytes(targets[1].tolist())
        (b've d', b'e do')
    """
    if isinstance(text_or_corpus, Path):
        text_or_corpus = "".join(read_text_chunks(text_or_corpus))
    elif isinstance(text_or_corpus, str):
        raise_if_path(text_or_corpus)
    ids = TokenCorpus.from_text(text_or_corpus, tokenizer) if isinstance(text_or_corpus, str) else text_or_corpus
    windows = TokenWindows(ids, max_length, stride, documents=documents)
    if drop_last and len(windows) < batch_size:
        raise TextError(f"drop_last leaves no batch: {len(windows)} windows are fewer than batch_size {batch_size}.")
    return _WindowLoader(
        windows,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        generator=generator,
    )


class WindowSampler:
    """Sampler of training windows that is a pure function of the step, so that a resumed run gets the same batches.

    An epoch splits the text into windows of `max_length` tokens and takes each once, in random order. The offset of
    the first window is drawn for each epoch, so that the position of a token in its window varies between epochs. The
    tokens before the first window and after the last one are left out of the epoch. Seed and epoch determine order and
    offset. A batch may continue into the next epoch. The order is computed for each batch: memory and start-up time do
    not depend on the length of the text.

    Args:
        ids_or_corpus: A `TokenCorpus`, or token IDs as `TokenWindows` takes them.
        max_length: Tokens in a window, T.
        batch_size: Windows in a batch, B.
        seed: Any integer.
        documents: Whether windows know the documents of a `TokenCorpus`; see `TokenWindows`.

    Raises:
        TextError: As for `TokenWindows`.

    Example:
        >>> sampler = WindowSampler(np.arange(100), max_length=8, batch_size=2, seed=1)
        >>> inputs, targets = sampler.batch(step=3)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 8]), True)
    """

    def __init__(
        self, ids_or_corpus: TokenIds, *, max_length: int, batch_size: int, seed: int, documents: bool = False
    ) -> None:
        self.at_token = TokenWindows(ids_or_corpus, max_length, stride=1, documents=documents)
        self.max_length, self.batch_size, self.seed = max_length, batch_size, seed
        if batch_size < 1:
            raise SizeError(f"batch_size is {batch_size}; it must be 1 or more.")
        # One window is given up to the phase, where there is more than one: every epoch has the same number.
        self.num_windows = max(1, (len(self.at_token.ids) - max_length) // max_length)

    def batch(self, step: int, *, rank: int = 0, ranks: int = 1) -> Batch:
        """Return the inputs and the targets of a step, `(B, T)` int64 each, or one rank's windows of them.

        With `documents` their mask follows, int64; and of a corpus with token weights those of the targets, float32.
        Rank `r` has windows `r * B // ranks` up to `(r + 1) * B // ranks`. The concatenation over all ranks is the
        batch, for any number of ranks.

        Args:
            step: Number of the step, from 0.
            rank: Rank of this process.
            ranks: Number of ranks.
        """
        return self.windows(windows_of_step(step, self.batch_size, rank, ranks))

    def windows(self, numbers: Indices) -> Batch:
        """Return what `batch` does, of windows by their numbers in the order of training, over all epochs."""
        epochs, places = np.divmod(numbers, self.num_windows)
        starts = np.empty_like(numbers)
        spare = len(self.at_token.ids) - 1 - self.num_windows * self.max_length
        for epoch in np.unique(epochs):
            # seed and epoch alone determine how an epoch cuts its windows (the phase) and orders them
            generator = torch.Generator().manual_seed(derive_seed(self.seed, int(epoch)))
            phase = int(torch.randint(min(spare + 1, self.max_length), (), generator=generator))
            here = epochs == epoch
            starts[here] = RandomPermutation(self.num_windows, generator)(places[here]) * self.max_length + phase
        return self.at_token.batch(starts)


def windows_of_step(step: int, batch_size: int, rank: int, ranks: int) -> Indices:
    """Return the numbers of a rank's windows of a step, in the order of training."""
    check_rank(rank, ranks)
    share = items_of_rank(batch_size, rank, ranks)
    return np.arange(step * batch_size + share.start, step * batch_size + share.stop)


def check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise SizeError(f"Rank {rank} of {ranks} does not exist: ranks are counted from 0 to {ranks - 1}.")


def items_of_rank(count: int, rank: int, ranks: int) -> range:
    """Return which of the items `0..count - 1` a rank gets if they are split evenly over the ranks, in order."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


class _WindowLoader(DataLoader[Any]):
    """`DataLoader` of a `TokenWindows` that is faster without worker processes: it cuts several batches at a time."""

    def __init__(self, windows: TokenWindows, **options: Any) -> None:
        super().__init__(windows, collate_fn=_stack, **options)

    def __iter__(self) -> Any:
        if self.num_workers:
            return super().__iter__()
        # DataLoader draws a seed for its workers before it draws the order: draw it too, and the order is the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        windows, per_batch = self.dataset, self.batch_size
        assert isinstance(windows, TokenWindows)
        assert per_batch is not None
        together = max(1, _GATHER_BYTES // (8 * per_batch * (windows.max_length + 1)))
        batches = iter(self.batch_sampler or ())
        groups = iter(lambda: list(islice(batches, together)), [])
        cut = (windows.batch([index for batch in group for index in batch]) for group in groups)
        return (batch for tensors in cut for batch in zip(*(rows.split(per_batch) for rows in tensors), strict=True))


def _stack(windows: list[Window]) -> Batch:
    """Stack the tensors of windows, `(T,)` each, into those of a batch, `(B, T)` each."""
    return tuple(torch.stack(rows) for rows in zip(*windows, strict=True))


def _windows(array: IdArray | ConcatenatedArray, starts: npt.NDArray[np.int64], length: int) -> IdArray:
    """Return `array[s : s + length]` for each start `s`."""
    if isinstance(array, ConcatenatedArray):
        return array.windows(starts, length)
    rows: IdArray = np.lib.stride_tricks.sliding_window_view(array, length)[starts]
    return rows


def derive_seed(seed: int, *numbers: int) -> int:
    """Hash a seed and other numbers, such as step and rank, to a new seed from 0 to `2**63 - 1`.

    Seeds for neighbouring numbers are unrelated. `seed` is any integer, modulo `2**64`.
    """
    return int(np.random.SeedSequence([seed % 2**64, *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _as_array(ids: TokenIds) -> IdArray | ConcatenatedArray:
    """Return token IDs of any accepted kind as a NumPy array or `ConcatenatedArray`."""
    if isinstance(ids, TokenCorpus):
        return ids.ids
    if isinstance(ids, ConcatenatedArray):
        return ids
    if isinstance(ids, str | bytes | Path) or (isinstance(ids, list | tuple) and ids and isinstance(ids[0], str)):
        raise TextError(f"Windows are cut from token IDs; found {type(ids).__name__} with text. Encode it first.")
    values = ids.ids if isinstance(ids, Encoding) else ids
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(f"Token IDs are integers; found {array.dtype}. Pass encode(text).ids of a tokenizer.")
    return array
