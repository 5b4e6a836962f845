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
├── StaleRowsError     RuntimeError  a weight written in place while its rows had pending updates
├── UnknownTokenError  KeyError      a key of TokenVectors without a row; also a TokenizerError and a TokenIdError
├── VocabularyError    ValueError    a change to a vocabulary that cannot be made
├── CheckpointError    ValueError    a saved file or folder that is damaged or does not fit
├── FileError          OSError       a path that cannot be read or written
├── PeerError          ConnectionError  another process of a run that differs, hangs or has ended
└── MissingExtraError  ImportError   an optional dependency; the message is the install line
```

What was asked for and is skipped is an `EmbedLayerWarning`.
"""

from types import ModuleType


class EmbedLayerError(Exception):
    """Base of all errors raised by embedlayer. Its text can be printed whatever names and values it quotes."""

    def __str__(self) -> str:
        return super().__str__().encode("utf-8", "backslashreplace").decode()


class SizeError(EmbedLayerError, ValueError):
    """A size or option from which nothing can be built."""


class ShapeError(EmbedLayerError, ValueError):
    """A tensor whose rank, length or type does not fit."""


class TokenIdError(EmbedLayerError, IndexError):
    """A token ID outside its table."""


class PositionError(EmbedLayerError, IndexError):
    """A position outside what its scheme covers."""


class TextError(EmbedLayerError, ValueError):
    """Text that is empty, too short, or not UTF-8."""


class TokenizerError(EmbedLayerError, ValueError):
    """A tokenizer that cannot be trained, read, or matched to its table."""


class StaleRowsError(EmbedLayerError, RuntimeError):
    """A row-sparse weight that was written in place while updates of its rows were pending."""


class UnknownTokenError(TokenizerError, TokenIdError, KeyError):
    """A key that stands for no single token of a table: what gensim raises `KeyError` for."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's own would quote the message


class VocabularyError(EmbedLayerError, ValueError):
    """A change to a vocabulary that cannot be made."""


class CheckpointError(EmbedLayerError, ValueError):
    """A saved file or folder that is damaged, incomplete, or of another make."""


class FileError(EmbedLayerError, OSError):
    """A path that cannot be read or written."""


class PeerError(EmbedLayerError, ConnectionError):
    """Another process of a run differs from this one, hangs, or has ended."""


class MissingExtraError(EmbedLayerError, ImportError):
    """An optional dependency is not installed."""


class EmbedLayerWarning(UserWarning):
    """Something asked for was skipped, or is likely not what was meant."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional dependency, or name the line that installs it.

    Args:
        module: Import name, such as `"matplotlib.pyplot"`.
        extra: The extra of embedlayer that brings it, such as `"plots"`.

    Raises:
        MissingExtraError: The module is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module.partition('.')[0]} is needed here and is not installed ({error}).\n"
            f"Install it with: pip install 'embedlayer[{extra}]'"
        ) from error
