"""Check values of a model's configuration that an untrusted `config.json` states."""

import math
import sys

from embedlayer.errors import CheckpointError


def as_number(value: object, key: str, *, above: float = -math.inf) -> float:
    """Check that the value of a configuration key is a finite number greater than `above`, and return it as a `float`.

    Args:
        value: The value as it was parsed from `config.json`.
        key: Name of the key, for the error message.
        above: Bound that the number must exceed.

    Raises:
        CheckpointError: The value is a boolean, not a number, not finite, or at most `above`.

    Example:
        >>> as_number(1, "rms_norm_eps", above=0.0)
        1.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
        kind = "a positive number" if above == 0 else "a number"
        raise CheckpointError(f"The configuration's {key} must be {kind}, not {value!r}.")
    return float(value)


def as_whole_number(value: object, key: str, *, most: int = 2**31 - 1) -> int:
    """Check that the value of a configuration key is a whole number from 1 to `most`, and return it as an `int`.

    A float without a fraction, such as `4.0`, is accepted.

    Args:
        value: The value as it was parsed from `config.json`.
        key: Name of the key, for the error message.
        most: Largest number that is accepted.

    Raises:
        CheckpointError: The value is not a whole number, or is outside 1 to `most`.

    Example:
        >>> as_whole_number(12, "num_attention_heads")
        12
    """
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(number) is not int or number < 1:
        raise CheckpointError(f"The configuration's {key} must be a whole number of at least 1, not {value!r}.")
    if number > most:
        raise CheckpointError(f"The configuration's {key} {number:,} is larger than in any model: the file is damaged.")
    return number
