"""The tokens that two tokenizers share, for drafts and teachers whose tokenizer is another one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.heads.draft import DraftHead
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.io.files import named_path
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.losses.divergence_kinds import Divergence, ForwardKL
from embedlayer.losses.divergences import divergence_of
from embedlayer.losses.objective import EventLogits, Request
from embedlayer.losses.options import LossOptions, LossSettings, Reduction, Statistic, check_options
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.comparison import common_tokens
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint

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
            others_t = _others(teacher_head, self.target_ids).token_statistics(teacher_hidden, statistics=_LOGSUMEXP)
        of_student = DraftHead(head, self.draft_ids).uncomputed_logits(hidden)
        others_s = _others(head, self.draft_ids).token_statistics(hidden, statistics=_LOGSUMEXP)
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


_LOGSUMEXP: tuple[Statistic, ...] = ("logsumexp",)
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
