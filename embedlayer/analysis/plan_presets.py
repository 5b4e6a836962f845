"""Plans of published models by name, and `plan`, which also reads a `config.json` or takes given sizes."""

import inspect
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias

from embedlayer.analysis.embedding_plan import OPTIONS, EmbeddingPlan
from embedlayer.core.errors import SizeError
from embedlayer.io.files import JsonObject

_PUBLISHED: list[tuple[str, int, int, bool, dict[str, Any]]] = [
    ("gpt2", 50257, 768, True, {"positions": 1024}),
    ("gpt2-medium", 50257, 1024, True, {"positions": 1024}),
    ("gpt2-large", 50257, 1280, True, {"positions": 1024}),
    ("gpt2-xl", 50257, 1600, True, {"positions": 1024}),
    ("bert-base", 30522, 768, True, {"positions": 512}),
    ("bert-large", 30522, 1024, True, {"positions": 512}),
    # RoBERTa and OPT start counting positions at 2.
    ("roberta-base", 50265, 768, True, {"positions": 514}),
    ("opt-125m", 50272, 768, True, {"positions": 2050}),
    # ALBERT's 512 positions are as narrow as its rank; not counted, as ours are added at full width.
    ("albert-base", 30000, 768, True, {"rank": 128}),
    ("t5-small", 32128, 512, True, {}),
    ("t5-base", 32128, 768, True, {}),
    ("bloom-560m", 250880, 1024, True, {}),
    ("pythia-70m", 50304, 512, False, {}),
    ("phi-2", 51200, 2560, False, {}),
    ("phi-3-mini", 32064, 3072, False, {}),
    ("llama-7b", 32000, 4096, False, {}),
    ("llama-13b", 32000, 5120, False, {}),
    ("llama-65b", 32000, 8192, False, {}),
    ("llama-2-7b", 32000, 4096, False, {}),
    ("llama-2-13b", 32000, 5120, False, {}),
    ("llama-2-70b", 32000, 8192, False, {}),
    ("llama-3-8b", 128256, 4096, False, {}),
    ("llama-3-70b", 128256, 8192, False, {}),
    ("llama-3.2-1b", 128256, 2048, True, {}),
    ("llama-3.2-3b", 128256, 3072, True, {}),
    ("mistral-7b", 32000, 4096, False, {}),
    ("gemma-2b", 256000, 2048, True, {}),
    ("gemma-7b", 256000, 3072, True, {}),
    ("gemma-2-2b", 256000, 2304, True, {}),
    ("gemma-2-9b", 256000, 3584, True, {}),
    ("gemma-2-27b", 256000, 4608, True, {}),
    ("gemma-3-270m", 262144, 640, True, {}),
    ("gemma-3-1b", 262144, 1152, True, {}),
    # The larger models read images too, and their tables have 64 rows more.
    ("gemma-3-4b", 262208, 2560, True, {}),
    ("gemma-3-12b", 262208, 3840, True, {}),
    ("gemma-3-27b", 262208, 5376, True, {}),
    ("qwen2-0.5b", 151936, 896, True, {}),
    ("qwen2-1.5b", 151936, 1536, True, {}),
    ("qwen2-7b", 152064, 3584, False, {}),
    ("qwen3-0.6b", 151936, 1024, True, {}),
    ("qwen3-1.7b", 151936, 2048, True, {}),
    ("qwen3-4b", 151936, 2560, True, {}),
    ("qwen3-8b", 151936, 4096, False, {}),
    ("qwen3-14b", 151936, 5120, False, {}),
    ("qwen3-32b", 151936, 5120, False, {}),
    ("smollm2-135m", 49152, 576, True, {}),
]
PRESETS = {name: EmbeddingPlan(*size, tied=tied, name=name, **rest) for name, *size, tied, rest in _PUBLISHED}
"""Tables and heads of published models by name. V is that of the checkpoint, padding to a round number included."""


Model: TypeAlias = str | JsonObject | None
"""Name of a preset, path of a `config.json` of transformers, its content, or `None` for given sizes."""


def plan(preset: Model = None, **options: Any) -> EmbeddingPlan:
    """Plan the table and head of a published model, or of given sizes.

    Args:
        preset: A name in `PRESETS`; or the path of a `config.json` of transformers, or its content; `None` if
            `vocab_size` and `embed_dim` are passed.
        **options: Fields of `EmbeddingPlan`. Beside a preset they replace its own; `None` keeps the preset's.

    Raises:
        FileError: The `config.json` cannot be read.
        CheckpointError: The `config.json` is of a model that is not planned: its type is unknown or not read by
            `embedlayer.load`, a size is missing, or it has a table or a head that no plan describes.

    Example:
        >>> plan("gpt2").parameters - plan("gpt2").position_parameters
        38597376
        >>> plan(vocab_size=32000, embed_dim=4096).table_bytes
        524288000
    """
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(preset, dict) or (preset is not None and preset.endswith(".json")):
        from embedlayer.analysis.plan_fields import fields_of_config

        return EmbeddingPlan(**{**fields_of_config(preset), **values})
    if preset in PRESETS:
        return replace(PRESETS[preset], **values)
    if preset is not None:
        close = get_close_matches(preset.lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(PRESETS)}."
        raise SizeError(f"there is no preset {preset!r}.\n{hint} Other models: give vocab_size and embed_dim.")
    if missing := {"vocab_size", "embed_dim"} - values.keys():
        raise SizeError(
            f"a plan without a preset needs vocab_size and embed_dim; {' and '.join(sorted(missing))} missing.\n"
            "Give both, or the name of a model: plan('gpt2')."
        )
    return EmbeddingPlan(**values)


plan.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "preset", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=str | JsonObject | None
        ),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.type)
            for name, option in OPTIONS.items()
        ),
    ],
    return_annotation=EmbeddingPlan,
)
