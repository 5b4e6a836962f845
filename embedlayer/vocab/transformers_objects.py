"""An edited tokenizer as a tokenizer object of transformers, with the settings of the old one."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from embedlayer.core.errors import EmbedLayerWarning, TokenizerError, require
from embedlayer.core.formatting import a_or_an
from embedlayer.tokenization.tokenizer_calls import as_tokenizer
from embedlayer.vocab.special_tokens import LISTS_OF_NAMES, added_texts, names_in, special_tokens_of, token_text

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
        MissingExtraError: transformers is not installed; `pip install 'embedlayer[hf]'`.

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
        raise TokenizerError(
            f"like is {a_or_an(like)}, not a fast tokenizer of transformers, whose settings would be kept. "
            f"Pass the tokenizer that AutoTokenizer.from_pretrained returned, or build a PreTrainedTokenizerFast."
        )
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
    """Return the chat templates that contain none of the tokens `lost`; warn of the others.

    The result is `None` if no template is left.
    """
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
