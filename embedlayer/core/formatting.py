"""Counts, sizes and classes as short text, for people."""


def format_parameters(count: int) -> str:
    """Format a number of parameters as text in decimal units: 1 M is 10^6.

    Example:
        >>> format_parameters(38597376)
        '38.6 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def format_bytes(count: int) -> str:
    """Format a number of bytes as text in binary units: 1 MiB is 2^20 bytes.

    The unit is chosen so that at most three digits stand before the decimal point, except from 1000 GiB on.

    Example:
        >>> format_bytes(32000 * 4096 * 4), format_bytes(32000 * 8192 * 4)
        ('500.0 MiB', '1.0 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count * 1024 >= size * 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def count_of(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an "s" unless the number is 1.

    Example:
        >>> count_of(1, "shard"), count_of(1200, "document")
        ('1 shard', '1,200 documents')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def a_or_an(noun: object) -> str:
    """Return a noun after "a" or "an", by its first letter: a string, or the name of the class of any other value.

    Example:
        >>> a_or_an("TokenTable"), a_or_an("unigram model"), a_or_an(1)
        ('a TokenTable', 'a unigram model', 'an int')
    """
    word = noun if isinstance(noun, str) else type(noun).__name__
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"


def shortened(value: object) -> str:
    """Return a value as text of at most 60 characters, the end of a longer text replaced by three dots."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
