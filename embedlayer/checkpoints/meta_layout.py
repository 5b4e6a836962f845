"""The configuration of checkpoints in Meta's LLaMA layout, which have `params.json` and no `config.json`."""

import json
import re
from collections.abc import Iterable, Mapping

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.core.errors import CheckpointError
from embedlayer.families import META_LLAMA, META_TENSORS, family_of
from embedlayer.families.causal import (
    BLOCK_PARAMS,
    FIXED_PARAMS,
    META_PARAMS,
    MISTRAL_BASES,
    QUERY_PARAMS,
    YARN_PARAMS,
)
from embedlayer.io.files import JsonObject, read_json
from embedlayer.io.json_fields import as_whole_number

PARAMS = "params.json"
QUERY = "blocks.{}.attention.query.weight"
ORIGINAL_LENGTH = "original_max_position_embeddings"


def has_meta_layout(checkpoint: Checkpoint) -> bool:
    """Return whether the tensors of a checkpoint have the names of Meta's LLaMA."""
    return {META_TENSORS["table.weight"], META_TENSORS[QUERY].format(0)} <= set(checkpoint.names)


def meta_config(checkpoint: Checkpoint) -> JsonObject:
    """Return a configuration for the model of a checkpoint in Meta's layout, with the keys of transformers.

    The sizes come from the metadata of the weight files, or else from `params.json`. Mistral's `yarn` and
    `llama_4_scaling` there become `rope_parameters`, as in transformers.
    """
    source = checkpoint.name
    params = {key: _parse(text) for header in checkpoint.headers.values() for key, text in header.metadata.items()}
    if "n_heads" not in params:
        file = checkpoint.file(PARAMS)
        if file is None:
            raise CheckpointError(f"{source} has no n_heads in its metadata and no {PARAMS}. Copy the model's there.")
        params, source = read_json(file), str(file)
        _require_known(source, params, (*META_PARAMS, *BLOCK_PARAMS, *FIXED_PARAMS), "")
    for key, allowed in FIXED_PARAMS.items():
        if params.get(key) not in (*allowed, None):
            known = " or ".join(map(json.dumps, allowed))
            raise CheckpointError(f"{source}: {key} {params[key]!r} is not read, only {known}.")
    family = family_of(META_LLAMA)
    assert family is not None
    query_rows = sum(checkpoint.info(META_TENSORS[QUERY].format(0)).shape[:1])
    refused_keys = ("quantization", "moe")
    theta = re.search(r"theta ([\d.]+)", str(params.get("rope", "")))  # llama2.c's export
    base = None
    if params.get("rope_theta") is not None:
        base = params["rope_theta"]
    elif theta is not None:
        base = _parse(theta[1])
    elif "head_dim" in params:  # Mistral's code has defaults
        base = MISTRAL_BASES["without a window" if params.get("sliding_window") is None else "with a window"]
    return {
        "model_type": META_LLAMA,
        **{own: params[own] for own, _ in family.aliases if params.get(own) is not None},
        **{key: params[key] for key in refused_keys if params.get(key) is not None},
        "vocab_size": None if params.get("vocab_size") == -1 else params.get("vocab_size"),  # -1: see the tokenizer
        "head_dim": query_rows // as_whole_number(params.get("n_heads"), "n_heads"),
        "sliding_window": params.get("sliding_window"),
        "rope_theta": base,
        "rope_parameters": _rope_parameters(source, params, base),
        "tie_word_embeddings": params.get("tied_embeddings", META_TENSORS["head.weight"] not in checkpoint.names),
    }


def _rope_parameters(source: str, params: JsonObject, base: object) -> JsonObject | None:
    """Return transformers' `rope_parameters` for Mistral's `yarn` and `llama_4_scaling`; `None` without both."""
    yarn, queries = params.get("yarn"), params.get("llama_4_scaling")
    for name, part, keys in (("yarn", yarn, (*YARN_PARAMS, "apply_scale")), ("llama_4_scaling", queries, QUERY_PARAMS)):
        if part is None:
            continue
        if not isinstance(part, dict) or not part.keys() >= {*keys}:
            raise CheckpointError(f"{source}: {name} must have the keys {', '.join(keys)}, not {part!r}.")
        _require_known(source, part, keys, f"{name}.")
    if queries is not None and (yarn is None or yarn[ORIGINAL_LENGTH] != queries[ORIGINAL_LENGTH]):
        raise CheckpointError(f"{source}: llama_4_scaling needs a yarn of the same {ORIGINAL_LENGTH}; found {yarn!r}.")
    if yarn is None:
        return None
    if yarn["apply_scale"] is not False:
        raise CheckpointError(f"{source}: yarn.apply_scale {yarn['apply_scale']!r} is not read, only false.")
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        **{common: yarn[own] for own, common in YARN_PARAMS.items()},
        **({} if queries is None else {"llama_4_scaling_beta": queries["beta"]}),
        **dict.fromkeys(("mscale", "mscale_all_dim"), 1.0),
    }


def _require_known(source: str, params: JsonObject, known: Iterable[str], prefix: str) -> None:
    """Check that every key that has a value is known; null, false and 0 are no values."""
    unknown = next((key for key, value in params.items() if key not in known and value not in (None, False)), None)
    if unknown is not None:
        raise CheckpointError(f"{source}: the key {prefix}{unknown} is not known here, so it may change the model.")


def _parse(text: str) -> object:
    """Return the JSON value that a metadata string contains, such as the number 8 for `"8"`; else the string itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def require_value(source: str, config: Mapping[str, object], key: str, *allowed: object) -> None:
    """Check that the value of a configuration key is one that `DecoderLM` implements."""
    if config.get(key) not in allowed:
        known = ", ".join(str(value) for value in allowed if value is not None)
        raise CheckpointError(f"{source}: {key} {config.get(key)!r} is not what DecoderLM has (known: {known}).")
