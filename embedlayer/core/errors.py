"""Everything embedlayer raises on purpose.

Each error says what was asked, what was found and what to do, and is also the builtin a reader would expect:

```
EmbedLayerError
├── SizeError          ValueError    a size or option that cannot be built
├── ShapeError         ValueError    a tensor of the wrong rank, length or type
├── TokenIdError       IndexError    a token ID outside its table
├── PositionError      IndexError    a position outside what a scheme covers
├── TextError          ValueError    text that is empty, too short, or not UTF-8
├── TokenizerError     ValueError    a tokenizer that cannot be trained, read or matched to its table
├── StaleRowsError     RuntimeError  a weight written in place while its old rows were needed
├── UnknownTokenError  KeyError      a key of TokenVectors without a row; also a TokenizerError and a TokenIdError
├── VocabularyError    ValueError    a change to a vocabulary that cannot be made
├── CheckpointError    ValueError    a saved file or folder that is damaged or does not fit
├── FileError          OSError       a path that cannot be read or written
├── PeerError          ConnectionError  another process of a run that differs, hangs or has ended
├── VersionError       ImportError   a feature that is wrong, or crashes, with the installed release of a dependency
└── MissingExtraError  ImportError   an optional dependency; the message is the install line
```

What was asked for and is skipped is an `EmbedLayerWarning`.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType


class EmbedLayerError(Exception):
    """Base class of all errors of embedlayer.

    `str(error)` can be printed: characters that UTF-8 cannot encode are escaped, such as those of odd file names.
    """

    def __str__(self) -> str:
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class SizeError(EmbedLayerError, ValueError):
    """A size or option has a value that is not allowed, or two options exclude each other."""


class ShapeError(EmbedLayerError, ValueError):
    """A tensor has the wrong number of dimensions, length or dtype."""


class TokenIdError(EmbedLayerError, IndexError):
    """A token ID is negative, or not below the number of rows of its table."""


class PositionError(EmbedLayerError, IndexError):
    """A position is outside the range that a position scheme covers."""


class TextError(EmbedLayerError, ValueError):
    """A text is empty, too short, or not UTF-8."""


class TokenizerError(EmbedLayerError, ValueError):
    """A tokenizer cannot be trained or read, or does not match its table."""


class StaleRowsError(EmbedLayerError, RuntimeError):
    """A weight was written in place while something still needed its old values.

    That is a row-sparse weight whose rows have pending updates, or a patched LM head whose logits are read later.
    """


class UnknownTokenError(TokenizerError, TokenIdError, KeyError):
    """A key, such as a text, is not exactly one token of a table. gensim raises `KeyError` in this case."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's own would quote the message


class VocabularyError(EmbedLayerError, ValueError):
    """A requested change to a vocabulary cannot be made."""


class CheckpointError(EmbedLayerError, ValueError):
    """A saved file or folder is damaged, incomplete, or in a format that cannot be read.

    Attributes:
        advice: The end of the message that says how to read a part of the checkpoint; `""` for none.
    """

    advice: str = ""


class FileError(EmbedLayerError, OSError):
    """A path cannot be read or written."""


class PeerError(EmbedLayerError, ConnectionError):
    """Another process of a distributed run has other options than this one, does not answer, or has ended."""


class VersionError(EmbedLayerError, ImportError):
    """A feature gives wrong results, or crashes, with the installed release of a dependency; other features work."""


class MissingExtraError(EmbedLayerError, ImportError):
    """An optional dependency is not installed."""


class EmbedLayerWarning(UserWarning):
    """Warning that a requested action was skipped, or that the result is probably not the intended one."""


TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.9", "2.15"), "transformers": ("5.6", "5.24")}
"""Package -> the oldest and the newest release, by major and minor version, with which all tests pass."""


def release(version: str) -> tuple[int, ...]:
    """Return major and minor version as numbers; fewer if the text has fewer."""
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", version)[:2])


@cache
def warn_if_untested(name: str, version: str) -> None:
    """Warn once per process if the installed release of a package in `TESTED` was not tested."""
    oldest, newest = TESTED[name]
    if not release(oldest) <= release(version) <= release(newest):
        warnings.warn(
            f"{name} {version} is installed; embedlayer is tested with {name} {oldest} to {newest}.",
            EmbedLayerWarning,
            stacklevel=2,
        )


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, such as `"matplotlib.pyplot"`, and return the module."""
    from importlib import import_module

    package = module.partition(".")[0]
    try:
        imported = import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package} is needed here and is not installed ({error}).\n"
            f"Install it with: pip install 'embedlayer[{extra}]'"
        ) from error
    if package in TESTED:
        warn_if_untested(package, import_module(package).__version__)
    return imported


@contextmanager
def transformers_errors(task: str, kind: type[EmbedLayerError] = CheckpointError) -> Iterator[None]:
    """Context manager: raise whatever transformers raises in the block, which does `task`, as an error of `kind`."""
    try:
        yield
    except EmbedLayerError:
        raise
    except Exception as error:  # its classes compute with unchecked values of a configuration
        first, *others = str(error).strip().splitlines() or [""]
        if others and first.endswith(":"):  # of a validation: the name of the field, and then what it expects
            first = f"{first} {others[0].strip()}"
        reason = first.partition(". ")[0].removesuffix(".") or type(error).__name__
        raise kind(f"transformers cannot {task}: {reason}.") from error
