"""Tokenizer classes of transformers that put the language or the task before a text, which `tokenizer.json` cannot.

An edited folder keeps such a class if the class gives the IDs of the edited tokenizer there.
"""

import importlib.util
import warnings
from collections.abc import Mapping

from tokenizers import Tokenizer

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, transformers_errors
from embedlayer.families.tokenizers import CLASS_OF_TYPE
from embedlayer.io.files import JsonObject, write_json
from embedlayer.io.partials import temporary_folder
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import decode, encode
from embedlayer.tokenization.tokenizer_config import class_name

_TRANSLATION = ("src_lang", "tgt_lang")
SETTINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("M2M100", "MBart", "MBart50", "Nllb", "PLBart", "SeamlessM4T"), _TRANSLATION),
    "Whisper": ("language", "task", "predict_timestamps"),
}
"""From the name of a class, without `Tokenizer`, to the settings that choose the tokens before a text."""

_PROBED = 2000
"""Number of vocabulary entries in the text that two tokenizers are compared on."""


def language_class(config: JsonObject, model: JsonObject) -> str | None:
    """Return the name of the tokenizer class of a folder if it has settings of `SETTINGS`, else `None`.

    `config` is the content of `tokenizer_config.json`, and `model` that of `config.json`; empty without the file.

    Example:
        >>> language_class({"tokenizer_class": "NllbTokenizerFast"}, {}), language_class({}, {"model_type": "whisper"})
        ('NllbTokenizer', 'WhisperTokenizer')
    """
    class_entry = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = class_name(str(class_entry)) if class_entry else None
    name = CLASS_OF_TYPE.get(str(model.get("model_type"))) if name is None else name
    return f"{name}Tokenizer" if name in SETTINGS else None


def gives_ids(config: JsonObject, model: JsonObject, tokenizer: Tokenizer) -> bool:
    """Return whether `AutoTokenizer` of a folder with these files gives the IDs of a tokenizer.

    It does if the class that `config` names is the one that is opened, and both tokenizers have the same vocabulary and
    encode a sample of its entries, and all added tokens, alike, with and without special tokens; for Whisper the
    languages must also be in their order. False if transformers is not installed, or does not open the folder.
    """
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import AutoTokenizer

    with temporary_folder() as folder:
        save_tokenizer(tokenizer, folder / "tokenizer.json")
        write_json(folder / "tokenizer_config.json", config)
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
    """Return whether the tokens of Whisper's languages follow the start token without gaps, in the order of its class.

    The class computes the ID of a language from that of the start token.
    """
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
