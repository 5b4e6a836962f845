"""New rows as weighted sums of old rows, with weights computed from auxiliary vectors: OMP, FOCUS and WECHSEL."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.errors import SizeError, VocabularyError
from embedlayer.vocab.init.auxiliary_vectors import AuxiliaryVectors
from embedlayer.vocab.init.old_rows import DeadRows, LiveRows, has_values
from embedlayer.vocab.init.row_init import ComputedRows, Generator, RowInit, RowOrigin, SubwordMeanInit, Tokens

WEIGHTED_AT_ONCE = 128
"""New tokens whose weights, one for each anchor, are in memory at the same time."""


class Anchors:
    """Read the auxiliary vectors of the live old tokens in chunks."""

    def __init__(self, auxiliary: AuxiliaryVectors, live: LiveRows) -> None:
        self._auxiliary = auxiliary
        ids = [token for token in sorted(auxiliary.old) if token < live.old.vocab_size and live.is_live[token]]
        usable = [has_values(auxiliary.look_up(part)) for part in self._parts(ids)]
        keep = torch.cat(usable).tolist() if usable else []
        self.ids = [token for token, is_usable in zip(ids, keep, strict=True) if is_usable]
        if not self.ids:
            raise VocabularyError(f"None of the {len(auxiliary.old)} old tokens with a vector has a trained row.")

    def __len__(self) -> int:
        return len(self.ids)

    def _parts(self, ids: Sequence[int]) -> Iterator[list[int]]:
        """Yield the row numbers of the vectors of the old tokens `ids`, a block at a time."""
        size = TABLE_ROWS["cpu"]
        for start in range(0, len(ids), size):
            yield [self._auxiliary.old[token] for token in ids[start : start + size]]

    def look_up(self, places: Int[Tensor, " m"]) -> Float[Tensor, "m A"]:
        """Return the vectors of the anchors at `places`, which are indices of `ids`."""
        return self._auxiliary.look_up([self._auxiliary.old[self.ids[place]] for place in places.tolist()])

    def products(self, vectors: Float[Tensor, "k A"]) -> Float[Tensor, "k n"]:
        return torch.cat([vectors @ self._auxiliary.look_up(part).T for part in self._parts(self.ids)], dim=1)

    @cached_property
    def _norms(self) -> Float[Tensor, " n"]:
        return torch.cat([self._auxiliary.look_up(part).norm(dim=1) for part in self._parts(self.ids)])

    def cosines(self, vectors: Float[Tensor, "k A"]) -> Float[Tensor, "k n"]:
        """Return the cosine similarities of `vectors`, which must not be zero, with all anchors."""
        return self.products(vectors / vectors.norm(dim=1, keepdim=True)) / self._norms


class AuxiliaryInit(RowInit):
    """Base class of inits whose new rows are weighted sums of old rows: `row[t] = sum over old i of w[t, i] * old[i]`.

    The weights are computed in an auxiliary space, where both the new token and the old tokens have vectors. Only live
    old rows, which `RowInit` defines, have weights. A new token without an auxiliary vector, or with one that is zero
    or not finite, gets the row that `SubwordMeanInit` computes; its `RowOrigin` says so.

    Attributes:
        auxiliary: The auxiliary vectors of old and new tokens.
        method: Name of the rule in `RowOrigin`.
    """

    auxiliary: AuxiliaryVectors
    method: ClassVar[str]

    @abstractmethod
    def weights(self, new: Float[Tensor, "k A"], anchors: Anchors) -> Float[Tensor, "k n"]:
        """Return the weight of each anchor's old row for each new token, `(k, n)`; most weights are zero.

        `new` has the auxiliary vectors of the k new tokens, and `anchors` those of the n old ones.
        """

    def compute(self, live: LiveRows, tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return the weighted sums for the tokens of the chunk; see `RowInit.compute`.

        The old IDs of an origin are those with a weight, the largest absolute weight first.

        Raises:
            VocabularyError: No old token with a live row has an auxiliary vector that is finite and not zero.
        """
        wanted, anchors = tokens[chunk], Anchors(self.auxiliary, live)
        values, origins = SubwordMeanInit(self.dead).compute(live, wanted, slice(None), generator)
        values, origins = values.clone(), list(origins)
        places = [place for place, token in enumerate(wanted) if token.text in self.auxiliary.new]
        for start in range(0, len(places), WEIGHTED_AT_ONCE):
            part = places[start : start + WEIGHTED_AT_ONCE]
            vectors = self.auxiliary.look_up([self.auxiliary.new[wanted[place].text] for place in part])
            usable = has_values(vectors)
            part = [place for place, is_usable in zip(part, usable.tolist(), strict=True) if is_usable]
            weights = self.weights(vectors[usable], anchors).double()
            used = weights.any(0).nonzero().squeeze(1)
            weights, ids = weights[:, used], [anchors.ids[place] for place in used.tolist()]
            values[part] = weights @ live.look_up(ids)
            for place, row in zip(part, weights, strict=True):
                order = row.abs().argsort(descending=True)[: int(row.count_nonzero())]
                origins[place] = RowOrigin(self.method, tuple(ids[i] for i in order.tolist()))
        return values, origins


@dataclass(frozen=True, eq=False)
class OMPInit(AuxiliaryInit):
    """Combine at most `k` old rows with the weights by which orthogonal matching pursuit approximates a donor's row.

    The auxiliary vectors are the rows of another model (`AuxiliaryVectors.from_donor`). The donor's row of a new token
    is approximated by the donor's rows of shared tokens:

    1. Add the shared token whose row has the largest absolute inner product with the residual.
    2. Compute the weights of all added tokens by least squares; the residual is what they leave.
    3. Repeat until there are `k` tokens, or the residual is zero, at the latest with as many as the donor's width.

    The same weights are then applied to the old rows of these tokens, whose width may be another one.

    Args:
        auxiliary: The auxiliary vectors of old and new tokens.
        k: Largest number of old rows in a sum.
        dead: IDs of old rows that are not read; see `RowInit`.

    Raises:
        VocabularyError: When rows are computed: no old token with a live row has an auxiliary vector.

    Reference: Goddard and Fernandes Neto, Training-Free Tokenizer Transplantation via Orthogonal Matching Pursuit, 2025
    (arXiv 2506.06607). mergekit's tokensurgeon has the same method, with k = 64.

    Example:
        >>> auxiliary = AuxiliaryVectors.from_tensors([0, 1], torch.eye(2), ["new"], torch.tensor([[2.0, -1.0]]))
        >>> old = TokenEmbedding.from_pretrained(torch.tensor([[1.0, 3.0], [3.0, 5.0], [9.0, 9.0]]))
        >>> OMPInit(auxiliary).rows(old, [NewToken("new")]).values
        tensor([[-1.,  1.]])
    """

    auxiliary: AuxiliaryVectors
    k: int = 64
    dead: DeadRows = ()
    method: ClassVar[str] = "OMP"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SizeError(f"k must be at least 1, not {self.k}.")

    def weights(self, new: Float[Tensor, "k A"], anchors: Anchors) -> Float[Tensor, "k n"]:
        """Return the least-squares weights of at most `k` anchors for each new token; see `AuxiliaryInit.weights`."""
        count, width = new.shape
        steps = min(self.k, len(anchors), width)
        chosen = torch.zeros(count, steps, dtype=torch.int64)
        is_chosen = torch.zeros(count, len(anchors), dtype=torch.bool)
        basis, atoms = new.new_zeros(2, count, width, steps)
        residual, smallest = new.clone(), 10 * torch.finfo(new.dtype).eps * new.norm(dim=1)
        for step in range(steps):
            active = residual.norm(dim=1) > smallest
            best = anchors.products(residual).abs().masked_fill_(is_chosen, -1).argmax(1)
            atom = anchors.look_up(best) * active.unsqueeze(1)
            rest = atom
            for _ in range(2):  # twice, so that the basis stays orthogonal
                rest = rest - (basis @ (basis.mT @ rest.unsqueeze(-1))).squeeze(-1)
            independent = rest.norm(dim=1, keepdim=True) > 10 * torch.finfo(new.dtype).eps * atom.norm(
                dim=1, keepdim=True
            )
            direction = torch.where(independent, rest / rest.norm(dim=1, keepdim=True), 0)
            basis[:, :, step], atoms[:, :, step] = direction, atom * independent
            chosen[:, step] = best
            is_chosen.scatter_(1, best.unsqueeze(1), True)
            residual = residual - direction * (direction * residual).sum(1, keepdim=True)
        targets = new.double().unsqueeze(-1)
        solved: Tensor = torch.linalg.lstsq(atoms.double(), targets, driver="gelsd").solution.squeeze(-1)
        solved = solved * atoms.any(1)  # an atom that was left out has no weight
        return torch.zeros(count, len(anchors), dtype=torch.float64).scatter_(1, chosen, solved)


@dataclass(frozen=True, eq=False)
class FocusInit(AuxiliaryInit):
    """Average old rows with sparsemax weights of the cosine similarities of auxiliary vectors.

    `w[t] = sparsemax(cos(new[t], old[i]) over i)`: the point of the probability simplex that is nearest to the vector
    of similarities. Most weights are zero, the others sum to one.

    Args:
        auxiliary: The auxiliary vectors of old and new tokens, such as those of `train_fasttext`.
        dead: IDs of old rows that are not read; see `RowInit`.

    Raises:
        VocabularyError: When rows are computed: no old token with a live row has an auxiliary vector.

    Reference: Dobler and de Melo, FOCUS: Effective Embedding Initialization for Monolingual Specialization of
    Multilingual Models, 2023 (arXiv 2305.14481); Martins and Astudillo, From Softmax to Sparsemax, 2016. The paper
    trains fastText on text of the new tokenizer; here the caller chooses the vectors.

    Example:
        >>> auxiliary = AuxiliaryVectors.from_tensors([0, 1], torch.eye(2), ["new"], torch.ones(1, 2))
        >>> old = TokenEmbedding.from_pretrained(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
        >>> new = FocusInit(auxiliary).rows(old, [NewToken("new")])
        >>> new.values, str(new.origins[0])
        (tensor([[2., 4.]]), 'FOCUS of 0, 1')
    """

    auxiliary: AuxiliaryVectors
    dead: DeadRows = ()
    method: ClassVar[str] = "FOCUS"

    def weights(self, new: Float[Tensor, "k A"], anchors: Anchors) -> Float[Tensor, "k n"]:
        """Return `sparsemax(cosines)`, `(k, n)`; see `AuxiliaryInit.weights`."""
        return sparsemax(anchors.cosines(new).double())


@dataclass(frozen=True, eq=False)
class WechselInit(AuxiliaryInit):
    """Average the old rows of the nearest auxiliary vectors, with a softmax of their cosine similarities as weights.

    `w[t] = softmax(cos(new[t], old[i]) / temperature over the neighbors i)`.

    Args:
        auxiliary: The auxiliary vectors of old and new tokens. Those of two languages must be aligned before.
        neighbors: Number of old tokens with a weight; if there are fewer, all of them have one.
        temperature: Divisor of the similarities.
        dead: IDs of old rows that are not read; see `RowInit`.

    Raises:
        VocabularyError: When rows are computed: no old token with a live row has an auxiliary vector.

    Reference: Minixhofer et al., WECHSEL: Effective Initialization of Subword Embeddings for Cross-Lingual Transfer of
    Monolingual Language Models, 2022 (arXiv 2112.06598).

    Example:
        >>> auxiliary = AuxiliaryVectors.from_tensors([0, 1], torch.eye(2), ["new"], torch.tensor([[1.0, 0.0]]))
        >>> old = TokenEmbedding.from_pretrained(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
        >>> WechselInit(auxiliary, neighbors=1).rows(old, [NewToken("new")]).values
        tensor([[1., 3.]])
    """

    auxiliary: AuxiliaryVectors
    neighbors: int = 10
    temperature: float = 0.1
    dead: DeadRows = ()
    method: ClassVar[str] = "WECHSEL"

    def __post_init__(self) -> None:
        if self.neighbors < 1 or not self.temperature > 0:
            raise SizeError(
                f"WechselInit needs neighbors >= 1 and temperature > 0, not {self.neighbors}, {self.temperature}."
            )

    def weights(self, new: Float[Tensor, "k A"], anchors: Anchors) -> Float[Tensor, "k n"]:
        """Return the softmax over the nearest anchors, `(k, n)`; see `AuxiliaryInit.weights`."""
        cosines = anchors.cosines(new).double()
        nearest = cosines.topk(min(self.neighbors, len(anchors)), dim=1)
        weights = torch.softmax(nearest.values / self.temperature, dim=1)
        return torch.zeros_like(cosines).scatter_(1, nearest.indices, weights)


def sparsemax(scores: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
    """Return for each row the nearest point of the probability simplex: `max(scores - threshold, 0)`, of sum one."""
    ordered = scores.sort(dim=1, descending=True).values
    sums, counts = ordered.cumsum(1) - 1, torch.arange(1, scores.shape[1] + 1)
    support = (counts * ordered > sums).sum(1, keepdim=True)
    return (scores - sums.gather(1, support - 1) / support).clamp(min=0)
