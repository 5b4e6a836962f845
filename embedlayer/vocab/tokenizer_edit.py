"""Tokenizers with another vocabulary: tokens added, removed, merged or reordered.

The edit changes the data of the `tokenizer.json`; the old tokenizer is not changed.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from embedlayer.core.errors import EmbedLayerWarning, TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.io.files import JsonObject
from embedlayer.tokenization.bytes import Token, TokenBytes
from embedlayer.tokenization.ids import table_size, unknown_id
from embedlayer.tokenization.tokenizer_calls import (
    as_tokenizer,
    build_tokenizer,
    decode_batch,
    encode,
    encode_batch,
    pure_tokenizer,
    tokenizer_errors,
    tokens_of_word,
)
from embedlayer.vocab.bpe_merges import BPEMerges
from embedlayer.vocab.new_tokens import (
    AddedMerge,
    AddedTokens,
    check_merges,
    check_reached,
    has_added_ids,
    new_entries,
    token_name,
)
from embedlayer.vocab.token_selection import select_tokens, shown_names

_ABOVE_ITS_SUBWORDS = 1e-4
_AROUND = (("", ""), ("a ", " b"), ("a", "b"), ("は", "は"), ("は ", " は"))

_BEGINS, _ENDS = "\ufdd0", "\ufdd1"
"""Marks inside a decoder: code points that are not characters, so that no text contains them."""
_GLUED = re.compile(r"\(\?<=\\A\(\?:(.+)\)\)\\z", re.DOTALL)


@dataclass(frozen=True)
class TokenizerEdit:
    """Store a new tokenizer, and the old ID of each of its tokens.

    Attributes:
        tokenizer: The new tokenizer; its IDs are 0..n-1 without gaps.
        sources: Old ID of each token, in the order of the new IDs; `None` for a new token.
        dropped: Old IDs that were removed and not merged, ascending. If the old IDs had gaps, the IDs in the gaps are
            included.
        merged: From the old ID of each merged token, which is removed too, to the new ID of the token that replaces it.
        unreachable: Those of `dropped` that were removed although not named, ascending: no text is encoded with them
            once the named ones are gone.
    """

    __repr__ = short_repr

    tokenizer: Tokenizer
    sources: tuple[int | None, ...]
    dropped: tuple[int, ...]
    merged: dict[int, int]
    unreachable: tuple[int, ...] = ()


def edit_tokenizer(
    tokenizer: object,
    *,
    add: AddedTokens = (),
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    order: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    special: Iterable[str | AddedToken] = (),
) -> TokenizerEdit:
    """Return a new tokenizer with the old tokens that are kept, in their order, and then the new ones.

    The old tokenizer is not changed. An old token is named by its ID, by its entry in the vocabulary (`Ġdog`), or by
    its text (` dog`).

    The kind of tokenizer decides the details:

    - **BPE finds a new token wherever its text occurs**, inside words too, as the tokenizers library finds added
      tokens. A word in running text includes the space before it: add `" dog"`. Some normalizers put a space before the
      text (LLaMA-2, llama2.c), and put one after an added token too. The new tokenizer's decoder removes that space
      from decoded text; the space's token stays among the IDs, one more at each use (`receipt.extra_space` of an edit).
      `AddedToken(" dog", rstrip=True)` includes the following space instead. An `AddedMerge` instead joins two tokens
      where they are neighbours; `suggest_tokens` returns these.
    - **Other kinds get an ordinary entry for a new word.** WordPiece and word tokenizers find it where a whole word
      (or, with `##`, the rest of a word) is that text. Unigram finds it where the text was encoded as its subwords
      before; add `" dog"` here too. A new token of more than one word, or a special token, is found wherever its text
      occurs.
    - **BPE tokens that are built from a removed token are removed too**, if no text is encoded with them any more.
      `keep` also keeps the shorter tokens that the kept tokens are built from.
    - **Tokens that the tokenizer needs cannot be removed**: the unknown token, the tokens of the post-processor, the
      padding token of a tokenizer that pads, and the 256 bytes of a byte-level one without an unknown token. `keep`
      includes these.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        add: New tokens; an `AddedToken` has its own rules for spaces, normalization and word borders, and an
            `AddedMerge` joins two tokens of a BPE tokenizer.
        remove: Tokens to remove.
        keep: Remove all tokens but these; not together with `remove`.
        order: All tokens of the result, in the order of their new IDs. An added token before one of the model's tokens
            becomes an entry of the model too.
        merge: From each token to remove to the old or new token whose ID replaces it in stored IDs. A text with the
            removed token is encoded as other tokens, not as the replacement.
        special: New special tokens, which decoding may skip. A token that is also in `add` keeps its position there.

    Raises:
        VocabularyError: A token is unknown, is named twice, exists already, or is needed by the tokenizer; the order
            does not name all tokens; `keep` and `remove` are both passed; or no text would be encoded with a new token.
        TokenizerError: `tokenizer` is no tokenizer, cannot be written as a `tokenizer.json`, or gives the edited
            vocabulary other IDs.

    Warns:
        EmbedLayerWarning: Text around a new token is decoded differently than before.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", kind="word")
        >>> edit = edit_tokenizer(tokenizer, add=["otters"], remove=["cats"])
        >>> edit.tokenizer.encode("I love otters, dogs, cats").tokens
        ['I', 'love', 'otters', ',', 'dogs', ',', '<unk>']
        >>> edit.sources, edit.dropped
        ((0, 1, 2, 3, 4, 6, None), (5,))
    """
    tokenizer = as_tokenizer(tokenizer)
    add, special = (add if isinstance(add, str) else [*add], special if isinstance(special, str) else [*special])
    data = tokenizer_data(tokenizer)
    old = TokenBytes(tokenizer)
    new = new_entries(old, add, special)
    names, sources, merged, unreachable = select_tokens(
        old,
        new,
        remove=remove,
        keep=keep,
        order=order,
        merge=merge,
        required=required_tokens(data, old),
        with_parts=lambda kept: with_parts(kept, old, data),
        unreachable=lambda removed: _unreachable_without(removed, old, data),
    )
    merges = {token_name(token, old): token for token in add if isinstance(token, AddedMerge)}
    check_merges(merges, names, data)
    edited = _built(data, names, new, old, merges.values())
    check_reached(edited, new, BPEMerges(data["model"]) if merges else None)
    warn_of_other_texts(tokenizer, edited, [text for text in add if isinstance(text, str) and text not in special])
    return TokenizerEdit(
        tokenizer=edited,
        sources=tuple(None if source < 0 else source for source in sources),
        dropped=tuple(sorted({*range(table_size(tokenizer))} - {*sources} - merged.keys())),
        merged=merged,
        unreachable=tuple(unreachable),
    )


def required_tokens(data: JsonObject, old: TokenBytes) -> dict[int, str]:
    """Return a dictionary from the ID of each token that the tokenizer itself uses to the reason."""
    reasons = dict.fromkeys(_template_ids(data.get("post_processor")), "the post-processor puts it around texts")
    if data.get("padding"):
        reasons[data["padding"]["pad_id"]] = "the tokenizer pads with it"
    unknown = unknown_id(old.tokenizer)
    if unknown is not None:
        reasons[unknown] = "it replaces all text that the model cannot encode"
    elif old.convention == "byte-level":
        reasons |= dict.fromkeys(old.single_bytes, "a byte that no other token encodes")
    return {token_id: reason for token_id, reason in reasons.items() if token_id in old.entries}


def _template_ids(processor: JsonObject | None) -> Iterator[int]:
    """Yield the IDs of the tokens that a post-processor puts around a text or a pair of texts."""
    kind = processor and processor["type"]
    if not processor:
        return
    if kind == "Sequence":
        for step in processor["processors"]:
            yield from _template_ids(step)
    elif kind in ("BertProcessing", "RobertaProcessing"):
        yield from (processor["sep"][1], processor["cls"][1])
    elif kind == "TemplateProcessing":
        for name in _names_in_template(processor):
            yield from processor["special_tokens"][name]["ids"]


def _names_in_template(processor: JsonObject) -> set[str]:
    """Return the names of the special tokens that a `TemplateProcessing` puts around a text or a pair."""
    parts = [*processor["single"], *processor["pair"]]
    return {part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part}


def with_parts(kept: set[int], old: TokenBytes, data: JsonObject) -> set[int]:
    """Return `kept` and the IDs of all tokens without which a kept token would no longer be encoded as before."""
    model = data["model"]
    if model["type"] == "BPE":
        merged = (old.entries[token_id] for token_id in kept - old.added)
        kept = kept | {old.vocabulary[name] for name in BPEMerges(model).with_parts(merged)}
    elif model["type"] == "Unigram" and model["vocab"]:
        kept = kept | {min(range(len(model["vocab"])), key=lambda token_id: model["vocab"][token_id][1])}
    return kept


def _unreachable_without(removed: set[int], old: TokenBytes, data: JsonObject) -> set[int]:
    """Return the IDs of the other BPE tokens that no text is encoded with after the tokens `removed` are removed."""
    if data["model"]["type"] != "BPE" or not removed:
        return set()
    merges = BPEMerges(data["model"])
    names = {old.entries[token_id] for token_id in removed}
    if not any(part in names for pair in merges.pairs for part in pair):
        return set()
    return {old.vocabulary[name] for name in merges.unreachable_without(names)} - old.added


def _built(
    data: JsonObject,
    names: list[str],
    new: Mapping[str, AddedToken | None],
    old: TokenBytes,
    merges: Iterable[AddedMerge] = (),
) -> Tokenizer:
    """Build the tokenizer after an edit, in which the token of ID i is `names[i]`."""
    model = data["model"]
    unigram = model["type"] == "Unigram"
    old_model = dict(model["vocab"]) if unigram else model["vocab"]
    ids = {name: new_id for new_id, name in enumerate(names)}
    new_id_of = {token_id: ids[name] for token_id, name in old.entries.items() if name in ids}

    inside = model["type"] != "BPE" and not has_added_ids(old)
    entries = {name for name in names if name in old_model or (name in new and (inside or new[name] is None))}
    last = max((ids[name] for name in entries), default=-1)
    entries |= set(names[: last + 1])  # the library numbers tokens outside the model after the model's
    in_order = [name for name in names if name in entries]
    if unigram:
        lowest = min(old_model.values(), default=0.0)
        scores = {
            name: max(lowest, _score(name, old.tokenizer, old_model)) for name, rules in new.items() if rules is None
        }
        model["unk_id"] = None if model["unk_id"] is None else new_id_of[model["unk_id"]]
        model["vocab"] = [[name, old_model.get(name, scores.get(name, lowest))] for name in in_order]
    else:
        model["vocab"] = {name: ids[name] for name in in_order}
    if model["type"] == "BPE" and not old_model.keys() <= ids.keys():
        model["merges"] = BPEMerges({**model, "vocab": old_model}).without(old_model.keys() - ids.keys()).pairs
    for merge in merges:
        model["merges"].append((merge.left, merge.right))

    records = [{**record, "id": ids[record["content"]]} for record in data["added_tokens"] if record["content"] in ids]
    records += [{"id": ids[text], **token.__getstate__()} for text, token in new.items() if token is not None]
    data["added_tokens"] = sorted(records, key=lambda record: record["id"])
    normalizer = data.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):  # a space before a text, as in LLaMA-2, and after a token
        glued = [text for text, token in new.items() if token is not None and not (token.special or token.rstrip)]
        data["decoder"] = _with_glue(data.get("decoder"), glued, ids)
    _renumber_template(data.get("post_processor"), new_id_of)
    if data.get("padding"):
        data["padding"]["pad_id"] = new_id_of.get(data["padding"]["pad_id"], data["padding"]["pad_id"])
    edited = build_tokenizer(data)
    if edited.get_vocab(with_added_tokens=True) != ids:
        raise TokenizerError("tokenizers orders the edited vocabulary otherwise than requested.")
    return edited


def _score(entry: str, tokenizer: Tokenizer, scores: Mapping[str, float]) -> float:
    """Return a Unigram score for a new token, just above the sum of its subwords' scores."""
    subwords = [token.value for token in tokens_of_word(tokenizer, entry)]
    return round(sum(scores.get(subword, -math.inf) for subword in subwords) + _ABOVE_ITS_SUBWORDS, 10)


def _renumber_template(processor: JsonObject | None, new_id_of: Mapping[int, int]) -> None:
    """Replace the old token IDs in a post-processor by the new ones, in place; `None` is ignored."""
    # A `TemplateProcessing` may list tokens that it never puts around a text; removed ones leave the list.
    if not processor:
        return
    if processor["type"] == "Sequence":
        for step in processor["processors"]:
            _renumber_template(step, new_id_of)
    elif processor["type"] in ("BertProcessing", "RobertaProcessing"):
        for end in ("sep", "cls"):
            name, token_id = processor[end]
            processor[end] = [name, new_id_of.get(token_id, token_id)]
    elif processor["type"] == "TemplateProcessing":
        used = _names_in_template(processor)
        processor["special_tokens"] = {
            name: {**special, "ids": [new_id_of.get(token_id, token_id) for token_id in special["ids"]]}
            for name, special in processor["special_tokens"].items()
            if name in used or all(token_id in new_id_of for token_id in special["ids"])
        }


def _with_glue(decoder: JsonObject | None, new: Sequence[str], ids: Mapping[str, int]) -> JsonObject | None:
    """Return a copy of a decoder that removes the space which the normalizer puts after an added token."""
    # Two steps at the start mark the listed tokens; steps after `Fuse` remove each mark and the space behind it. Where
    # the decoder strips the text's first space, a step puts it back before a listed token. Steps of earlier edits are
    # replaced.
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
    """Return the texts with `terms`, such as added tokens, that `old` decodes exactly and `new` does not."""
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
    """Warn if a text with a new token is no longer decoded exactly, although the old tokenizer did so."""
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
    """Return those added tokens after which a text has an additional token for a space, as in LLaMA-2's tokenizer."""
    bare, added = pure_tokenizer(tokenizer), tokenizer.get_added_tokens_decoder()
    words = [token for token in ids if token in added and not added[token].special]
    after = len(encode(bare, "a b").ids) - len(encode(bare, "a").ids)
    encodings = encode_batch(bare, [f"a{added[token].content} b" for token in words])
    return [
        token
        for token, each in zip(words, encodings, strict=True)
        if token in each.ids and len(each.ids) - 1 - each.ids.index(token) > after
    ]


def tokenizer_data(tokenizer: Tokenizer) -> JsonObject:
    """Return the content of the `tokenizer.json` of a tokenizer, as a new dictionary, which the caller may change."""
    with tokenizer_errors("be written as a tokenizer.json, and so not be edited"):
        data: JsonObject = json.loads(tokenizer.to_str())
    return data
