"""Choose the tokens of a draft vocabulary, and write and read them as EAGLE-3 (`d2t`, `t2d`) and FR-Spec store them."""

import operator
from collections.abc import Iterable
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenIdError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.io.files import named_path, replace_file
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.io.weight_files import WeightFiles, choose_weight_files, find_folder, no_such_path

D2T, T2D = "d2t", "t2d"  # EAGLE-3's names of the two tensors that describe a draft vocabulary

EAGLE_SUFFIX, FR_SPEC_SUFFIX = ".safetensors", ".pt"
_PICKLE_SUFFIXES = (FR_SPEC_SUFFIX, ".pth")


def check_draft_tokens(token_ids: Iterable[int] | Int[Tensor, " N"], vocab_size: int) -> tuple[int, ...]:
    """Check the tokens of a draft vocabulary and return them in the given order: draft ID i is token `token_ids[i]`."""
    if isinstance(token_ids, Tensor | np.ndarray):
        if token_ids.ndim != 1:
            raise ShapeError(f"token_ids must be (N,), not {tuple(token_ids.shape)}.")
        ids = token_ids.tolist()  # of one type
        if ids and type(ids[0]) is int and min(ids) >= 0 and max(ids) < vocab_size and len({*ids}) == len(ids):
            return tuple(ids)
        token_ids = ids
    places: dict[int, int] = {}
    for place, entry in enumerate(token_ids):
        if isinstance(entry, bool) or not hasattr(entry, "__index__"):
            raise ShapeError(
                f"Entry {place} of token_ids is {entry!r}, not an integer. Pass mask.nonzero().flatten() for a mask."
            )
        token = operator.index(entry)
        if not 0 <= token < vocab_size:
            raise TokenIdError(
                f"token id {token} at place {place} of token_ids is outside the full vocabulary of {vocab_size} tokens."
            )
        if token in places:
            raise SizeError(
                f"Token {token} is at places {places[token]} and {place} of token_ids: name each token once."
            )
        places[token] = place
    if not places:
        raise SizeError("token_ids is empty: a draft vocabulary has at least one token.")
    return tuple(places)


def frequent_tokens(
    counts: TokenCorpus | Tensor | npt.ArrayLike, number: int, *, include: Iterable[int] = ()
) -> tuple[int, ...]:
    """Return the IDs of the most frequent tokens, in ascending order, as FR-Spec and EAGLE-3 choose a draft vocabulary.

    Of equally frequent tokens, those with the lowest IDs are chosen. So tokens that never occur fill the list, lowest
    ID first, if too few tokens occur.

    Args:
        counts: A `TokenCorpus`; or how often each token occurs, `(V,)`, as an array, tensor or list of numbers.
        number: Number of tokens to choose, N, those of `include` among them.
        include: Tokens that are always chosen, such as special tokens: a draft model that cannot predict the end of a
            text never proposes it.

    Raises:
        TokenIdError: A token of `include` is outside the vocabulary.

    Example:
        >>> frequent_tokens([5, 0, 9, 7, 1], 3, include=[4])
        (2, 3, 4)
    """
    numbers = torch.as_tensor(counts.counts(counts.vocab_size) if isinstance(counts, TokenCorpus) else counts)
    if numbers.dim() != 1 or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ShapeError(
            f"counts must be a number for each token, (V,), not {numbers.dtype} of {tuple(numbers.shape)}."
        )
    size = len(numbers)
    always = {operator.index(token) for token in include}
    if outside := sorted(token for token in always if not 0 <= token < size):
        raise TokenIdError(
            f"token id {outside[0]} of include is outside the {size} tokens that were counted (0..{size - 1})."
        )
    if not max(1, len(always)) <= number <= size:
        raise SizeError(
            f"number must be at least 1, at least {len(always)} (include) and at most {size}, not {number}."
        )
    order = numbers.sort(descending=True, stable=True).indices
    others = (token for token in order.tolist() if token not in always)
    return tuple(sorted(always | {token for token, _ in zip(others, range(number - len(always)), strict=False)}))


def eagle_tensors(token_ids: Iterable[int] | Int[Tensor, " N"], vocab_size: int) -> dict[str, Tensor]:
    """Return the tensors `d2t` and `t2d` by which EAGLE-3 describes a draft vocabulary, by name.

    `d2t` `(N,)` int64 is an offset: draft ID i is token `i + d2t[i]`. `t2d` `(V,)` bool is `True` for each token of the
    draft vocabulary. EAGLE-3's training takes `logits[..., t2d]`, which are in ascending order of the tokens, so the
    order of the draft IDs must be the same.

    Args:
        token_ids: Token IDs in ascending order.
        vocab_size: Number of tokens of the full vocabulary, V.

    Raises:
        TokenIdError: A token is outside the full vocabulary.

    Example:
        >>> eagle_tensors([1, 2, 4], 6)["d2t"].tolist()
        [1, 1, 2]

    Reference: SafeAILab/EAGLE, `eagle/traineagle3/cnets.py`; vLLM calls `d2t` `draft_id_to_target_id`.
    """
    tokens = check_draft_tokens(token_ids, vocab_size)
    for place, (token, after) in enumerate(pairwise(tokens)):
        if token > after:
            raise SizeError(
                f"EAGLE-3 needs ascending tokens; {after} at place {place + 1} follows {token}. Use sorted(token_ids)."
            )
    ids = torch.tensor(tokens)
    return {D2T: ids - torch.arange(len(ids)), T2D: torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)}


def save_draft_tokens(path: Path | str, token_ids: Iterable[int] | Int[Tensor, " N"], vocab_size: int) -> None:
    """Write a draft vocabulary, atomically; the suffix of the file says which tools read it.

    - `.safetensors`: `d2t` and `t2d`, see `eagle_tensors`. EAGLE-3, SpecForge and speculators train with them, SGLang
      and vLLM read `d2t`.
    - `.pt`: the list of IDs by `torch.save`. FR-Spec and SGLang's `--speculative-token-map` read it, with
      `weights_only=True`.

    EAGLE-3's tensors are part of the draft model's checkpoint: merge `eagle_tensors(...)` into its state to save both
    in one file. A `.pt` file keeps any order of the tokens.

    Args:
        path: The file; an existing one is replaced.
        token_ids: Token IDs; draft ID i is token `token_ids[i]`.
        vocab_size: Number of tokens of the full vocabulary, V.

    Raises:
        CheckpointError: The file has another suffix.
        SizeError, TokenIdError, ShapeError: As in `eagle_tensors`; a `.pt` file may have any order.
        FileError: The file cannot be written.
    """
    path = named_path(path)
    if path.suffix == EAGLE_SUFFIX:
        save_tensors(path, eagle_tensors(token_ids, vocab_size))
    elif path.suffix == FR_SPEC_SUFFIX:
        content = BytesIO()
        torch.save(list(check_draft_tokens(token_ids, vocab_size)), content)
        with replace_file(path) as partial:
            partial.write_bytes(content.getvalue())
    else:
        raise CheckpointError(
            f"{path} has an unknown suffix: use {EAGLE_SUFFIX} (EAGLE-3) or {FR_SPEC_SUFFIX} (FR-Spec)."
        )


def load_draft_tokens(path: Path | str) -> tuple[int, ...]:
    """Read a draft vocabulary from EAGLE-3's tensors, and return its token IDs: draft ID i is token `result[i]`.

    A file without `t2d`, which inference does not need, is accepted. With it the two tensors must agree.

    Args:
        path: A safetensors file with `d2t`, such as one of `save_draft_tokens`, or the folder of a draft model's
            checkpoint. The tensors may have a prefix, as in `model.d2t`.

    Raises:
        FileError: The file or folder is missing or cannot be read.
        CheckpointError: There is no `d2t`, or there are several; the tensors are damaged or contradict each other; or
            the file is a pickle, such as a `.pt` file of FR-Spec. Read this one with `torch.load(path,
            weights_only=True)`, and pass the result to `DraftHead`.
    """
    path = Path(path)
    place = find_folder(path)
    if place is None:
        raise no_such_path(path)
    folder, file = place
    if path.suffix in _PICKLE_SUFFIXES and file is not None:
        raise CheckpointError(
            f"{path} is a pickle, which could run code: load it yourself. See docs/errors.md, Pickles."
        )
    files = WeightFiles(folder, choose_weight_files(folder, file))
    names = files.find(D2T)
    if len(names) != 1:
        shown = f"{len(names)} tensors {', '.join(names)}" if names else f"no tensor {D2T!r}"
        raise CheckpointError(f"{files.name} has {shown}: one {D2T} describes a draft vocabulary of EAGLE-3.")
    masks = [name for name in (f"{names[0].removesuffix(D2T)}{T2D}",) if name in files.names]
    return _tokens_of(files.read(names[0]), files.read(masks[0]) if masks else None, source=files.name)


def _tokens_of(d2t: Tensor, t2d: Tensor | None, *, source: str) -> tuple[int, ...]:
    """Return the token IDs that EAGLE-3's offsets and mask describe; `t2d` is `None` if the file has no mask."""
    if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(f"{source}: {D2T} must be int64 or int32 (N,), not {d2t.dtype} {tuple(d2t.shape)}.")
    ids = d2t.long() + torch.arange(len(d2t))
    if t2d is not None and (t2d.dim() != 1 or t2d.dtype != torch.bool):
        raise CheckpointError(f"{source}: {T2D} must be bool (V,), not {t2d.dtype} {tuple(t2d.shape)}.")
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise CheckpointError(
            f"{source}: the {int(t2d.sum())} tokens of {T2D} are not the {len(ids)} ascending i + {D2T}[i]."
        )
    size = len(t2d) if t2d is not None else int(ids.max()) + 1 if len(ids) else 0
    try:
        return check_draft_tokens(ids, size)
    except (SizeError, TokenIdError) as error:
        raise CheckpointError(
            f"{source}: draft ID i is token i + {D2T}[i], and these are no draft vocabulary: {error}"
        ) from error
