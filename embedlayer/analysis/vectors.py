"""Nearest neighbours of tokens in a table, with the methods of gensim's `KeyedVectors`.

`cos(a, b) = a . b / (|a| |b|)`, exactly over all rows, without an index or sampling. Rows are read in chunks, so a
factorised or quantised table is searched without being written out.
"""

import json
import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float32
from tokenizers import Tokenizer, models
from torch import Tensor

from embedlayer.analysis.judgements import (
    AnalogyScores,
    WordPairScores,
    evaluate_word_analogies,
    evaluate_word_pairs,
    whole_words,
)
from embedlayer.analysis.nearest import cosines_with, table_cosines
from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenizerError, UnknownTokenError
from embedlayer.losses.largest import top_k
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tables.conversions import TableLike
from embedlayer.tokenization.bytes import decode_readable, row_texts, token_text
from embedlayer.tokenization.ids import require_rows
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, pure_tokenizer
from embedlayer.tokenization.vocabulary_files import unknown_word, word_tokenizer

Token: TypeAlias = str | int | bytes | np.integer[Any]  # a token by its text, its ID, or its bytes
Vector: TypeAlias = Tensor | npt.NDArray[Any]  # a vector `(D,)`

Query: TypeAlias = Token | Vector | tuple[Token | Vector, float]
"""A token or a vector to add or subtract, alone or in a pair with its weight."""

Neighbors: TypeAlias = list[tuple[str, float]] | Float[np.ndarray, " V"]
"""`(readable text, cosine)`, nearest first; with `topn=None`, the cosine of every row."""

Key = TypeVar("Key", str, int, bytes)

LISTED = 8  # most tokens that an error lists


class TokenVectors:
    """Look up rows by token, and find the nearest neighbours of tokens and vectors.

    Rows are read again at each call, so the results follow a table that is being trained. Rows without a token (tables
    are often padded to a multiple of 64 rows) are never in a list of results. Results show readable text: with leading
    spaces, with `<0xE2>` for bytes that are not a whole character, and with special tokens as written.

    Methods, arguments and results are those of gensim's `KeyedVectors`, and an unknown word is a `KeyError`. There are
    three differences. `vectors[word]` is a tensor. A word that is several tokens, or unknown, raises the error also
    where gensim skips it (`doesnt_match`); only `get_mean_vector` skips it. Equal cosines are ordered by ID.

    Results of all methods are on the CPU: for a table on an accelerator each call waits for the device.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a plain tensor or NumPy array `(V, D)`.
            `open_model`'s result has both: `TokenVectors(open_model(source))`.
        tokenizer: The tokenizer of the table: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers; or the
            names of the rows, a list of V strings. `open_model(source).tokenizer` of a file of vectors is one too.

    Raises:
        SizeError: `table` is no table, or the number of names is not that of rows.
        TokenizerError: There is no tokenizer, or it has IDs outside the table or is of another kind.

    Example:
        >>> from embedlayer.tokenization import table_size, train_tokenizer
        >>> tokenizer = train_tokenizer("cat dog fish", kind="word")
        >>> TokenVectors(torch.eye(table_size(tokenizer)), tokenizer).similarity("cat", "dog")
        0.0
    """

    def __init__(self, table: TableLike | OpenedModel, tokenizer: object = None) -> None:
        if isinstance(table, OpenedModel):
            tokenizer, table = table.require_tokenizer() if tokenizer is None else tokenizer, table.table
        self._rows = RowReader(table)
        if tokenizer is None:
            raise TokenizerError("A table alone has no names: pass its tokenizer, or TokenVectors(open_model(source)).")
        if isinstance(tokenizer, list | tuple):
            if len(tokenizer) != len(self._rows):
                raise SizeError(f"The table has {len(self._rows)} rows and {len(tokenizer)} names: pass one for each.")
            tokenizer = word_tokenizer(tokenizer)
        self.vocab_size, self.embed_dim = self._rows.vocab_size, self._rows.embed_dim
        self.table = self._rows.table
        self.tokenizer = tokenizer = pure_tokenizer(as_tokenizer(tokenizer))
        has_token = [tokenizer.id_to_token(index) is not None for index in range(self.vocab_size)]
        if sum(has_token) < tokenizer.get_vocab_size():  # an entry has another one's ID, or one outside the table
            require_rows(tokenizer, self.vocab_size)
        self._has_token = torch.tensor(has_token, dtype=torch.bool)

    @property
    def vector_size(self) -> int:
        """Return the width of a row, D, under gensim's name."""
        return self.embed_dim

    @property
    def vectors(self) -> npt.NDArray[Any]:
        """Return a copy of all rows as a NumPy array `(V, D)`, in float32 or wider."""
        return self._rows.take(torch.arange(self.vocab_size)).numpy()

    @cached_property
    def index_to_key(self) -> list[str | None]:
        """Return the readable text of each row; `None` for a row without a token."""
        texts = row_texts(self.tokenizer, self.vocab_size)
        return [text if has else None for text, has in zip(texts, self._has_token.tolist(), strict=True)]

    @cached_property
    def key_to_index(self) -> dict[str, int]:
        """Return the lowest ID of each readable text."""
        ids: dict[str, int] = {}
        for index, text in enumerate(self.index_to_key):
            if text is not None:
                ids.setdefault(text, index)
        return ids

    def __len__(self) -> int:
        return int(self._has_token.sum())

    def __contains__(self, token: Token) -> bool:
        try:
            self.id_of(token)
        except UnknownTokenError:
            return False
        return True

    def __getitem__(self, token: Token | Sequence[Token] | npt.NDArray[np.integer[Any]]) -> Float[Tensor, "*N D"]:
        if isinstance(token, Sequence | np.ndarray) and not isinstance(token, str | bytes):
            return torch.stack([self._row(self.id_of(each)) for each in token])
        return self._row(self.id_of(token))

    def id_of(self, token: Token) -> int:
        """Return the ID of a token named by its text, its ID, or its bytes.

        A text is encoded without special tokens and must be a single token. Otherwise it is looked up as an entry of
        the vocabulary (`"##ing"`, `"[PAD]"`), then as the readable text of a token. An ID is returned as it is, also
        that of a row without a token.

        Raises:
            UnknownTokenError: The ID is outside the table; or the text is several tokens, none, or unknown.
        """
        if not isinstance(token, str | bytes):
            index = operator.index(token)
            if not 0 <= index < self.vocab_size:
                rows = f"{self.vocab_size} rows (0..{self.vocab_size - 1})"
                raise UnknownTokenError(f"Token id {index} is outside this table of {rows}.")
            return index
        text = token if isinstance(token, str) else decode_readable(token)
        has_all_words = self._is_of_words and unknown_word(self.tokenizer, text) is None
        encoding = encode(self.tokenizer if has_all_words else self._encoder, text)
        if len(encoding.ids) == 1:
            entry = self.tokenizer.id_to_token(encoding.ids[0])
            # Unigram writes an unknown word itself as the text of the unknown token
            if entry == encoding.tokens[0] and entry != getattr(self.tokenizer.model, "unk_token", None):
                return int(encoding.ids[0])
        literal = self.tokenizer.token_to_id(text)
        if literal is None and self.index_to_key.count(text) == 1:
            literal = self.key_to_index[text]
        if literal is not None:
            return int(literal)
        if len(encoding.ids) > 1 and not self._is_of_words:
            shown = [f"{token!r} (#{index})" for token, index in zip(encoding.tokens, encoding.ids, strict=True)]
            tokens = ", ".join(shown[:LISTED]) + ", ..." * (len(shown) > LISTED)
            respaced = text.lstrip(" ") if text.startswith(" ") else f" {text}"
            hint = f"Pass one of them, by text or ID; spaces count, so {respaced!r} may be one token."
            raise UnknownTokenError(f"{text!r} is {len(shown)} tokens to this tokenizer: {tokens}.\n{hint}")
        read = f"; it is read as {encoding.tokens[0]!r}" if encoding.ids and not self._is_of_words else ""
        hint = "Pass a token that is, by text or ID (in a command such as '#0')."
        raise UnknownTokenError(f"{text!r} is not among the {len(self):,} tokens{read}.\n{hint}")

    @cached_property
    def _is_of_words(self) -> bool:
        """Return whether the tokens are whole words as they are, as in a file of vectors."""
        is_plain = isinstance(self.tokenizer.model, models.WordLevel) and self.tokenizer.normalizer is None
        return is_plain and not self.tokenizer.get_added_tokens_decoder()

    @cached_property
    def _encoder(self) -> Tokenizer:
        """Return a tokenizer that also encodes unknown words: as an ID that no token has."""
        if isinstance(self.tokenizer.model, models.BPE):  # leaves out what it does not know
            return self.tokenizer
        content = json.loads(self.tokenizer.to_str())
        model, unknown = content["model"], self.vocab_size
        if model["type"] in ("WordLevel", "WordPiece") and model["unk_token"] not in model["vocab"]:
            model["vocab"][model["unk_token"]] = unknown
        elif model["type"] == "Unigram" and model["unk_id"] is None:
            model["unk_id"] = len(model["vocab"])
            model["vocab"].append(["<unknown>", 0.0])
        else:
            return self.tokenizer
        return Tokenizer.from_str(json.dumps(content))

    def has_index_for(self, key: Token) -> bool:
        """Return whether `key` names a token; see `id_of`."""
        return key in self

    def get_vector(self, key: Token, norm: bool = False) -> Float[Tensor, "D"]:
        """Return the row of a token; with `norm=True` at length 1, if it is not zero.

        Raises:
            UnknownTokenError: `key` is not a token of the table, see `id_of`.
        """
        row = self[key]
        return row / row.norm().clamp_min(torch.finfo(row.dtype).tiny) if norm else row

    def n_similarity(self, ws1: Sequence[Token], ws2: Sequence[Token]) -> float:
        """Return the cosine of the mean rows of two lists of tokens.

        Raises:
            UnknownTokenError: A word is not a token of the table, see `id_of`.
        """
        one, other = (self[list(words)].mean(0) for words in (ws1, ws2))
        return float(cosines_with(one[None], other[None]))

    def distances(self, word_or_vector: Token | Vector, other_words: Sequence[Token] = ()) -> Float[np.ndarray, " N"]:
        """Return the cosine distance, from 0 to 2, of a token or vector to each of `other_words`, or to each row.

        A row of zeros has the distance 1.

        Raises:
            UnknownTokenError: A word is not a token of the table, see `id_of`.
        """
        is_token = isinstance(word_or_vector, str | int | bytes | np.integer)
        query = self[word_or_vector] if is_token else self._checked(word_or_vector)  # type: ignore[index, arg-type]
        if len(other_words):
            rows = self[list(other_words)]
            return 1.0 - cosines_with(rows, query[None])[0].numpy()
        return 1.0 - self._cosines_to(query, 0, self.vocab_size).numpy()

    def similarity(self, w1: Token, w2: Token) -> float:
        """Return the cosine of the rows of two tokens, from -1 to 1; 0 where one of the rows is zero.

        Raises:
            UnknownTokenError: One of the two is not a token of the table, see `id_of`.
        """
        return float(cosines_with(self[w1][None], self[w2][None]))

    def distance(self, w1: Token, w2: Token) -> float:
        """Return the cosine distance of the rows of two tokens, `1 - similarity(w1, w2)`, from 0 to 2.

        Raises:
            UnknownTokenError: One of the two is not a token of the table, see `id_of`.
        """
        return 1.0 - self.similarity(w1, w2)

    def most_similar(
        self,
        positive: Query | Sequence[Query] | None = None,
        negative: Query | Sequence[Query] | None = None,
        topn: int | None = 10,
        clip_start: int = 0,
        clip_end: int | None = None,
        restrict_vocab: int | None = None,
        indexer: object = None,
    ) -> Neighbors:
        """Return the tokens whose rows have the largest cosine to a query: a weighted sum of tokens and vectors.

        A token adds its row at length 1 to the sum, with the weight 1 if it is positive and -1 if it is negative.

        Args:
            positive: Tokens or vectors `(D,)` to add, one or a list. In a list, a pair `(token, weight)` replaces the
                weight 1. Vectors are not normalised.
            negative: Tokens or vectors to subtract: `most_similar(["king", "woman"], ["man"])`. As in gensim, the
                weight of a pair replaces -1: `("man", -0.5)` subtracts half.
            topn: Number of results, fewer in a smaller table; `None` returns the cosines of all rows searched, by ID,
                as a NumPy array.
            clip_start: First ID to search.
            clip_end: ID after the last one to search; `None` or 0 for the end of the table. Negative clips count from
                the end.
            restrict_vocab: Search only IDs below this number, where tokenizers keep frequent tokens; it overrides
                `clip_start` and `clip_end`; `None` or 0 for no such number.
            indexer: Must be `None`: the search is exact.

        Returns:
            A list of `(readable text, cosine)`, nearest first; equal cosines by ID. The tokens of the query, rows
            without a token and rows with NaN are left out of the list.

        Raises:
            SizeError: The query is empty, no ID is in the range to search, or `indexer` is not `None`.
            UnknownTokenError: An item is not a token of the table, see `id_of`.
            CheckpointError: A row or vector of the query holds NaN or infinity.
        """
        if indexer is not None:
            raise SizeError("The search here is exact and takes no indexer: leave indexer out.")
        queries = [*self._queries(positive, 1.0), *self._queries(negative, -1.0)]
        if not queries:
            raise SizeError("most_similar needs at least one positive or negative token; found none.")
        query = torch.zeros(self.embed_dim, dtype=torch.float64)
        for vector, weight, _ in queries:
            query += weight * vector
        start, stop = self._ends(clip_start, clip_end, restrict_vocab)
        scores = self._cosines_to(query, start, stop)
        return self._answer(scores, topn, start, without=[index for *_, index in queries if index is not None])

    def most_similar_cosmul(
        self,
        positive: Query | Sequence[Query] | None = None,
        negative: Query | Sequence[Query] | None = None,
        topn: int | None = 10,
        restrict_vocab: int | None = None,
    ) -> Neighbors:
        """Return the tokens with the best multiplicative score (3CosMul) for positive and negative items.

        A row's score is the product of `(1 + cos(row, p)) / 2` over the positive items p, divided by the same product
        over the negative items. A single distant word cannot dominate this product as it can the sum of `most_similar`.
        Arguments, result and errors are those of `most_similar`, except that weights other than 1 raise a `SizeError`.

        Reference: Levy and Goldberg, 2014; gensim's 3CosMul, with its 1e-6 in the denominator.
        """
        sides = list(self._queries(positive, 1.0)), list(self._queries(negative, 1.0))
        if not any(sides):
            raise SizeError("most_similar_cosmul needs at least one positive or negative token; found none.")
        if any(weight != 1.0 for side in sides for _, weight, _ in side):
            raise SizeError("most_similar_cosmul multiplies cosines and has no weights: call most_similar.")
        start, stop = self._ends(0, None, restrict_vocab)
        above, below = torch.ones(stop), torch.ones(stop)
        for product, side in zip((above, below), sides, strict=True):
            for vector, _, _ in side:
                product *= (1 + self._cosines_to(vector, start, stop).to(product)) / 2
        without = [index for side in sides for *_, index in side if index is not None]
        return self._answer(above / (below + 1e-6), topn, start, without=without)

    def similar_by_key(self, key: Token, topn: int | None = 10, restrict_vocab: int | None = None) -> Neighbors:
        """Return the `topn` tokens nearest to a token as `(readable text, cosine)`; see `most_similar`."""
        return self.most_similar(key, topn=topn, restrict_vocab=restrict_vocab)

    def similar_by_word(self, word: Token, topn: int | None = 10, restrict_vocab: int | None = None) -> Neighbors:
        """Return the `topn` tokens nearest to a token as `(readable text, cosine)`; see `most_similar`."""
        return self.most_similar(word, topn=topn, restrict_vocab=restrict_vocab)

    def similar_by_vector(self, vector: Vector, topn: int | None = 10, restrict_vocab: int | None = None) -> Neighbors:
        """Return the `topn` tokens nearest to a vector `(D,)` as `(readable text, cosine)`; see `most_similar`."""
        return self.most_similar(self._checked(vector), topn=topn, restrict_vocab=restrict_vocab)

    def doesnt_match(self, words: Sequence[Token]) -> str:
        """Return the readable text of the token that is furthest, by cosine, from the mean of all the words' unit rows.

        Raises:
            UnknownTokenError: A word is not a token of the table, see `id_of`.
        """
        if not words:
            raise SizeError("doesnt_match needs at least one token; found none.")
        ids = [self.id_of(token) for token in words]
        units = torch.stack([_unit(self._row(index).double()) for index in ids])
        return token_text(self.tokenizer, ids[int((units @ _unit(units.mean(0))).argmin())])

    def most_similar_to_given(self, key1: Token, keys_list: Sequence[Key]) -> Key:
        """Return the key of `keys_list` whose row has the largest cosine to that of `key1`; of equals, the first.

        Raises:
            UnknownTokenError: A key is not a token of the table, see `id_of`.
        """
        return max(keys_list, key=lambda key: self.similarity(key1, key))

    def closer_than(self, key1: Token, key2: Token) -> list[str]:
        """Return the readable texts of all tokens that are nearer to `key1`, by cosine, than `key2` is.

        The texts are in the order of the token IDs, not of the cosines.

        Raises:
            UnknownTokenError: One of the two is not a token of the table, see `id_of`.
        """
        return [token_text(self.tokenizer, index) for index in self._nearer(key1, key2).nonzero().flatten().tolist()]

    def rank(self, key1: Token, key2: Token) -> int:
        """Return the rank of `key2` among the neighbours of `key1` by cosine: 1 if no other token is nearer.

        Raises:
            UnknownTokenError: One of the two is not a token of the table, see `id_of`.
        """
        return int(self._nearer(key1, key2).sum()) + 1

    def get_mean_vector(
        self,
        keys: Sequence[Token | Vector],
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
        pre_normalize: bool = True,
        post_normalize: bool = False,
        ignore_missing: bool = True,
    ) -> Float32[np.ndarray, " D"]:
        """Return the weighted mean of rows and vectors, `sum of w_i v_i / sum of |w_i|`, as a NumPy array.

        The result is a zero vector if every key is skipped.

        Args:
            keys: Tokens, whose rows are averaged, and vectors `(D,)`, which are not normalised.
            weights: One weight per key; `None` for 1.
            pre_normalize: Normalise the rows of tokens to length 1 first.
            post_normalize: Normalise the mean to length 1.
            ignore_missing: Skip keys that are not tokens of the table, and their weights.

        Raises:
            UnknownTokenError: A key is not a token, and `ignore_missing` is false.
        """
        if len(keys) == 0:
            raise SizeError("A mean needs at least one key; found none.")
        weights = [1.0] * len(keys) if weights is None else list(weights)
        mean, total = torch.zeros(self.embed_dim, dtype=torch.float64), 0.0
        for key, weight in zip(keys, weights, strict=True):
            if isinstance(key, Tensor | np.ndarray):
                vector = self._checked(key)
            elif ignore_missing and key not in self:
                continue
            else:
                vector = self._row(self.id_of(key)).to("cpu", torch.float64)
                vector = _unit(vector) if pre_normalize else vector
            mean, total = mean + float(weight) * vector, total + abs(float(weight))
        mean = mean / total if total else mean
        return (_unit(mean) if post_normalize else mean).float().numpy()

    def relative_cosine_similarity(self, wa: Token, wb: Token, topn: int = 10) -> float:
        """Return `cos(wa, wb)` divided by the sum of the cosines of the `topn` tokens nearest to `wa`.

        A value above `1 / topn`, 0.1 by default, means that `wb` is nearer to `wa` than the average of these
        neighbours.

        Raises:
            UnknownTokenError: One of the two is not a token of the table, see `id_of`.

        Reference: Leeuwenberg et al., A minimally supervised approach for synonym extraction with word embeddings,
        2016, equation 1.
        """
        neighbors = self.similar_by_word(wa, topn)
        if len(neighbors) == 0:
            raise SizeError(f"relative_cosine_similarity needs at least one neighbour; found none with topn={topn}.")
        return self.similarity(wa, wb) / sum(cosine for _, cosine in neighbors)

    def evaluate_word_pairs(self, file: Path | str) -> WordPairScores:
        """Correlate the cosines of the word pairs in a file with human scores; see `analysis.evaluate_word_pairs`."""
        return evaluate_word_pairs(self.table, self._words, file)

    def evaluate_word_analogies(self, file: Path | str, restrict_vocab: int | None = None) -> AnalogyScores:
        """Answer the analogy questions in a file and count right answers; see `analysis.evaluate_word_analogies`."""
        return evaluate_word_analogies(self.table, self._words, file, restrict_vocab=restrict_vocab)

    def _nearer(self, key1: Token, key2: Token) -> Bool[Tensor, " V"]:
        """Return a mask `(V,)` of the tokens whose rows have a larger cosine to `key1` than `key2` has."""
        first, second = self.id_of(key1), self.id_of(key2)
        cosines = self._cosines_to(self._row(first), 0, self.vocab_size)
        nearer = (cosines > cosines[second]) & self._has_token
        nearer[first] = False
        return nearer

    def _answer(self, scores: Float[Tensor, " N"], topn: int | None, start: int, without: list[int]) -> Neighbors:
        """Return the `topn` tokens with the highest scores as `(readable text, score)`, highest first.

        Equal scores are sorted by ID. `scores` belong to consecutive rows from the ID `start` on, and are
        overwritten if `topn` is not `None`; otherwise all are returned as a NumPy array, by ID. Rows without a token
        and NaN scores are left out of the list.
        """
        if topn is None:
            return scores.numpy()
        scores[~self._has_token[start : start + len(scores)] | scores.isnan()] = -torch.inf
        scores[[index - start for index in without if start <= index < start + len(scores)]] = -torch.inf
        count = min(topn, int(scores.isfinite().sum()))
        if count <= 0:
            return []
        best, ids = top_k(scores, count)
        return [
            (token_text(self.tokenizer, start + i), score) for i, score in zip(ids.tolist(), best.tolist(), strict=True)
        ]

    def _queries(
        self, queries: Query | Sequence[Query] | None, weight: float
    ) -> Iterator[tuple[Float[Tensor, " D"], float, int | None]]:
        """Yield `(vector, weight, token ID)` for each item of a query.

        The vector of a token is its row at length 1; a vector is yielded as it was passed, with the ID `None`. All
        vectors are float64 on the CPU. The weight is the argument `weight` unless the item is a pair `(token, weight)`.
        """
        is_one = isinstance(queries, str | int | bytes | np.integer) or (
            isinstance(queries, Tensor | np.ndarray) and queries.ndim < 2
        )
        items: Any = [queries] if is_one else [] if queries is None else queries
        for item in items:
            token, its_weight = item if isinstance(item, tuple | list) else (item, weight)
            index = None
            if isinstance(token, Tensor | np.ndarray):
                vector = self._checked(token)
            else:
                index = self.id_of(token)
                vector = _unit(self._row(index).to("cpu", torch.float64))
            if not vector.isfinite().all():
                what = "A vector of the query" if index is None else f"Row {index} ({self.index_to_key[index]!r})"
                raise CheckpointError(f"{what} holds NaN or infinity, so it has no neighbours: leave it out.")
            yield vector, float(its_weight), index

    def _ends(self, clip_start: int, clip_end: int | None, restrict_vocab: int | None) -> tuple[int, int]:
        """Return the range of IDs to search: the first ID, and the ID after the last one.

        A `restrict_vocab` other than `None` overrides both clips: the range is then `0 .. restrict_vocab - 1`. Clips
        have the meaning of a Python slice; bounds beyond the end of the table are reduced to it.
        """
        if restrict_vocab:
            clip_start, clip_end = 0, restrict_vocab
        start, stop, _ = slice(clip_start, clip_end or None).indices(self.vocab_size)
        if start >= stop:
            raise SizeError(f"There is no ID from {clip_start} to {clip_end} in a table of {self.vocab_size} rows.")
        return start, stop

    @torch.no_grad()
    def _cosines_to(self, query: Float[Tensor, " D"], start: int, stop: int) -> Float[Tensor, " N"]:
        """Return the cosine of a vector with each of the rows `start` to `stop - 1`, on the CPU."""
        return table_cosines(self._rows, query[None], start, stop)[0]

    @torch.no_grad()
    def _row(self, index: int) -> Float[Tensor, "D"]:
        """Return a copy of one row, in the dtype and on the device of the table."""
        return self._rows.read(index, index + 1)[0].clone()

    def _checked(self, vector: Vector) -> Float[Tensor, " D"]:
        """Return a vector as a float64 tensor on the CPU, after a check of its shape."""
        if tuple(vector.shape) != (self.embed_dim,):
            raise ShapeError(f"A vector for this table is ({self.embed_dim},); found {tuple(vector.shape)}.")
        return torch.as_tensor(np.array(vector) if isinstance(vector, np.ndarray) else vector.detach()).to(
            "cpu", torch.float64
        )

    @cached_property
    def _words(self) -> dict[str, int]:
        """Return the words that are a single token each, as word -> row ID; see `analysis.whole_words`."""
        return whole_words(self.tokenizer, self.vocab_size)


def _unit(vector: Float[Tensor, "D"]) -> Float[Tensor, "D"]:
    """Return the vector scaled to length 1; a zero vector is returned unchanged."""
    norm = torch.linalg.vector_norm(vector)
    return vector / norm if norm > 0 else vector
