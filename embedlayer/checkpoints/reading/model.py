"""The language model in a checkpoint: the record of its family, its configuration and its tensors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Literal

import torch

from embedlayer.checkpoints.meta_layout import has_meta_layout
from embedlayer.checkpoints.reader import Checkpoint, weight_beside
from embedlayer.checkpoints.reading.configuration import Configuration, text_config, with_defaults, with_whole_model
from embedlayer.checkpoints.reading.tensors import CheckpointTensors
from embedlayer.checkpoints.refusals import unknown_family_error
from embedlayer.core.errors import CheckpointError
from embedlayer.families import CONFIG_KEYS, MULTIMODAL, STATIC_EMBEDDING, UNKNOWN, Family, family_of, gguf_family
from embedlayer.families.field_types import Step
from embedlayer.families.vocabulary_tensors import TensorRule, tensor_rule
from embedlayer.io.files import JsonObject
from embedlayer.saving import is_description

SIZE_KEYS = ("hidden_size", *CONFIG_KEYS["num_attention_heads"], *CONFIG_KEYS["num_hidden_layers"])
HEAD_WIDTH_KEYS = ("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim")
"""Configuration keys of widths on which positions depend; in a family without positions they may be 0."""


@dataclass(frozen=True)
class CheckpointModel:
    """The language model in a checkpoint, from which the readers build the parts of its embedding layer."""

    family: Family  # for the stacks that are stored
    config: Configuration  # of the stack that is read; the encoder's is first
    tensors: CheckpointTensors
    whole_config: JsonObject  # of the whole language model, which may contain those of its stacks
    padding_id: int | None  # `pad_token_id` of the first stack that is stored
    table_only: bool = False
    table_name: str = ""  # full name of the tensor to read as the table; empty to find it by the record

    def used_steps(self, recipe: Sequence[Step]) -> list[Step]:
        """Return the steps of a recipe without those that the configuration leaves out."""
        left_out = {step for step, key, default in self.family.optional if not self.config.get(key, default)}
        return [step for step in recipe if step not in left_out]

    def of_decoder(self) -> "CheckpointModel":
        """Return the same model with the decoder's configuration; itself in a family whose stacks have no own ones."""
        if not self.family.sub_configs:
            return self
        content = _stack_config(self.family, self.whole_config, "decoder", self.tensors.checkpoint.name)
        return replace(self, config=replace(self.config, content=content))


def checkpoint_model(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str, *, table_only: bool | str = False
) -> CheckpointModel:
    """Find the record of a checkpoint's family, and check the numbers of its configuration."""
    config = text_config(checkpoint.config)
    table_name = table_only if isinstance(table_only, str) else ""
    tensors = CheckpointTensors(checkpoint, dtype, device, str(config.get("model_type")))
    family = UNKNOWN if table_name else _family(tensors, config, table_only=bool(table_only))
    if table_name:
        tensors.notes.append(f"Only {table_name} was read, as the table: everything else was left out.")
    tensors.family_name = family.name or tensors.family_name
    family, stack = _of_stored_stacks(checkpoint, family)
    whole = content = with_defaults(family, config)
    if family.sub_configs:
        content = _stack_config(family, whole, stack, checkpoint.name)
    checked = Configuration(content, tensors.config_file)
    for key in () if table_only else (*SIZE_KEYS, *(() if family.position is None else HEAD_WIDTH_KEYS)):
        if checked.get(key) is not None:
            checked.whole(key)
    for key, values in () if table_only else family.not_computed:
        if checked.get(key, values[0]) not in values:
            known = " or ".join(map(repr, values))
            raise CheckpointError(
                f"{checked.file}: {key} {checked.get(key)!r} is not supported in {tensors.family_name}, only {known}."
            )
    for key in () if table_name else ("vocab_size", "pad_token_id"):
        if type(content.get(key, 0)) not in (int, NoneType):
            raise CheckpointError(f"{checked.file}: {key} must be a whole number or null, not {content[key]!r}.")
    padding_id = None if table_name else content.get("pad_token_id")
    return CheckpointModel(family, checked, tensors, whole, padding_id, bool(table_only), table_name)


def _family(tensors: CheckpointTensors, config: JsonObject, *, table_only: bool) -> Family:
    """Return the record of a checkpoint's family; `UNKNOWN` for an unknown one of which only the table is read."""
    checkpoint = tensors.checkpoint
    family = checkpoint_family(checkpoint)
    if family is None and not table_only:
        raise unknown_family_error(checkpoint, config.get("model_type"))
    if table_only:
        where = "" if family is not None else ", and found by its name because the family is unknown"
        tensors.notes.append(f"Only the table was read{where}: scale, positions, norms and head were left out.")
    if family is None:
        return UNKNOWN
    outer = MULTIMODAL.get(str(checkpoint.config.get("model_type")))
    if outer is None:
        return family
    if outer.table:
        family = replace(family, table=outer.table)
        whole = checkpoint.config.get("tie_word_embeddings", outer.tied)
        text = checkpoint.config.get("text_config")
        if not table_only and isinstance(text, dict) and text.get("tie_word_embeddings", whole) != whole:
            raise CheckpointError(f"{tensors.config_file}: tie_word_embeddings must be {whole!r} in text_config too.")
    return with_whole_model(family, checkpoint.config.get("model_type"))


def _of_stored_stacks(checkpoint: Checkpoint, family: Family) -> tuple[Family, Literal["encoder", "decoder"]]:
    """Return the record for the stacks that a checkpoint stores of an encoder-decoder model, and the first of them.

    An encoder-decoder model may be stored without its encoder (`AutoModelForCausalLM`) or without its decoder; an
    encoder alone has no head. The names of the tensors tell: those of a stack contain `encoder.` or `decoder.`.
    """
    spec = family.decoder_input
    if spec is None:
        return family, "decoder"
    prefix = spec.table[0].partition(".")[0].removesuffix("decoder")  # "text_" in families with other encoders
    stack = re.compile(rf"(?:^|[.{'' if prefix else '_'}]){prefix}((?:en|de)coder)\.")
    stacks = {each for name in checkpoint.names for each in stack.findall(name)}
    if stacks == {"encoder"}:
        return replace(family, decoder_input=None, head=None), "encoder"
    if stacks != {"decoder"}:
        return family, "encoder" if stacks else "decoder"
    alone = replace(
        family,
        table=tuple(dict.fromkeys((*spec.table, *family.table))),
        position=spec.position or family.position,
        norm=spec.norm or family.norm,
        recipe=family.recipe if spec.recipe is None else spec.recipe,
        scale=family.scale if spec.is_scaled else None,
        decoder_input=None,
    )
    return alone, "decoder"


def _stack_config(family: Family, whole: JsonObject, stack: Literal["encoder", "decoder"], name: str) -> JsonObject:
    """Return the configuration of one stack, in a family whose configuration `whole` has one for each.

    Keys that the stack's own configuration lacks are those of `whole`; so is `tie_word_embeddings` if `whole` has it.
    """
    key = family.sub_configs[0 if stack == "encoder" else 1]
    own = whole.get(key)
    if not isinstance(own, dict):
        raise CheckpointError(f"{name}: the configuration has no {key!r}, which states its sizes.")
    tied = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole}
    return {**whole, **own, **tied}


def checkpoint_family(checkpoint: Checkpoint) -> Family | None:
    """Return the family that a checkpoint's configuration names, or `None` if it names none or an unknown one."""
    if checkpoint.is_static_embedding:
        return family_of(STATIC_EMBEDDING)
    family = family_of(text_config(checkpoint.config).get("model_type"))
    return family if family is None or checkpoint.gguf is None else gguf_family(family)


def tensor_rules(checkpoint: Checkpoint) -> dict[str, TensorRule | None]:
    """Return how an edit of the vocabulary moves each tensor of a checkpoint, by its family's record.

    A tensor that the record does not name as one of tokens has `None`. Stored rows that the record names are under the
    name of the weight that they replace.
    """
    family, model_type = checkpoint_family(checkpoint), checkpoint.config.get("model_type")
    families, names = [] if family is None else [family], dict.fromkeys(checkpoint.names)
    weights = dict.fromkeys(map(weight_beside, names))
    rules = {name: tensor_rule(name, families, model_type) for name in names | weights}
    return {name: rule for name, rule in rules.items() if name in names or (rule and checkpoint.stored(name))}


def is_unknown_family(checkpoint: Checkpoint) -> bool:
    """Return whether `load` reads a checkpoint with `table_only=True` alone, because its family is unknown."""
    is_known = is_description(checkpoint.config) or checkpoint_family(checkpoint) is not None
    return not is_known and not ("model_type" not in checkpoint.config and has_meta_layout(checkpoint))
