"""Vectors of old and new tokens in one space other than the edited table: a donor's rows, word vectors, or fastText."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError, TextError, VocabularyError, require
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.comparison import match_tokenizers
from embedlayer.tokenization.tokenizer_calls import encode_batch
from embedlayer.vocab.init.old_rows import OldRows, WeightRows


@dataclass(frozen=True, eq=False)
class AuxiliaryVectors:
    """Pair the rows of one table of vectors, `(R, A)`, with old tokens and with new tokens.

    `OMPInit`, `FocusInit` and `WechselInit` compute the weights of old rows from these vectors.

    Args:
        vectors: The table of vectors, in a space of any width A. It is read in chunks.
        old: From the ID of an old token to its row in `vectors`. Old tokens without a vector are left out.
        new: From the text of a new token (`NewToken.text`, as written in the new tokenizer) to its row in `vectors`.

    Raises:
        VocabularyError: `old` is empty: no token is shared.

    Example:
        >>> AuxiliaryVectors(TokenEmbedding(3, 16), old={7: 0, 9: 1}, new={" otters": 2})
        AuxiliaryVectors(2 old tokens, 1 new tokens, width 16)
    """

    vectors: OldRows
    old: Mapping[int, int]
    new: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.old:
            raise VocabularyError("No old token has an auxiliary vector. Use SubwordMeanInit().")
        rows, size = {*self.old.values(), *self.new.values()}, self.vectors.vocab_size
        if min(rows) < 0 or max(rows) >= size:
            raise SizeError(f"There are {size} vectors, with rows 0..{size - 1}; a token has row {max(rows)}.")

    def __repr__(self) -> str:
        return f"AuxiliaryVectors({len(self.old)} old tokens, {len(self.new)} new tokens, width {self.embed_dim})"

    @property
    def embed_dim(self) -> int:
        """Return the width of the vectors, A."""
        return self.vectors.embed_dim

    def look_up(self, rows: Sequence[int]) -> Float[Tensor, "n A"]:
        """Return rows of `vectors` on the CPU, in float64 if they are stored so, else in float32."""
        with torch.no_grad():
            ids = torch.tensor(rows, dtype=torch.int64, device=self.vectors.rows(0, 1).device)
            vectors = self.vectors.look_up(ids).cpu()
        return vectors if vectors.dtype == torch.float64 else vectors.float()

    @classmethod
    def from_tensors(
        cls, old_ids: Sequence[int], old: Float[Tensor, "n _"], new_tokens: Sequence[str], new: Float[Tensor, "k _"]
    ) -> "AuxiliaryVectors":
        """Pair two tensors, such as aligned vectors of two languages, with tokens.

        Args:
            old_ids: IDs of old tokens.
            old: The vector of each, `(n, A)`.
            new_tokens: Texts of new tokens, as written in the new tokenizer.
            new: The vector of each, `(k, A)`.

        Raises:
            VocabularyError: There are no old tokens.

        Example:
            >>> AuxiliaryVectors.from_tensors([4, 5], torch.eye(2), [" otters"], torch.ones(1, 2))
            AuxiliaryVectors(2 old tokens, 1 new tokens, width 2)
        """
        if old.shape[1:] != new.shape[1:] or (len(old), len(new)) != (len(old_ids), len(new_tokens)):
            raise ShapeError(
                f"{len(old_ids)} old and {len(new_tokens)} new tokens need rows (V, D) of one width, not "
                f"{tuple(old.shape)} and {tuple(new.shape)}."
            )
        both = torch.cat([old, new.to(old)])
        old_rows = {int(token): row for row, token in enumerate(old_ids)}
        return cls(WeightRows(both), old_rows, {token: len(old) + row for row, token in enumerate(new_tokens)})

    @classmethod
    def from_donor(
        cls, donor: TokenTable, donor_tokenizer: object, old_tokenizer: object, new_tokenizer: object
    ) -> "AuxiliaryVectors":
        """Pair the rows of another model's table with the tokens that its tokenizer shares with the two others.

        `match_tokenizers` finds the shared tokens. The table is not copied, and may have any width.

        Args:
            donor: The other model's table.
            donor_tokenizer: The other model's tokenizer.
            old_tokenizer: The tokenizer before the edit.
            new_tokenizer: The tokenizer after the edit: that of `edit_tokenizer`, or the one to transplant to.

        Raises:
            VocabularyError: The donor shares no token with the old tokenizer.
            TokenizerError: One of the tokenizers is none.

        Example:
            >>> text = "I love dogs, I love cats"
            >>> old, donor = train_tokenizer((), "byte"), train_tokenizer(text, vocab_size=270)
            >>> new = edit_tokenizer(old, add=[" love", " otters"]).tokenizer
            >>> AuxiliaryVectors.from_donor(TokenEmbedding(270, 16), donor, old, new)
            AuxiliaryVectors(257 old tokens, 258 new tokens, width 16)
        """
        names = {token: name for name, token in TokenBytes(new_tokenizer).vocabulary.items()}
        of_old, of_new = (match_tokenizers(donor_tokenizer, other) for other in (old_tokenizer, new_tokenizer))
        size = donor.vocab_size
        return cls(
            donor,
            {token: row for token, row in enumerate(of_old) if row is not None and row < size},
            {names[token]: row for token, row in enumerate(of_new) if row is not None and row < size},
        )

    @classmethod
    def from_words(
        cls, words: Sequence[str], vectors: Float[Tensor, "R A"], old_tokenizer: object, new_tokenizer: object
    ) -> "AuxiliaryVectors":
        """Pair word vectors, such as those of `read_vectors` or gensim's `index_to_key` and `vectors`, with tokens.

        If a word contains a space or `▁`, words are spelled as tokens: `▁dog` is the token " dog". Otherwise a word
        belongs to the token that starts a word with this text, and tokens inside words have no vector.

        Args:
            words: The word of each row.
            vectors: The vectors, `(R, A)`.
            old_tokenizer: The tokenizer before the edit.
            new_tokenizer: The tokenizer after the edit.

        Raises:
            VocabularyError: No old token is one of the words.
            TokenizerError: One of the tokenizers is none.

        Example:
            >>> old = train_tokenizer(" dogs bite" * 9, vocab_size=300)
            >>> new = edit_tokenizer(old, add=[" otters"]).tokenizer
            >>> AuxiliaryVectors.from_words(["dogs", "bite", "otters"], torch.eye(3), old, new)
            AuxiliaryVectors(2 old tokens, 3 new tokens, width 3)
        """
        spelled = any(" " in word or "▁" in word for word in words)
        rows: dict[bytes, int] = {}
        for row, word in enumerate(words):
            rows.setdefault((word.replace("▁", " ") if spelled else word).encode(), row)

        def found(tokens: TokenBytes) -> dict[int, int]:
            matches = {}
            for token in tokens.entries:
                reading = tokens.readings(token)[0]
                if not spelled and tokens.word_position(token) == "inside":
                    continue
                row = rows.get(reading if spelled else reading.removeprefix(b" "))
                if row is not None:
                    matches[token] = row
            return matches

        old, new = TokenBytes(old_tokenizer), TokenBytes(new_tokenizer)
        return cls(WeightRows(vectors), found(old), {new.entries[token]: row for token, row in found(new).items()})


def train_fasttext(
    texts: Iterable[str],
    old_tokenizer: object,
    new_tokenizer: object,
    *,
    embed_dim: int = 100,
    epochs: int = 5,
    seed: int = 0,
) -> AuxiliaryVectors:
    """Train fastText vectors of the tokens of two tokenizers on text, with gensim, and pair them with the tokens.

    Each line of the text is encoded by both tokenizers, and both sequences of tokens are sentences of the training.
    A token that `match_tokenizers` finds in both has one vector. So old and new tokens are in one space. A new token
    that does not occur gets the mean of the vectors of its character n-grams; an old one gets no vector.

    Args:
        texts: The text, in parts that are split into lines. Use training text only, never text to measure on.
        old_tokenizer: The tokenizer before the edit.
        new_tokenizer: The tokenizer after the edit.
        embed_dim: Width of the vectors, A.
        epochs: Passes over the text.
        seed: Seed of the vectors. One thread is used, so equal seeds give equal vectors.

    Raises:
        TextError: The text has no tokens.
        VocabularyError: No old token occurs in the text.
        TokenizerError: One of the tokenizers is none.
        MissingExtraError: gensim is not installed.

    Reference: Bojanowski et al., Enriching Word Vectors with Subword Information, 2017 (arXiv 1607.04606).
    """
    fasttext = require("gensim.models.fasttext", extra="fasttext").FastText
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    old, new = TokenBytes(old_tokenizer), TokenBytes(new_tokenizer)
    sources = match_tokenizers(old_tokenizer, new_tokenizer)
    words = {token: _word(old, token) for token in sorted(old.entries)}
    new_words = {
        token: _word(new, token) if (source := sources[token]) is None else words[source]
        for token in sorted(new.entries)
    }
    sentences = [
        [names[token] for token in encoding.ids if token in names]
        for tokens, names in ((old, words), (new, new_words))
        for encoding in encode_batch(tokens.tokenizer, lines)
    ]
    if not any(sentences):
        raise TextError("The text to train auxiliary vectors on has no tokens. Pass a file with text.")
    model = fasttext(vector_size=embed_dim, window=5, min_count=1, workers=1, seed=seed, sg=1, bucket=50_000)
    model.build_vocab(sentences)
    model.train(sentences, total_examples=len(sentences), epochs=epochs)
    all_words = [
        *model.wv.index_to_key,
        *dict.fromkeys(word for word in new_words.values() if word not in model.wv.key_to_index),
    ]
    rows = {word: row for row, word in enumerate(all_words)}
    return AuxiliaryVectors(
        WeightRows(torch.from_numpy(model.wv[all_words])),
        {token: rows[word] for token, word in words.items() if word in model.wv.key_to_index},
        {new.entries[token]: rows[word] for token, word in new_words.items()},
    )


def _word(tokens: TokenBytes, token: int) -> str:
    """Return the text of a token as a word of fastText; bytes that are no text are written as escapes."""
    return tokens.readings(token)[0].decode(errors="backslashreplace")
