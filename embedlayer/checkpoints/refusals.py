"""Errors for checkpoints that are refused: an unknown model family, and quantised tables and heads."""

import re

from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.errors import CheckpointError
from embedlayer.families import TRANSFORMERS_VERSION, nearest_model_types


def unknown_family_error(checkpoint: Checkpoint, model_type: object) -> CheckpointError:
    """Return, without raising it, the error for a checkpoint whose configuration names no known family.

    It names the known model types that are spelt most similarly, and what to do.

    Args:
        checkpoint: The checkpoint.
        model_type: The `model_type` in its configuration, or `None` if there is none.
    """
    alone = "To read the table alone: load(..., table_only=True)."
    file = checkpoint.file(CONFIG)
    if file is None:
        return CheckpointError(
            f"{checkpoint.name}: there is no {CONFIG}, so the model family is unknown, and with it scale, positions "
            f"and head. Copy the model's {CONFIG} there. {alone}"
        )
    if model_type is None:
        return CheckpointError(
            f"{file} has no model_type, so the model family is unknown, and with it scale, positions and head. Copy "
            f"the model's own {CONFIG} there, or add its model_type. {alone}"
        )
    near = " or ".join(map(repr, nearest_model_types(str(model_type))))
    written = str(checkpoint.config.get("transformers_version", ""))
    newer = (
        f"It was written by transformers {written}, and this embedlayer knows the families of {TRANSFORMERS_VERSION}: "
        f"look for a newer embedlayer. "
        if _version(written) > _version(TRANSFORMERS_VERSION)
        else ""
    )
    return CheckpointError(
        f"{file}: model_type {model_type!r} is not known (nearest known: {near}), so scale, positions and head are not "
        f"known either. {newer}{alone}"
    )


def _version(text: str) -> tuple[int, ...]:
    """Return major and minor version as numbers, such as `(5, 23)` for `"5.23.0"`; fewer if the text has fewer."""
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", text)[:2])
