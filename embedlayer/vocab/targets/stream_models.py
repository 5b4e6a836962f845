"""Streams of codes of models of transformers: their rows by name, and the sizes and IDs that models state of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedlayer.census.configurations import entries_of, part_at
from embedlayer.core.errors import SizeError, VocabularyError
from embedlayer.families import MULTIMODAL, family_of
from embedlayer.families.field_types import End, Names
from embedlayer.families.stream_records import CodeSpec, Layout, tensors_of_streams
from embedlayer.io.weight_files import names_ending_in
from embedlayer.vocab.targets.live import assignment
from embedlayer.vocab.targets.module_settings import Assignment
from embedlayer.vocab.targets.stream_rows import StreamRows, Streams


class SizeChange(NamedTuple):
    """Describe how an edit of one stream changes the size that all streams of a model have.

    Attributes:
        old: Number of codes of each stream.
        new: That after the edit.
        streams: Number of streams of codes.
        new_ids: New ID of each code of the edited stream, or -1.
    """

    old: int
    new: int
    streams: int
    new_ids: Tensor


def spec_and_config(config: Any) -> tuple[CodeSpec, Any] | None:
    """Return the record of the streams of a model, and the configuration that states their sizes; `None` for none.

    `config` is that of the whole model, an object or a dictionary, and so is the result.
    """
    outer = part_at(config, ["model_type"])
    text = part_at(config, [MULTIMODAL[outer].part]) if outer in MULTIMODAL else None
    text = config if text is None else text
    family = family_of(part_at(text, ["model_type"]))
    if family is None or family.codes is None:
        return None
    return family.codes, part_at(text, family.sub_configs[1:])


def streams_of_model(model: Any) -> Streams | None:
    """Return the streams of a live model of transformers; `None` for a model without them."""
    known = spec_and_config(model.config)
    if known is None:
        return None
    tensors = dict(model.named_parameters(remove_duplicate=False))
    streams = named_streams(*known, tensors, tensors.__getitem__)
    return streams._replace(resize=partial(_resize_model, model, *known, streams))


def named_streams(spec: CodeSpec, config: Any, names: Iterable[str], read: Callable[[str], Tensor]) -> Streams:
    """Return the streams of a model, whose tensors have their names in checkpoints; a tied one is there once.

    All streams are alike, but that of a text.

    Args:
        spec: What the record says about the streams.
        config: Configuration that states their sizes.
        names: Names of all tensors.
        read: Function that returns the tensor of a name.
    """
    entries, names, text = entries_of(config), list(names), spec.text_streams
    num_streams = text + entries[spec.count] * spec.sides
    size = next((value for key in spec.size if (value := entries.get(key)) is not None), None)
    places: list[tuple[Names, Sequence[int], End, int, Layout]] = [
        (*each, "table", spec.more_rows, "joined") for each in tensors_of_streams(spec.table, range(num_streams))
    ]
    for head in spec.heads:
        tensors = tensors_of_streams(head.weight, spec.streams_of(head, num_streams))
        places += [(*each, "head", 0, head.layout) for each in tensors]
    rows: dict[int, StreamRows] = {}
    for ends, streams, end, more, layout in places:
        for name in names_ending_in(names, *ends):
            tensor = read(name)
            own_size = len(tensor) - more if size is None else size
            sizes = tuple(entries[str(spec.text_size)] if k < text else own_size for k in streams)
            if layout != "joined" or len(tensor) >= sum(sizes) + more * len(
                sizes
            ):  # else it only ends in the same name
                rows.setdefault(id(tensor), StreamRows(name, tensor, tuple(streams), sizes, end, more, layout))
    by_stream = {k: size for part in rows.values() for k, size in zip(part.streams, part.sizes, strict=True)}
    all_sizes = tuple(by_stream[k] for k in sorted(by_stream))
    return Streams([*rows.values()], all_sizes, frozenset(by_stream) - {*range(text)})


def changed_entries(
    spec: CodeSpec, config: Any, others: Sequence[Any], change: SizeChange
) -> list[tuple[Any, str, int]]:
    """Return the entries of configurations that follow the size of streams: configuration, key and new value.

    Args:
        spec: What the record says about the streams.
        config: Configuration that states the size of the streams.
        others: Further configurations with the same keys.
        change: The size before and after the edit.

    Raises:
        VocabularyError: A configuration names a code that has a meaning in all streams, and the edit moves it in one.
    """
    old, new, streams, _ = change
    result: list[tuple[Any, str, int]] = []
    for owner in (*_configs_of_streams(spec, config), *others):
        entries = entries_of(owner)
        result += [(owner, key, new) for key in spec.size if entries.get(key) == old]
        if spec.shared_padding is not None and type(last := entries.get(spec.shared_padding)) is int:
            result += [(owner, spec.shared_padding, last + streams * (new - old))]
        for key in spec.token_ids:
            value = entries.get(key)
            _check_unmoved(key, value, change.new_ids)
            if type(value) is int and old <= value < old + spec.more_rows:
                result += [(owner, key, value + new - old)]
    return result


def _configs_of_streams(spec: CodeSpec, config: Any) -> list[Any]:
    """Return the configuration that states the size of streams, and those in it that state it too."""
    return [config, *(each for key in spec.configs if (each := entries_of(config).get(key)) is not None)]


def _check_unmoved(key: str, value: object, new_ids: Tensor) -> None:
    """Check that an edit does not move or remove a code that a configuration names for all streams."""
    for code in value if isinstance(value, list) else [value]:
        if type(code) is int and 0 <= code < len(new_ids) and int(new_ids[code]) != code:
            raise VocabularyError(
                f"{key} names the code {code} of every stream, and the edit of one stream would move or remove it "
                f"there: keep its ID."
            )


def _resize_model(
    model: Any,
    spec: CodeSpec,
    config: Any,
    streams: Streams,
    sizes: tuple[int, ...],
    stream: int,
    new_ids: Tensor,
) -> list[Assignment]:
    """Return the assignments that give a model of transformers another size of its streams.

    Its modules have that size as attributes of their own, and offsets of the streams in buffers.

    Raises:
        SizeError: The stream is one of text.
        VocabularyError: As in `changed_entries`.
    """
    if stream < spec.text_streams:
        raise SizeError("Stream 0 of this model is its text: load its layer, el.load(folder), and edit that.")
    change = SizeChange(streams.sizes[-1], sizes[-1], len(streams.alike), new_ids)
    others = [each for each in [getattr(model, "generation_config", None)] if each is not None]
    result = [assignment(*entry) for entry in changed_entries(spec, config, others, change)]
    keys = [key for key in spec.size if getattr(config, key, None) == change.old]
    configs = {id(each) for each in (model.config, *_configs_of_streams(spec, config))}
    by_weight = {id(part.tensor): part for part in streams.rows}
    for part in model.modules():
        own_rows = by_weight.get(id(part._parameters.get("weight")))
        if own_rows is not None and own_rows.layout == "joined":
            result += _resize_weight(part, own_rows, spec, change)
        if id(getattr(part, "config", None)) in configs:
            result += [assignment(part, key, change.new) for key in keys if vars(part).get(key) == change.old]
        result += _move_offsets(part, spec, change)
    return result


def _resize_weight(part: nn.Module, rows: StreamRows, spec: CodeSpec, change: SizeChange) -> list[Assignment]:
    """Return the assignments that change what a module states of its weight, which has these rows of streams."""
    added = (change.new - change.old) * len([k for k in rows.streams if k >= spec.text_streams])
    keys = [key for key in ("num_embeddings", "out_features") if getattr(part, key, None) == len(rows.tensor)]
    if getattr(part, "padding_idx", None) is not None and spec.shared_padding is not None:
        keys.append("padding_idx")
    return [assignment(part, key, getattr(part, key) + added) for key in keys]


def _move_offsets(part: nn.Module, spec: CodeSpec, change: SizeChange) -> list[Assignment]:
    """Return the assignments that change the buffers of a module which have the first row of each stream of codes."""
    numbers, text, result = torch.arange(change.streams), spec.text_streams, list[Assignment]()
    for name, buffer in part._buffers.items():
        if buffer is not None and "offsets" in name and not buffer.is_floating_point():
            steps = buffer[text:].cpu()
            if len(steps) == len(numbers) and bool((steps - steps[0] == numbers * change.old).all()):
                moved = buffer.clone()
                moved[text:] += (numbers * (change.new - change.old)).to(buffer)
                result += [assignment(part, name, moved)]
    return result
