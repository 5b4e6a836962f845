"""A tokenizer with another vocabulary: tokens added, removed, merged, put in another order.

The tokenizer is edited as what it is in a file, the data of a `tokenizer.json`; the old one is not touched.
"""

import json
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from embedlayer.data.tokenizer import as_tokenizer, table_size, without_truncation
from embedlayer.errors import EmbedLayerWarning, TokenizerError, VocabularyError
from embedlayer.short_repr import short_repr
from embedlayer.vocab.merges import Merges
from embedlayer.vocab.pieces import Pieces, Token

Data = dict[str, Any]

_SHOWN = 5
_ABOVE_ITS_PIECES = 1e-4


@dataclass(frozen=True)
class TokenizerEdit:
    """A new tokenizer, and where each of its IDs came from.

    Attributes:
        tokenizer: The new one. Its IDs are 0..n-1 without gaps.
        sources: For each new ID the old ID that its entry had; `None` for a new token.
        dropped: Old IDs that are gone, ascending; gaps between the old IDs count.
        merged: For each old ID that was merged, the new ID that stands for it now.
    """

    __repr__ = short_repr

    tokenizer: Tokenizer
    sources: tuple[int | None, ...]
    dropped: tuple[int, ...]
    merged: dict[int, int]


def edit_tokenizer(
    tokenizer: object,
    *,
    add: Iterable[str | AddedToken] = (),
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    order: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    special: Iterable[str | AddedToken] = (),
) -> TokenizerEdit:
    """A new tokenizer whose entries are the old ones that stay, in their order, and then the new ones.

    An old token is named by its ID, as it stands in the vocabulary (`Ġdog`), or by what it stands for (` dog`).

    What follows from what the tokenizer is:

    - **A new token of BPE is itself wherever its text stands**, inside words too, as tokenizers' added tokens are. A
      word in running text includes the space before it: add `" dog"`. Where a normalizer puts a space in front of the
      text (LLaMA-2, llama2.c), it does so again behind an added token: the new tokenizer's decoder takes that space
      off again, and its token stays among the IDs. `AddedToken(" dog", rstrip=True)` takes the space that follows
      instead.
    - **A new word of the other kinds is an entry like the model's own.** For WordPiece and whole words it is found
      where a word (or, with `##`, the rest of one) is that text; for Unigram (`" dog"` here too) it stands where its
      pieces stood. What is more than one word, and special tokens, are found wherever their text stands.
    - **What BPE makes from a removed token goes with it**: a token that no text can reach any more is dropped. In the
      other direction `keep` also keeps what the kept tokens are made from.
    - **What the tokenizer cannot do without stays**: the unknown token, what the post-processor puts around a text, the
      padding token of a tokenizer that pads, and the 256 bytes of a byte-level one. `keep` includes these.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        add: New tokens; an `AddedToken` brings its own rules for spaces, normalization and word borders.
        remove: Tokens to drop.
        keep: Drop all but these; not together with `remove`.
        order: All tokens of the result, in the order wanted. An added token that so comes to stand before one of the
            model's becomes an entry of the model too.
        merge: Old token to the token, old or new, that stands for it from now on. Its own text is read as other tokens.
        special: New special tokens, which decoding may skip; those that are also in `add` take their place there.

    Raises:
        VocabularyError: An unknown token, one that is named twice or exists already, one that the tokenizer needs, an
            order that is not one of all tokens, or a new token that could never be found in a text.
        TokenizerError: The tokenizer cannot be written as a file.

    Warns:
        EmbedLayerWarning: Text around a new token is decoded otherwise than before.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", kind="word")
        >>> edit = edit_tokenizer(tokenizer, add=["otters"], remove=["cats"])
        >>> edit.tokenizer.encode("I love otters, dogs, cats").tokens
        ['I', 'love', 'otters', ',', 'dogs', ',', '<unk>']
        >>> edit.sources, edit.dropped
        ((0, 1, 2, 3, 4, 6, None), (5,))
    """
    tokenizer = as_tokenizer(tokenizer)
    add, special = (given if isinstance(given, str) else list(given) for given in (add, special))
    data = tokenizer_data(tokenizer)
    old = Pieces(tokenizer)
    needed = required_tokens(data, old)
    new = _new_tokens(old, add, special)
    merged = _merges_asked(old, merge or {}, new)
    gone = _gone(old, remove, keep, merged, needed, data)
    gone |= _lost_with(gone, old, data, merged, needed)

    stay = [token_id for token_id in sorted(old.entries) if token_id not in gone]
    names = _ordered([old.entries[token_id] for token_id in stay] + list(new), order, old, new)
    edited = _built(data, names, new, old)
    _check_reached(edited, new)
    warn_of_other_texts(tokenizer, edited, [text for text in add if isinstance(text, str) and text not in special])

    ids = {name: new_id for new_id, name in enumerate(names)}
    holes = set(range(table_size(tokenizer))) - old.entries.keys()
    return TokenizerEdit(
        tokenizer=edited,
        sources=tuple(old.vocabulary.get(name) for name in names),
        dropped=tuple(sorted((gone | holes) - merged.keys())),
        merged={token_id: ids[name] for token_id, name in merged.items()},
    )


# What is asked


def _new_tokens(
    old: Pieces, add: Iterable[str | AddedToken], special: Iterable[str | AddedToken]
) -> dict[str, AddedToken | None]:
    """The new tokens by their text, each with the rules by which it is found."""
    if isinstance(add, str) or isinstance(special, str):
        raise VocabularyError(f"Give a list of tokens, not the text {add or special!r}: its letters would be added.")
    added, specials = _by_text(add, "add"), _by_text(special, "special")
    for text in added | specials:
        if not text:
            raise VocabularyError("An empty text cannot be a token. Leave it out.")
        there = old.vocabulary.get(text)
        if there is None and old.convention in ("byte-level", "sentencepiece"):
            there = old.by_meaning.get(text.encode())
            there = None if there is not None and old.is_byte(there) else there
        if there is not None:
            raise VocabularyError(
                f"{text!r} cannot be added: it is token {there} ({old.entries[there]!r}) of this tokenizer already. "
                f"Leave it out."
            )
    tokens: dict[str, AddedToken | None] = {}
    for text, token in (added | specials).items():
        entry = None if text in specials or isinstance(token, AddedToken) else _entry(old.tokenizer, text)
        if entry is not None and not _numbered_behind(old):
            if entry in tokens:
                raise VocabularyError(f"{text!r} is named twice among the new tokens. Name each once.")
            tokens[entry] = None
        else:
            _check_spelled_out(old, token)
            tokens[text] = _rules(old, token, word=entry == text, special=text in specials)
    return tokens


def _check_spelled_out(old: Pieces, token: str | AddedToken) -> None:
    """Refuse a new token in the letters of a tokenizer's file, which no text has."""
    mark = {"byte-level": "Ġ", "sentencepiece": "▁"}.get(old.convention)
    if isinstance(token, str) and mark is not None and mark in token:
        raise VocabularyError(
            f"{token!r} cannot be added: no text has the {mark!r} with which this tokenizer's file writes a space. "
            f"Give the text itself: {token.replace(mark, ' ')!r}."
        )


def _rules(old: Pieces, token: str | AddedToken, *, word: bool, special: bool) -> AddedToken:
    """How a new token is found that is not one of the model's own."""
    if isinstance(token, AddedToken):
        record = {**_record(token, 0), "special": token.special or special}
        return AddedToken(**{name: value for name, value in record.items() if name != "id"})
    normal = old.tokenizer.normalizer is not None and normalized(old.tokenizer, token) == token
    word = word and old.convention in ("word", "wordpiece")
    return AddedToken(token, single_word=word, normalized=normal and not special, special=special)


def _entry(tokenizer: Tokenizer, text: str) -> str | None:
    """The entry with which the model itself finds a new token; `None` where it cannot, and for BPE.

    A word of WordPiece or of whole words, or a piece that SentencePiece's Unigram does not cut before it looks.
    """
    kind, steps = type(tokenizer.model).__name__, tokenizer.pre_tokenizer
    cut = [text] if steps is None else [piece for piece, _ in steps.pre_tokenize_str(text)]
    if kind == "Unigram":
        entry = text.replace(" ", "▁")
        word, whole = entry.removeprefix("▁"), cut in ([entry], ["▁" + entry])
    elif kind in ("WordPiece", "WordLevel"):
        entry, word = text, text.removeprefix(_continuing(tokenizer)) or text
        pieces = [word] if steps is None else [piece for piece, _ in steps.pre_tokenize_str(word)]
        whole = pieces == [word] and len(word) <= _longest_word(tokenizer)
    else:
        return None
    return entry if whole and word and normalized(tokenizer, word) == word else None


def _among(new: Mapping[str, AddedToken | None], token: Token) -> str | None:
    """The entry of a new token that is named by its text."""
    names = (token, token.replace(" ", "▁")) if isinstance(token, str) else ()
    return next((name for name in names if name in new), None)


def _by_text(tokens: Iterable[str | AddedToken], option: str) -> dict[str, str | AddedToken]:
    named: dict[str, str | AddedToken] = {}
    for token in tokens:
        text = token if isinstance(token, str) else token.content
        if text in named:
            raise VocabularyError(f"{option} names {text!r} twice. Name each new token once.")
        named[text] = token
    return named


def _found(old: Pieces, tokens: Iterable[Token], option: str) -> dict[int, Token]:
    if isinstance(tokens, str):
        raise VocabularyError(f"Give {option} a list of tokens, not the text {tokens!r}.")
    found: dict[int, Token] = {}
    for token in tokens:
        token_id = old.find(token)
        if token_id in found and option == "remove":
            raise VocabularyError(
                f"{option} names token {token_id} twice: {found[token_id]!r} and {token!r}. Name each token once."
            )
        found[token_id] = token
    return found


def _merges_asked(old: Pieces, merge: Mapping[Token, Token], new: Mapping[str, AddedToken | None]) -> dict[int, str]:
    """For each old ID that is merged, the text of the entry that it becomes."""
    merged: dict[int, str] = {}
    for token, target in merge.items():
        token_id = old.find(token)
        name = _among(new, target) or old.entries[old.find(target)]
        if token_id in merged or old.entries[token_id] == name:
            raise VocabularyError(f"{token!r} cannot be merged into {target!r}: it is that token, or is merged twice.")
        merged[token_id] = name
    for token_id, name in merged.items():
        if old.vocabulary.get(name) in merged:
            raise VocabularyError(
                f"{old.entries[token_id]!r} cannot be merged into {name!r}, which is merged into another token itself. "
                f"Name the last one of the chain."
            )
    return merged


def _gone(
    old: Pieces,
    remove: Iterable[Token],
    keep: Iterable[Token] | None,
    merged: Mapping[int, str],
    needed: Mapping[int, str],
    data: Data,
) -> set[int]:
    """The old IDs that are not to stay, as asked for."""
    removed = _found(old, remove, "remove")
    if keep is not None and removed:
        raise VocabularyError("remove and keep were both given. Give one: keep drops all tokens that it does not name.")
    for token_id in removed.keys() | merged.keys():
        if token_id in needed:
            raise VocabularyError(
                f"{old.entries[token_id]!r} (token {token_id}) cannot be dropped: {needed[token_id]}. Keep it."
            )
    gone = set(removed)
    if keep is not None:
        kept = _found(old, keep, "keep").keys() - merged.keys()
        gone = old.entries.keys() - with_parts(kept | needed.keys(), old, data)
    both = sorted(merged.keys() & removed.keys())
    if both:
        raise VocabularyError(f"{old.entries[both[0]]!r} is to be merged and to be removed. Ask for one of the two.")
    for token_id, name in merged.items():
        if old.vocabulary.get(name) in gone:
            raise VocabularyError(
                f"{old.entries[token_id]!r} cannot be merged into {name!r}, which is dropped. Keep that one."
            )
    return gone | merged.keys()


def _ordered(
    names: list[str], order: Sequence[Token] | None, old: Pieces, new: Mapping[str, AddedToken | None]
) -> list[str]:
    if order is None:
        return names
    wanted = [_among(new, token) or old.entries[old.find(token)] for token in order]
    there = set(names)
    extra = [name for name in wanted if name not in there]
    missing = sorted(there - set(wanted), key=names.index)
    if extra or missing or len(wanted) != len(names):
        raise VocabularyError(
            f"The order names {len(set(wanted)):,} tokens in {len(wanted):,} places, and the result has {len(names):,}"
            f"{_listed('; it lacks', missing)}{_listed('; not in the result:', extra)}. Name each of its tokens once."
        )
    return wanted


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(map(repr, names[:_SHOWN]))}{more}"


# What follows


def required_tokens(data: Data, old: Pieces) -> dict[int, str]:
    """Return the IDs that the tokenizer cannot do without, each with the reason."""
    reasons = dict.fromkeys(_template_ids(data.get("post_processor")), "the post-processor puts it around texts")
    if data.get("padding"):
        reasons[data["padding"]["pad_id"]] = "the tokenizer pads with it"
    unknown = unknown_token(data, old)
    if unknown is not None:
        reasons[unknown] = "it stands for all that the model cannot write"
    elif old.convention == "byte-level":
        reasons |= dict.fromkeys(old.single_bytes, "a byte that no other token writes")
    return {token_id: reason for token_id, reason in reasons.items() if token_id in old.entries}


def unknown_token(data: Data, old: Pieces) -> int | None:
    """Return the ID of the unknown token, or `None`."""
    model = data["model"]
    return model["unk_id"] if model["type"] == "Unigram" else old.vocabulary.get(model.get("unk_token"))


def _template_ids(processor: Data | None) -> Iterator[int]:
    """The IDs that a post-processor puts around a text or a pair of texts."""
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


def _names_in_template(processor: Data) -> set[str]:
    parts = [*processor["single"], *processor["pair"]]
    return {part["SpecialToken"]["id"] for part in parts if "SpecialToken" in part}


def with_parts(kept: set[int], old: Pieces, data: Data) -> set[int]:
    """Return the IDs, and those that the kept tokens cannot be read without."""
    model = data["model"]
    if model["type"] == "BPE":
        merged = (old.entries[token_id] for token_id in kept - old.added)
        kept = kept | {old.vocabulary[name] for name in Merges(model).with_parts(merged)}
    elif model["type"] == "Unigram" and model["vocab"]:
        kept = kept | {min(range(len(model["vocab"])), key=lambda token_id: model["vocab"][token_id][1])}
    return kept


def _lost_with(
    gone: set[int], old: Pieces, data: Data, merged: Mapping[int, str], needed: Mapping[int, str]
) -> set[int]:
    """The IDs of tokens that cannot be read any more without those that are gone."""
    if data["model"]["type"] != "BPE" or not gone:
        return set()
    merges = Merges(data["model"])
    names = {old.entries[token_id] for token_id in gone}
    if not any(part in names for pair in merges.pairs for part in pair):
        return set()
    lost = {old.vocabulary[name] for name in merges.lost_with(names)} - old.added - needed.keys()
    for token_id, name in merged.items():
        if old.vocabulary.get(name) in lost:
            raise VocabularyError(
                f"{old.entries[token_id]!r} cannot be merged into {name!r}, which is made from it and would be lost."
            )
    return lost


# The new tokenizer


def _built(data: Data, names: list[str], new: Mapping[str, AddedToken | None], old: Pieces) -> Tokenizer:
    """The tokenizer whose entry of ID i is `names[i]`."""
    model = data["model"]
    unigram = model["type"] == "Unigram"
    old_model = dict(model["vocab"]) if unigram else model["vocab"]
    ids = {name: new_id for new_id, name in enumerate(names)}
    new_id_of = {token_id: ids[name] for token_id, name in old.entries.items() if name in ids}

    inside = model["type"] != "BPE" and not _numbered_behind(old)
    entries = {name for name in names if name in old_model or (inside and name in new)}
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
        model["merges"] = Merges({**model, "vocab": old_model}).without(old_model.keys() - ids.keys()).pairs

    records = [{**record, "id": ids[record["content"]]} for record in data["added_tokens"] if record["content"] in ids]
    records += [_record(token, ids[text]) for text, token in new.items() if token is not None]
    data["added_tokens"] = sorted(records, key=lambda record: record["id"])
    if _puts_space_before_each_part(data.get("normalizer")):
        glued = [text for text, token in new.items() if token is not None and not (token.special or token.rstrip)]
        data["decoder"] = _with_glue(data.get("decoder"), glued, ids)
    _renumber_template(data.get("post_processor"), new_id_of)
    if data.get("padding"):
        data["padding"]["pad_id"] = new_id_of.get(data["padding"]["pad_id"], data["padding"]["pad_id"])
    try:
        edited: Tokenizer = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"The edited tokenizer cannot be built: {error}.") from error
    if edited.get_vocab(with_added_tokens=True) != ids:
        raise TokenizerError(
            "The tokenizers library numbers the edited vocabulary in another order than was asked for."
        )
    return edited


def _puts_space_before_each_part(normalizer: Data | None) -> bool:
    """Whether a space is put in front of a text, and so of each part of it between added tokens (LLaMA-2)."""
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    return any(step["type"] == "Prepend" for step in steps)


def _with_glue(decoder: Data | None, new: Sequence[str], ids: Mapping[str, int]) -> Data | None:
    """Return a decoder that takes off the space which the normalizer puts behind an added token.

    Two steps in front mark where these tokens begin and end, and those behind `Fuse` take off the space at the end of
    each and the marks; at the start of a text they put the space in front that the decoder strips there. Tokens that
    are gone leave the steps, and the steps go with the last one.
    """
    steps = list((decoder or {}).get("decoders", []))
    if decoder is None or not any(step["type"] == "Fuse" for step in steps):
        return decoder
    pattern = steps[0].get("pattern", {}).get("Regex", "")
    there = _GLUED.fullmatch(pattern)
    escaped = re.findall(r"(?:\\.|[^|\\])+", there[1], re.DOTALL) if there else []
    tokens = [token for token in (re.sub(r"\\(.)", r"\1", one, flags=re.DOTALL) for one in escaped) if token in ids]
    tokens += [token for token in new if token not in tokens]
    steps = [step for step in steps if not _is_glue(step)]
    if not tokens:
        return {**decoder, "decoders": steps}
    place = next(at for at, step in enumerate(steps) if step["type"] == "Fuse") + 1
    any_of = "|".join(map(re.escape, tokens))
    front = [_replace(rf"(?<=\A(?:{any_of}))\z", _ENDS), _replace(rf"\A(?=(?:{any_of}){_ENDS}\z)", _BEGINS)]
    behind = [_replace(f"{_ENDS} ", ""), _replace(rf"\A{_BEGINS}", " "), _replace(f"[{_BEGINS}{_ENDS}]", "")]
    if not any(step["type"] == "Strip" for step in steps[place:]):
        del behind[1]
    return {**decoder, "decoders": [*front, *steps[:place], *behind, *steps[place:]]}


def _replace(pattern: str, content: str) -> Data:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _is_glue(step: Data) -> bool:
    return any(mark in json.dumps(step, ensure_ascii=False) for mark in (_BEGINS, _ENDS))


def warn_of_other_texts(old: Tokenizer, new: Tokenizer, terms: Sequence[str]) -> None:
    """Warn where a text that holds a new token was decoded exactly before and is not any more.

    Each token is looked at alone, between words and, where tokens write the spaces, inside other letters.
    """
    spaces = Pieces(old).convention in ("byte-level", "sentencepiece")
    old, new = without_truncation(old), without_truncation(new)
    texts = {f"{left}{term}{right}": term for term in terms for left, right in (_AROUND if spaces else _AROUND[:2])}

    def decoded(tokenizer: Tokenizer) -> list[str]:
        encodings = tokenizer.encode_batch([*texts], add_special_tokens=False)
        return tokenizer.decode_batch([encoding.ids for encoding in encodings])

    changed: dict[str, tuple[str, str]] = {}
    for (text, term), before, after in zip(texts.items(), decoded(old), decoded(new), strict=True):
        if before == text != after:
            changed.setdefault(term, (before, after))
    if changed:
        before, after = next(iter(changed.values()))
        warnings.warn(
            f"Text around {len(changed):,} of the new tokens is decoded otherwise than before"
            f"{_listed(':', list(changed))}. For example {before!r} becomes {after!r}. Give an AddedToken with rules "
            f"for the spaces around it, or leave these out.",
            EmbedLayerWarning,
            stacklevel=4,
        )


_AROUND = (("", ""), ("a ", " b"), ("a", "b"), ("は", "は"), ("は ", " は"))
_BEGINS, _ENDS = "\ufdd0", "\ufdd1"
"""Marks inside a decoder: no text has these code points, which are no characters."""
_GLUED = re.compile(r"\(\?<=\\A\(\?:(.+)\)\)\\z", re.DOTALL)


def _score(entry: str, tokenizer: Tokenizer, scores: Mapping[str, float]) -> float:
    """Just above what the pieces of a new entry of Unigram score together, so that it stands where they stood."""
    pieces = [token.value for token in tokenizer.model.tokenize(entry)]
    return round(sum(scores.get(piece, -math.inf) for piece in pieces) + _ABOVE_ITS_PIECES, 10)


def _record(token: AddedToken, token_id: int) -> Data:
    return {
        "id": token_id,
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }


def _renumber_template(processor: Data | None, new_id_of: Mapping[int, int]) -> None:
    """Give the special tokens of a post-processor their new IDs; those that it never uses and are gone go."""
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


def _check_reached(tokenizer: Tokenizer, new: Mapping[str, AddedToken | None]) -> None:
    """Refuse a new token that a text can never hold, because another one always takes a part of it."""
    bare = without_truncation(tokenizer)
    for text in [text for text, rules in new.items() if rules is not None]:
        encoding = bare.encode(text, add_special_tokens=False)
        if encoding.ids != [bare.token_to_id(text)]:
            raise VocabularyError(
                f"{text!r} cannot be added: it would never be found in a text, for it is read as {encoding.tokens}. "
                f"Give an AddedToken with other rules, or remove the token that is in its way."
            )


# Small things


def tokenizer_data(tokenizer: Tokenizer) -> Data:
    """Return what a tokenizer.json would hold.

    Raises:
        TokenizerError: The tokenizer has parts written in Python, which no file holds.
    """
    try:
        data: Data = json.loads(tokenizer.to_str())
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(
            f"The tokenizer cannot be written as a tokenizer.json, and so not be edited: {error}."
        ) from error
    return data


def _numbered_behind(old: Pieces) -> bool:
    """Whether added tokens of this tokenizer stand behind the model's vocabulary and not in it."""
    return not old.added <= {*old.tokenizer.get_vocab(with_added_tokens=False).values()}


def _continuing(tokenizer: Tokenizer) -> str:
    return getattr(tokenizer.model, "continuing_subword_prefix", None) or ""


def _longest_word(tokenizer: Tokenizer) -> int:
    return getattr(tokenizer.model, "max_input_chars_per_word", sys.maxsize)


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as the tokenizer's normalizer leaves it."""
    return text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
