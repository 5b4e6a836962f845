"""The tokens of a draft vocabulary: chosen by frequency, or shared by two tokenizers; and the files that store them.

EAGLE-3 stores a draft vocabulary as the tensors `d2t` and `t2d`, and FR-Spec as a list of IDs.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.data.corpus import TokenCorpus
from embedlayer.heads.draft import DraftHead, check_draft_tokens
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.io.files import named_path, replace_file
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.io.weight_files import WeightFiles, choose_weight_files, find_folder, no_such_path
from embedlayer.losses.divergences import Divergence, ForwardKL, divergence_of
from embedlayer.losses.objective import EventLogits, Request
from embedlayer.losses.options import LossOptions, LossSettings, Reduction, check_options
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.comparison import common_tokens
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint

D2T, T2D = "d2t", "t2d"  # EAGLE-3's names of the two tensors that describe a draft vocabulary

EAGLE_SUFFIX, FR_SPEC_SUFFIX = ".safetensors", ".pt"
_PICKLE_SUFFIXES = (FR_SPEC_SUFFIX, ".pth")


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


Head = OutputHead | PredictionHead | TokenTable
_NONE = -1


@dataclass(frozen=True, eq=False)
class DraftMap:
    """The tokens of a draft model's tokenizer that are tokens of its target's tokenizer too, one to one.

    Two tokens are a pair if they stand for the same bytes of a text: those of `TokenBytes.readings(token)[0]`, so a
    WordPiece token without `##` stands for its bytes after a space. Of several draft tokens with the bytes of one
    target token, the one that is no byte-fallback token is chosen. The ends of a text, as `end_of_text_id` finds them,
    are a pair. Other special tokens are pairs if they have the same name; the unknown token has none.

    Attributes:
        draft_ids: The draft's IDs of the pairs, ascending, `(N,)` int64.
        target_ids: The target's ID of each, `(N,)` int64.
        draft_size: Number of IDs of the draft's tokenizer.
        target_size: Number of IDs of the target's tokenizer.
        draft_digest: `fingerprint` of the draft's tokenizer.
        target_digest: `fingerprint` of the target's tokenizer.

    Example:
        >>> draft, target = train_tokenizer((), kind="byte"), train_tokenizer("I love dogs", vocab_size=260)
        >>> shared = DraftMap.between(draft, target)
        >>> len(shared.draft_ids), shared.to_target(torch.tensor([97, 256])).tolist()  # a, and the end of a text
        (257, [65, 0])
    """

    __repr__ = short_repr

    draft_ids: Int[Tensor, " N"]
    target_ids: Int[Tensor, " N"]
    draft_size: int
    target_size: int
    draft_digest: str
    target_digest: str

    @classmethod
    def between(cls, draft: object, target: object) -> Self:
        """Find the pairs of two tokenizers, each a `tokenizers.Tokenizer` or a fast tokenizer of transformers.

        Raises:
            TokenizerError: An argument is no tokenizer, or they share no token.
        """
        ours, theirs = TokenBytes(draft), TokenBytes(target)
        ends = end_of_text_id(ours.tokenizer), end_of_text_id(theirs.tokenizer)

        def is_pair(token: int, other: int) -> bool:
            if None not in ends and (token == ends[0] or other == ends[1]):
                return False
            if token in ours.special or other in theirs.special:
                is_unknown = token == ours.unknown or other == theirs.unknown
                return not is_unknown and ours.entries[token] == theirs.entries[other]
            return ours.readings(token)[0] == theirs.readings(other)[0]

        pairs = {token: other for other, token in common_tokens(target, draft) if is_pair(token, other)}
        if ends[0] is not None and ends[1] is not None:
            pairs[ends[0]] = ends[1]
        if not pairs:
            raise TokenizerError(
                "The two tokenizers share no token: no token of one has the bytes of a token of the other."
            )
        ids = torch.tensor(sorted(pairs.items()), dtype=torch.int64, device="cpu")
        sizes = table_size(ours.tokenizer), table_size(theirs.tokenizer)
        digests = fingerprint(as_tokenizer(draft)), fingerprint(as_tokenizer(target))
        return cls(ids[:, 0].clone(), ids[:, 1].clone(), *sizes, *digests)

    def to_target(self, ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the target's ID of each of the draft's token IDs; -1 for one that the target does not have.

        Raises:
            TokenIdError: An ID is not one of the draft's tokenizer.
        """
        return _mapped(ids, self.draft_ids, self.target_ids, self.draft_size)

    def to_draft(self, ids: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the draft's ID of each of the target's token IDs; -1 for one that the draft does not have.

        Raises:
            TokenIdError: An ID is not one of the target's tokenizer.
        """
        return _mapped(ids, self.target_ids, self.draft_ids, self.target_size)

    def coverage(self, ids: Int[Tensor, "*batch"]) -> float:
        """Return the share of the draft's token IDs of a text that are tokens of the target; of no IDs it is 0."""
        return float((self.to_target(ids) != _NONE).double().mean()) if ids.numel() else 0.0

    def draft_head(self, head: Head) -> DraftHead:
        """Return the shared tokens of a head of the target, whose arguments and results are the draft's token IDs.

        Its draft ID i is the pair i, as that of `DraftHead(student_head, map.draft_ids)` is, so that `divergence` of
        the two compares the same tokens: a teacher with another tokenizer than its student.

        Raises:
            TokenIdError: The head has fewer rows than the target's tokenizer has IDs.
        """
        return DraftHead(head, self.target_ids, names=self.draft_ids, vocab_size=self.draft_size)

    def divergence(
        self,
        student: tuple[Float[Tensor, "*batch D"], Head],
        teacher: tuple[Float[Tensor, "*batch E"], Head],
        kind: Divergence | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> Float[Tensor, "*result"]:
        """Compute the divergence over the shared tokens and one event for all others, in nats, without all logits.

        With p of the teacher, q of the student and S the shared tokens, `ForwardKL` is
        `sum over S of p (log p - log q) + p_rest (log p_rest - log q_rest)`, where `p_rest` is the probability of all
        other tokens. The student has the draft's tokenizer, and the teacher, which is a constant, the target's.

        Args:
            student: Hidden states and the head or table of the model that is trained. Pass those at positions of a text
                at which both tokenizers have the end of a token, and a token for a token follows (`TokenAlignment`).
            teacher: The same of the teacher, at the same positions.
            kind: `ForwardKL()`, the default, `ReverseKL()` or `JensenShannon(beta)`.
            reduction: `"mean"`, `"sum"` or `"none"`.

        Returns:
            A scalar, or `(...)` with `reduction="none"`.

        Raises:
            ShapeError: There is not one hidden state of each for every position, or they do not fit the rows.
            TokenIdError: A head has fewer rows than its tokenizer has IDs.
        """
        kind = ForwardKL() if kind is None else kind
        if not isinstance(kind, Divergence):
            raise SizeError(f"kind must be ForwardKL(), ReverseKL() or JensenShannon(beta), not {kind!r}.")
        check_options({}, LossOptions, "DraftMap.divergence", reduction=reduction)
        (hidden, head), (teacher_hidden, teacher_head) = student, teacher
        if (shape := hidden.shape[:-1]) != teacher_hidden.shape[:-1]:
            raise ShapeError(
                f"Hidden states of student {tuple(hidden.shape)} and teacher {tuple(teacher_hidden.shape)} must match."
            )
        with torch.no_grad():
            of_teacher = self.draft_head(teacher_head).uncomputed_logits(teacher_hidden)
            others_t = _others(teacher_head, self.target_ids).token_statistics(
                teacher_hidden, statistics=("logsumexp",)
            )
        of_student = DraftHead(head, self.draft_ids).uncomputed_logits(hidden)
        others_s = _others(head, self.draft_ids).token_statistics(hidden, statistics=("logsumexp",))
        rest = EventLogits(*(each.logsumexp.reshape(-1, 1) for each in (others_s, others_t)))  # type: ignore[union-attr]
        kept = torch.ones(shape, dtype=torch.bool, device=hidden.device)
        request = Request(kind, of_teacher, events=rest)
        return divergence_of(of_student, request, kind, kept, LossSettings(reduction=reduction))

    def save(self, path: Path | str) -> None:
        """Write the pairs as a safetensors file, atomically, with sizes and digests of both tokenizers.

        Raises:
            FileError: The file cannot be written.
        """
        metadata = {name: str(getattr(self, name)) for name in _METADATA}
        save_tensors(named_path(path), {"draft_ids": self.draft_ids, "target_ids": self.target_ids}, metadata)

    @classmethod
    def load(cls, path: Path | str, draft: Tokenizer | None = None, target: Tokenizer | None = None) -> Self:
        """Read the file of `save`, and check the tokenizers that are passed against it.

        Raises:
            FileError: The file cannot be read.
            CheckpointError: The file is damaged or another one.
            TokenizerError: `draft` or `target` is another tokenizer than the one of the file.
        """
        file = Path(path)
        tensors, metadata = load_tensors(file)
        values = {name: metadata.get(name, "") for name in _METADATA}
        sizes = [int(values[name]) if values[name].isdecimal() else 0 for name in _METADATA[:2]]
        draft_ids, target_ids = (tensors.get(name, torch.empty(0, 0)) for name in ("draft_ids", "target_ids"))
        for ids, size in ((draft_ids, sizes[0]), (target_ids, sizes[1])):
            is_list = ids.dtype == torch.int64 and ids.dim() == 1 and ids.shape == draft_ids.shape and len(ids) > 0
            if not is_list or not 0 <= int(ids.min()) <= int(ids.max()) < size or len(ids.unique()) != len(ids):
                raise CheckpointError(f"{file} is no file of DraftMap.save, or damaged: it has no pairs of token IDs.")
        for role, tokenizer in (("draft", draft), ("target", target)):
            if tokenizer is not None and fingerprint(as_tokenizer(tokenizer)) != values[f"{role}_digest"]:
                raise TokenizerError(
                    f"{file} was made with another {role} tokenizer. Use DraftMap.between(draft, target)."
                )
        return cls(draft_ids, target_ids, sizes[0], sizes[1], values["draft_digest"], values["target_digest"])


_METADATA = ("draft_size", "target_size", "draft_digest", "target_digest")


def _others(head: Head, token_ids: Tensor) -> DraftHead:
    """Return the draft head over all tokens of a head but some."""
    size = DraftHead(head, token_ids).vocab_size
    others = torch.ones(size, dtype=torch.bool).index_fill(0, token_ids, False).nonzero().flatten()
    if not len(others):
        raise SizeError(
            f"All {size} tokens of a head are shared, so there is no event for the rest. Compare the shared tokens "
            f"alone: divergence((hidden, DraftHead(head, map.draft_ids)), (teacher_hidden, map.draft_head(teacher)))."
        )
    return DraftHead(head, others)


def _mapped(ids: Tensor, sources: Tensor, results: Tensor, size: int) -> Tensor:
    """Return the result of each ID whose source it is, and -1 for the others; `size` is the number of IDs."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise TokenIdError(f"token ids {int(ids.min())}..{int(ids.max())} are not all in 0..{size - 1}.")
    places = torch.full((size,), _NONE, device=sources.device).index_copy(0, sources, results)
    return places.to(ids.device)[ids.long()]
