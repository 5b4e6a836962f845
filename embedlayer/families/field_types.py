"""Types of the fields of records: names, steps of the input embedding, how positions are counted, and ends."""

from typing import Literal

Names = tuple[str, ...]

Presence = bool | tuple[str, bool]
"""Whether a tensor exists: yes or no, or a pair (configuration key that says it, value if the key is missing)."""

Step = Literal[
    "look_up",
    "scale",
    "types",
    "project",
    "position",
    "injections",
    "norm",
    "dropout",
    "mask",
    "length_mask",
    "token_dropout",
    "streams",
    "codes",
]
"""A step of the input embedding: recipes of families, traces, plots and the explorer use these names.

- `"look_up"`: read the rows of the token IDs; always the first step, so recipes leave it out, as they do `"scale"`.
- `"scale"`: multiply the rows by the factor of the table. `forward` computes it in the look-up.
- `"types"`: add token types.
- `"project"`: project to the width of the model.
- `"position"`: add positions.
- `"injections"`: add the vectors of additional tables, such as those of n-grams. No family has this step.
- `"norm"`: normalise.
- `"dropout"`: set random numbers to zero, in training only. No family has this step.
- `"mask"`: set the vectors of padding to zero, by the attention mask (DeBERTa).
- `"length_mask"`: as `"mask"`; without an attention mask, a row with n tokens other than the padding token keeps its
  first n vectors (XLM).
- `"token_dropout"`: set the vectors of the mask token to zero, and rescale the others (ESM).
- `"streams"`: append the vectors of the streams that predict later tokens (ProphetNet).
- `"codes"`: add the sum of the rows of K streams of codes (Moshi), or put it in the place of some tokens (CSM, Higgs).
"""

Numbering = Literal["all", "mask", "ids"]
"""How default positions are counted.

- `"all"`: every token, from 0.
- `"mask"`: only tokens that the attention mask keeps; padding has position -1.
- `"ids"`: only tokens other than the padding ID; padding has position -1.
"""

End = Literal["table", "head", "per_layer"]
"""Which initialisation computes the values of a tensor for new tokens: that of the input table, of the output head, or
of a per-layer table."""
