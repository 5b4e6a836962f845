"""Convert the tokenizer in the metadata of a GGUF file to a `tokenizers.Tokenizer`, and back.

A GGUF file states the kind of the model, a text, a kind and a score for each token, and for byte-level BPE the merges
and the name of a pre-tokenizer, which is data of llama.cpp's code (`embedlayer.families.PRE_TOKENIZERS`).

Reference: src/llama-vocab.cpp and convert_hf_to_gguf.py in the repository of llama.cpp.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.families import GGUF_TOKENIZERS, PRE_TOKENIZERS
from embedlayer.tokenization.bytes import BYTE_ENTRY
from embedlayer.tokenization.sentencepiece_files import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    sentencepiece_normalizer,
    sentencepiece_tokenizer,
)
from embedlayer.tokenization.tokenizer_calls import decode_batch, encode_batch
from embedlayer.tokenization.tokenizer_config import template
from embedlayer.tokenization.vocabulary_files import bert_tokenizer, component_types, is_lowercased

PREFIX, JSON = "tokenizer.ggml.", "tokenizer.huggingface.json"
TOKEN_ID = "_token_id"
"""End of the keys of a special token's ID."""

_SCORE = -1000.0
"""Score of tokens that are never merged, as llama.cpp's converter writes it."""

_FORMS = {"byte-level": "byte-level BPE", "sentencepiece": "SentencePiece BPE", "unigram": "Unigram"}
_PROBED = 512
"""Tokens whose texts are encoded to compare two tokenizers."""

_PROBE = (
    "The quick brown fox, aged 12345, can't jump over 3.14 lazy dogs!",
    "  Two spaces  in  front and between,\nlines\n\n\tand tabs.  ",
    "naïve café, 日本語のテキスト, Привет мир, ½ ™ 🙂",
    "def f(x):\n    return x**2  # code",
)

Values = Mapping[str, Any]


def tokenizer_of(values: Values, path: Path) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes."""
    kind, entries = values.get(f"{PREFIX}model"), values.get(f"{PREFIX}tokens")
    if kind is None or not entries:
        raise TokenizerError(f"{path} has no tokenizer: its metadata has no {PREFIX}model or no {PREFIX}tokens.")
    kinds = values.get(f"{PREFIX}token_type", [NORMAL] * len(entries))
    scores = values.get(f"{PREFIX}scores", [0.0] * len(entries))
    if not len(entries) == len(kinds) == len(scores):
        raise TokenizerError(f"{path} has {len(entries):,} tokens, {len(kinds):,} types and {len(scores):,} scores.")
    builders: dict[str, Callable[[], Tokenizer]] = {
        "byte-level": lambda: _byte_level(values, entries, kinds, path),
        "sentencepiece": lambda: _sentencepiece(values, entries, kinds, scores, is_unigram=False),
        "unigram": lambda: _sentencepiece(values, entries, kinds, scores, is_unigram=True),
        "wordpiece": lambda: _wordpiece(values, entries, kinds),
    }
    form = GGUF_TOKENIZERS.get(str(kind))
    if form is None:
        raise TokenizerError(f"{path} has a tokenizer of kind {kind!r}; embedlayer reads {', '.join(GGUF_TOKENIZERS)}.")
    try:
        tokenizer = builders[form]()
        if form != "wordpiece":
            _add_ends(tokenizer, values, entries, form, path)
    except TokenizerError:
        raise
    except Exception as error:  # the class of all errors of the tokenizers library
        raise TokenizerError(f"The tokenizer of {path} cannot be built ({error}): the file is damaged.") from error
    return tokenizer


def _byte_level(values: Values, entries: list[str], kinds: list[int], path: Path) -> Tokenizer:
    """Return a byte-level BPE tokenizer, as in GPT-2."""
    name = values.get(f"{PREFIX}pre")
    if name not in PRE_TOKENIZERS:
        fault = "names no pre-tokenizer" if name is None else f"has the pre-tokenizer {name!r}, which is not known here"
        raise TokenizerError(f"{path} {fault} (known: {', '.join(PRE_TOKENIZERS)}).")
    splits, merges = PRE_TOKENIZERS[str(name)], values.get(f"{PREFIX}merges", [])
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {entry: token for token, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=splits.ignores_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, entries, kinds)
    return tokenizer


def _sentencepiece(
    values: Values, entries: list[str], kinds: list[int], scores: list[float], *, is_unigram: bool
) -> Tokenizer:
    """Return a tokenizer as SentencePiece builds it, BPE or Unigram."""
    adds_space = bool(values.get(f"{PREFIX}add_space_prefix", not is_unigram))
    charsmap = bytes(byte % 256 for byte in values.get(f"{PREFIX}precompiled_charsmap", [])) if is_unigram else b""
    trims = is_unigram and bool(values.get(f"{PREFIX}remove_extra_whitespaces", False))
    unknown = values.get(f"{PREFIX}unknown_token_id", kinds.index(UNKNOWN) if UNKNOWN in kinds else 0)
    return sentencepiece_tokenizer(
        list(zip(entries, scores, strict=True)),
        kinds,
        unknown,
        is_unigram=is_unigram,
        normalizer=sentencepiece_normalizer(charsmap, adds_space=adds_space, trims=trims, space=SPACE),
        adds_space=adds_space,
        normalizes_symbols=False,
    )


def _wordpiece(values: Values, entries: list[str], kinds: list[int]) -> Tokenizer:
    """Return a WordPiece tokenizer, as in BERT.

    Text is lower-cased if no entry except the bracketed ones has an upper-case letter. A start and an end token go
    around it if the metadata or the vocabulary (`[CLS]`, `[SEP]`) has both.
    """
    names = []
    for entry, kind in zip(entries, kinds, strict=True):  # `▁` marks the start of a word, where `##` marks the rest
        is_text = kind in (NORMAL, UNUSED)
        names.append(entry if not is_text else entry[1:] if entry.startswith(SPACE) else f"##{entry}")
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = bert_tokenizer(vocabulary, lowercase=is_lowercased(names))
    _add(tokenizer, names, kinds)
    start = values.get(f"{PREFIX}cls{TOKEN_ID}", values.get(f"{PREFIX}bos{TOKEN_ID}", vocabulary.get("[CLS]")))
    end = values.get(f"{PREFIX}seperator{TOKEN_ID}", vocabulary.get("[SEP]"))  # spelt so in llama.cpp
    if start is not None and end is not None:
        tokenizer.post_processor = processors.BertProcessing((names[end], end), (names[start], start))
    return tokenizer


def _add(tokenizer: Tokenizer, names: list[str], kinds: list[int]) -> None:
    """Tell a tokenizer which of its tokens are special, and which are found anywhere in a text."""
    pairs = list(zip(names, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name, kind in pairs if kind in (CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name, kind in pairs if kind == USER_DEFINED])


def _add_ends(tokenizer: Tokenizer, values: Values, entries: list[str], form: str, path: Path) -> None:
    """Let a tokenizer put the begin-of-text and end-of-text token around a text, as the metadata says.

    Where the metadata says nothing, the default of llama.cpp for this `form` of tokenizer applies.
    """
    splits = PRE_TOKENIZERS.get(values.get(f"{PREFIX}pre", "")) if form == "byte-level" else None
    defaults = {"bos": form == "sentencepiece" or (splits is not None and splits.adds_bos), "eos": form == "unigram"}
    known = {"sentencepiece": {"bos": 1, "eos": 2}, "unigram": {"eos": 1}}.get(form, {})
    ends: dict[str, tuple[str, ...]] = {}
    for end, default in defaults.items():
        if values.get(f"{PREFIX}add_{end}_token", default):
            token = values.get(f"{PREFIX}{end}{TOKEN_ID}", known.get(end))
            if token is None or token >= len(entries):
                raise TokenizerError(f"The tokenizer adds {end}, without a valid {PREFIX}{end}{TOKEN_ID}.")
            ends[end] = (entries[token],)
    if ends:
        first, last = (ends.get(end, ()) for end in ("bos", "eos"))
        tokenizer.post_processor = template(tokenizer, first, last, (*last, *first), path)


# Writing


def check_kind(tokenizer: Tokenizer, old: Values, path: Path) -> None:
    """Raise a `TokenizerError` unless a GGUF file can describe the kind of a tokenizer, such as byte-level BPE."""
    model, kind = type(tokenizer.model).__name__, str(old[f"{PREFIX}model"])
    own_form = {"Unigram": "unigram", "WordPiece": "wordpiece"}.get(model, model)
    if model == "BPE":
        steps = component_types(tokenizer.decoder) | component_types(tokenizer.pre_tokenizer)
        own_form = "byte-level" if "ByteLevel" in steps else "sentencepiece"
    if own_form != (wanted := GGUF_TOKENIZERS[kind]):
        names = [_FORMS.get(form, form.replace("wordpiece", "WordPiece")) for form in (wanted, own_form)]
        raise TokenizerError(
            f"{path} has a tokenizer of kind {kind!r} ({names[0]}), which cannot describe a {names[1]} model: edit and "
            f"convert the checkpoint that it is from."
        )


def tokenizer_metadata(tokenizer: Tokenizer, old: Values, rows: int, path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file for an edited tokenizer: tokens, their kinds and scores, and merges.

    Old tokens keep their score, and their kind unless they became added tokens or stopped being added tokens. Unigram
    takes the scores of the new tokenizer; SentencePiece's BPE gets new scores if the order of its merges changed
    (`_merge_scores`). Rows without a token become unused tokens. Only keys of `old`, the metadata of the file, are
    returned.
    """
    check_kind(tokenizer, old, path)
    data, before = json.loads(tokenizer.to_str()), tokenizer_of(old, path)
    form, model = GGUF_TOKENIZERS[old[f"{PREFIX}model"]], data["model"]
    old_kinds = old.get(f"{PREFIX}token_type", [NORMAL] * len(old[f"{PREFIX}tokens"]))
    old_scores = old.get(f"{PREFIX}scores", [_SCORE] * len(old_kinds))
    old_ids = before.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    names = {token: name for name, token in tokenizer.get_vocab(with_added_tokens=True).items()}
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", [])]
    scores = dict(model["vocab"]) if form == "unigram" else {}
    if form == "sentencepiece":
        single = [name for row, name in sorted(names.items()) if row not in added and not BYTE_ENTRY.fullmatch(name)]
        scores = _merge_scores(merges, single, {name: old_scores[token] for name, token in old_ids.items()})
    unknown = model.get("unk_token") if form == "sentencepiece" else None
    tokens: list[tuple[str, int, float]] = []
    for row in range(rows):
        name = names.get(row)
        if name is None:
            tokens.append((f"[PAD{row}]", UNUSED, _SCORE))
            continue
        token = old_ids.get(name)
        number = NORMAL if token is None else old_kinds[token]
        if row in added:
            is_unknown = number == UNKNOWN or name == unknown
            number = USER_DEFINED if not added[row].special else UNKNOWN if is_unknown else CONTROL
        elif number in (CONTROL, USER_DEFINED):
            number = NORMAL
        if model.get("byte_fallback") and BYTE_ENTRY.fullmatch(name):
            number = BYTE
        text = name
        if form == "wordpiece" and number in (NORMAL, UNUSED):
            text = name.removeprefix("##") if name.startswith("##") else SPACE + name
        tokens.append((text, number, scores.get(name, _SCORE if token is None else old_scores[token])))
    new = {
        f"{PREFIX}tokens": [text for text, _, _ in tokens],
        f"{PREFIX}token_type": [number for _, number, _ in tokens],
        f"{PREFIX}scores": [score for _, _, score in tokens],
        f"{PREFIX}merges": [" ".join(pair) for pair in merges],
        JSON: tokenizer.to_str(),
    }
    new = {key: value for key, value in new.items() if key in old}
    _check_same_ids(tokenizer, tokenizer_of({**old, **new}, path), path)
    return new


def _merge_scores(
    merges: Sequence[tuple[str, ...]], entries: Sequence[str], old_scores: Mapping[str, float]
) -> dict[str, float]:
    """Return scores with which SentencePiece merges subwords in the order of a list of merges.

    SentencePiece has no list of merges: it merges the two neighbours whose merged subword has the highest score. If the
    scores of the file already have the order of `merges`, they are kept (and left out of the result), and merged
    subwords that are new get lower scores. Otherwise all scores are new: 0, -1, -2, ... in the order of the merges,
    then for the subwords that no merge gives, by ID, as SentencePiece's trainer numbers them. `entries` are the
    subwords by ID, without special tokens and bytes.
    """
    order = list(dict.fromkeys(left + right for left, right in merges))
    known = [name for name in order if name in old_scores]
    place = {name: number for number, name in enumerate(entries)}
    sorted_known = sorted(known, key=lambda name: (-old_scores[name], place.get(name, 0)))
    if known and known == order[: len(known)] == sorted_known:
        low = min(old_scores.values())
        step = max(1.0, 2 * float(np.spacing(np.float32(abs(low)))))  # float32 numbers that differ
        return {name: low - step * (1 + number) for number, name in enumerate(order[len(known) :])}
    merged = set(order)
    return {name: -float(number) for number, name in enumerate([*order, *(e for e in entries if e not in merged)])}


def _check_same_ids(tokenizer: Tokenizer, written: Tokenizer, path: Path) -> None:
    """Raise a `TokenizerError` unless a tokenizer and the one written into metadata give some texts the same IDs."""
    # sample texts, `_PROBED` tokens from all over the vocabulary, and its last ones, which an edit added
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    probed = sorted({*range(0, size, max(1, size // _PROBED)), *range(max(0, size - 64), size)})
    tokens = decode_batch(tokenizer, [[token] for token in probed], skip_special_tokens=False)
    texts = [*_PROBE, *(f"a{token} b{token}" for token in tokens)]
    ids = [[each.ids for each in encode_batch(one, texts)] for one in (tokenizer, written)]
    for text, ours, theirs in zip(texts, *ids, strict=True):
        if ours != theirs:
            raise TokenizerError(
                f"The metadata of {path} cannot describe this tokenizer: {text!r} becomes {ours}, and there {theirs}."
            )
