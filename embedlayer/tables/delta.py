"""A frozen table with a few trained rows, for fine-tuning new or selected tokens."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.class_identifiers import kind_of
from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.initialization import init_normal_
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import fusible, is_exporting, recompute_weights
from embedlayer.formats.adapters import read_adapter, write_token_rows
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import parse_json
from embedlayer.io.safetensors_files import byte_chunks
from embedlayer.saving import describe
from embedlayer.tables.computed_weight import ComputedRows
from embedlayer.tables.conversions import as_table
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable

BASE = "embedlayer.base"  # key of the metadata of an adapter's weights that describes the base

Delta = TypeVar("Delta", bound="DeltaEmbedding")


class DeltaEmbedding(ComputedRows, ComputedBuffers, checks_ids=True):
    """A frozen table with N trained rows: `out[..., :] = scale * (delta[n] if ids == token_ids[n] else base[ids])`.

    Only `delta`, `(N, D)`, has a gradient and optimizer state. A look-up reads the rows of the base and replaces those
    of `token_ids`; `logits` and `loss` replace columns in the same way. No `(V, D)` tensor is copied. The base may be a
    table of any kind; `merge` writes the rows into a dense one, or quantises them into one of stored codes.

    Args:
        base: Table, or `nn.Embedding`. It is frozen: `requires_grad_(False)` is called on it.
        token_ids: Tokens whose rows are trained, in any order, each once. They are stored in ascending order.
        values: Initial rows, `(N, D)`, in the order in which `token_ids` is passed; `None` for the rows of the base.
        dtype: Data type of `delta`; `None` for that of the base. `torch.float32` over a bfloat16 base keeps small
            updates that bfloat16 would round away; rows are rounded when they are read.

    Raises:
        TokenIdError: A token is outside the table.

    Example:
        >>> base = TokenEmbedding(100, 8)
        >>> table = DeltaEmbedding(base, [7, 98, 99])
        >>> [(name, tuple(p.shape)) for name, p in table.named_parameters() if p.requires_grad]
        [('delta', (3, 8))]
        >>> table.loss(torch.randn(5, 8), torch.tensor([1, 2, 99, 4, 7])).backward()
        >>> table.delta.grad.shape, base.weight.grad
        (torch.Size([3, 8]), None)

    Reference: PEFT, `tuners/trainable_tokens/layer.py`. We differ: its forward pass copies the whole table to insert
    the rows, and copies it again for a tied head.
    """

    token_tensor: Tensor

    def __init__(
        self,
        base: TokenTable | nn.Embedding,
        token_ids: Iterable[int] | Int[Tensor, " N"],
        *,
        values: Float[Tensor, "N D"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        base = as_table(base)
        given = [int(token) for token in token_ids]
        if outside := [token for token in given if not 0 <= token < base.vocab_size]:
            raise TokenIdError(f"token id {outside[0]} of token_ids is outside this table of {base.vocab_size} rows.")
        if not given or len({*given}) < len(given):
            raise SizeError(f"token_ids must name at least one token, and each once, not {given}.")
        if base.padding_idx in given:
            raise SizeError(
                f"{base.padding_idx} is the padding token. See docs/errors.md, The padding token of a delta table."
            )
        self.embed_dim = base.embed_dim
        self.padding_idx = base.padding_idx
        self.scale = base.scale
        self.token_ids = tuple(sorted(given))
        with torch.no_grad():
            device = next((tensor.device for tensor in base.state_dict().values()), torch.device("cpu"))
            rows = base.look_up(torch.tensor(self.token_ids, device=device))
            if values is not None:
                if values.shape != rows.shape:
                    raise ShapeError(f"values must have shape {tuple(rows.shape)}, not {tuple(values.shape)}.")
                order = torch.tensor(given, device=values.device).argsort()
                rows = values[order].to(rows.device, dtype or rows.dtype)
        self.base = base.requires_grad_(False)
        self.delta = nn.Parameter(rows.to(dtype) if dtype is not None else rows)
        self.recompute_buffers(device)

    @classmethod
    def last(
        cls: type[Delta], base: TokenTable | nn.Embedding, count: int, *, values: Float[Tensor, "N D"] | None = None
    ) -> Delta:
        """Build a table that trains the last `count` rows of `base`, such as those of tokens that were just added.

        Args:
            base: Table, or `nn.Embedding`, which is frozen.
            count: Number of trained rows, N.
            values: Initial rows, `(N, D)`, in ascending order of their tokens; `None` for the rows of the base.

        Raises:
            TokenIdError: `count` is larger than the table.

        Example:
            >>> DeltaEmbedding.last(TokenEmbedding(100, 8), 3).token_ids
            (97, 98, 99)
        """
        base = as_table(base)
        return cls(base, range(base.vocab_size - count, base.vocab_size), values=values)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Return the number of tokens of the base, V."""
        return self.base.vocab_size

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Return the number of rows of the base, spare rows included."""
        return self.base.num_rows

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the vectors of the base."""
        return self.base.dtype

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON: a description of the base, and `token_ids`."""
        return {"base": describe(self.base), "token_ids": list(self.token_ids)}

    @property
    def init_std(self) -> float:
        """Return the `init_std` of the base; 0 for a base without one, such as a quantised table."""
        return getattr(self.base, "init_std", 0.0)

    def reset_parameters(self) -> None:
        """Draw the trained rows from N(0, init_std^2) in place, with the base's `init_std`. The base is not changed.

        Over a base without an `init_std`, such as a quantised table, they become zero.
        """
        init_normal_(self.delta, std=self.init_std)

    @property
    def embed_scale(self) -> float | Tensor | None:
        """Return the factor that `forward` multiplies looked-up vectors by: the base's own factor, or `None` for 1.

        If the base rounds its scale (`round_scale`), this is the rounded one.
        """
        return self.base.factor

    def buffer_values(self) -> dict[str, Tensor]:
        """Return `{"token_tensor": ids}`, the sorted `token_ids` as a tensor, `(N,)`."""
        return {"token_tensor": torch.tensor(self.token_ids)}

    def look_up(self, ids: Ids) -> Vectors:
        """Return the vectors of `ids` without `scale`, `(...)` to `(..., D)`.

        They are the trained rows for `token_ids` and the vectors of the base for other tokens, in the dtype of the
        base. See `LookupTable.look_up` for the errors.
        """
        return self._replaced(self.base.look_up(ids), ids)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return vectors for products in `dtype`: trained rows are not rounded to the dtype of the base."""
        return self._replaced(self.base.vectors_as(ids, dtype).to(dtype), ids)

    def _replaced(self, vectors: Vectors, ids: Ids) -> Vectors:
        """Return vectors of the base, with those of trained tokens replaced."""
        if "delta" in vars(self):
            recompute_weights(self)
        delta, places = self.delta, self._places(ids.long().contiguous()).clamp(max=len(self.token_ids) - 1)
        ours = F.embedding(places, self.token_tensor.unsqueeze(-1)).squeeze(-1) == ids
        if ids.dim() and device_kind(vectors) == "cpu" and fusible(vectors, delta):
            where = ours.nonzero(as_tuple=True)
            return vectors.index_put_(where, F.embedding(places[where], delta).to(vectors.dtype))
        return torch.where(ours.unsqueeze(-1), F.embedding(places, delta).to(vectors.dtype), vectors)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1`, `(stop - start, D)`, without `scale`, in the dtype of the base.

        The result is a copy if a trained row is among them, else what the base returns, which may be a view.
        """
        rows = self.base.rows(start, stop)
        first, last = self._between(start, stop)
        if first == last:
            return rows
        if "delta" in vars(self):
            recompute_weights(self)
        return rows.index_copy(0, self.token_tensor[first:last] - start, self.delta[first:last].to(rows.dtype))

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T`: raw logits of the base, with the columns of trained tokens replaced.

        See `TokenTable.raw_logits` for the arguments.
        """
        products = self.base.raw_logits(hidden, start, stop)
        first, last = self._between(start, self.vocab_size if stop is None else stop)
        if first == last:
            return products
        if "delta" in vars(self):
            recompute_weights(self)
        ours = F.linear(hidden, self.delta[first:last].to(hidden.dtype)).to(products.dtype)
        columns = self.token_tensor[first:last] - start
        insert = products.index_copy_ if fusible(products, ours) else products.index_copy
        return insert(-1, columns, ours)

    @torch.no_grad()
    def merge(self) -> TokenTable:
        """Write the trained rows into the base in place, and return the base, which stays frozen.

        In a dense base they are rounded to its dtype. In a base of stored codes, such as a quantised table, those that
        training has changed are quantised by the rule of the format; all other stored bytes stay.

        Raises:
            ShapeError: A number is too large for the codes of a `QuantizedEmbedding`. The base is not changed.
            SizeError: The base is of another kind, which does not store each row separately.
            CheckpointError: No function quantises rows to the format of the base, or it cannot represent a number of
                them. The base is not changed.
        """
        if isinstance(self.base, PackedRows):
            changed = (self.delta != self.base.look_up(self.token_tensor).to(self.delta.dtype)).any(1)
            rows = self.base.stored_rows.quantised(self.delta[changed])
            self.base.store_rows(self.token_tensor[changed], rows)
            return self.base
        if not isinstance(self.base, DenseTable):
            raise SizeError(f"Rows cannot be written into {a_or_an(self.base)}: TokenEmbedding.from_pretrained(rows).")
        self.base.weight.index_copy_(0, self.token_tensor, self.delta.to(self.base.weight.dtype))
        return self.base

    def save_adapter(self, directory: Path | str, *, module: str = "model.embed_tokens") -> None:
        """Save the trained rows without the base, as an adapter of PEFT's method trainable tokens.

        `peft.PeftModel.from_pretrained(model, directory)` loads the folder, if `module` names the table in `model`. The
        header of the file of weights contains the `fingerprint` of the base, which PEFT ignores: with it,
        `from_pretrained(directory, base=...)` raises a `CheckpointError` for any other base. `save_pretrained` saves
        the base too.

        Args:
            directory: Folder, created if missing. It gets `adapter_config.json` and `adapter_model.safetensors`.
            module: Name of the table in the model of transformers that the adapter is for. The default is that of
                LLaMA, Mistral, Qwen, Gemma and most others.

        Raises:
            FileError: The folder cannot be written.
            CheckpointError: The rows are sharded.
        """
        metadata = {BASE: json.dumps(_identity(self.base))}
        write_token_rows(directory, {module: self.delta}, self.token_tensor, metadata)

    @classmethod
    def from_pretrained(
        cls: type[Delta],
        directory: Path | str,
        *,
        device: torch.device | str = "cpu",
        base: TokenTable | None = None,
        module: str | None = None,
    ) -> Delta:
        """Read a folder that `save_pretrained` wrote or, with `base`, the trainable tokens of a PEFT adapter.

        All rows are read bit for bit. An adapter that `save_adapter` wrote is loaded onto its own base only. Those that
        PEFT wrote do not describe their base, so only the width and the token IDs are compared.

        Args:
            directory: Folder to read.
            device: Device of the table that `save_pretrained` wrote. Ignored with `base`: an adapter is on its base's
                device.
            base: Table that the adapter was trained on; `None` for a folder of `save_pretrained`.
            module: Name of the module to read, if the adapter has trainable tokens in several and they differ; `None`
                for the one of the base's size.

        Raises:
            FileError: The folder or a file in it is missing.
            CheckpointError: A file is damaged, the adapter was trained on another base, or it changes more of the table
                than the rows of some tokens; `embedlayer.vocab.merge_adapter` reads that.
            TokenIdError: A token of the adapter is outside the base.
        """
        if base is None:
            return super().from_pretrained(directory, device=device)
        adapter = read_adapter(directory)
        if BASE in adapter.metadata:
            expected, identity = parse_json(adapter.metadata[BASE], directory), _identity(base)
            if not isinstance(expected, dict) or expected.keys() != identity.keys():
                raise CheckpointError(f"The adapter in {directory} does not say what table it is for: it is damaged.")
            for name, value in identity.items():
                if expected[name] != value:
                    shown = f"{name} {expected[name]!r}, not {value!r}" if name != "fingerprint" else "other numbers"
                    raise CheckpointError(f"The adapter in {directory} was trained on a table with {shown}.")
        tokens = adapter.choose(base.vocab_size, base.embed_dim, module).tokens_alone
        if tokens is None:
            raise CheckpointError(f"{directory} changes more than the rows of some tokens: call vocab.merge_adapter.")
        return cls(base, tokens.token_ids, values=tokens.values, dtype=tokens.values.dtype)

    def extra_repr(self) -> str:
        """Return the vocabulary size, the width and the number of trained rows, for `print`."""
        return f"{self.vocab_size}, {self.embed_dim}, learning={len(self.token_ids)}"

    def _places(self, ids: Tensor) -> Tensor:
        """Return for each ID the index in the sorted `token_ids` at which it is or would be inserted, from 0 to N."""
        if is_exporting():  # ONNX has no binary search
            return (self.token_tensor < ids.unsqueeze(-1)).sum(-1)
        return torch.searchsorted(self.token_tensor, ids)

    def _between(self, start: int, stop: int) -> tuple[int, int]:
        """Return `(first, last)` so that `token_ids[first:last]` are the trained tokens in `start .. stop - 1`."""
        return lower_bound(self.token_ids, start), lower_bound(self.token_ids, stop)


def lower_bound(ascending: tuple[int, ...], value: int) -> int:
    """Return the number of entries of a sorted tuple that are below `value`: `bisect.bisect_left` for compiled code."""
    low, high = 0, len(ascending)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def fingerprint(table: TokenTable) -> str:
    """Return a SHA-256 over the names, dtypes, shapes and bytes of a table's `state_dict()`, as hexadecimal text."""
    digest = hashlib.sha256()
    for name, tensor in sorted(table.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for chunk in byte_chunks(tensor):
            digest.update(chunk.numpy().data)
    return digest.hexdigest()


def _identity(base: TokenTable) -> JsonObject:
    """Return what an adapter file records about its base."""
    return {
        "kind": kind_of(type(base)),
        "vocab_size": base.vocab_size,
        "embed_dim": base.embed_dim,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in base.state_dict().values()}),
        "fingerprint": fingerprint(base),
    }
