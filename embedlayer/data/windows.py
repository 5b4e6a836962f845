"""Cut token IDs into batches of sliding windows, directly from the (memory-mapped) array."""

from collections.abc import Iterator, Sequence
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
from embedlayer.core.errors import ShapeError, SizeError, TextError, TokenizerError
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
        self.document_starts = _documents_of(ids) if documents else None
        self.max_length = max_length
        self.stride = stride
        _check_windows(self.ids, max_length, stride=stride)

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
        return _gather(self.ids, self.document_starts, self.token_weights, starts, self.max_length)

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
    _check_sizes(batch_size=batch_size)
    windows = TokenWindows(_ids_of(text_or_corpus, tokenizer), max_length, stride, documents=documents)
    if drop_last and len(windows) < batch_size:
        raise TextError(
            f"there is no batch: the number of windows of {max_length} tokens is {len(windows)}, below the batch size "
            f"of {batch_size}, and drop_last leaves them out. Pass drop_last=False, or a smaller batch_size or stride."
        )
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
        self.ids = _as_array(ids_or_corpus)
        self.token_weights = ids_or_corpus.token_weights if isinstance(ids_or_corpus, TokenCorpus) else None
        self.document_starts = _documents_of(ids_or_corpus) if documents else None
        self.max_length = max_length
        self.batch_size = batch_size
        self.seed = seed
        _check_windows(self.ids, max_length, batch_size=batch_size)
        # One window is given up to the phase, where there is more than one: every epoch has the same number.
        self.num_windows = max(1, (len(self.ids) - max_length) // max_length)

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
        check_rank(rank, ranks)
        share = items_of_rank(self.batch_size, rank, ranks)
        first = step * self.batch_size
        return self.windows(np.arange(first + share.start, first + share.stop))

    def windows(self, numbers: Indices) -> Batch:
        """Return what `batch` does, of windows by their numbers in the order of training, over all epochs."""
        return _gather(self.ids, self.document_starts, self.token_weights, self._starts(numbers), self.max_length)

    def _starts(self, numbers: Indices) -> Indices:
        """Return the index of the first token of each window."""
        epochs, places = np.divmod(numbers, self.num_windows)
        starts = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            phase, order = self._offset_and_order(int(epoch))
            here = epochs == epoch
            starts[here] = order(places[here]) * self.max_length + phase
        return starts

    def _offset_and_order(self, epoch: int) -> tuple[int, RandomPermutation]:
        """Draw how the epoch `epoch` cuts and orders its windows; equal for equal seeds and epochs."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        spare = len(self.ids) - 1 - self.num_windows * self.max_length
        phase = int(torch.randint(min(spare + 1, self.max_length), (), generator=generator))
        return phase, RandomPermutation(self.num_windows, generator)


def check_rank(rank: int, ranks: int) -> None:
    """Raise a `SizeError` unless `0 <= rank < ranks`."""
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
        return self._cut_here()

    def _cut_here(self) -> Iterator[Batch]:
        """Yield the batches `(inputs, targets)` of one pass; they are cut in this process."""
        windows, per_batch = self.dataset, self.batch_size
        assert isinstance(windows, TokenWindows)
        assert per_batch is not None
        together = max(1, _GATHER_BYTES // (8 * per_batch * (windows.max_length + 1)))
        batches = iter(self.batch_sampler or ())
        while group := list(islice(batches, together)):
            tensors = windows.batch([index for batch in group for index in batch])
            yield from zip(*(torch.split(rows, per_batch) for rows in tensors), strict=True)


def _stack(windows: list[Window]) -> Batch:
    """Stack the tensors of windows, `(T,)` each, into those of a batch, `(B, T)` each."""
    return tuple(torch.stack(rows) for rows in zip(*windows, strict=True))


def _gather(
    ids: IdArray | ConcatenatedArray,
    document_starts: npt.NDArray[np.int64] | None,
    token_weights: IdArray | ConcatenatedArray | None,
    starts: npt.NDArray[np.int64],
    length: int,
) -> Batch:
    """Copy windows of token IDs and return them as a batch, `(starts, length)` each."""
    rows = _windows(ids, starts, length + 1).astype(np.int64)
    batch = [rows[:, :-1].copy(), rows[:, 1:].copy()]
    if document_starts is not None:
        places = starts[:, None] + np.arange(length + 1)
        numbers = np.searchsorted(document_starts, places, side="right")
        batch.append(numbers[:, :-1] - numbers[:, :1] + 1)
        batch[1][numbers[:, 1:] != numbers[:, :-1]] = IGNORED
    if token_weights is not None:
        batch.append(_windows(token_weights, starts + 1, length).astype(np.float32))
    return tuple(map(torch.from_numpy, batch))


def _windows(array: IdArray | ConcatenatedArray, starts: npt.NDArray[np.int64], length: int) -> IdArray:
    """Return `array[s : s + length]` for each start `s`."""
    if isinstance(array, ConcatenatedArray):
        return array.windows(starts, length)
    rows: IdArray = np.lib.stride_tricks.sliding_window_view(array, length)[starts]
    return rows


def derive_seed(seed: int, *numbers: int) -> int:
    """Hash a seed and other numbers, such as step and rank, to a new seed from 0 to `2**63 - 1`."""
    return int(np.random.SeedSequence([seed % 2**64, *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _documents_of(ids: TokenIds) -> npt.NDArray[np.int64]:
    """Return the index of the first token of each document of a corpus; other token IDs are a `TextError`."""
    if not isinstance(ids, TokenCorpus):
        raise TextError(
            f"documents=True needs a TokenCorpus, which knows where its documents begin, not {type(ids).__name__}: "
            f"TokenCorpus.build makes one of texts, and embedlayer.data.map_token_files one of files of token IDs."
        )
    return ids.documents


def _as_array(ids: TokenIds) -> IdArray | ConcatenatedArray:
    """Return token IDs of any accepted kind as a NumPy array or `ConcatenatedArray`."""
    if isinstance(ids, TokenCorpus):
        return ids.ids
    if isinstance(ids, ConcatenatedArray):
        return ids
    if isinstance(ids, str | bytes | Path) or (isinstance(ids, list | tuple) and ids and isinstance(ids[0], str)):
        raise TextError(
            f"Windows are cut from token IDs, but this is {type(ids).__name__} with text. Encode it first, "
            f"TokenCorpus.from_text(text, tokenizer), or call create_dataloader(text, tokenizer)."
        )
    values = ids.ids if isinstance(ids, Encoding) else ids
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{type(ids).__name__} has no token IDs in one dimension ({error}).") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(
            f"Token IDs are integers, but these are {array.dtype}: pass encode(text).ids of a tokenizer, or "
            f"convert them with astype(np.int64) if they are whole numbers."
        )
    return array


def _ids_of(text_or_corpus: str | Path | TokenIds, tokenizer: object) -> TokenIds:
    """Encode a text or a text file into a `TokenCorpus`; return token IDs of any other kind unchanged."""
    if not isinstance(text_or_corpus, str | Path):
        return text_or_corpus
    if tokenizer is None:
        raise TokenizerError("A text needs a tokenizer: create_dataloader(text, tokenizer). Only a corpus needs none.")
    if isinstance(text_or_corpus, Path):
        text_or_corpus = "".join(read_text_chunks(text_or_corpus))
    else:
        raise_if_path(text_or_corpus)
    return TokenCorpus.from_text(text_or_corpus, tokenizer)


def _check_sizes(**sizes: int) -> None:
    """Raise a `SizeError` unless every size is an integer of at least 1; sizes are passed by name, for the message."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise SizeError(f"{name} is {size!r}, {type(size).__name__}; it must be an integer, 1 or more.")


def _check_windows(ids: IdArray | ConcatenatedArray, max_length: int, **sizes: int) -> None:
    """Raise an error unless windows of `max_length` tokens can be cut from token IDs."""
    _check_sizes(max_length=max_length, **sizes)
    if ids.ndim != 1:
        raise SizeError(
            f"Windows are cut from token IDs in one dimension, but these have shape {ids.shape}. Pass all texts in "
            f"a row, ids.reshape(-1), or one row."
        )
    if len(ids) <= max_length:
        raise TextError(
            f"The text has {len(ids)} tokens and a window of max_length={max_length} needs {max_length + 1}, one for "
            f"the last target. Pass a longer text or a max_length of at most {max(len(ids) - 1, 0)}."
        )
