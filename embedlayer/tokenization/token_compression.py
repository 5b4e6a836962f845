"""Tokenizer compression: one ID for all tokens that differ only in case, accents and white space around them."""

import re

import torch
from jaxtyping import Int64
from tokenizers import normalizers
from torch import Tensor

from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, decode_batch

_WHITE_SPACE = re.compile(r"[ \t\r\n]+")
_REPLACEMENT = "\ufffd"


def compressed_tokens(tokenizer: object) -> Int64[Tensor, " V"]:
    """Return the compressed ID of each token: tokens of one normal form have one ID, counted by first occurrence.

    The normal form of a token is its decoded text after NFKC, NFD, removal of accents and lower-casing, with each run
    of spaces, tabs and line breaks as one space, and without white space around it. A text that is one space stays so.
    Where the normal form is empty, the text itself counts. A token that is not valid UTF-8 alone counts by its entry in
    the vocabulary.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.

    Returns:
        `(V,)`, where V is `table_size(tokenizer)`. Numbers without a token have the ID of the empty text.

    Raises:
        TokenizerError: The argument is not a tokenizer, its highest ID is `MAX_TOKEN_IDS` (16,777,216) or more, or it
            cannot decode a token.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> tokenizer = train_tokenizer("Dogs dogs cafe Café", kind="word", special_tokens=())
        >>> [tokenizer.id_to_token(token_id) for token_id in range(5)]
        ['<unk>', 'Café', 'Dogs', 'cafe', 'dogs']
        >>> compressed_tokens(tokenizer)
        tensor([0, 1, 2, 1, 2])

    Reference: Cheng et al., Conditional memory via scalable lookup, arXiv 2601.07372 (2026), "tokenizer compression";
    github.com/deepseek-ai/Engram, engram_demo_v1.py. We differ for a token that contains U+E000, a private character
    that the demo uses as a mark: it keeps the character here and becomes a space there.
    """
    backend = as_tokenizer(tokenizer)
    size = table_size(backend)
    texts = decode_batch(backend, [[token_id] for token_id in range(size)], skip_special_tokens=False)
    fold = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    strip = normalizers.Strip()

    numbers: dict[str, int] = {}
    compressed = []
    for token_id, text in enumerate(texts):
        spaced = _WHITE_SPACE.sub(" ", fold.normalize_str(text))
        normal_form = spaced if spaced == " " else strip.normalize_str(spaced)
        key = (backend.id_to_token(token_id) or "") if _REPLACEMENT in text else normal_form or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(compressed, dtype=torch.int64)
