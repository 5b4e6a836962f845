"""Hashed n-gram tables: each token looks up rows by hashes of itself and the tokens before it (Engram, Qwen4-Exp)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.documents import AttentionMask
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.numbers import random_words, signed
from embedlayer.core.shapes import IdsLike
from embedlayer.inputs.history import DecodingState, documents_of, prepend_history
from embedlayer.io.files import JsonObject
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.saving import Pretrained
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tokenization.ids import MAX_TOKEN_IDS
from embedlayer.tokenization.token_compression import compressed_tokens

LARGEST_INT64 = (1 << 63) - 1
_LAYER_STEP = 10007
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


class NgramHash(Pretrained, ComputedBuffers):
    """Row numbers of the n-grams that end at each token, for orders 2 to N and several hash heads for each order.

    Let `c[i]` be the compressed ID of the token i places before, and `m` the multipliers. The row of order n and head h
    is, in int64::

        mix = (c[0] * m[0]) XOR (c[1] * m[1]) XOR ... XOR (c[n - 1] * m[n - 1])
        row = offset[n, h] + (mix mod head_sizes[n - 2][h])

    where `offset[n, h]` sums the head sizes before (n, h), in the order of `head_sizes`. An n-gram does not reach over
    the start of a text or of a document: `pad_id` takes the place of the tokens before it. Padding tokens are hashed as
    `pad_id`.

    `NgramHash.engram` and `NgramHash.qwen4_exp` compute the numbers of these models; `NgramHash.for_rows` those for a
    table of a certain size.

    Args:
        vocab_size: Number of token IDs, V.
        multipliers: One odd number for each token of the longest n-gram, the token itself first; their number is N.
        head_sizes: For each order from 2 to N the number of rows of each of its heads, in general distinct primes. All
            orders have the same number of heads.
        pad_id: Compressed ID before the start of a text.
        separator_id: Compressed ID of the token that ends a text, after which a new one starts, or `None`.
        token_map: Compressed ID of each token, `(V,)`, as `compressed_tokens` returns; saved with the layer. `None`:
            the token's own ID.
        compressed_size: Number of compressed IDs; by default the largest in `token_map` plus one. Without a `token_map`
            it is V.

    Attributes:
        max_order: Length of the longest n-gram, N.
        heads: Number of hash heads of each order.
        num_hashes: Number of rows that a token looks up, `K = (max_order - 1) * heads`.
        num_rows: Number of rows that a table needs: the sum of all head sizes.

    Example:
        >>> ngrams = NgramHash(100, [3, 5, 7], [[11, 13], [17, 19]], pad_id=0)
        >>> ngrams(torch.tensor([8, 9, 8, 9]))
        tensor([[ 2, 22, 31, 46],
                [ 7, 23, 24, 54],
                [ 9, 12, 37, 54],
                [ 7, 23, 36, 53]])

    Reference: Cheng et al., Conditional memory via scalable lookup, arXiv 2601.07372 (2026);
    github.com/deepseek-ai/Engram, engram_demo_v1.py; transformers/models/qwen4_exp (`Qwen4ExpTextNGramEmbedding`).
    """

    token_map: Tensor | None
    factors: Tensor
    moduli: Tensor
    offsets: Tensor

    def __init__(
        self,
        vocab_size: int,
        multipliers: Sequence[int],
        head_sizes: Sequence[Sequence[int]],
        *,
        pad_id: int,
        separator_id: int | None = None,
        token_map: Tensor | None = None,
        compressed_size: int | None = None,
    ) -> None:
        super().__init__()
        self.token_map: Tensor | None
        self.vocab_size, self.pad_id, self.separator_id = vocab_size, pad_id, separator_id
        self.multipliers = tuple(map(int, multipliers))
        self.head_sizes = tuple(tuple(map(int, sizes)) for sizes in head_sizes)
        self.max_order = len(self.multipliers)
        self.heads = len(self.head_sizes[0])
        if len(self.head_sizes) != self.max_order - 1:
            raise SizeError(
                f"{self.max_order} multipliers need head sizes of one order less, not of {len(self.head_sizes)}."
            )
        if min(pad_id + 1, *self.multipliers, *map(min, self.head_sizes)) < 1:
            raise SizeError(f"multipliers and head sizes must be at least 1, and pad_id ({pad_id}) 0.")
        if token_map is not None and token_map.shape != (vocab_size,):  # a look-up on CUDA would end the process
            raise SizeError(f"token_map must have {vocab_size} numbers, one for each token, not {[*token_map.shape]}.")
        self.register_buffer("token_map", token_map)
        self._mapped_size = compressed_size
        if token_map is not None and compressed_size is None:
            self._mapped_size = int(token_map.max()) + 1
        if (fault := self._fault_of(token_map)) is not None:
            raise SizeError(fault)
        self.require_products(self.compressed_size)
        self.num_hashes = (self.max_order - 1) * self.heads
        self.num_rows = sum(map(sum, self.head_sizes))
        self.index_check = IndexCheck(vocab_size, "token id")
        self.recompute_buffers(None if token_map is None else token_map.device)

    @classmethod
    def engram(
        cls,
        tokenizer: object,
        ngram_vocab_sizes: Sequence[int],
        *,
        layer_id: int,
        layer_ids: Sequence[int] | None = None,
        heads: int = 8,
        pad_token_id: int = 2,
        seed: int = 0,
    ) -> "NgramHash":
        """Return the hash of one Engram layer.

        NumPy draws the multipliers from the seed `seed + 10007 * layer_id`. The head sizes are primes from
        `ngram_vocab_sizes` on, distinct over all heads, orders and layers.

        Args:
            tokenizer: The tokenizer, or the result of `compressed_tokens` for it, so that several layers compute it
                once.
            ngram_vocab_sizes: Smallest head size for each order from 2 on.
            layer_id: Number of the layer.
            layer_ids: All layers that have a hash, in the model's order. Earlier ones take their primes first. By
                default this layer only.
            heads: Hash heads of each order.
            pad_token_id: Token before the start of a text.
            seed: Seed of the model.

        Raises:
            TokenIdError: `pad_token_id` is not a token.
            TokenizerError: `tokenizer` is no tokenizer.

        Example:
            >>> ngrams = NgramHash.engram(torch.arange(1000) % 700, [500, 500], layer_id=1, heads=2)
            >>> ngrams.head_sizes
            ((503, 509), (521, 523))

        Reference: github.com/deepseek-ai/Engram, engram_demo_v1.py.
        """
        token_map = tokenizer if isinstance(tokenizer, Tensor) else compressed_tokens(tokenizer)
        max_order = len(ngram_vocab_sizes) + 1
        layers = [layer_id] if layer_ids is None else list(layer_ids)
        used: set[int] = set()
        sizes: list[list[int]] = []
        for _ in layers[: layers.index(layer_id) + 1]:
            sizes = []
            for smallest in ngram_vocab_sizes:
                sizes.append(list(islice(_primes(smallest, used), heads)))
                used.update(sizes[-1])
        compressed_size = int(token_map.max()) + 1
        pad_id = int(token_map[IndexCheck(len(token_map), "token id")(pad_token_id)[0]])
        half = max(1, LARGEST_INT64 // compressed_size // 2)
        drawn = np.random.default_rng(seed + _LAYER_STEP * layer_id).integers(0, half, max_order, dtype=np.int64)
        multipliers = [2 * int(number) + 1 for number in drawn]
        return cls(len(token_map), multipliers, sizes, pad_id=pad_id, token_map=token_map)

    @classmethod
    def qwen4_exp(cls, config: Any, layer_index: int = 0) -> "NgramHash":
        """Return the hash of one layer of Qwen4-Exp, which hashes token IDs themselves.

        The end-of-text token separates texts, and it is the ID before the start of a text.

        Args:
            config: Configuration of the model or of its text part, as transformers reads it.
            layer_index: Place of the layer in `config.ple_layer_ids`, from 0.

        Example:
            >>> from transformers import Qwen4ExpTextConfig
            >>> config = Qwen4ExpTextConfig(vocab_size=100, eos_token_id=1, ngram_vocab_size_base=50, heads_per_ngram=2)
            >>> NgramHash.qwen4_exp(config).head_sizes
            ((53, 59), (61, 67))

        Reference: transformers/models/qwen4_exp/modeling_qwen4_exp.py (`Qwen4ExpTextNGramEmbedding`).
        """
        config = getattr(config, "text_config", config)
        heads, max_order = config.heads_per_ngram, config.ngram_size
        hashes = heads * (max_order - 1)
        primes = list(islice(_primes(config.ngram_vocab_size_base), layer_index * hashes, (layer_index + 1) * hashes))
        sizes = [primes[first : first + heads] for first in range(0, hashes, heads)]
        bound = max(1, LARGEST_INT64 // config.vocab_size // 2)
        multipliers = _splitmix_multipliers(config.seed + _LAYER_STEP * layer_index, max_order, bound)
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        return cls(config.vocab_size, multipliers, sizes, pad_id=end, separator_id=end)

    @classmethod
    def for_rows(
        cls,
        num_rows: int,
        vocab_size: int,
        *,
        max_order: int = 3,
        heads: int = 8,
        token_map: Tensor | None = None,
        separator_id: int | None = None,
        seed: int = 0,
    ) -> "NgramHash":
        """Return a hash into at most `num_rows` rows, of which few are left over.

        The head sizes are consecutive primes, the largest whose sum is not above `num_rows`. The multipliers are below
        2^39, so that the vocabulary may grow to 2^24 tokens. `pad_id` is a number that no token has.

        Args:
            num_rows: Number of rows of the table.
            vocab_size: Number of token IDs, V.
            max_order: Length of the longest n-gram.
            heads: Hash heads of each order.
            token_map: Compressed ID of each token; see `NgramHash`.
            separator_id: Compressed ID of the token that ends a text, or `None`.
            seed: Seed of the multipliers; different layers should have different ones.

        Example:
            >>> ngrams = NgramHash.for_rows(1 << 14, 5000)
            >>> ngrams.num_hashes, ngrams.num_rows, ngrams.head_sizes[0]
            (16, 16308, (971, 977, 983, 991, 997, 1009, 1013, 1019))
        """
        hashes = heads * (max_order - 1)
        smallest = list(islice(_primes(2), hashes))
        if num_rows < sum(smallest):
            raise SizeError(
                f"{hashes} heads of distinct prime sizes need at least {sum(smallest)} rows, not {num_rows}."
            )
        below = sorted(islice(filter(_is_prime, range(num_rows // hashes, 1, -1)), hashes))
        chosen = below if len(below) == hashes else smallest
        for prime in _primes(chosen[-1] + 1):
            if sum(chosen[1:]) + prime > num_rows:
                break
            chosen = [*chosen[1:], prime]
        sizes = [chosen[first : first + heads] for first in range(0, hashes, heads)]
        compressed_size = vocab_size if token_map is None else int(token_map.max()) + 1
        multipliers = _splitmix_multipliers(seed, max_order, (LARGEST_INT64 // MAX_TOKEN_IDS + 1) // 2)
        return cls(
            vocab_size, multipliers, sizes, pad_id=compressed_size, separator_id=separator_id, token_map=token_map
        )

    @property
    def compressed_size(self) -> int:
        """Return the number of compressed IDs: V without a `token_map`."""
        return self.vocab_size if self.token_map is None or self._mapped_size is None else self._mapped_size

    @compressed_size.setter
    def compressed_size(self, size: int) -> None:
        self._mapped_size = size

    @property
    def next_id(self) -> int:
        """Return the compressed ID for the next new token, which neither a token nor the start of a text has."""
        return max(self.compressed_size, self.pad_id + 1)

    @property
    def compressed_ids(self) -> Int64[Tensor, " V"]:
        """Return the compressed ID of each token: `token_map`, or the IDs themselves."""
        return torch.arange(self.vocab_size, device=self.offsets.device) if self.token_map is None else self.token_map

    @compressed_ids.setter
    def compressed_ids(self, ids: Int64[Tensor, " V"]) -> None:
        if self.token_map is not None or not torch.equal(ids, torch.arange(len(ids), device=ids.device)):
            self.token_map = ids

    @property
    def hashes_token_ids(self) -> bool:
        """Return whether the token IDs themselves are hashed, without a `token_map`; it can be set."""
        return self.token_map is None

    @hashes_token_ids.setter
    def hashes_token_ids(self, value: bool) -> None:
        self.token_map = None if value else self.compressed_ids

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON; `compressed_size` is `None` without a `token_map`."""
        return {
            "vocab_size": self.vocab_size,
            "multipliers": list(self.multipliers),
            "head_sizes": [list(sizes) for sizes in self.head_sizes],
            "pad_id": self.pad_id,
            "separator_id": self.separator_id,
            "compressed_size": None if self.token_map is None else self.compressed_size,
        }

    @classmethod
    def from_config(cls: type["NgramHash"], config: JsonObject) -> "NgramHash":
        """Build the hash that `config` describes. The values of its `token_map` come from the saved tensors.

        Raises:
            CheckpointError: An argument is missing, unknown or does not fit.
        """
        has_map = config.get("compressed_size") is not None
        token_map = torch.zeros(int(config["vocab_size"]), dtype=torch.int64) if has_map else None
        return cls.construct(**config, token_map=token_map)

    def buffer_values(self) -> dict[str, Tensor]:
        """Return multipliers, head sizes and offsets as tensors of int64."""
        moduli = torch.tensor(self.head_sizes).flatten()
        return {
            "factors": torch.tensor(self.multipliers),
            "moduli": moduli,
            "offsets": torch.cumsum(moduli, 0) - moduli,
        }

    def require_products(self, compressed_size: int) -> None:
        """Check that every compressed ID below `compressed_size`, and `pad_id`, can be multiplied in int64."""
        largest = max(compressed_size - 1, self.pad_id)
        if largest * max(self.multipliers) > LARGEST_INT64:
            most = LARGEST_INT64 // max(self.multipliers)
            raise SizeError(f"Compressed ID {largest} times a multiplier exceeds int64: IDs are at most {most}.")

    def _fault_of(self, token_map: Tensor | None) -> str | None:
        """Return what is wrong with the compressed IDs of a token map; `None` if nothing is."""
        if token_map is None or token_map.is_meta or token_map.numel() == 0:
            return None
        smallest, largest = map(int, torch.aminmax(token_map))
        if smallest >= 0 and largest < self.compressed_size:
            return None
        return f"token_map has compressed IDs from {smallest} to {largest}, outside 0 to {self.compressed_size - 1}."

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load as torch does, after a check of the token map."""
        if self.token_map is not None and (fault := self._fault_of(state_dict.get(f"{prefix}token_map"))) is not None:
            raise CheckpointError(f"{prefix}{fault} Weights and configuration do not belong together.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, ids: IdsLike, documents: AttentionMask | None = None, state: DecodingState | None = None
    ) -> Int64[Tensor, "*batch T hashes"]:
        """Return the rows of the n-grams that end at each token, `(T,)` or `(B, T)` to `(..., T, K)`.

        The rows are those of order 2, head by head, then those of order 3, and so on.

        Args:
            ids: Token IDs, `(T,)` or `(B, T)`.
            documents: 0 for padding, else the number of the token's document, as the attention mask of `positions_of`.
                `None`: each row is one document, or in cached decoding the continuation of its last one.
            state: For cached decoding a dictionary, empty at first, in which the layer keeps the last N - 1 compressed
                IDs of each text and their documents. Reading a text in parts then gives the rows of reading it at once.

        Raises:
            TokenIdError: On the CPU, an ID is outside the vocabulary. On an accelerator another ID takes its place, and
                the next `check()` raises the error.
        """
        tokens: Tensor = self.index_check(ids)[0]
        if tokens.dim() not in (1, 2):
            raise ShapeError(f"An n-gram hash needs sequences of IDs, (T,) or (B, T), not {tuple(tokens.shape)}.")
        documents, shape = documents_of(documents, tokens.shape), tokens.shape
        tokens = torch.atleast_2d(tokens)
        if self.token_map is None:
            tokens = tokens.long()
        else:
            tokens = self.token_map.index_select(0, tokens.flatten()).view(tokens.shape)
        start, length = self.max_order - 1, shape[-1]
        tokens, documents = prepend_history("ngram_ids", tokens, documents, state, length=start, fill=self.pad_id)
        own = tokens[:, start:]
        here = None if documents is None else documents[:, start:]
        reached = torch.ones_like(own, dtype=torch.bool) if here is None else here != 0
        mix = torch.where(reached, own, self.pad_id) * self.factors[0]
        mixes = []
        for back in range(1, self.max_order):
            earlier = tokens[:, start - back :][:, :length]
            if documents is not None:
                reached = reached & (documents[:, start - back :][:, :length] == here)
            if self.separator_id is not None:
                reached = reached & (earlier != self.separator_id)
            mix = mix ^ (torch.where(reached, earlier, self.pad_id) * self.factors[back])
            mixes.append(mix)
        moduli = self.moduli.view(self.max_order - 1, self.heads)
        rows = torch.remainder(torch.stack(mixes, -1)[..., None], moduli).flatten(-2) + self.offsets
        return rows if len(shape) == 2 else rows[0]

    def extra_repr(self) -> str:
        """Return sizes for `print`: `"V=100, orders 2..3, 8 heads, 16308 rows"`."""
        return f"V={self.vocab_size}, orders 2..{self.max_order}, {self.heads} heads, {self.num_rows} rows"


class NgramEmbedding(Pretrained):
    """Vectors of hashed n-grams: `out[..., t, :] = concat(table(hash(ids)[..., t, k]) for k in range(K))`.

    K is `hash.num_hashes`, the number of rows that a token looks up.

    Args:
        hash: Row numbers of the n-grams.
        table: The rows, in any storage format. It is not a table of tokens: a row belongs to all n-grams of one hash.

    Attributes:
        embed_dim: Width of a vector: `K * table.embed_dim`.

    Example:
        >>> ngrams = NgramEmbedding.dense(NgramHash.for_rows(1 << 14, 5000), 64)
        >>> ngrams([[7, 2, 7, 2]]).shape, ngrams.table.embed_dim
        (torch.Size([1, 4, 64]), 4)

    Reference: see `NgramHash`.
    """

    def __init__(self, hash: NgramHash, table: LookupTable) -> None:
        super().__init__()
        if table.vocab_size < hash.num_rows:
            raise SizeError(f"The hash needs a table of vocab_size {hash.num_rows} or more, not {table.vocab_size}.")
        self.hash = hash
        self.table = table

    @classmethod
    def dense(
        cls,
        hash: NgramHash,
        embed_dim: int,
        *,
        init_std: float = 0.02,
        row_sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "NgramEmbedding":
        """Return n-gram vectors of width `embed_dim` over a new dense table.

        Args:
            hash: Row numbers of the n-grams.
            embed_dim: Width of the concatenated rows of all heads.
            init_std: Standard deviation of the rows at the start.
            row_sparse: Whether a backward pass gives gradients to the looked-up rows only; see `RowSparseEmbedding`.
            device: Device of the table.
            dtype: Data type of the rows.
        """
        if embed_dim % hash.num_hashes:
            raise SizeError(f"embed_dim {embed_dim} must be a multiple of the {hash.num_hashes} rows of each token.")
        width = embed_dim // hash.num_hashes
        kind = RowSparseEmbedding if row_sparse else TokenEmbedding
        table = kind(hash.num_rows, width, init_std=init_std, device=device, dtype=dtype)
        return cls(hash, table)

    @property
    def embed_dim(self) -> int:
        """Return the width of a vector, `K * table.embed_dim`."""
        return self.hash.num_hashes * self.table.embed_dim

    def forward(
        self, ids: IdsLike, documents: AttentionMask | None = None, state: DecodingState | None = None
    ) -> Float[Tensor, "*batch T E"]:
        """Return the vectors of the n-grams that end at each token, `(..., T)` to `(..., T, embed_dim)`.

        Args:
            ids: Token IDs, `(T,)` or `(B, T)`.
            documents: 0 for padding, else the number of the token's document; see `NgramHash.forward`.
            state: Dictionary for cached decoding; see `NgramHash.forward`.

        Raises:
            TokenIdError: As `NgramHash.forward`.
        """
        vectors: Tensor = self.table(self.hash(ids, documents, state))
        return vectors.flatten(-2)


def _splitmix_multipliers(seed: int, number: int, bound: int) -> list[int]:
    """Return odd numbers `2 * r + 1`, where r are numbers 2, 3, ... of `random_words`, unsigned and modulo `bound`."""
    return [2 * (word % (1 << 64) % bound) + 1 for word in random_words(signed(seed), 2, number).tolist()]


def _primes(smallest: int, used: Collection[int] = ()) -> Iterator[int]:
    return (size for size in count(smallest) if size not in used and _is_prime(size))


def _is_prime(number: int) -> bool:
    """Return whether a number is prime, by Miller and Rabin's test, which is exact for these bases below 3e23."""
    if number < 2 or any(number % base == 0 for base in _WITNESSES):
        return number in _WITNESSES
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for base in _WITNESSES:
        value = pow(base, (number - 1) >> twos, number)
        if value not in (1, number - 1) and not any(
            (value := value * value % number) == number - 1 for _ in range(twos - 1)
        ):
            return False
    return True
