"""The configuration of checkpoints in Meta's LLaMA layout, which have `params.json` and no `config.json`."""

import json
import re
from collections.abc import Mapping

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.errors import CheckpointError
from embedlayer.families import META_LLAMA, META_TENSORS, family_of
from embedlayer.io.config_values import as_whole_number
from embedlayer.io.files import JsonObject, read_json

PARAMS = "params.json"
QUERY = "blocks.{}.attention.query.weight"


def has_meta_layout(checkpoint: Checkpoint) -> bool:
    """Return whether the tensors of a checkpoint have the names of Meta's LLaMA."""
    return {META_TENSORS["table.weight"], META_TENSORS[QUERY].format(0)} <= set(checkpoint.names)


def meta_config(checkpoint: Checkpoint) -> JsonObject:
    """Return a configuration for the model of a checkpoint in Meta's layout, in the form that `Loader` reads.

    The sizes come from the metadata of the weight files, or else from `params.json`.

    Raises:
        CheckpointError: The number of heads is missing, or a value is not implemented.
    """
    source = checkpoint.name
    stated = {key: _parse(text) for header in checkpoint.headers.values() for key, text in header.metadata.items()}
    if "n_heads" not in stated:
        file = checkpoint.file(PARAMS)
        if file is None:
            raise CheckpointError(
                f"{source} does not state its sizes: its metadata has no n_heads, and no {PARAMS} is beside it."
            )
        stated = read_json(file)
    require_value(source, stated, "use_scaled_rope", False, None)
    theta = re.search(r"theta ([\d.]+)", str(stated.get("rope", "")))  # llama2.c's export
    family = family_of(META_LLAMA)
    assert family is not None
    query_rows = sum(checkpoint.info(META_TENSORS[QUERY].format(0)).shape[:1])
    return {
        "model_type": META_LLAMA,
        **{own: stated[own] for own, _ in family.aliases if stated.get(own) is not None},
        "vocab_size": None if stated.get("vocab_size") == -1 else stated.get("vocab_size"),  # -1: see the tokenizer
        "head_dim": query_rows // as_whole_number(stated.get("n_heads"), "n_heads"),
        "rope_theta": stated.get("rope_theta", None if theta is None else _parse(theta[1])),
        "tie_word_embeddings": META_TENSORS["head.weight"] not in checkpoint.names,
    }


def _parse(text: str) -> object:
    """Return the JSON value that a metadata string contains, such as the number 8 for `"8"`; else the string itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def require_value(source: str, config: Mapping[str, object], key: str, *allowed: object) -> None:
    """Check that the value of a configuration key is one that `DecoderLM` implements.

    Args:
        source: Name of the configuration, for the message.
        config: The configuration.
        key: The key to check; a missing key counts as `None`.
        *allowed: Values that are implemented.

    Raises:
        CheckpointError: The value is none of `allowed`; the message names both.
    """
    if config.get(key) not in allowed:
        known = ", ".join(str(value) for value in allowed if value is not None)
        raise CheckpointError(f"{source}: {key} {config.get(key)!r} is not what DecoderLM has (known: {known}).")
