"""What the files beside a vocabulary say about its tokenizer: class, settings, special tokens and added tokens.

The files are those of transformers: `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, and the
model type of `config.json`.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from tokenizers.processors import PostProcessor

from embedlayer.core.errors import CheckpointError, TokenizerError
from embedlayer.families.tokenizers import (
    BPE_CLASSES,
    CLASS_OF_TYPE,
    CONVERTED_CLASSES,
    GENERIC_CLASSES,
    REFUSED_CLASSES,
    SENTENCEPIECE_CLASSES,
    WORDPIECE_CLASSES,
)
from embedlayer.io.files import read_json

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens, in the order in which transformers adds those that a vocabulary lacks."""

_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

ADVICE = (
    "Where transformers is installed, write the tokenizer.json of the folder with AutoTokenizer."
    "from_pretrained({folder!r}).save_pretrained({folder!r})"
)
"""What helps where the rules of a class are not known, for a message; `folder` is the folder."""


@dataclass(frozen=True)
class TokenizerConfig:
    """What the files of a folder state about its tokenizer."""

    folder: Path
    kind: str | None = None  # the tokenizer class without `Tokenizer` and `Fast`
    names_class: bool = False  # a file names it, not the model type alone
    model_type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, AddedToken | str | None] = field(default_factory=dict)  # special tokens; `None`: set to null
    specials: tuple[AddedToken, ...] = ()  # special tokens without a role
    added: Mapping[int, AddedToken] = field(default_factory=dict)

    def setting(self, name: str, default: bool) -> bool:
        """Return a setting of `tokenizer_config.json` that is true or false; `default` if the file does not set it."""
        value = self.settings.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(f"{self.folder} sets {name} to {value!r}, not true or false.")
        return value

    def role(self, name: str, defaults: Mapping[str, str]) -> str | None:
        """Return the text of the special token of a role, as the files or else `defaults` say; `None` without one."""
        if name in self.roles:
            token = self.roles[name]
            return token if token is None or isinstance(token, str) else token.content
        return defaults.get(name)

    def refuse_class(self, file: Path, known: str = "", *, reason: str = "") -> TokenizerError:
        """Return the error for a class whose rules for `file` are not known, with what helps."""
        model = "" if self.model_type is None else f" (model type {self.model_type})"
        if self.kind is None or self.kind in GENERIC_CLASSES:
            return TokenizerError(
                f"{file} has no file beside it that names its tokenizer class{model}: put the tokenizer_config.json or "
                f"tokenizer.json of the model there. Known: {known}."
            )
        is_read = self.kind in (*BPE_CLASSES, *WORDPIECE_CLASSES, *SENTENCEPIECE_CLASSES)
        unknown = "does not read this file" if is_read else "has rules that are not known here"
        reason = reason or REFUSED_CLASSES.get(self.kind, unknown)
        advice = (
            ADVICE.format(folder=str(self.folder))
            if self.kind in CONVERTED_CLASSES
            else "Put the tokenizer.json of the model into the folder if there is one, or encode text with the class "
            "itself and pass the token IDs"
        )
        return TokenizerError(f"{file} belongs to {self.kind}Tokenizer{model}, which {reason}. {advice}.")


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read what the files of a folder state about its tokenizer. Missing files state nothing."""
    settings, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    model_type = model.get("model_type") if isinstance(model.get("model_type"), str) else None
    named = next((name for name in (settings.get("tokenizer_class"), model.get("tokenizer_class")) if name), None)
    kind = None if named is None else class_name(str(named))
    if kind is None or kind in GENERIC_CLASSES:
        kind = CLASS_OF_TYPE.get(model_type, kind) if model_type is not None else kind
        named = named if kind in GENERIC_CLASSES else None
    special_map = _read(folder / "special_tokens_map.json")
    decoder = settings.get("added_tokens_decoder")
    texts = {**settings, **({} if isinstance(decoder, dict) else special_map)}
    roles = {role: _token(texts[role], folder) for role in ROLES if role in texts}
    listed = [token for name in _LISTS if isinstance(texts.get(name), list) for token in texts[name]]
    specials = [
        AddedToken(token, special=True) if isinstance(token, str) else token
        for token in (_token(each, folder) for each in listed)
        if token is not None
    ]
    names = {str(token if isinstance(token, str) else token.content) for token in (*roles.values(), *specials) if token}
    added = _added(folder, decoder, names)
    by_text = {token.content: token for token in added.values()}
    return TokenizerConfig(
        folder,
        kind,
        named is not None,
        model_type,
        settings,
        {role: by_text.get(token, token) if isinstance(token, str) else token for role, token in roles.items()},
        tuple(by_text.get(token.content, token) for token in specials),
        added,
    )


def add_configured_tokens(
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    defaults: Mapping[str, str],
    *,
    file: Path,
    lstrip: tuple[str, ...] = (),
    normalizes: bool = True,
) -> None:
    """Add the tokens that the files state, and the special tokens of a class, to a tokenizer in place.

    Added tokens come first, in the order of their IDs; then the special tokens, which get the next IDs if the
    vocabulary lacks them. Special tokens that only the class states, and not a file, are not added if the vocabulary
    lacks them. `lstrip` are roles whose token takes the spaces before it, unless a file sets the token with other
    rules.
    """
    for token_id, token in sorted(config.added.items()):
        token = token if normalizes else _on_raw_text(token)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        own_id = tokenizer.token_to_id(token.content)
        if own_id != token_id:
            raise TokenizerError(
                f"{config.folder} gives {token.content!r} the ID {token_id}; after {file.name} it is {own_id}."
            )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    present = {token.content for token in config.added.values()}
    for role in ROLES:
        named = config.roles[role] if role in config.roles else defaults.get(role)
        if isinstance(named, str):
            if role not in config.roles and named not in vocabulary:
                continue
            named = AddedToken(named, special=True, lstrip=role in lstrip)
        if named is not None and named.content not in present:
            tokenizer.add_special_tokens([named if normalizes else _on_raw_text(named)])
            present.add(named.content)
    tokenizer.add_special_tokens([token for token in config.specials if token.content not in present])


def _on_raw_text(token: AddedToken) -> AddedToken:
    """Return a token that is found before the text is normalised, with the other rules of `token`."""
    rules = {flag: getattr(token, flag) for flag in _FLAGS if flag != "normalized"}
    return AddedToken(token.content, normalized=False, **rules)


def template(
    tokenizer: Tokenizer, starts: Sequence[str], ends: Sequence[str], between: Sequence[str] | None, file: Path
) -> PostProcessor:
    """Return the processor that puts `starts` in front of a text and `ends` behind it.

    `between` are the tokens between two texts; by default `ends`, or `starts` if there are none.
    """
    if between is None:
        between = ends or starts
    pairs = []
    for name in dict.fromkeys((*starts, *ends, *between)):
        token_id = tokenizer.token_to_id(name)
        if token_id is None:
            raise TokenizerError(f"{file} has no {name!r}, which its tokenizer class puts around a text.")
        pairs.append((name, token_id))
    return processors.TemplateProcessing(
        single=[*starts, "$A", *ends], pair=[*starts, "$A", *between, "$B", *ends], special_tokens=pairs
    )


def class_name(name: str) -> str:
    """Return the name of a tokenizer class without `Fast` and `Tokenizer`."""
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def read_json_file(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON file as `read_json_file` does; a missing file is an empty object."""
    return read_json_file(file) if file.is_file() else {}


def _token(value: object, folder: Path) -> AddedToken | str | None:
    """Return a special token as a file writes it: its text, or with its rules as an `AddedToken`; `None` for null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)}
        return AddedToken(value["content"], **{"special": True, **flags})
    raise TokenizerError(f"{folder} has a special token {value!r}, which is neither a text nor has content.")


def _added(folder: Path, decoder: object, specials: Container[str]) -> dict[int, AddedToken]:
    """Return the added tokens by ID: those of `added_tokens_decoder`, or else of `added_tokens.json`."""
    if isinstance(decoder, dict):
        tokens = {}
        for token_id, value in decoder.items():
            content = value.get("content") if isinstance(value, dict) else None
            if not str(token_id).isdecimal() or not isinstance(content, str):
                raise TokenizerError(f"{folder / 'tokenizer_config.json'} has an added token {token_id!r}: {value!r}.")
            flags = {flag: value[flag] for flag in _FLAGS if isinstance(value.get(flag), bool)}
            tokens[int(token_id)] = AddedToken(content, **flags)
        return tokens
    file = folder / "added_tokens.json"
    content = _read(file)
    if not all(type(token_id) is int for token_id in content.values()):
        raise TokenizerError(f"{file} is not a list of added tokens: it should map each token to its ID.")
    return {
        token_id: AddedToken(text, special=text in specials, normalized=text not in specials)
        for text, token_id in content.items()
    }
