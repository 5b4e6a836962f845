"""The configuration and tokenizer files of a checkpoint folder after an edit.

Tokenizer classes of transformers that put the language or the task before a text are kept if they give the IDs of the
edited tokenizer, because `tokenizer.json` cannot state these tokens.
"""

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from embedlayer.checkpoints.meta_layout import PARAMS
from embedlayer.checkpoints.reader import CONFIG
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, VocabularyError, transformers_errors
from embedlayer.families import PER_LAYER_ROWS
from embedlayer.families.class_defaults import with_moved_defaults
from embedlayer.families.configurations import edited_configuration
from embedlayer.families.tokenizers import CLASS_OF_TYPE, OWN_RULES
from embedlayer.io.files import JsonObject, read_bytes, read_json, write_json
from embedlayer.io.partials import temporary_folder
from embedlayer.opening.path_kinds import GENERATION, TOKENIZER_CONFIG
from embedlayer.tokenization.ids import USUAL_NAMES
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import decode, encode
from embedlayer.tokenization.tokenizer_config import class_name
from embedlayer.vocab.edit import TokenMap
from embedlayer.vocab.map import RowMap
from embedlayer.vocab.special_tokens import (
    LISTS_OF_NAMES,
    NewTokenIds,
    added_texts,
    first_id,
    names_in,
    roles_of_class,
    special_tokens_of,
    stated_roles,
    token_text,
    tokenizer_config,
    with_class,
)
from embedlayer.vocab.tokenizer_edit import tokenizer_data

SPECIALS, ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATES = ("chat_template*.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
OTHER_FORMS = (
    *("*vocab.json", "*merges.txt", "*encoder.json", "*vocab.bpe", "*vocab.txt"),
    *("*.model", "*.model.v[0-9]", "*.spm", "*.tiktoken", "tekken.json", "tok*.bin"),
)
"""Files that state the vocabulary again; `tokenizer.json` replaces them."""


def edited_files(folder: Path, tokens: TokenMap, row_map: RowMap, *, per_layer: bool) -> dict[str, str | None]:
    """Return the new text of each file that an edit changes, other than the weights and `tokenizer.json`."""
    ids, special, model = tokens.new_token_ids(row_map), tokens.special_tokens, read_json_if_there(folder / CONFIG)

    def edited_config(content: JsonObject) -> JsonObject:
        edited = edited_configuration(content, ids, CONFIG)
        if per_layer:
            text, sizes = edited.get("text_config"), dict.fromkeys(PER_LAYER_ROWS, row_map.size)
            edited = {**edited, **({"text_config": {**text, **sizes}} if isinstance(text, dict) else sizes)}
        return with_moved_defaults(content, _with_all_roles(edited, ids), ids, CONFIG)

    def edited_params(content: JsonObject) -> JsonObject:
        size = {"vocab_size": row_map.size} if content.get("vocab_size") == row_map.old_size else {}
        return {**edited_configuration(content, ids, PARAMS), **size}

    edits: dict[str, Callable[[JsonObject], JsonObject]] = {
        CONFIG: edited_config,
        GENERATION: lambda content: edited_configuration(content, ids, GENERATION),
        PARAMS: edited_params,
    }
    removed: list[Path] = []
    old_tokenizer, tokenizer = tokens.old_tokenizer, tokens.tokenizer
    own_class = language_class(read_json_if_there(folder / TOKENIZER_CONFIG), model)
    if special is not None:
        if own_class is not None:
            warn_of_lost_settings(own_class)
        special.warn()
        if model.get("model_type") in OWN_RULES:
            warnings.warn(
                f"transformers' AutoTokenizer opens checkpoints of {model['model_type']} with that family's own rules, "
                f"whatever tokenizer.json says, and returns other IDs than the new tokenizer. Open the new folder with "
                f"transformers.PreTrainedTokenizerFast.from_pretrained.",
                EmbedLayerWarning,
                stacklevel=4,
            )
        edits[TOKENIZER_CONFIG] = lambda content: tokenizer_config(content, special, model, replaced=True)
        edits[SPECIALS] = lambda _: dict(special)
        removed = list(folder.glob(ADDED))
    elif old_tokenizer is not None and tokenizer is not None:
        roles = _roles_in(folder, old_tokenizer, tokenizer)

        def edited_tokenizer_config(content: JsonObject) -> JsonObject:
            if own_class is not None:
                own = _without_removed_names(with_class(content, own_class), tokens, tokenizer, TOKENIZER_CONFIG)
                if gives_ids(own, model, tokenizer):
                    return own
                warn_of_lost_settings(own_class)
            generic = tokenizer_config(content, roles, model, replaced=False)
            return _without_removed_names(generic, tokens, tokenizer, TOKENIZER_CONFIG)

        edits[TOKENIZER_CONFIG] = edited_tokenizer_config
        edits[SPECIALS] = lambda content: _without_removed_names(content, tokens, tokenizer, SPECIALS)
        edits[ADDED] = lambda content: _added_tokens(content, tokens, tokenizer)
    contents: dict[str, JsonObject] = {}
    for name, edit in edits.items():
        if (folder / name).is_file() or (name == TOKENIZER_CONFIG and (folder / CONFIG).is_file()):
            old = read_json_if_there(folder / name)
            new = edit(old)
            if new != old:
                contents[name] = new
    if old_tokenizer is not None and tokenizer is not None:
        removed += [file for pattern in OTHER_FORMS for file in folder.glob(pattern)]
        removed += _templates_to_remove(folder, sorted(added_texts(old_tokenizer) - added_texts(tokenizer)), contents)
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()}
    return {**texts, **{file.relative_to(folder).as_posix(): None for file in removed}}


def read_json_if_there(file: Path) -> JsonObject:
    """Return the content of a JSON file, or an empty dictionary if there is no such file."""
    return read_json(file) if file.is_file() else {}


def _with_all_roles(content: JsonObject, ids: NewTokenIds) -> JsonObject:
    """Return a copy of the content of a `config.json` in which the IDs of special tokens are complete."""
    # Another tokenizer: missing IDs are written out, as transformers would use the defaults of the model's class.
    content = {key: value for key, value in content.items() if key != "tokenizer_class"}
    if ids.role_ids is None:
        return content
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = _with_all_roles(content["text_config"], ids)
    elif "vocab_size" in content or "model_type" in content:
        for role in ("bos_token", "eos_token"):
            content.setdefault(f"{role}_id", ids.id_of(role))
        for role in ("bos_token", "eos_token", "pad_token"):
            if content.get(f"{role}_id") is None and role in ids.role_ids:
                content[f"{role}_id"] = ids.role_ids[role]
    return content


def _roles_in(folder: Path, old: Tokenizer, new: Tokenizer) -> Mapping[str, str]:
    """Return a dictionary from each role, such as `eos_token`, to the text of the edited tokenizer's special token."""
    roles = roles_of_class(folder)
    if roles is not None:
        return {role: token for role, token in roles.items() if token in added_texts(new)}
    role_texts = stated_roles(folder)
    for name in (CONFIG, GENERATION):
        content = read_json_if_there(folder / name)
        for role in USUAL_NAMES:
            token_id = first_id(content.get(f"{role}_id"))
            if type(token_id) is int and token_id >= 0 and role not in role_texts:
                role_texts[role] = old.id_to_token(token_id) or ""
    return special_tokens_of(new, role_texts)


def _templates_to_remove(folder: Path, lost: Sequence[str], contents: dict[str, JsonObject]) -> list[Path]:
    """Return the files of chat templates that contain a token of `lost`; warn of these tokens."""
    # Changes `contents` in place: a template in `tokenizer_config.json` is removed there.
    files = {file: read_bytes(file).decode(errors="replace") for glob in TEMPLATES for file in folder.glob(glob)}
    named = {file: names for file, text in files.items() if (names := names_in(text, lost))}
    absent = {name for names in named.values() for name in names}
    config = contents.get(TOKENIZER_CONFIG, read_json_if_there(folder / TOKENIZER_CONFIG))
    template = json.dumps(config["chat_template"], ensure_ascii=False) if "chat_template" in config else ""
    if names := names_in(template, lost):
        absent |= {*names}
        contents[TOKENIZER_CONFIG] = {key: value for key, value in config.items() if key != "chat_template"}
    if absent:
        warnings.warn(
            f"The chat template is left out: it contains {', '.join(sorted(absent))}, which the new tokenizer does not "
            f"have. Write one for the new tokenizer.",
            EmbedLayerWarning,
            stacklevel=6,
        )
    return list(named)


def _without_removed_names(content: JsonObject, tokens: TokenMap, new: Tokenizer, file: str) -> JsonObject:
    """Return a copy of the content of a tokenizer's configuration file, changed to match the edited tokenizer."""
    removed, content = set(tokens.dropped.values()), dict(content)
    for key in USUAL_NAMES:
        token = token_text(content.get(key))
        if token in removed:
            raise VocabularyError(f"Token {token!r} cannot be removed: {file} names it as {key}.")
    for key in LISTS_OF_NAMES:
        if isinstance(content.get(key), list):
            content[key] = [token for token in content[key] if token_text(token) not in removed]
    if "added_tokens_decoder" in content:
        content["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in tokenizer_data(new)["added_tokens"]
        }
    return content


def _added_tokens(content: JsonObject, tokens: TokenMap, new: Tokenizer) -> JsonObject:
    """Return the new content of `added_tokens.json`: a dictionary from the text of each added token to its new ID."""
    names = {*tokens.added.values(), *content}
    records = tokenizer_data(new)["added_tokens"]
    return {token["content"]: token["id"] for token in records if token["content"] in names}


_TRANSLATION = ("src_lang", "tgt_lang")
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("M2M100", "MBart", "MBart50", "Nllb", "PLBart", "SeamlessM4T"), _TRANSLATION),
    "Whisper": ("language", "task", "predict_timestamps"),
}
"""From the name of a class, without `Tokenizer`, to the settings that choose the tokens before a text."""

_PROBED = 2000
"""Number of vocabulary entries in the text that two tokenizers are compared on."""


def language_class(config: JsonObject, model: JsonObject) -> str | None:
    """Return the name of the tokenizer class of a folder if it has settings of `SETTINGS`, else `None`."""
    class_entry = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = class_name(str(class_entry)) if class_entry else None
    name = CLASS_OF_TYPE.get(str(model.get("model_type"))) if name is None else name
    return f"{name}Tokenizer" if name in SETTINGS else None


def gives_ids(config: JsonObject, model: JsonObject, tokenizer: Tokenizer) -> bool:
    """Return whether `AutoTokenizer` of a folder with these files gives the IDs of a tokenizer."""
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import AutoTokenizer

    with temporary_folder() as folder:
        save_tokenizer(tokenizer, folder / "tokenizer.json")
        write_json(folder / TOKENIZER_CONFIG, config)
        write_json(folder / "config.json", {key: model[key] for key in ("model_type",) if key in model})
        try:
            with transformers_errors("open the edited tokenizer"):
                opened = AutoTokenizer.from_pretrained(folder)
        except CheckpointError:
            return False  # the class reads other files, or needs a token that is removed
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if type(opened).__name__ != config["tokenizer_class"] or opened.get_vocab() != vocabulary:
        return False
    if config["tokenizer_class"] == "WhisperTokenizer" and not _languages_follow(vocabulary):
        return False
    ids = range(0, len(vocabulary), max(len(vocabulary) // _PROBED, 1))
    added = " ".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    texts = [decode(tokenizer, [*ids]), added]
    return all(
        opened(text, add_special_tokens=special)["input_ids"] == encode(tokenizer, text, add_special_tokens=special).ids
        for text in texts
        for special in (True, False)
    )


def _languages_follow(vocabulary: Mapping[str, int]) -> bool:
    """Return whether the tokens of Whisper's languages follow the start token without gaps, in its class's order."""
    # The class computes the ID of a language from that of the start token.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    first = vocabulary.get("<|startoftranscript|>", 0) + 1
    return all(vocabulary.get(f"<|{code}|>", first + place) == first + place for place, code in enumerate(LANGUAGES))


def warn_of_lost_settings(name: str) -> None:
    """Warn that an edited folder opens without the settings of its former tokenizer class."""
    settings = ", ".join(SETTINGS[name.removesuffix("Tokenizer")])
    warnings.warn(
        f"The tokenizer class of this folder, {name}, does not give the IDs of the edited tokenizer, so the new folder "
        f"has the generic class PreTrainedTokenizerFast, which ignores {settings}. Put the tokens that these settings "
        f"chose before each text yourself.",
        EmbedLayerWarning,
        stacklevel=7,
    )
