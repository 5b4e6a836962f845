"""Find spelling variants: tokens with the same letters that differ in case, in a leading space or in a marker.

| convention | spelling variants |
|---|---|
| byte-level BPE (`Ġ` is a space) | `class`, `Ġclass`, `Class`, `ĠClass`, `CLASS` |
| SentencePiece (`▁` is a space) | `class`, `▁class`, `Class`; a byte token `<0x61>` and `a` |
| WordPiece (`##` continues a word) | `class`, `##class` |
| end-of-word suffix (CLIP) | `class`, `class</w>` |
"""

import unicodedata
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

RAW_MARKERS = (" ", "▁", "##")
"""Markers that are removed if there is no tokenizer that says which ones its entries have."""


def spelling_variants(
    texts: Sequence[str], tokenizer: Tokenizer | None = None, *, special: Collection[int] = ()
) -> dict[int, list[int]]:
    """Return for each token that has spelling variants the IDs of these variants, in ascending order.

    Two tokens are variants if their texts are equal after these steps:

    1. one marker at the start is removed: a space, or the prefix of the tokenizer that continues a word, such as `##`;
       without a tokenizer one of `RAW_MARKERS`. A text that is nothing but the marker keeps it;
    2. the suffix of the tokenizer that ends a word, such as `</w>`, is removed;
    3. compatibility characters are replaced (Unicode's NFKC: full-width letters, ligatures), and case is folded.

    Texts that are empty or all white space, and special tokens, have no variants. `texts` are the readable texts of the
    rows, as `OpenedModel.token_texts` has them; `""` for a row without a token.

    Example:
        >>> spelling_variants(["class", " class", "Class", "glass", " Class"])
        {0: [1, 2, 4], 1: [0, 2, 4], 2: [0, 1, 4], 4: [0, 1, 2]}
    """
    model = None if tokenizer is None else tokenizer.model
    prefix = getattr(model, "continuing_subword_prefix", None)
    markers = RAW_MARKERS if tokenizer is None else (" ", *([prefix] if prefix else []))
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    groups: dict[str, list[int]] = {}
    left_out = set(special)
    for token, text in enumerate(texts):
        key = "" if token in left_out else spelling_key(text, markers, suffix)
        if key:
            groups.setdefault(key, []).append(token)
    shared = [group for group in groups.values() if len(group) > 1]
    return dict(sorted((token, [other for other in group if other != token]) for group in shared for token in group))


def spelling_key(text: str, markers: Sequence[str] = RAW_MARKERS, suffix: str = "") -> str:
    """Return what spelling variants have in common: the text without its marker and suffix, in NFKC, its case folded.

    The result is `""` for a text that is all white space.
    """
    marker = ""
    if text.startswith(tuple(markers)):
        marker = next((each for each in markers if text.startswith(each) and text != each), "")
    bare = text[len(marker) :]
    bare = bare.removesuffix(suffix) or bare
    if bare.isascii():
        key = bare.lower()
    else:
        key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", bare).casefold())
    return key if key.strip() else ""
