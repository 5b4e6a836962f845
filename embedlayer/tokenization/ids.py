"""The IDs of a tokenizer: how many rows they need of a table, and the roles of special tokens, such as end of text."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from embedlayer.core.errors import TokenizerError
from embedlayer.core.formatting import command_line
from embedlayer.tokenization.vocabulary_files import END_OF_TEXT

MAX_TOKEN_IDS = 1 << 24
"""Largest table size. A file with a higher ID is damaged, and its table would fill the memory."""

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "unk_token": ("<unk>", "[UNK]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos_token": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("<mask>", "[MASK]"),
}
"""The usual names of the token of each role, the most likely first; roles are named as in transformers."""

EQUIVALENT = {"bos_token": "cls_token", "cls_token": "bos_token", "eos_token": "sep_token", "sep_token": "eos_token"}
"""Roles that replace each other where a tokenizer has only one of the two."""

_ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|eot_id|>")


def table_size(tokenizer: Tokenizer) -> int:
    """Return the number of rows that a table needs for this tokenizer: its highest ID plus 1. IDs may have gaps.

    Raises:
        TokenizerError: The highest ID is `MAX_TOKEN_IDS` or more.

    Example:
        >>> table_size(train_tokenizer((), kind="byte"))
        257
    """
    entries = tokenizer.get_vocab_size()
    if entries <= MAX_TOKEN_IDS and all(tokenizer.id_to_token(index) is not None for index in range(entries)):
        return entries  # as many IDs as entries, so there is no higher one
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > MAX_TOKEN_IDS:
        name = next(entry for entry, token_id in vocabulary.items() if token_id == size - 1)
        raise TokenizerError(f"{name!r} has the ID {size - 1:,}; IDs are below {MAX_TOKEN_IDS:,}. The file is damaged.")
    return size


def missing_rows_message(tokenizer: Tokenizer, rows: int, where: object = None) -> str | None:
    """Return, without raising it, the message for IDs of a tokenizer that exceed the rows of a table, else `None`."""
    size = table_size(tokenizer)
    if size <= rows:
        return None
    of, missing = "" if where is None else f" of {where}", f"{size - rows} tokens have none"
    what = f"The tokenizer{of} gives IDs up to {size - 1} and the table has {rows} rows: {missing}."
    if not added_without_rows(tokenizer, rows):
        remedy = f"use the tokenizer of the model, or embedlayer.vocab.add_tokens(model, {size - rows})"
        return f"{what} They do not belong together: {remedy}."
    line = "embedlayer vocab add DIR -o OUT for a folder"
    if isinstance(where, Path) and where.is_dir():
        line = command_line("vocab", "add", where, "-o", "...")
    return f"{what} Give them rows: {line}, or embedlayer.vocab.add_tokens(model, [], tokenizer=tokenizer)."


def added_without_rows(tokenizer: Tokenizer, rows: int) -> list[int]:
    """Return the IDs of `rows` and more, if all of them are added tokens of the tokenizer; else an empty list."""
    # the case of a tokenizer that was extended while the table was not; a tokenizer of another model has ordinary
    # tokens at these IDs
    missing = sorted(token_id for token_id in tokenizer.get_vocab(with_added_tokens=True).values() if token_id >= rows)
    return missing if {*missing} <= tokenizer.get_added_tokens_decoder().keys() else []


def require_rows(tokenizer: Tokenizer, rows: int, where: object = None) -> None:
    """Raise an error if the IDs of a tokenizer exceed the rows of a table."""
    if mismatch := missing_rows_message(tokenizer, rows, where):
        raise TokenizerError(mismatch)


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    """Return the ID of the end-of-text token, which separates documents; `None` if the tokenizer has none."""
    ids = (tokenizer.token_to_id(token) for token in _ENDS_OF_TEXT)
    return next((token_id for token_id in ids if token_id is not None), None)


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the ID of the unknown token, for text that the model cannot encode, or `None`."""
    model: Any = tokenizer.model
    if isinstance(model, models.Unigram):  # it has the ID alone, and no attribute for it
        token_id: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return token_id
    name = getattr(model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)
