"""Chats: messages rendered by the chat template of a tokenizer, with the ranges that the assistant generates."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedlayer.core.errors import TextError, TokenizerError, require, transformers_errors
from embedlayer.io.files import write_json
from embedlayer.tokenization.read import load_tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
ERRORS_OF_CODE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What the expressions of a template may raise, besides errors of Jinja."""

_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template of a tokenizer of transformers, which marks what the assistant generates by `{% generation %}`."""

    template: str
    special_tokens: Mapping[str, str]

    @classmethod
    def of(cls, tokenizer: object) -> "ChatTemplate":
        if isinstance(tokenizer, str | Path):
            tokenizer = _read(Path(tokenizer))
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        if not isinstance(template, str):
            raise TokenizerError("The tokenizer has no chat template. See docs/errors.md, Chat templates.")
        if not _GENERATION.search(template):
            raise TokenizerError("The chat template has no {% generation %}. See docs/errors.md, Chat templates.")
        named = getattr(tokenizer, "special_tokens_map", {})
        return cls(template, {role: text for role, text in named.items() if isinstance(text, str)})

    @property
    def digest(self) -> str:
        """Digest of the template and its special tokens, 16 hexadecimal digits."""
        stated = json.dumps([self.template, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(stated.encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write the template and its special tokens into a folder beside its `tokenizer.json`; `of` reads them."""
        write_json(folder / TOKENIZER_CONFIG, {**self.special_tokens, "chat_template": self.template})

    def render(self, messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the character ranges `(start, stop)` that the assistant generates."""
        chats = require("transformers.utils.chat_template_utils", extra="hf")
        jinja = require("jinja2", extra="hf")
        try:
            if not messages:
                raise ValueError("there are no messages")
            for number, message in enumerate(messages):
                if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                    names = ", ".join(message) if isinstance(message, Mapping) else "no fields"
                    raise ValueError(f"message {number} (counted from 0) has no role (it has {names})")
            plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
            texts, ranges = chats.render_jinja_template(
                conversations=[plain],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.special_tokens,
            )
        except (jinja.TemplateError, *ERRORS_OF_CODE) as error:
            raise TextError(f"The chat template cannot render the messages: {error}.") from error
        others = [content for message in plain if (content := message.get("content")) and not isinstance(content, str)]
        if any(str(content) in texts[0] for content in others):
            raise TextError("The chat template writes contents that are no texts as Python prints them.")
        return texts[0], [(start, stop) for start, stop in ranges[0]]


def _read(path: Path) -> object:
    """Return the tokenizer in a folder or file as one of transformers, with the template of the folder."""
    transformers = require("transformers", extra="hf")
    tokenizer = load_tokenizer(path)
    folder = path if path.is_dir() else path.parent
    with transformers_errors(f"read a tokenizer with a chat template, which chats need, from {folder}", TokenizerError):
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            str(folder), tokenizer_object=tokenizer, local_files_only=True
        )
