"""Neighbours in a table, with gensim's verbs.

`cos(a, b) = a . b / (|a| |b|)`, over all rows, exactly: no index, no sampling. Rows are read through `rows()` a chunk
at a time, so a factorised or quantised table is searched without ever being written out.
"""

import operator
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.evaluate import (
    AnalogyScores,
    WordPairScores,
    evaluate_word_analogies,
    evaluate_word_pairs,
    whole_words,
)
from embedlayer.analysis.rows import Rows
from embedlayer.errors import ShapeError, SizeError, TokenIdError, TokenizerError
from embedlayer.tables.table import TokenTable
from embedlayer.text.tokenizer import require_rows, token_text

Token = str | int | bytes
"""A token by its text, its ID, or its bytes."""

CHUNK_NUMBERS = 1 << 19
"""Numbers read at a time, 2 MB in float32: small enough to stay in a core's cache."""

LISTED = 8
"""Pieces that an error names."""


class TokenVectors:
    """The rows of a table by token, and what lies near them.

    Rows are read anew on each call, so the answers follow a table that is being trained. Rows without a token (a table
    padded to a multiple) are never an answer. Answers show tokens as people read them: with their space, bytes that are
    no whole character as `<0xE2>`, special tokens as they are written.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        tokenizer: Its tokenizer.

    Raises:
        ShapeError: A plain tensor that is not `(V, D)`.
        TokenizerError: The tokenizer has IDs outside the table.

    Example:
        >>> from embedlayer.text.tokenizer import table_size, train_tokenizer
        >>> tokenizer = train_tokenizer("cat dog fish", kind="word")
        >>> TokenVectors(torch.eye(table_size(tokenizer)), tokenizer).similarity("cat", "dog")
        0.0
    """

    def __init__(self, table: TokenTable | Tensor, tokenizer: Tokenizer) -> None:
        self._rows = Rows(table)
        self.vocab_size, self.embed_dim = self._rows.vocab_size, self._rows.embed_dim
        self.table = table
        self.tokenizer = tokenizer
        require_rows(tokenizer, self.vocab_size)
        ids = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()))
        self._has_token = torch.zeros(self.vocab_size, dtype=torch.bool)
        self._has_token[ids] = True

    def __len__(self) -> int:
        return int(self._has_token.sum())

    def __contains__(self, token: Token) -> bool:
        try:
            self.id_of(token)
        except (TokenizerError, TokenIdError):
            return False
        return True

    def __getitem__(self, token: Token) -> Float[Tensor, "D"]:
        return self._row(self.id_of(token))

    def id_of(self, token: Token) -> int:
        """The ID that a text, an ID or a byte string stands for.

        A text is encoded (without special tokens) and must come out as one token; else it is taken as a literal entry
        of the vocabulary (`"##ing"`, `"[PAD]"`), else as a token's readable text, as answers show it.

        Raises:
            TokenIdError: An ID outside the table.
            TokenizerError: A text that is several tokens, or none, or unknown.
        """
        if isinstance(token, str):
            return self._id_of_text(token)
        if isinstance(token, bytes):
            return self._id_of_bytes(token)
        index = operator.index(token)
        if not 0 <= index < self.vocab_size:
            raise TokenIdError(
                f"Token id {index} is outside this table of {self.vocab_size} rows (0..{self.vocab_size - 1})."
            )
        return index

    def similarity(self, a: Token, b: Token) -> float:
        """`cos(a, b)`, from -1 to 1; 0 where one of the rows is zero."""
        return float(_cosines(self[a][None], self[b])[0])

    def distance(self, a: Token, b: Token) -> float:
        """`1 - cos(a, b)`, from 0 to 2."""
        return 1.0 - self.similarity(a, b)

    def most_similar(
        self,
        positive: Token | Tensor | Sequence[Token | Tensor] = (),
        negative: Token | Tensor | Sequence[Token | Tensor] | None = None,
        topn: int = 10,
        restrict_vocab: int | None = None,
    ) -> list[tuple[str, float]]:
        """The tokens nearest to `mean(positive unit rows, -negative unit rows)`, gensim's meaning.

        Args:
            positive: Tokens that pull: one or a list. A vector `(D,)` among them is taken at its own length.
            negative: Tokens that push: `most_similar(["king", "woman"], ["man"])`.
            topn: How many answers; fewer where the table has fewer.
            restrict_vocab: Look only at the first so many IDs, where tokenizers keep frequent tokens.

        Returns:
            `(readable token, cosine)`, nearest first; equal cosines by ID. The tokens asked with are left out.

        Raises:
            SizeError: Nothing was asked, or `restrict_vocab` is below 1.
            TokenIdError, TokenizerError: See `id_of`.
        """
        pull, push, asked = self._asked(positive, negative)
        query = sum(pull, torch.zeros(self.embed_dim, dtype=torch.float64)) - sum(push, torch.zeros(()))
        return self._nearest(query, topn, restrict_vocab, without=asked)

    def most_similar_cosmul(
        self,
        positive: Token | Tensor | Sequence[Token | Tensor] = (),
        negative: Token | Tensor | Sequence[Token | Tensor] | None = None,
        topn: int = 10,
        restrict_vocab: int | None = None,
    ) -> list[tuple[str, float]]:
        """The tokens with the largest `product of (1 + cos(positive)) / 2 over product of (1 + cos(negative)) / 2`.

        One far word cannot outweigh the others as it can in the sum of `most_similar`, whose arguments and errors it
        has.

        Source: Levy and Goldberg, 2014; gensim's 3CosMul, with its 1e-6 in the denominator.
        """
        pull, push, asked = self._asked(positive, negative)
        stop = self._stop(restrict_vocab)
        above, below = torch.ones(stop), torch.ones(stop)
        for product, queries in ((above, pull), (below, push)):
            for query in queries:
                product *= (1 + self._cosines_to(query, stop).to(product)) / 2
        return self._best(above / (below + 1e-6), topn, without=asked)

    def doesnt_match(self, tokens: Sequence[Token]) -> str:
        """The token that goes least with the others: the one furthest from the mean of their unit rows.

        Raises:
            SizeError: No tokens.
            TokenIdError, TokenizerError: See `id_of`.
        """
        if not tokens:
            raise SizeError("doesnt_match needs at least one token; found none.")
        ids = [self.id_of(token) for token in tokens]
        units = torch.stack([_unit(self._row(index).double()) for index in ids])
        return token_text(self.tokenizer, ids[int((units @ _unit(units.mean(0))).argmin())])

    def rank(self, a: Token, b: Token) -> int:
        """How near `b` is to `a`: 1 where no other token is nearer."""
        first, second = self.id_of(a), self.id_of(b)
        cosines = self._cosines_to(self._row(first), self.vocab_size)
        nearer = (cosines > cosines[second]) & self._has_token
        nearer[first] = False
        return int(nearer.sum()) + 1

    def evaluate_word_pairs(self, file: Path | str) -> WordPairScores:
        """Compare similarities with those that people gave to pairs of words; see `evaluate.evaluate_word_pairs`."""
        return evaluate_word_pairs(self.table, self._words, file)

    def evaluate_word_analogies(self, file: Path | str, restrict_vocab: int | None = None) -> AnalogyScores:
        """Ask `a is to b as c is to ?`; see `evaluate.evaluate_word_analogies`."""
        return evaluate_word_analogies(self.table, self._words, file, restrict_vocab=restrict_vocab)

    def similar_by_vector(
        self, vector: Float[Tensor, "D"], topn: int = 10, restrict_vocab: int | None = None
    ) -> list[tuple[str, float]]:
        """The tokens nearest to a vector `(D,)`, nearest first; see `most_similar`."""
        return self._nearest(self._checked(vector).detach(), topn, restrict_vocab, without=[])

    def _nearest(
        self, query: Float[Tensor, "D"], topn: int, restrict_vocab: int | None, without: list[int]
    ) -> list[tuple[str, float]]:
        return self._best(self._cosines_to(query, self._stop(restrict_vocab)), topn, without)

    def _best(self, scores: Float[Tensor, "stop"], topn: int, without: list[int]) -> list[tuple[str, float]]:
        """The tokens with the highest scores, equals by ID."""
        stop = len(scores)
        scores[~self._has_token[:stop] | scores.isnan()] = -torch.inf
        scores[[token_id for token_id in without if token_id < stop]] = -torch.inf
        found = min(topn, int(scores.isfinite().sum()))
        if found < 1:
            return []
        # topk leaves the order of equals open, so it only finds the last value that counts; the sort keeps IDs in order
        candidates = torch.nonzero(scores >= scores.topk(found).values[-1])[:, 0]
        best = candidates[scores[candidates].argsort(descending=True, stable=True)][:found]
        return [(token_text(self.tokenizer, int(i)), float(scores[i])) for i in best]

    def _asked(
        self,
        positive: Token | Tensor | Sequence[Token | Tensor],
        negative: Token | Tensor | Sequence[Token | Tensor] | None,
    ) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """What pulls and what pushes, in float64: unit rows, and vectors as given; and the IDs among them."""
        sides = (_as_list(positive), _as_list(negative))
        if not any(sides):
            raise SizeError("most_similar needs at least one positive or negative token; found none.")
        asked: list[int] = []
        vectors: tuple[list[Tensor], list[Tensor]] = ([], [])
        for tokens, found in zip(sides, vectors, strict=True):
            for token in tokens:
                if isinstance(token, Tensor):
                    found.append(self._checked(token).detach().to("cpu", torch.float64))
                else:
                    asked.append(self.id_of(token))
                    found.append(_unit(self._row(asked[-1]).to("cpu", torch.float64)))
        return *vectors, asked

    def _stop(self, restrict_vocab: int | None) -> int:
        if restrict_vocab is not None and restrict_vocab < 1:
            raise SizeError(f"restrict_vocab is a number of IDs, at least 1; found {restrict_vocab}.")
        return min(self.vocab_size, restrict_vocab or self.vocab_size)

    @torch.no_grad()
    def _cosines_to(self, query: Float[Tensor, "D"], stop: int) -> Float[Tensor, "stop"]:
        step = max(1, CHUNK_NUMBERS // max(1, self.embed_dim))
        chunks = [_cosines(self._rows.read(i, min(i + step, stop)), query) for i in range(0, stop, step)]
        return torch.cat(chunks).cpu()

    @torch.no_grad()
    def _row(self, index: int) -> Float[Tensor, "D"]:
        return self._rows.read(index, index + 1)[0].clone()

    def _checked(self, vector: Tensor) -> Tensor:
        if vector.shape != (self.embed_dim,):
            raise ShapeError(f"A vector for this table is ({self.embed_dim},); found {tuple(vector.shape)}.")
        return vector

    def _id_of_text(self, text: str) -> int:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) == 1 and not self._is_unknown(encoding.ids[0], encoding.tokens[0]):
            return int(encoding.ids[0])
        literal = self.tokenizer.token_to_id(text)
        if literal is None:
            literal = self._id_by_readable_text.get(text)
        if literal is not None:
            return int(literal)
        if len(encoding.ids) > 1:
            raise TokenizerError(
                f"{text!r} is {len(encoding.ids)} tokens to this tokenizer: {_listing(encoding.tokens)}.\n"
                f"Ask for one of them, by text or ID ({_listing(encoding.ids)}); spaces count, so "
                f"{_other_spacing(text)!r} may be one token."
            )
        raise TokenizerError(
            f"{text!r} is not in this tokenizer's vocabulary of {len(self)} tokens: it is read as "
            f"{encoding.tokens[0]!r}.\nAsk for a token that is, by text or ID."
            if encoding.ids
            else f"{text!r} has no tokens to this tokenizer. Ask for a token by text or ID."
        )

    def _id_of_bytes(self, raw: bytes) -> int:
        """By the text that the bytes are; bytes that are part of a character only, as answers show them: `<0xE2>`."""
        text = raw.decode("utf-8", errors="surrogateescape")
        lone = {code: f"<0x{code - 0xDC00:02X}>" for code in range(0xDC80, 0xDD00)}
        return self._id_of_text(text.translate(lone))

    def _is_unknown(self, token_id: int, piece: str) -> bool:
        """Whether a piece stands for text that the vocabulary lacks (Unigram shows the text itself as the piece)."""
        entry = self.tokenizer.id_to_token(token_id)
        return entry != piece or entry == getattr(self.tokenizer.model, "unk_token", None)

    @cached_property
    def _words(self) -> dict[str, int]:
        return whole_words(self.tokenizer, self.vocab_size)

    @cached_property
    def _id_by_readable_text(self) -> dict[str, int]:
        """Texts that exactly one token is shown as."""
        ids: dict[str, int] = {}
        shared: set[str] = set()
        for index in torch.nonzero(self._has_token)[:, 0].tolist():
            text = token_text(self.tokenizer, index)
            if ids.setdefault(text, index) != index:
                shared.add(text)
        return {text: index for text, index in ids.items() if text not in shared}


def _as_list(tokens: Token | Tensor | Sequence[Token | Tensor] | None) -> list[Token | Tensor]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, str | int | bytes | Tensor) else list(tokens)


def _unit(vector: Float[Tensor, "D"]) -> Float[Tensor, "D"]:
    norm = torch.linalg.vector_norm(vector)
    return vector / norm if norm > 0 else vector


def _cosines(rows: Float[Tensor, "rows D"], query: Float[Tensor, "D"]) -> Float[Tensor, "rows"]:
    """Cosine of each row with the query, in float32 or wider; 0 for zero rows.

    A sum per row and not a matrix product, whose blocks can round equal rows differently: equal rows must tie.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    rows, query = rows.to(dtype), _unit(query.to(rows.device, torch.float64)).to(dtype)
    norms = torch.linalg.vector_norm(rows, dim=-1)
    cosines: Tensor = (rows * query).sum(-1) / norms.where(norms > 0, 1.0)
    return cosines.clamp(-1.0, 1.0)


def _other_spacing(text: str) -> str:
    return text.lstrip(" ") if text.startswith(" ") else f" {text}"


def _listing(values: Sequence[object]) -> str:
    shown = ", ".join(repr(value) for value in values[:LISTED])
    return f"{shown}, ..." if len(values) > LISTED else shown
