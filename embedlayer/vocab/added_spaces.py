"""Spaces that a normalizer puts after an added token: how the decoder removes them, and which texts change."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer

from embedlayer.data.tokenizer_calls import decode_batch, encode, encode_batch, pure_tokenizer
from embedlayer.errors import EmbedLayerWarning
from embedlayer.io.files import JsonObject
from embedlayer.vocab.token_bytes import TokenBytes
from embedlayer.vocab.token_selection import shown_names

_AROUND = (("", ""), ("a ", " b"), ("a", "b"), ("は", "は"), ("は ", " は"))
_BEGINS, _ENDS = "\ufdd0", "\ufdd1"
"""Marks inside a decoder: code points that are not characters, so that no text contains them."""
_GLUED = re.compile(r"\(\?<=\\A\(\?:(.+)\)\)\\z", re.DOTALL)


def puts_space_before_each_part(normalizer: JsonObject | None) -> bool:
    """Return whether a normalizer has a `Prepend` step, which puts a space before a text, as in LLaMA-2.

    Such a normalizer also puts a space before each part of a text that follows an added token.

    Args:
        normalizer: The `normalizer` of a `tokenizer.json`, or `None`.
    """
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    return any(step["type"] == "Prepend" for step in steps)


def with_glue(decoder: JsonObject | None, new: Sequence[str], ids: Mapping[str, int]) -> JsonObject | None:
    """Return a copy of a decoder that removes the space which the normalizer puts after an added token.

    The copy has two more steps at the start, which mark where the listed tokens begin and end. After the step `Fuse`,
    which joins all tokens, further steps remove each mark and the space behind the token. If the decoder strips a space
    at the start of a text, a step inserts that space again before a listed token.

    If an earlier edit has put such steps into the decoder, they are replaced: the tokens that they list and that still
    exist are listed again.

    Args:
        decoder: The `decoder` of the old `tokenizer.json`. It is returned unchanged if it is `None` or has no step
            `Fuse`.
        new: Texts of the new tokens to list.
        ids: From the name of each token after the edit to its new ID.
    """
    steps = list((decoder or {}).get("decoders", []))
    if decoder is None or not any(step["type"] == "Fuse" for step in steps):
        return decoder
    pattern = steps[0].get("pattern", {}).get("Regex", "")
    there = _GLUED.fullmatch(pattern)
    escaped = re.findall(r"(?:\\.|[^|\\])+", there[1], re.DOTALL) if there else []
    tokens = [token for token in (re.sub(r"\\(.)", r"\1", one, flags=re.DOTALL) for one in escaped) if token in ids]
    tokens += [token for token in new if token not in tokens]
    steps = [step for step in steps if {_BEGINS, _ENDS}.isdisjoint(json.dumps(step, ensure_ascii=False))]
    if not tokens:
        return {**decoder, "decoders": steps}
    place = next(at for at, step in enumerate(steps) if step["type"] == "Fuse") + 1
    any_of = "|".join(map(re.escape, tokens))
    front = [_replace(rf"(?<=\A(?:{any_of}))\z", _ENDS), _replace(rf"\A(?=(?:{any_of}){_ENDS}\z)", _BEGINS)]
    after_fuse = [_replace(f"{_ENDS} ", ""), _replace(rf"\A{_BEGINS}", " "), _replace(f"[{_BEGINS}{_ENDS}]", "")]
    if not any(step["type"] == "Strip" for step in steps[place:]):
        del after_fuse[1]
    return {**decoder, "decoders": [*front, *steps[:place], *after_fuse, *steps[place:]]}


def _replace(pattern: str, content: str) -> JsonObject:
    """Return a decoder step that replaces all matches of the regular expression `pattern` by `content`."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def other_texts(old: Tokenizer, new: Tokenizer, terms: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the texts with added tokens that one tokenizer decodes exactly and another does not.

    Each term is tried alone, between words and, if the tokenizer's tokens include spaces, between letters without
    spaces.

    Args:
        old: The tokenizer that may decode exactly.
        new: The other one.
        terms: Texts of the added tokens.

    Returns:
        From each term with such texts to them, each as `old` and as `new` decodes it.
    """
    spaces = TokenBytes(old).convention in ("byte-level", "sentencepiece")
    old, new = pure_tokenizer(old), pure_tokenizer(new)
    texts = {f"{left}{term}{right}": term for term in terms for left, right in (_AROUND if spaces else _AROUND[:2])}

    def decoded(tokenizer: Tokenizer) -> list[str]:
        return decode_batch(tokenizer, [encoding.ids for encoding in encode_batch(tokenizer, texts)])

    changed: dict[str, list[tuple[str, str]]] = {}
    for (text, term), before, after in zip(texts.items(), decoded(old), decoded(new), strict=True):
        if before == text != after:
            changed.setdefault(term, []).append((before, after))
    return changed


def warn_of_other_texts(old: Tokenizer, new: Tokenizer, terms: Sequence[str]) -> None:
    """Warn if a text with a new token is no longer decoded exactly, although the old tokenizer did so.

    Args:
        old: The tokenizer before the edit.
        new: The tokenizer after the edit.
        terms: Texts of the new tokens.
    """
    if changed := other_texts(old, new, terms):
        before, after = next(iter(changed.values()))[0]
        warnings.warn(
            f"Text around {len(changed):,} of the new tokens is decoded differently than before"
            f"{shown_names(':', list(changed))}. For example {before!r} becomes {after!r}. Pass an AddedToken with "
            f"rules for the spaces around it, or leave these out.",
            EmbedLayerWarning,
            stacklevel=4,
        )


def tokens_with_extra_space(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """Return those added tokens after which a text has an additional token for a space, as in LLaMA-2's tokenizer.

    The text behind an added token then starts with the space that the normalizer puts before a text. Special tokens are
    left out.

    Args:
        tokenizer: The tokenizer.
        ids: IDs of the tokens to test.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> edit = edit_tokenizer(tokenizer, add=[" otters"])
        >>> tokens_with_extra_space(edit.tokenizer, [edit.tokenizer.token_to_id(" otters")])
        []
    """
    bare, added = pure_tokenizer(tokenizer), tokenizer.get_added_tokens_decoder()
    words = [token for token in ids if token in added and not added[token].special]
    after = len(encode(bare, "a b").ids) - len(encode(bare, "a").ids)
    encodings = encode_batch(bare, [f"a{added[token].content} b" for token in words])
    return [
        token
        for token, each in zip(words, encodings, strict=True)
        if token in each.ids and len(each.ids) - 1 - each.ids.index(token) > after
    ]
