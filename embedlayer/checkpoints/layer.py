"""The embedding layer of a checkpoint: input embedding, positions and LM head, with their names in the file."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.meta_layout import has_meta_layout, meta_config
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.layer import (
    LayerReport,
    LoadRecord,
    build_with_tensors,
    finds_table,
    load_record,
    read_layer_arguments,
)
from embedlayer.checkpoints.reading.model import checkpoint_model
from embedlayer.checkpoints.reading.tensors import LoadedTensor
from embedlayer.checkpoints.refusals import table_advice
from embedlayer.checkpoints.writer import WriteReceipt, tensors_of_layer, write_tensors
from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import (
    CheckpointError,
    EmbedLayerError,
    EmbedLayerWarning,
    ShapeError,
    SizeError,
    TokenizerError,
)
from embedlayer.core.index_checks import as_ids, check_integer_positions
from embedlayer.core.shapes import Ids, IdsLike, Positions, Vectors
from embedlayer.families.field_types import Numbering, Step
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead, build_head, build_part, describe_head, part_config
from embedlayer.inputs.codes import CodeStreams, StreamLookup
from embedlayer.inputs.embedding import UnscaledLookup, sequence_of
from embedlayer.inputs.parts import DecoderInput, PredictionStreams, TokenDropout, TypeTables
from embedlayer.inputs.per_layer import PerLayerInputs
from embedlayer.inputs.steps import EmbeddingStep, TokenBatch, TracedStep, run_steps, trace_steps
from embedlayer.integrations.peft import PeftReference
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position, positions_of
from embedlayer.saving import FLOATS, Pretrained, build, describe, is_description
from embedlayer.tables.conversions import as_table
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable
from embedlayer.tokenization.ids import table_size


class EmbeddingLayer(Pretrained):
    """Embedding layer of a language model: `input(ids)` are the first block's inputs, `head(hidden)` the logits.

    `embedlayer.load` builds one from a checkpoint. The layer has no dropout: the caller applies the dropout that some
    families have after the input embedding in training.

    Args:
        table: Token table; `None` for a model whose IDs are `codes` alone.
        position: Position scheme of the first block; `None` for no positions.
        head: LM head, tied to `table` or untied; `None` for none.
        family: Name of the model family.
        recipe: Steps of the input embedding after look-up and scale; see `families.field_types.Step`.
        numbering: How default positions are counted; see `families.field_types.Numbering`.
        padding_id: Token that `numbering="ids"` does not count.
        first_position_id: Position ID that transformers uses for position 0 (RoBERTa: 2).
        types: Table or tables of token types, `"table"` if they are rows of `table` (GPT-2), or `None` for none.
        norm: Norm of the step `"norm"`, or the module in its place.
        projection: Projection of the step `"project"`.
        token_dropout: Module of the step `"token_dropout"`.
        streams: Module of the step `"streams"`, after which there are more vectors than tokens.
        decoder: The decoder's own parts of an encoder-decoder model, which `decoder_input` reads; `None` for a model
            with one stack.
        final_norm: Norm between the last block and the head, which reads `final_norm(x)`; `load(..., final_norm=True)`
            reads it. `None` if it was not read, or if the model has none.
        layer_types: Type of each block's attention as the configuration states it, such as `"sliding_attention"`;
            empty if it states none.
        window: Number of tokens to which a query of a block with sliding attention attends, itself included; `None` if
            the configuration states none.
        per_layer: Per-layer inputs of Gemma 3n and 4: `layer.per_layer(ids, layer.input(ids))` returns one vector for
            each token and block. `None` for other models.
        codes: K streams of codes, such as those of a sound codec, and the heads that predict them: the IDs of `input`
            if there is no token table, of `decoder_input` if there is a `decoder`, and otherwise the argument `codes`
            of `input`. `None` for a model of tokens alone.
        other_positions: Position schemes of other layers by kind: Gemma 3's `"full_attention"`, T5's `"decoder"`.
        block_positions: For each block in order, the key of its scheme in `other_positions`, or `""` for `position`.
            Empty if every block has `position`. In an encoder-decoder model the blocks are those of the decoder.
        encoder_block_positions: The same for the blocks of the encoder in an encoder-decoder model.
        tensor_names: Key in `state_dict()` -> names of that tensor in the checkpoint; `load` read the first name. The
            key `"weight[2:5]"` stands for the rows 2 to 4 of `weight`, if the checkpoint stores them by themselves.
        is_part: Whether the checkpoint may have more tensors with a row for each token than this layer:
            `load(..., table_only=True)`, `load(..., per_layer=False)`, and families with further tables.
        is_edited: Whether the vocabulary of the layer was edited, so that its rows are in another order than those of
            the checkpoint that it lacks. `edit_vocabulary` sets it.

    Example:
        >>> layer = EmbeddingLayer(TokenEmbedding(100, 8), SinusoidalPositionalEmbedding(16, 8), recipe=["position"])
        >>> layer.input(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        table: TokenTable | nn.Embedding | None,
        position: Position | None = None,
        head: OutputHead | PredictionHead | None = None,
        *,
        family: str = "unknown",
        recipe: Sequence[Step] = (),
        numbering: Numbering = "all",
        padding_id: int | None = None,
        first_position_id: int = 0,
        types: TokenEmbedding | TypeTables | Literal["table"] | None = None,
        norm: nn.Module | None = None,
        projection: nn.Linear | None = None,
        token_dropout: TokenDropout | None = None,
        streams: PredictionStreams | None = None,
        decoder: DecoderInput | None = None,
        per_layer: PerLayerInputs | None = None,
        codes: CodeStreams | None = None,
        final_norm: nn.Module | None = None,
        layer_types: Sequence[str] = (),
        window: int | None = None,
        other_positions: Mapping[str, Position] | None = None,
        block_positions: Sequence[str] = (),
        encoder_block_positions: Sequence[str] = (),
        tensor_names: Mapping[str, Sequence[str]] | None = None,
        is_part: bool = False,
        is_edited: bool = False,
    ) -> None:
        super().__init__()
        modules: dict[str, object] = {"types": types, "project": projection, "norm": norm, "position": True}
        modules |= {"mask": True, "length_mask": padding_id, "token_dropout": token_dropout, "streams": streams}
        modules["codes"] = codes
        for each in (recipe, () if decoder is None or decoder.recipe is None else decoder.recipe):
            if len(set(each)) != len(each) or any(modules.get(step) is None for step in each):
                raise SizeError(f"The recipe {' -> '.join(each)} has a step twice, or one without its module.")
        if numbering == "ids" and padding_id is None:
            raise SizeError('numbering="ids" counts the tokens that are not padding: it needs padding_id.')
        if table is None and codes is None:
            raise SizeError("A layer needs a token table, or streams of codes.")
        self._modules["table"] = None if table is None else as_table(table)
        self.position = Position() if position is None else position
        self.head = head
        output = head.output if isinstance(head, PredictionHead) else head
        parent, name = (head, "output") if isinstance(head, PredictionHead) else (self, "head")
        if output is not None and output.table is table:
            output.follow_references([PeftReference(self, "table")], PeftReference(parent, name))
        elif output is not None and decoder is not None and output.table is decoder.table is not None:
            output.follow_references([PeftReference(decoder, "table")], PeftReference(parent, name))
        self.family, self.recipe, self.numbering = family, tuple(recipe), numbering
        self.padding_id, self.first_position_id = padding_id, first_position_id
        self.types = types if isinstance(types, nn.Module) else None
        self.norm, self.projection, self.token_dropout, self.streams = norm, projection, token_dropout, streams
        self.decoder, self.per_layer, self.codes, self.final_norm = decoder, per_layer, codes, final_norm
        self.layer_types, self.window = tuple(layer_types), window
        self.other_positions = nn.ModuleDict(dict(other_positions or {}))
        self.block_positions, self.encoder_block_positions = tuple(block_positions), tuple(encoder_block_positions)
        if unknown := {*self.block_positions, *self.encoder_block_positions} - {"", *self.other_positions}:
            raise SizeError(f"block_positions has {', '.join(sorted(unknown))}, which other_positions has not.")
        self.tensor_names = {key: tuple(names) for key, names in (tensor_names or {}).items()}
        self.is_part, self.is_edited = is_part, is_edited
        self.load_record = LoadRecord()
        self._checkpoint: Checkpoint | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def table(self) -> TokenTable:
        """Return the token table; in a model whose IDs are codes alone, the rows of all streams, `codes.rows`."""
        table = self._modules["table"]
        if table is None:
            assert self.codes is not None
            table = self.codes.rows
        return cast(TokenTable, table)  # or what PEFT put in its place

    @property
    def width(self) -> int:
        """Return the width of the vectors that the first block receives, D."""
        return self.table.embed_dim if self.projection is None else self.projection.out_features

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON, which `from_config` reads."""
        values = {name: getattr(self, name) for name in signature(EmbeddingLayer).parameters}
        values["table"] = self._modules["table"]
        values["head"] = None if self.head is None else describe_head(self.head)
        values["types"] = "table" if self.types is None and "types" in self.recipe else self.types
        values["other_positions"] = {kind: describe(self.position_of(kind)) for kind in self.other_positions}
        values["tensor_names"] = {key: list(names) for key, names in self.tensor_names.items()}
        values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {name: part_config(value) if isinstance(value, nn.Module) else value for name, value in values.items()}

    @classmethod
    def from_config(cls: type["EmbeddingLayer"], config: JsonObject) -> "EmbeddingLayer":
        """Build the layer that `config` describes, with initial weights; a tied head is tied to the new table.

        Raises:
            CheckpointError: An argument is missing, unknown or of another type, or an inner layer cannot be built. All
                other errors are those of the constructor.
        """
        parts = dict(config)
        try:
            parts["position"] = build(parts["position"])
            for name in ("table", "codes", "decoder", "per_layer", "token_dropout", "streams"):
                parts[name] = None if parts.get(name) is None else build(parts[name])
            own = None if parts["decoder"] is None else parts["decoder"].table
            parts["head"] = None if parts["head"] is None else build_head(parts["head"], own or parts["table"])
            parts["types"] = build(parts["types"]) if isinstance(parts["types"], dict) else parts["types"]
            parts["projection"] = build_part(nn.Linear, parts["projection"])
            for name in ("norm", "final_norm"):
                parts[name] = build_part(nn.LayerNorm, parts.get(name))
            parts["other_positions"] = {kind: build(value) for kind, value in parts["other_positions"].items()}
            return cls.construct(**parts)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"The saved configuration does not fit an EmbeddingLayer: {error!r}.") from error

    @classmethod
    def from_pretrained(
        cls, source: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> "EmbeddingLayer":
        """Return `embedlayer.load(source, dtype=dtype, device=device)`; see there for the errors."""
        return load(source, dtype=dtype, device=device)

    def save_pretrained(self, directory: Path | str, *, tokenizer: Any = None) -> None:
        """Write the layer and its tokenizer to a folder that `embedlayer.load` reads back bit for bit.

        Args:
            directory: The folder to write.
            tokenizer: Tokenizer to write; `None` writes the one that this layer was loaded with, if any.

        Raises:
            FileError: The folder cannot be written, or the tokenizer file of the checkpoint cannot be read.
            CheckpointError: The layer could not be loaded again; see `Pretrained.save_pretrained`.
            TokenizerError: `tokenizer` is no tokenizer.
            MissingExtraError: The tokenizer of the checkpoint needs an extra; see `tokenizer`.

        Warns:
            EmbedLayerWarning: The tokenizer that this layer was loaded with cannot be read, so it is left out.
        """
        if tokenizer is None:
            try:
                tokenizer = self.tokenizer
            except TokenizerError as error:
                warnings.warn(f"{directory} is written without a tokenizer. {error}", EmbedLayerWarning, stacklevel=2)
        super().save_pretrained(directory, tokenizer=tokenizer)

    def write_into(self, checkpoint_dir: Path | str, out_dir: Path | str) -> WriteReceipt:
        """Write a copy of a checkpoint to `out_dir`, in which the tensors of this layer replace those that `load` read.

        All other tensors are copied from file to file. Tied names, the index of shards and the stored dtypes stay. A
        table with another number of rows changes `vocab_size`. A quantised table is written in the format of the
        checkpoint. If the vocabulary is another one, second copies in safetensors get the same rows, and files that
        hold values by token and cannot be edited, such as `optimizer.pt`, are left out with a warning. Tokenizer and
        token IDs in configurations stay those of the checkpoint: edit the folder with `edit_vocabulary` to move tokens
        that they name. The new folder appears complete or not at all.

        Args:
            checkpoint_dir: Folder with the safetensors files from which this layer was loaded; it does not change.
            out_dir: A folder that does not exist or is empty.

        Returns:
            The changed tensors and files.

        Raises:
            CheckpointError: The layer belongs to another checkpoint, or to one in another format; or its table was
                computed from several tensors, so that it cannot be put back (model2vec with a mapping or weights); or
                the format cannot store this number of rows (GPTQ and AWQ: a multiple of 8); or its vocabulary was
                edited, and the checkpoint may have more tensors with a row for each token, which this layer lacks
                (`is_part`); or another safetensors file has values of tokens that cannot be moved, such as an adapter.
            FileError: `checkpoint_dir` is no folder; or `out_dir` is not empty, or cannot be written.

        Warns:
            EmbedLayerWarning: Files are left out.
        """
        tensors = tensors_of_layer(self, self.tensor_names, is_part=self.is_part, is_edited=self.is_edited)
        return write_tensors(tensors, checkpoint_dir, out_dir, table=next(iter(tensors)), is_edited=self.is_edited)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the checkpoint's tokenizer, or `None` if there is none; the file is read at the first access.

        Raises:
            TokenizerError: The tokenizer file is damaged.
            FileError: The tokenizer file cannot be read.
            MissingExtraError: A `.model` needs the extra `spm`, and a `.gguf` the extra `gguf`.

        Warns:
            EmbedLayerWarning: The tokenizer has IDs without a row in the table.
        """
        if self._tokenizer is None and self._checkpoint is not None:
            text = None if self.codes is None else self.codes.text_stream
            if self._modules["table"] is not None:
                self._tokenizer = self._checkpoint.read_tokenizer(self.table.vocab_size)
            elif self.codes is not None and text is not None:
                self._tokenizer = self._checkpoint.read_tokenizer(self.codes.table.sizes[text])
        return self._tokenizer

    def input(
        self,
        ids: IdsLike,
        attention_mask: AttentionMask | None = None,
        *,
        position_ids: Positions | None = None,
        positions: Positions | None = None,
        token_type_ids: Ids | None = None,
        codes: IdsLike | None = None,
        streams: int | None = None,
    ) -> Vectors:
        """Return the vectors that the first block receives, `(T, D)` or `(B, T, D)`.

        Bad IDs or positions on an accelerator are raised later, by `check`.

        Args:
            ids: Token IDs, `(T,)` or `(B, T)`; in a model whose IDs are codes alone, `(T, K)` or `(B, T, K)`.
            attention_mask: 0 for padding. As in transformers, it changes positions in OPT only; in other families,
                left-padded text needs `positions=positions_of(ids, attention_mask)`. The steps `"mask"` and
                `"length_mask"` set the vectors of padding to zero (DeBERTa, ESM, XLM).
            position_ids: Position of each token as transformers counts for this family (from 2 in RoBERTa).
            positions: Position of each token, counted from 0 in every family.
            token_type_ids: Segment of each token. `None` for segment 0 where segments have a table of their own (BERT),
                and for no segments where they are rows of the token table (GPT-2).
            codes: Codes of K streams beside each token, `(T, K)` or `(B, T, K)`, which the step `"codes"` reads; `None`
                for text alone.
            streams: In a model whose IDs are codes alone, the number of streams that are summed, the first ones, as in
                Bark's fine model; `None` for all.

        Raises:
            ShapeError: IDs or positions are no integers, or positions, mask, segments or codes do not fit the IDs.
            TokenIdError: An ID, a segment or a code is outside its table or stream.
            PositionError: A position is outside what the scheme covers, as in a sequence that is too long.
        """
        steps = self._steps(ids, attention_mask, position_ids, positions, token_type_ids, codes=codes, streams=streams)
        return run_steps(*steps)

    def decoder_input(
        self,
        ids: IdsLike,
        attention_mask: AttentionMask | None = None,
        *,
        position_ids: Positions | None = None,
        positions: Positions | None = None,
    ) -> Vectors:
        """Return the vectors that the first block of the decoder receives, `(T, D)` or `(B, T, D)`.

        Arguments and errors are those of `input`. The position scheme is `position_of("decoder")` if there is one, else
        that of the encoder.
        """
        if self.decoder is None:
            raise SizeError(f"A layer of family {self.family} has no second input: its only stack is read by input.")
        return run_steps(*self._steps(ids, attention_mask, position_ids, positions, None, self.decoder))

    def trace(
        self,
        ids: IdsLike,
        attention_mask: AttentionMask | None = None,
        *,
        position_ids: Positions | None = None,
        positions: Positions | None = None,
        token_type_ids: Ids | None = None,
        codes: IdsLike | None = None,
        streams: int | None = None,
    ) -> Iterator[TracedStep]:
        """Yield the vectors after each step of `input`, with the name and a description of the step.

        Arguments and errors are those of `input`; the last vectors equal its result bit for bit.
        """
        steps = self._steps(ids, attention_mask, position_ids, positions, token_type_ids, codes=codes, streams=streams)
        yield from trace_steps(*steps)

    def forward(self, ids: IdsLike, attention_mask: AttentionMask | None = None, **options: Any) -> Vectors:
        """Compute `input(ids, attention_mask, **options)`."""
        return self.input(ids, attention_mask, **options)

    def _steps(
        self,
        ids: IdsLike,
        attention_mask: AttentionMask | None,
        position_ids: Positions | None,
        positions: Positions | None,
        token_type_ids: Ids | None,
        decoder: DecoderInput | None = None,
        *,
        codes: IdsLike | None = None,
        streams: int | None = None,
    ) -> tuple[list[EmbeddingStep], TokenBatch]:
        """Check the arguments of `input`, and return the two arguments of `run_steps`."""
        if position_ids is not None and positions is not None:
            raise SizeError("Pass position_ids (as transformers counts) or positions (from 0), not both.")
        if token_type_ids is not None and "types" not in self.recipe:
            raise SizeError(f"A layer of family {self.family} has no token types: leave token_type_ids out.")
        if codes is not None and "codes" not in self.recipe:
            raise SizeError(f"A layer of family {self.family} reads no codes beside tokens: leave codes out.")
        is_of_codes = self.codes is not None and (self._modules["table"] is None or decoder is not None)
        if streams is not None and not is_of_codes:
            raise SizeError(f"The IDs of family {self.family} are not those of streams: leave streams out.")
        if position_ids is not None:
            check_integer_positions(position_ids)
            positions = position_ids - self.first_position_id
        table, position, norm, recipe = self.table, self.position, self.norm, self.recipe
        if decoder is not None:
            table = table if decoder.table is None else decoder.table
            position = self.position_of("decoder" if "decoder" in self.other_positions else None)
            norm = norm if decoder.norm is None else decoder.norm
            recipe = recipe if decoder.recipe is None else decoder.recipe
        look_up: Callable[..., Any] = table if decoder is None or decoder.is_scaled else UnscaledLookup(table)
        ids = sequence_of(ids, None, table)
        if is_of_codes:
            assert self.codes is not None
            look_up = StreamLookup(self.codes.table, ids, streams)
            ids = look_up.first
        if token_type_ids is None and self.types is not None:
            token_type_ids = torch.zeros_like(ids)
        if token_type_ids is not None and token_type_ids.shape != ids.shape:
            raise ShapeError(f"token_type_ids {tuple(token_type_ids.shape)} do not fit ids {tuple(ids.shape)}.")
        types = table if self.types is None else self.types  # those of the recipe exist: the constructor checks it
        modules: dict[Step, Any] = {"types": types, "position": position, "norm": norm, "project": self.projection}
        modules |= {"mask": self, "length_mask": self, "token_dropout": self.token_dropout, "streams": self.streams}
        modules["codes"] = self.codes
        steps = [EmbeddingStep("look_up", look_up), *(EmbeddingStep(step, modules[step]) for step in recipe)]
        if attention_mask is not None:
            check_mask(attention_mask, ids.shape)
        if positions is None:
            positions = self.default_positions(ids, attention_mask)
        else:
            position.check_positions(positions, ids.shape)
        if attention_mask is None and "length_mask" in recipe:
            assert self.padding_id is not None
            lengths = ids.ne(self.padding_id).sum(-1, keepdim=True)
            attention_mask = (torch.arange(ids.shape[-1], device=ids.device) < lengths).long()
        following = position(positions + 1) if "streams" in recipe else None
        codes = None if codes is None else as_ids(codes, beside=table)
        return steps, TokenBatch(ids, positions, token_type_ids, attention_mask, following, codes)

    def default_positions(self, ids: Ids, attention_mask: AttentionMask | None = None) -> Positions:
        """Return the position that `input` gives each token by default, counted from 0.

        `numbering` says which tokens count: all, those in `attention_mask`, or those other than the padding token. A
        token that does not count has position -1. With the numbering `"mask"` and no mask, all tokens count; with the
        other two, `attention_mask` is not read.
        """
        if self.numbering == "ids":
            assert self.padding_id is not None
            attention_mask = ids.ne(self.padding_id)
        return positions_of(ids, None if self.numbering == "all" else attention_mask, padding_position=-1)

    def position_of(self, kind: str | None = None) -> Position:
        """Return the position scheme of a kind of layer; for `None`, that of the first block.

        Args:
            kind: A key of `other_positions`, such as `"full_attention"`, or `None`.
        """
        if kind is None:
            return self.position
        if kind not in self.other_positions:
            raise SizeError(f"No layers of kind {kind!r} have positions of their own, only {[*self.other_positions]}.")
        return cast(Position, self.other_positions[kind])

    def position_of_block(self, block: int, *, encoder: bool = False) -> Position:
        """Return the position scheme of a block; a neutral `Position` for a block without positions (NoPE).

        Args:
            block: Number of the block, from 0; a negative number counts from the end.
            encoder: Whether to count the blocks of the encoder of an encoder-decoder model, not those of its decoder.
        """
        blocks = self.encoder_block_positions if encoder else self.block_positions
        if not blocks:
            return self.position
        return self.position_of(blocks[block] or None)

    def window_of_block(self, block: int) -> int | None:
        """Return the number of tokens to which a query of a block attends, itself included; `None` for all before it.

        Args:
            block: Number of the block, from 0; a negative number counts from the end.

        Example:
            >>> types = ["sliding_attention", "full_attention"]
            >>> layer = EmbeddingLayer(TokenEmbedding(100, 8), layer_types=types, window=512)
            >>> layer.window_of_block(0), layer.window_of_block(1)
            (512, None)
        """
        types = self.layer_types
        kind = types[block] if types else None
        if kind == "full_attention":
            return None
        if kind != "sliding_attention" or self.window is None:
            raise SizeError(f"The window of block {block} is not known: type {kind!r}, sliding_window {self.window}.")
        return self.window

    def report(self) -> LayerReport:
        """Return a report of this layer and of the tensors that `load` read for it; also reads the tokenizer file.

        For a layer that was not loaded, the fields of `LoadRecord` are empty.
        """
        try:
            tokenizer: int | str | None = None if self.tokenizer is None else table_size(self.tokenizer)
        except EmbedLayerError as error:
            tokenizer = str(error)
        output = self.head.output if isinstance(self.head, PredictionHead) else self.head
        extra = self.per_layer
        first, rows = next(iter((*self.table.parameters(), *self.table.buffers()))), self.table
        stored_type = rows.stored_type if isinstance(rows, PackedRows) else str(first.dtype).removeprefix("torch.")
        embed_scale = getattr(self.table, "embed_scale", None)
        return LayerReport(
            **vars(self.load_record),
            family=self.family,
            vocab_size=self.table.vocab_size,
            embed_dim=self.table.embed_dim,
            width=self.width,
            dtype=stored_type,
            device=str(first.device),
            scale=self.table.scale,
            embed_scale=float(embed_scale) if isinstance(embed_scale, Tensor) else None,
            padding_idx=self.table.padding_idx,
            recipe=self.recipe,
            positions={
                kind: "none" if type(scheme) is Position else f"{type(scheme).__name__}({scheme.extra_repr()})"
                for kind, scheme in {"": self.position, **self.other_positions}.items()
            },
            head=None if self.head is None else "tied" if self.head.tied else "untied",
            logit_scale=None if output is None else output.logit_scale,
            softcap=None if output is None else output.softcap,
            tokenizer=tokenizer,
            per_layer=None if extra is None else (extra.table.vocab_size, extra.num_layers, extra.layer_width),
            streams=() if self.codes is None else self.codes.table.sizes,
            parameters=sum(parameter.numel() for parameter in self.parameters()),
        )


def load(
    source: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    table_only: bool | str = False,
    per_layer: bool = True,
    final_norm: bool = False,
) -> EmbeddingLayer:
    """Load the embedding layer of a checkpoint: table, positions, scale, norms and head, and no other weights.

    Args:
        source: A folder in Hugging Face's layout, a safetensors file, an index of several such files, a GGUF file of
            llama.cpp, a folder of `EmbeddingLayer.save_pretrained`, or a hub name such as `"openai-community/gpt2"`.
            The hub needs the `hf` extra; with `HF_HUB_OFFLINE` set, only its cache on this machine is searched.
        dtype: Dtype of all tensors; `None` for that of the table in the checkpoint.
        device: Device of the tensors. On the CPU, without a change of dtype, tensors stay mapped to the file until they
            are written to.
        revision: Branch, tag or commit on the hub; `None` for the main branch. It is not read for a local path.
        table_only: Read the token table alone, also of an unknown model family. The layer then has no scale, no
            positions and no head, so its `input` returns rows of the table. A string is the name of the tensor to read
            as the table, for a model with several tables. Of a folder of `save_pretrained`, the table keeps its scale,
            and a string has the effect of `True`.
        per_layer: Read the per-layer inputs of Gemma 3n and 4 too, as `layer.per_layer`. Their table may be larger than
            the token table; on the CPU, without a change of dtype, its rows are read where they are looked up.
        final_norm: Read the norm between the last block and the head too, as `layer.final_norm`. It is `None` for a
            model whose last block ends with a norm (BERT, BART).

    Returns:
        A trainable layer. `print(layer.report())` shows what was read.

    Raises:
        FileError: `source` does not exist, or a file cannot be read.
        CheckpointError: The model family is unknown and `table_only` is false; a file is damaged or a pickle; a tensor
            that the family needs is missing; tensors and configuration disagree; the folder holds another kind of saved
            layer; or the final norm is requested, and that of this model type is not known. If a table of the
            checkpoint can be read alone, the message says how.
        MissingExtraError: The hub needs `pip install 'embedlayer[hf]'`, and a GGUF file `'embedlayer[gguf]'`.

    Warns:
        EmbedLayerWarning: Rows contain NaN or infinity; the configuration contradicts the tensors in a way that can be
            resolved; or an unknown model family has several tables, of which one was read with `table_only=True`.

    Example:
        >>> from embedlayer.io.safetensors_files import save_tensors
        >>> from embedlayer.io.files import write_json
        >>> save_tensors("model.safetensors", {"wte.weight": torch.randn(100, 8), "wpe.weight": torch.randn(16, 8)})
        >>> write_json("config.json", {"model_type": "gpt2", "vocab_size": 100, "n_embd": 8})
        >>> layer = load(".")
        >>> layer.input(torch.tensor([[1, 2, 3]])).shape, layer.head.tied
        (torch.Size([1, 3, 8]), True)
    """
    if dtype is not None and dtype not in FLOATS:
        raise SizeError(f"dtype must be one of {', '.join(map(str, FLOATS))}, not {dtype}.")
    checkpoint = Checkpoint.open(source, revision=revision)
    if is_description(checkpoint.config):
        layer = _read_saved_layer(checkpoint, dtype, device, table_only=bool(table_only), per_layer=per_layer)
        if final_norm and layer.final_norm is None:
            raise CheckpointError(f"{checkpoint.name} was saved without its final norm: leave out final_norm=True.")
    else:
        try:
            if "model_type" not in checkpoint.config and not table_only and has_meta_layout(checkpoint):
                checkpoint.config = meta_config(checkpoint)
            model = checkpoint_model(checkpoint, dtype, device, table_only=table_only)
            parts = {"per_layer": per_layer, "final_norm": final_norm}
            layer = build_with_tensors(model, lambda: EmbeddingLayer(**read_layer_arguments(model, **parts)))
        except CheckpointError as error:
            if isinstance(table_only, str):
                raise
            advice = table_advice(checkpoint, is_found=not table_only and finds_table(checkpoint))
            refused = CheckpointError(f"{error} {advice}".rstrip())
            refused.advice = advice
            raise refused from error
        layer.load_record = load_record(model)
    layer._checkpoint = checkpoint
    for note in layer.load_record.notes[bool(table_only) :]:
        warnings.warn(f"{checkpoint.name}: {note}", EmbedLayerWarning, stacklevel=2)
    return layer


def _read_saved_layer(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str, *, table_only: bool, per_layer: bool
) -> EmbeddingLayer:
    """Read a folder that `EmbeddingLayer.save_pretrained` wrote, by arguments of `load`.

    The file is always read in full; what the arguments exclude is left out afterwards.
    """
    config = checkpoint.file(CONFIG)
    assert config is not None
    layer = super(EmbeddingLayer, EmbeddingLayer).from_pretrained(config.parent, device=device).to(dtype=dtype)
    if not per_layer and layer.per_layer is not None:
        layer.per_layer, layer.is_part = None, True
        layer.tensor_names = {key: names for key, names in layer.tensor_names.items() if "per_layer." not in key}
    infos = {key: checkpoint.info(key) for key in layer.state_dict()}
    tensors = tuple(LoadedTensor(key, key, info.shape, info.dtype, info.nbytes) for key, info in infos.items())
    record = LoadRecord(source=checkpoint.name, tensors=tensors, bytes_read=sum(tensor.nbytes for tensor in tensors))
    if table_only:
        names = {key: names for key, names in layer.tensor_names.items() if key.startswith("table.")}
        options: dict[str, Any] = {"family": layer.family, "padding_id": layer.padding_id, "is_edited": layer.is_edited}
        layer = EmbeddingLayer(layer.table, tensor_names=names, is_part=True, **options)
        note = "Only the table was kept: positions, norms and head were left out."
        record = replace(record, notes=(note,), table_only=True)
    layer.load_record = record
    return layer
