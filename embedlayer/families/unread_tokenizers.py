"""Files of tokenizers that are not read: how they are named, what they are, and what helps."""

from typing import NamedTuple


class UnreadTokenizer(NamedTuple):
    """A kind of tokenizer file that is not read.

    Attributes:
        pattern: Glob pattern of its name.
        what: What the file is, the middle of a sentence.
        copied_to: Name under which a copy is read; `"*"` in it stands for the stem. Empty if no name helps.
    """

    pattern: str
    what: str
    copied_to: str = ""


MARIAN = UnreadTokenizer("source.spm", "the SentencePiece model of a Marian model, whose IDs are in vocab.json")
TIKTOKEN = UnreadTokenizer("*.tiktoken", "a vocabulary of tiktoken")

UNREAD_TOKENIZERS: tuple[UnreadTokenizer, ...] = (
    MARIAN,
    MARIAN._replace(pattern="target.spm"),
    TIKTOKEN,
    UnreadTokenizer("tekken.json", "a tekken tokenizer of Mistral"),
    UnreadTokenizer("tokenizer.model.v*", "a SentencePiece model under a name of Mistral's", "tokenizer.model"),
    UnreadTokenizer("*.spm", "a SentencePiece model under another name", "*.model"),
)
"""The kinds; the first one that fits a name counts."""
