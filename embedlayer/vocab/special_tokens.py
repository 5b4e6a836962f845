"""The roles of special tokens: which token begins a text, ends one, pads, and so on.

A `tokenizers.Tokenizer` does not know the roles. The files beside it in a checkpoint state them; without these files
they follow from the usual names.
"""

import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from embedlayer.core.errors import (
    CheckpointError,
    EmbedLayerWarning,
    FileError,
    TokenizerError,
    VocabularyError,
    require,
    transformers_errors,
)
from embedlayer.core.formatting import a_or_an
from embedlayer.families.tokenizers import BPE_CLASSES, GENERIC_CLASSES, WORDPIECE_CLASSES
from embedlayer.io.files import JsonObject, read_json
from embedlayer.tokenization.ids import EQUIVALENT, USUAL_NAMES
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer
from embedlayer.tokenization.tokenizer_config import class_name, read_tokenizer_config

_STATED_IN = ("tokenizer_config.json", "special_tokens_map.json")
_PLAIN_NAMES = ("tokenizer.json", "vocab.json", "encoder.json", "vocab.txt", "tokenizer.model", "spiece.model")
_IDENTIFYING = ("pad_token", "eos_token", "bos_token", "sep_token", "cls_token", "mask_token", "unk_token")
_READS_TOKENIZER_JSON = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that read tokenizer.json as it is; those of a model family add rules of their own."""

LISTS_OF_NAMES = ("additional_special_tokens", "extra_special_tokens")
"""Names under which transformers lists special tokens that have no role."""

_DPR = ("DPRContextEncoder", "DPRQuestionEncoder")
_BERT = ("Bert", "ConvBert", *_DPR, "Electra", "Lxmert", "MarkupLM", "MobileBert", "SqueezeBert")
_DEBERTA = ("Deberta", "DebertaV2")
_PADS_LEFT = ("CodeLlama", "Cohere", "Gemma", "Llama", "Phi3", "Siglip2", "XLNet")
"""Tokenizer classes of transformers, without `Tokenizer`, whose settings differ from those of the generic class."""

_OF_THE_MODEL = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template")
_OF_FILES = ("auto_map", "tokenizer_file", "vocab_file", "merges_file", "spm_file")


class SpecialTokens(dict[str, str]):
    """Dictionary from each role, such as `eos_token`, to the text of the tokenizer's special token with that role.

    Attributes:
        doubt: If the end-of-text token is a guess, a sentence that says so; else `None`.
    """

    doubt: str | None = None

    def warn(self) -> None:
        """Warn with the sentence `doubt` if the end-of-text token is a guess; otherwise do nothing."""
        if self.doubt is not None:
            warnings.warn(self.doubt, EmbedLayerWarning, stacklevel=5)


def tokenizer_with_roles(source: object, special: Mapping[str, str] | None = None) -> tuple[Tokenizer, SpecialTokens]:
    """Return a tokenizer, and a dictionary from each role to the text of its special token."""
    if isinstance(source, str | Path):
        path = Path(source)
        tokenizer, texts = load_tokenizer(path), {}
        if path.is_dir() or path.name in _PLAIN_NAMES:
            texts = stated_roles(path if path.is_dir() else path.parent)
    else:
        tokenizer = as_tokenizer(source)
        roles = getattr(source, "special_tokens_map", None)
        texts = {role: token_text(token) for role, token in roles.items()} if isinstance(roles, Mapping) else {}
    added = added_texts(tokenizer)
    for role, token in (special or {}).items():
        if role not in USUAL_NAMES or token not in added:
            raise TokenizerError(
                f"{role}={token!r}: a role is one of {', '.join(USUAL_NAMES)}, and its token one of {sorted(added)}."
            )
    return tokenizer, special_tokens_of(tokenizer, {**texts, **(special or {})})


def stated_roles(folder: Path) -> dict[str, str]:
    """Return the special tokens that a checkpoint's tokenizer files state, as a dictionary from role to text."""
    roles: dict[str, str] = {}
    for name in _STATED_IN:
        with suppress(FileError):
            content = read_json(folder / name)
            texts = {role: token_text(content.get(role)) for role in USUAL_NAMES}
            roles = {role: token for role, token in texts.items() if isinstance(token, str)} | roles
    return roles


def roles_of_class(folder: Path) -> dict[str, str] | None:
    """Return the roles of a folder's tokenizer: those that its files state, and those of its class in transformers."""
    config = read_tokenizer_config(folder)
    kind = class_name(str(config.settings.get("tokenizer_class") or config.kind or ""))
    rules = BPE_CLASSES.get(kind) or WORDPIECE_CLASSES.get(kind)
    is_generic = kind in GENERIC_CLASSES or (not kind and config.model_type is None)
    if rules is not None or is_generic:
        roles = {role: config.role(role, {} if rules is None else rules.roles) for role in USUAL_NAMES}
        return {role: token for role, token in roles.items() if token is not None}
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoTokenizer

    with suppress(CheckpointError), transformers_errors(f"open the tokenizer of {folder}"):
        opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return {role: token_text(token) for role, token in opened.special_tokens_map.items() if role in USUAL_NAMES}
    return None  # the class is not there, or reads other files


def special_tokens_of(tokenizer: Tokenizer, stated: Mapping[str, str]) -> SpecialTokens:
    """Return a dictionary from each role, such as `eos_token`, to the text of the tokenizer's special token."""
    added = added_texts(tokenizer)
    known = SpecialTokens({role: stated[role] for role in USUAL_NAMES if stated.get(role) in added})
    if known:
        return known
    for role, names in USUAL_NAMES.items():
        present = [name for name in names if name in added]
        if present:
            known[role] = present[0]
        if role == "eos_token" and len(present) > 1:
            known.doubt = (
                f"The tokenizer does not say which token ends a text: {present[0]!r} is assumed, and {present[1]!r} "
                f"is possible. Pass the folder with its tokenizer_config.json, or "
                f"special={{'eos_token': {present[1]!r}}}."
            )
    return known


def added_texts(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.get_added_tokens_decoder().values()}


class NewTokenIds:
    """Convert the token IDs in configurations, such as `eos_token_id`, after an edit of the vocabulary.

    If another tokenizer replaces the old one, an entry gets the ID of the new token with the same role: the
    `eos_token_id` becomes the ID of the new `eos_token`, not the new ID of the old token.

    Args:
        new_ids: New ID of each old ID, or -1 for a removed token.
        dropped: From the old ID of each removed token to its text.
        tokenizer: The tokenizer after the edit, or `None`.
        special_tokens: If another tokenizer replaces the old one: from each role to the text of its special token.
            Else `None`.
        size: Number of rows after the edit.

    Attributes:
        role_ids: If another tokenizer replaces the old one: from each role to the ID of its special token. Else `None`.
    """

    def __init__(
        self,
        new_ids: Sequence[int],
        dropped: Mapping[int, str],
        tokenizer: Tokenizer | None = None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        size: int,
    ) -> None:
        self.new_ids, self.dropped, self.size = new_ids, dropped, size
        self.role_ids: dict[str, int] | None = None
        if tokenizer is not None and special_tokens is not None:
            ids = {role: tokenizer.token_to_id(token) for role, token in special_tokens.items()}
            self.role_ids = {role: token_id for role, token_id in ids.items() if token_id is not None}

    def of(self, key: str, value: Any, config: Mapping[str, Any], where: str, *, role: str = "") -> Any:
        """Return the new value of one entry of a configuration; `config` is not changed.

        If another tokenizer replaces the old one, an entry for a role, such as `eos_token_id`, gets that role's new ID,
        whatever its old value; `None` stays, and the result is `None` if the new tokenizer has no such token. In a list
        the role's ID replaces the first one, and removed tokens are left out. Any other entry whose old ID the
        configuration also states for a role gets that role's new ID, if there is one. Else the result is the new ID of
        the old token.

        Args:
            key: Name of the entry, such as `eos_token_id`.
            value: The old ID, a list of old IDs, or `None`. In an entry that gets no role's ID, any other value, and a
                number that is no old ID, is returned unchanged.
            config: The configuration that contains the entry.
            where: Name of the configuration, for the error.
            role: The usual key of the entry's role, such as `pad_token_id` for `pad_index`; "" if `key` is that key.

        Raises:
            VocabularyError: The token of an entry that gets no role's ID is removed; or the entry is for the padding
                token, and the new tokenizer has none.

        Warns:
            EmbedLayerWarning: The entry is for the end-of-text token, and the new tokenizer does not state one.
        """
        role = (role or key).removesuffix("s").removesuffix("_id")
        if self.role_ids is not None and role in USUAL_NAMES:
            return self._by_role(role, value, key, where)
        if isinstance(value, list | tuple):
            return type(value)(self.of(key, one, config, where, role=role) for one in value)
        if type(value) is not int or not 0 <= value < len(self.new_ids):
            return value
        if self.role_ids is not None:
            same = next((name for name in _IDENTIFYING if first_id(config.get(f"{name}_id")) == value), None)
            if same is not None and self.id_of(same) is not None:
                return self.id_of(same)
        if self.new_ids[value] < 0:
            name = f" ({self.dropped[value]!r})" if value in self.dropped else ""
            raise VocabularyError(f"Token {value}{name} cannot be removed: {where} names it as {key}.")
        return self.new_ids[value]

    def _by_role(self, role: str, value: Any, key: str, where: str) -> Any:
        """Return the new value of a configuration's entry for a role, if another tokenizer replaces the old one."""
        if value is None:
            return None
        new = self.id_of(role)
        if new is None and role == "pad_token":
            raise VocabularyError(f"{where} names {key}, the new tokenizer none: special={{'pad_token': TOKEN}}.")
        if new is None and role == "eos_token":
            warnings.warn(
                f"{where} names the token that ends a text as {key}, and the new tokenizer does not say which does: "
                f"{key} becomes null. State it: pass the tokenizer's folder if its files name it, or "
                f"special={{'eos_token': TOKEN}} to embedlayer.vocab.transplant.",
                EmbedLayerWarning,
                stacklevel=2,
            )
        if not isinstance(value, list | tuple):
            return new
        others = [self.new_ids[one] for one in value[1:] if type(one) is int and 0 <= one < len(self.new_ids)]
        return type(value)(dict.fromkeys(([] if new is None else [new]) + [one for one in others if one >= 0]))

    def id_of(self, role: str) -> int | None:
        """Return the ID of the new tokenizer's special token for a role, such as `eos_token`, or `None` if it has none.

        If only the equivalent role has a token (`sep_token` for `eos_token`), its ID is returned. May be called only if
        another tokenizer replaces the old one.
        """
        assert self.role_ids is not None
        return self.role_ids.get(role, self.role_ids.get(EQUIVALENT.get(role, "")))


def names_in(template: str, names: Sequence[str]) -> list[str]:
    """Return those of `names` that occur in a chat template, as plain text or with the escapes of JSON."""
    return [name for name in names if name in template or json.dumps(name)[1:-1] in template]


def tokenizer_config(old: JsonObject, roles: Mapping[str, str], model: JsonObject, *, replaced: bool) -> JsonObject:
    """Return the content of a `tokenizer_config.json` with which transformers uses `tokenizer.json` as it is."""
    entries = {key: value for key, value in old.items() if (key in _OF_THE_MODEL if replaced else key not in _OF_FILES)}
    entries = class_settings(old.get("tokenizer_class"), model) | entries
    new_roles = {role: token for role, token in roles.items() if replaced or entries.get(role) is None}
    generic = old.get("tokenizer_class") if old.get("tokenizer_class") in _READS_TOKENIZER_JSON else None
    return {**entries, **new_roles, "tokenizer_class": generic or _READS_TOKENIZER_JSON[0]}


def with_class(old: JsonObject, name: str) -> JsonObject:
    """Return the content of a `tokenizer_config.json` for `tokenizer.json` and a tokenizer class of transformers."""
    return {**{key: value for key, value in old.items() if key not in _OF_FILES}, "tokenizer_class": name}


def class_settings(name: str | None, model: JsonObject) -> JsonObject:
    """Return the settings of a tokenizer class of transformers that differ from those of `PreTrainedTokenizerFast`."""
    # Without them a BERT tokenizer returns no `token_type_ids`, and LLaMA's pads on the other side. transformers 5
    # opens LLaMA's class as the generic one for other families, so its side counts for its own family only.
    stem, inputs = class_name(name or ""), ["input_ids", "attention_mask"]
    family = str(model.get("model_type", "")).replace("_", "")
    if stem in _PADS_LEFT and family and (family.startswith(stem.lower()) or stem.lower().endswith(family)):
        return {"padding_side": "left"}
    if stem in _DEBERTA:
        return {"model_input_names": [*inputs, "token_type_ids"]}
    if stem == "FNet":
        return {"model_input_names": ["input_ids", "token_type_ids"]}
    if stem in _BERT or (name is None and model.get("type_vocab_size", 0) > 1):
        return {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    return {}


def token_text(token: Any) -> Any:
    """Return the text of a token that is stated as a text, as a dictionary with `content`, or as an `AddedToken`."""
    return token.get("content") if isinstance(token, dict) else getattr(token, "content", token)


def first_id(value: Any) -> Any:
    """Return the first ID of a list, `None` for an empty list, and any other value unchanged."""
    return (value[0] if value else None) if isinstance(value, list | tuple) else value


_SETTINGS = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "clean_up_tokenization_spaces")


def transformers_tokenizer(tokenizer: Tokenizer, like: Any, *, special: Mapping[str, str] | None = None) -> Any:
    """Return a tokenizer of transformers with the IDs of an edited tokenizer and the settings of the old one.

    An edit of a live model changes neither the tokenizer that was passed nor its backend, which other models may use;
    `receipt.tokenizer` is the edited one. This function wraps it for code that needs a tokenizer of transformers. Kept
    are the roles of special tokens, the lists of further special tokens and chat templates, as far as the tokens still
    exist; the sides of padding and truncation, the names of the model's inputs, the largest length, and whether
    decoding cleans up spaces.

    Args:
        tokenizer: The edited tokenizer, such as `receipt.tokenizer`.
        like: The fast tokenizer of transformers before the edit; it is not changed.
        special: After a change to another tokenizer: its special tokens by role, such as `{"eos_token": "<|end|>"}`.
            The default is the roles of `like` whose tokens exist; if there are none, they follow from the usual names.

    Returns:
        A `transformers.PreTrainedTokenizerFast`. `save_pretrained` writes files that `AutoTokenizer` reads.

    Raises:
        TokenizerError: `like` is not a fast tokenizer of transformers.
        MissingExtraError: transformers is not installed: `pip install 'embedlayer[hf]'`.

    Warns:
        EmbedLayerWarning: A chat template is left out, because it contains tokens that no longer exist.

    Example:
        >>> from transformers import PreTrainedTokenizerFast
        >>> old = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", padding_side="left")
        >>> edit = edit_tokenizer(old, add=["cat"], special=["<|call|>"])
        >>> new = transformers_tokenizer(edit.tokenizer, like=old)
        >>> new("a cat<|call|>").input_ids == edit.tokenizer.encode("a cat<|call|>").ids, new.padding_side
        (True, 'left')
    """
    roles = getattr(like, "special_tokens_map", None)
    if not isinstance(roles, Mapping):
        raise TokenizerError(f"like must be a fast tokenizer of transformers, not {a_or_an(like)}.")
    there = added_texts(tokenizer)
    texts = {role: token_text(token) for role, token in {**roles, **(special or {})}.items()}
    named = {role: token for role, token in texts.items() if isinstance(token, str) and token in there}
    options = {name: getattr(like, name) for name in _SETTINGS if getattr(like, name, None) is not None}
    for name in LISTS_OF_NAMES:
        listed = getattr(like, name, None)
        if isinstance(listed, Sequence) and listed:
            options[name] = [token for token in map(token_text, listed) if token in there]
    templates = _kept_templates(like.chat_template, sorted(added_texts(as_tokenizer(like)) - there))
    return require("transformers", extra="hf").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=templates, **options, **(named or special_tokens_of(tokenizer, {}))
    )


def _kept_templates(templates: str | dict[str, str] | None, lost: Sequence[str]) -> str | dict[str, str] | None:
    """Return the chat templates that contain none of the tokens `lost`; warn of the others."""
    named = templates if isinstance(templates, dict) else {"default": templates or ""}
    absent = sorted({name for text in named.values() for name in names_in(text, lost)})
    if not absent:
        return templates
    warnings.warn(
        f"A chat template is left out: it contains {', '.join(absent)}, which the new tokenizer does not have. Write "
        f"one for the new tokenizer.",
        EmbedLayerWarning,
        stacklevel=3,
    )
    return {name: text for name, text in named.items() if not names_in(text, lost)} or None
