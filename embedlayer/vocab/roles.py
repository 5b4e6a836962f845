"""What special tokens are for: which token begins a text, ends one, pads, and so on.

A tokenizers.Tokenizer does not know; the files beside it in a checkpoint say so, and else the usual names.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from embedlayer.data.tokenizer import as_tokenizer, load_tokenizer
from embedlayer.errors import EmbedLayerWarning, FileError, TokenizerError, VocabularyError
from embedlayer.io.files import JsonObject, read_json

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "unk_token": ("<unk>", "[UNK]"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos_token": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("<mask>", "[MASK]"),
}
"""Role, as transformers calls it, to the names that tokens of this role usually have; the most likely first."""

ALIKE = {"bos_token": "cls_token", "cls_token": "bos_token", "eos_token": "sep_token", "sep_token": "eos_token"}
"""Roles that replace each other where a tokenizer has only one of the two."""

_STATED_IN = ("tokenizer_config.json", "special_tokens_map.json")
_PLAIN_NAMES = ("tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "tokenizer.model", "spiece.model")


class Roles(dict[str, str]):
    """The special token of each role that a tokenizer has.

    Attributes:
        doubt: A sentence where the end of a text is guessed from several usual names, or `None`.
    """

    doubt: str | None = None

    def warn(self) -> None:
        """Warn of the doubt, where the end of a text matters."""
        if self.doubt is not None:
            warnings.warn(self.doubt, EmbedLayerWarning, stacklevel=5)


def tokenizer_with_roles(source: object, special: Mapping[str, str] | None = None) -> tuple[Tokenizer, Roles]:
    """Return a tokenizer and the token of each role that it has.

    Args:
        source: A `tokenizers.Tokenizer`, a fast tokenizer of transformers, or the path of a file or folder that
            `load_tokenizer` reads.
        special: Roles to tokens, such as `{"eos_token": "<|end|>"}`; go before what is stated elsewhere.

    Raises:
        TokenizerError: `source` is no tokenizer, or `special` names no role or no special token of it.

    Example:
        >>> _, roles = tokenizer_with_roles(train_tokenizer((), kind="byte"))
        >>> roles
        {'bos_token': '<|endoftext|>', 'eos_token': '<|endoftext|>'}
    """
    if isinstance(source, str | Path):
        path = Path(source)
        tokenizer = load_tokenizer(path)
        stated = stated_roles(path if path.is_dir() else path.parent) if _has_files_beside(path) else {}
    else:
        tokenizer = as_tokenizer(source)
        theirs = getattr(source, "special_tokens_map", None)
        stated = {} if not isinstance(theirs, Mapping) else {role: _text(token) for role, token in theirs.items()}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for role, token in (special or {}).items():
        if role not in USUAL_NAMES or token not in added:
            raise TokenizerError(
                f"{role}={token!r} is no special token of the new tokenizer: a role is one of "
                f"{', '.join(USUAL_NAMES)}, and its token one of {', '.join(sorted(added)) or 'none'}."
            )
    return tokenizer, roles_of(tokenizer, {**stated, **(special or {})})


def stated_roles(folder: Path) -> dict[str, str]:
    """Return the token of each role as the files of a checkpoint's tokenizer state it."""
    stated: dict[str, str] = {}
    for name in _STATED_IN:
        try:
            content = read_json(folder / name) if (folder / name).is_file() else {}
        except FileError:
            content = {}
        found = {role: _text(content.get(role)) for role in USUAL_NAMES}
        stated |= {role: token for role, token in found.items() if isinstance(token, str) and role not in stated}
    return stated


def roles_of(tokenizer: Tokenizer, stated: Mapping[str, str]) -> Roles:
    """Return the special token of each role: as stated or, where nothing is stated, by the usual names.

    Where anything is stated, a role that is not has no token.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known = Roles({role: stated[role] for role in USUAL_NAMES if stated.get(role) in added})
    if known:
        return known
    for role, names in USUAL_NAMES.items():
        present = [name for name in names if name in added]
        if present:
            known[role] = present[0]
        if role == "eos_token" and len(present) > 1:
            known.doubt = (
                f"The tokenizer does not say which token ends a text: {present[0]!r} is taken, and {present[1]!r} "
                f"could be it. Give the folder with its tokenizer_config.json, or say "
                f"special={{'eos_token': {present[1]!r}}}."
            )
    return known


class NewTokenIds:
    """The new IDs of tokens that a configuration names.

    Args:
        new_ids: New ID of each old one, or -1.
        dropped: Texts of tokens that are gone, by their old ID.
        roles: Where the tokenizer is another one: the ID of each role's token. A configuration's `eos_token_id` is
            then that of the new tokenizer's own end, whatever row matched the old one.
    """

    def __init__(self, new_ids: Sequence[int], dropped: Mapping[int, str], roles: Mapping[str, int] | None) -> None:
        self.new_ids, self.dropped, self.roles = new_ids, dropped, roles

    def of(self, key: str, value: Any, beside: Mapping[str, Any], where: str) -> Any:
        """Return what a configuration's entry becomes.

        Args:
            key: Such as `eos_token_id`.
            value: An ID, a list of IDs, or `None`.
            beside: The configuration that the entry is of: which ID has which role there.
            where: Name of the configuration, for the error.

        Raises:
            VocabularyError: The token is gone, or the new tokenizer has none of a role that cannot be empty.
        """
        role = key.removesuffix("s").removesuffix("_id")
        if self.roles is not None and role in USUAL_NAMES:
            return self._by_role(role, value, key, where)
        if isinstance(value, list | tuple):
            return type(value)(self.of(key, one, beside, where) for one in value)
        if type(value) is not int or not 0 <= value < len(self.new_ids):
            return value
        if self.roles is not None:
            own = next((name for name in _MOST_DEFINITE if _first(beside.get(f"{name}_id")) == value), None)
            if own is not None and self._id_of(own) is not None:
                return self._id_of(own)
        if self.new_ids[value] < 0:
            name = f" ({self.dropped[value]!r})" if value in self.dropped else ""
            raise VocabularyError(
                f"Token {value}{name} cannot go: {where} names it as {key}. Keep it, or change {where} first."
            )
        return self.new_ids[value]

    def _by_role(self, role: str, value: Any, key: str, where: str) -> Any:
        if value is None:
            return None
        new = self._id_of(role)
        if new is None and role == "pad_token":
            raise VocabularyError(
                f"The new tokenizer has no token that pads, and {where} names one as {key}. Add it first: "
                f"edit_tokenizer(new_tokenizer, special=['<pad>']).tokenizer."
            )
        if not isinstance(value, list | tuple):
            return new
        others = [self.new_ids[one] for one in value[1:] if type(one) is int and 0 <= one < len(self.new_ids)]
        return type(value)(dict.fromkeys(([] if new is None else [new]) + [one for one in others if one >= 0]))

    def _id_of(self, role: str) -> int | None:
        assert self.roles is not None
        return self.roles.get(role, self.roles.get(ALIKE.get(role, "")))


_MOST_DEFINITE = ("pad_token", "eos_token", "bos_token", "sep_token", "cls_token", "mask_token", "unk_token")


def role_ids(tokenizer: Tokenizer | None, roles: Mapping[str, str] | None) -> dict[str, int] | None:
    """Return the ID of each role's token; `None` where no roles are given."""
    if tokenizer is None or roles is None:
        return None
    ids = {role: tokenizer.token_to_id(token) for role, token in roles.items()}
    return {role: token_id for role, token_id in ids.items() if token_id is not None}


def names_in(template: str, names: Sequence[str]) -> list[str]:
    """Return those tokens that a chat template writes out."""
    return [name for name in names if name in template or json.dumps(name)[1:-1] in template]


def tokenizer_config(old: JsonObject, roles: Mapping[str, str], *, replaced: bool) -> JsonObject:
    """Return a tokenizer_config.json with which transformers reads tokenizer.json as it is.

    Args:
        old: What it was, empty if there was none.
        roles: The token of each role.
        replaced: The tokenizer is another one: of `old` only what is about the model stays.
    """
    kept = {key: value for key, value in old.items() if (key in _OF_THE_MODEL if replaced else key not in _OF_FILES)}
    stated = {role: token for role, token in roles.items() if replaced or kept.get(role) is None}
    generic = old.get("tokenizer_class") if old.get("tokenizer_class") in _READS_TOKENIZER_JSON else None
    return {**kept, **stated, "tokenizer_class": generic or _READS_TOKENIZER_JSON[0]}


_READS_TOKENIZER_JSON = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take tokenizer.json as it is; those of a model family add rules of their own."""

_OF_THE_MODEL = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template")
_OF_FILES = ("auto_map", "tokenizer_file", "vocab_file", "merges_file", "spm_file")


def _has_files_beside(path: Path) -> bool:
    return path.is_dir() or path.name in _PLAIN_NAMES


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else getattr(token, "content", token)


def _first(value: Any) -> Any:
    return (value[0] if value else None) if isinstance(value, list | tuple) else value
