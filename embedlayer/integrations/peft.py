"""PEFT: the modules that it puts around tables and heads of a live model, recognised by their attributes.

PEFT replaces the table inside its parent, `parent.table = lora.Embedding(base_layer=table)`. A reference to the table
would not see this. So a tied head refers to the parent and the name of the child, and reads the rows that the module
found there looks up. These are the rows of the table, of its trained copy, or of the table with LoRA or trained tokens.
Any other module raises a `CheckpointError`. PEFT is not imported. `formats.adapters` reads and writes its folders.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from embedlayer.core.errors import CheckpointError, SizeError, VocabularyError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.own_attributes import unwrapped
from embedlayer.formats.adapters import Adapter, LowRankAdapter, ReplacedRows
from embedlayer.heads.adapted_rows import AdaptedTable, ChildReference
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.table import TokenTable

MERGE = "PEFT's merge_and_unload()"
"""How an adapter is merged into a model, for advice in errors."""

_WRAPPERS = re.compile(r"(?<!\w)(?:base_layer|original_module|token_adapter|_orig_mod|modules_to_save\.\w+)\.")


def plain_name(name: str) -> str:
    """Return a name in a model without the parts that PEFT and torch.compile add, where they wrap a module."""
    return _WRAPPERS.sub("", name)


def base_model(model: Any) -> Any:
    """Return the model under PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def learns_prompts(model: Any) -> bool:
    """Return whether an adapter of a model adds learned vectors before the prompt."""
    return any(getattr(each, "is_prompt_learning", False) for each in getattr(model, "peft_config", {}).values())


class PeftReference(ChildReference):
    """Refer to a child of a module by its name, so that a module that PEFT later puts in its place is found."""

    def adapted_table(self) -> AdaptedTable:
        """Return the table inside the module that looks up rows, and the active adapters that PEFT has put on it."""
        here: Any = self.module
        adapters: tuple[Adapter, ...] = ()
        while not isinstance(here, (TokenTable, nn.Embedding, nn.Linear)):  # torch 2.9 traces no unions of classes
            if hasattr(here, "modules_to_save") and hasattr(here, "original_module"):
                active = [] if here.disable_adapters else here.active_adapters
                trained = [each for each in active if each in here.modules_to_save]
                here = here.modules_to_save[trained[0]] if trained else here.original_module
            elif hasattr(here, "token_adapter"):
                here = here.token_adapter
            elif hasattr(here, "base_layer"):
                if not (here.disable_adapters or here.merged):
                    adapters = (*_active_adapters(here, self.name), *adapters)
                here = here.base_layer
            else:
                raise CheckpointError(
                    f"{self.name!r}, which a tied head reads, is {a_or_an(here)} now. Use an untied head."
                )
        return AdaptedTable(here, adapters)

    def adds_adapters(self, head: nn.Linear, adapters: tuple[Adapter, ...]) -> bool:
        """Return whether PEFT wraps a tied head and already adds the table's adapters to its logits."""
        # PEFT does so with `ensure_weight_tying=True`; the head must then not add them a second time.
        wrapper: Any = self.module
        if wrapper is head or not hasattr(wrapper, "base_layer") or wrapper.disable_adapters or wrapper.merged:
            return False
        active = [each for each in wrapper.active_adapters if each in getattr(wrapper, "lora_A", ())]
        shared = {each.b.data_ptr() for each in adapters if isinstance(each, LowRankAdapter)}
        if active and all(wrapper.lora_A[each].weight.data_ptr() in shared for each in active):
            return True
        raise CheckpointError(
            f"{type(wrapper).__name__} on the tied head {self.name!r}: see docs/errors.md, PEFT on tied weights."
        )

    def require_unadapted(self, head: nn.Linear) -> None:
        """Raise a `CheckpointError` if PEFT wraps an untied head in an active module: its rows are not its logits."""
        wrapper: Any = self.module
        if wrapper is None or wrapper is head or not hasattr(wrapper, "active_adapters"):
            return
        if not wrapper.disable_adapters and not getattr(wrapper, "merged", False):
            wrapped = f"{type(wrapper).__name__} of PEFT on the untied head {head!r}"
            raise CheckpointError(f"{wrapped} is active: call merge_and_unload() first.")


def _active_adapters(wrapper: Any, name: str) -> Iterator[Adapter]:
    """Yield the active adapters of one PEFT module that wraps a table."""
    low_rank, replaced = (hasattr(wrapper, kind) for kind in ("lora_embedding_A", "trainable_tokens_delta"))
    if not low_rank and not replaced:
        raise CheckpointError(
            f"{type(wrapper).__name__} on {name!r} hides rows of a tied head: see docs/errors.md, PEFT on tied weights."
        )
    for adapter in wrapper.active_adapters:
        if low_rank and adapter in getattr(wrapper, "lora_variant", ()):
            raise CheckpointError(
                f"The adapter {adapter} is a variant of LoRA on {name!r} that a tied head cannot read."
            )
        if low_rank and adapter in wrapper.lora_embedding_A:
            yield LowRankAdapter(
                wrapper.lora_embedding_A[adapter], wrapper.lora_embedding_B[adapter], float(wrapper.scaling[adapter])
            )
        if replaced and adapter in wrapper.trainable_tokens_delta:
            yield ReplacedRows(list(wrapper.token_indices[adapter]), wrapper.trainable_tokens_delta[adapter])


def refuse_token_adapters(module: nn.Module, parts: Iterable[nn.Module | None], vocab_size: int) -> None:
    """Raise a `VocabularyError` if PEFT has put an adapter with values or IDs of tokens on one of some parts."""
    ends = {id(unwrapped(part)) for part in parts if part is not None}
    for name, wrapper in module.named_modules():
        base = unwrapped(wrapper)
        if base is wrapper or id(base) not in ends:
            continue
        own = {id(tensor) for tensor in chain(base.parameters(), base.buffers())}
        added = [each for each in chain(wrapper.parameters(), wrapper.buffers()) if id(each) not in own]
        if any(vocab_size in each.shape for each in added) or (added and hasattr(wrapper, "token_indices")):
            raise VocabularyError(f"PEFT adapts {name}: docs/errors.md, PEFT and an edited vocabulary.")


def refuse_frozen_rows(module: nn.Module, *_: object) -> None:
    """Raise a `SizeError` in training if PEFT has frozen the rows of a `DeltaEmbedding` inside a module.

    It is a forward pre-hook.
    """
    if not (module.training and torch.is_grad_enabled() and hasattr(module, "peft_config")):
        return
    rows = ((name, part) for name, part in module.named_modules() if isinstance(part, DeltaEmbedding))
    if frozen := [name for name, part in rows if not part.delta.requires_grad]:
        raise SizeError(f"PEFT has frozen {', '.join(frozen)}. See docs/errors.md, New rows that PEFT has frozen.")
