"""Convert SentencePiece's `.model` files, and llama2.c's `tokenizer.bin`, to `tokenizers.Tokenizer` objects.

SentencePiece itself reads the subwords. Its Python API does not return the kind of the model and the normaliser, so
these fields are read from the file, a protocol buffer. SentencePiece's own `sentencepiece_model_pb2` cannot be used:
after its import, transformers cannot import its copy of that module.

A `tokenizer.bin` has an int32, the length of the longest token, and for each token a float32 score, an int32 length and
the bytes of the token, little-endian. Token 1 starts a text; tokens 3 to 258 are the bytes 0 to 255.
"""

import math
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from embedlayer.core.errors import TokenizerError, require
from embedlayer.families.tokenizers import GENERIC_CLASSES, SENTENCEPIECE_CLASSES, SentencePieceRules, TextSteps
from embedlayer.io.files import read_bytes
from embedlayer.tokenization.tokenizer_calls import encode, normalized
from embedlayer.tokenization.tokenizer_config import TokenizerConfig, add_configured_tokens, read_json_file, template

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of subwords, which GGUF files have too."""

_UNIGRAM, _BPE = 1, 2
_SHIFTED_NAME = "sentencepiece.bpe.model"
"""Name of the model in folders of classes with IDs of their own: XLM-RoBERTa, mBART, NLLB, CamemBERT."""

_NEVER = 100.0
"""What is subtracted from the score of a subword that is not to be used, as transformers does it."""

_NFKC_PROBE = ("ﬁ", "①", "ｶ", "Ａ", "e\u0301", "½")
_PROBE = (
    "The quick brown fox, aged 12, can't jump over 3.14 lazy dogs!",
    "  Two spaces  in  front and between,\nlines\tand tabs.  ",
    "Ünïcödé ﬁne print: naïve café, 日本語のテキスト, Привет мир, ½ ™ 🙂👩‍💻",
    "def f(x):\n    return x**2  # code",
    "Tie\u0302\u0301ng Vie\u0323\u0302t, \u1112\u1161\u11ab, ﾊﾟｿｺﾝ ｶﾞ",
    "\u09a4\u09c7\u09be, \u0b95\u0bc6\u0bbe, α\u0313\u0301, ～, a▁b ▁c",
    "",
)


def read_sentencepiece(path: Path, config: TokenizerConfig) -> Tokenizer:
    """Read a SentencePiece `.model` file and return a tokenizer that gives the same subwords.

    The IDs are those of the class that the files beside the model state, or else the model's own. SentencePiece itself
    checks the result: both must give some sample texts the same subwords.
    """
    sentencepiece = require("sentencepiece", extra="spm")
    raw = read_bytes(path)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=raw)
        kinds = [dict(_fields(entry)).get(3, 1) for number, entry in _fields(raw) if number == 1]
        symbols = [processor.id_to_piece(i) for i, kind in enumerate(kinds) if kind == USER_DEFINED]
        rules = _rules(path, config)
        if rules.steps is not None and rules.steps.splits_commas:
            kinds = _without_commas(processor, kinds)
        vocabulary = _vocabulary(processor, kinds, rules, path)
        tokenizer = _tokenizer(processor, raw, vocabulary, rules)
    except (RuntimeError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is not a whole SentencePiece model ({error}): it is damaged.") from error
    texts = [*_PROBE, *(f"a {symbol} b{symbol}c" for symbol in symbols[:4])]
    _check_same_ids(path, tokenizer, processor, vocabulary.ids, texts, normalizers.Sequence(_steps(rules.steps)))
    _apply_settings(tokenizer, rules, config, path)
    lstrip = ("mask_token",) if rules.lstrip else ()
    _add_roles(tokenizer, rules, config, path)
    add_configured_tokens(tokenizer, config, {}, file=path, lstrip=lstrip, normalizes=False)
    _add_ends(tokenizer, processor, rules, config, path)
    return tokenizer


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary of a SentencePiece model with the IDs of a tokenizer class."""

    subwords: list[tuple[str, float]]  # subword and score of each ID
    kinds: list[int]
    unknown: int  # ID of unknown text
    ids: list[int]  # ID of each of the model's own IDs


def _rules(path: Path, config: TokenizerConfig) -> SentencePieceRules:
    """Return which IDs and which tokens around a text the class of a SentencePiece model has."""
    known = ", ".join(SENTENCEPIECE_CLASSES)
    if config.kind is not None and config.kind not in (*SENTENCEPIECE_CLASSES, *GENERIC_CLASSES):
        raise config.refuse_class(path)
    rules = SENTENCEPIECE_CLASSES.get(config.kind or "")
    if rules is None:
        if path.name.endswith(_SHIFTED_NAME):
            raise TokenizerError(
                f"{path} may be one of {known}. See docs/errors.md, Tokenizer files without their class."
            )
        return SentencePieceRules()
    if config.kind == "Pegasus" and config.settings.get("offset") == 0:
        return SentencePieceRules(ends=rules.ends, between=rules.between)
    for name, value in rules.fixed.items():
        if config.settings.get(name) not in (None, value):
            raise config.refuse_class(path, reason=f"is read with {name} {value!r}, not {config.settings[name]!r}")
    if rules.last[-1:] == ("<extra_id_0>",):
        extra = config.settings.get("extra_ids", len(rules.last))
        return replace(rules, last=tuple(f"<extra_id_{number}>" for number in range(int(extra) - 1, -1, -1)))
    if rules.steps is not None:
        keeps = config.setting("keep_accents", rules.steps.keeps_accents)
        lowers = config.setting("do_lower_case", rules.steps.lower_case)
        return replace(rules, steps=replace(rules.steps, keeps_accents=keeps, lower_case=lowers))
    if config.kind == "Nllb" and config.setting("legacy_behaviour", False):
        return replace(rules, starts=(), ends=("</s>", ""))
    return rules


def _steps(steps: TextSteps | None) -> list[normalizers.Normalizer]:
    """Return what a class changes in a text before SentencePiece reads it."""
    if steps is None:
        return []
    changes: list[normalizers.Normalizer] = []
    if steps.quotes:
        changes += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not steps.keeps_accents:
        changes += [normalizers.NFKD(), normalizers.StripAccents()]
    return [*changes, normalizers.Lowercase()] if steps.lower_case else changes


def _without_commas(processor: Any, kinds: Sequence[int]) -> list[int]:
    """Let a model split each comma from the digit before it, as ALBERT and XLNet do.

    Return the changed kinds of the subwords; `processor` is changed too, so that it can check the conversion.
    """
    texts = [processor.id_to_piece(i) for i in range(len(kinds))]
    kinds = [
        UNUSED if text.endswith(",") and text[-2:-1].isdigit() else kind
        for text, kind in zip(texts, kinds, strict=True)
    ]
    if UNUSED in kinds:
        processor.set_vocabulary([text for text, kind in zip(texts, kinds, strict=True) if kind != UNUSED])
    return kinds


def _vocabulary(processor: Any, kinds: Sequence[int], rules: SentencePieceRules, path: Path) -> _Vocabulary:
    """Give the subwords of a SentencePiece model the IDs of a tokenizer class."""
    own = [
        (processor.id_to_piece(i), processor.get_score(i) - (_NEVER if kind == UNUSED else 0))
        for i, kind in enumerate(kinds)
    ]
    if rules.reads_vocabulary:
        return _vocabulary_of_file(own, kinds, rules, path)
    if any(kind not in (CONTROL, UNKNOWN) for kind in kinds[: rules.skipped]):
        raise TokenizerError(f"{path} is not of its class: one of its first {rules.skipped} subwords is not special.")
    texts = [*rules.first, *(text for text, _ in own[rules.skipped :]), *rules.last]
    shift = len(rules.first) - rules.skipped
    unknown = texts.index(rules.unknown) if rules.unknown else processor.unk_id() + shift
    return _Vocabulary(
        [*((text, 0.0) for text in rules.first), *own[rules.skipped :], *((text, 0.0) for text in rules.last)],
        [
            *(UNKNOWN if text == rules.unknown else CONTROL for text in rules.first),
            *kinds[rules.skipped :],
            *[CONTROL] * len(rules.last),
        ],
        unknown,
        [unknown if i == processor.unk_id() else i + shift for i in range(len(own))],
    )


def _vocabulary_of_file(
    own: Sequence[tuple[str, float]], kinds: Sequence[int], rules: SentencePieceRules, path: Path
) -> _Vocabulary:
    """Give the subwords of a SentencePiece model the IDs of the `vocab.json` beside it.

    Entries of the file that the model lacks become unused subwords.
    """
    file = path.with_name("vocab.json")
    entries: dict[str, int] = read_json_file(file)
    by_id = {token_id: text for text, token_id in entries.items()}
    missing = [text for (text, _), kind in zip(own, kinds, strict=True) if kind == NORMAL and text not in entries]
    if by_id.keys() != set(range(len(entries))) or rules.unknown not in entries or missing:
        lacks = f"it lacks {missing[0]!r}" if missing else f"its IDs have gaps, or it lacks {rules.unknown}"
        raise TokenizerError(f"{file} does not give each subword of {path.name} an ID: {lacks}.")
    scores, kind_of = dict(own), dict(zip((text for text, _ in own), kinds, strict=True))
    least = min(scores.values(), default=0.0) - _NEVER
    texts = [by_id[token_id] for token_id in range(len(by_id))]
    special = {**dict.fromkeys(rules.first, CONTROL), rules.unknown: UNKNOWN}
    unknown: int = entries[rules.unknown]
    return _Vocabulary(
        [*((text, scores.get(text, least)) for text in texts), *((text, 0.0) for text in rules.last)],
        [*(special.get(text, kind_of.get(text, UNUSED)) for text in texts), *[CONTROL] * len(rules.last)],
        unknown,
        [
            unknown if kind == UNKNOWN else entries.get(text, unknown)
            for (text, _), kind in zip(own, kinds, strict=True)
        ],
    )


def _apply_settings(tokenizer: Tokenizer, rules: SentencePieceRules, config: TokenizerConfig, path: Path) -> None:
    """Let a tokenizer put a space before a text as the settings `legacy` and `add_prefix_space` say."""
    adds_space = config.setting("add_prefix_space", True)
    texts = ["a", *_NFKC_PROBE]
    changed: list[str] = [normalized(tokenizer, text) for text in texts]
    if rules.legacy is None:
        if not adds_space and changed[0].startswith(SPACE):
            raise config.refuse_class(path, reason="is read with add_prefix_space True, not False")
        return
    if adds_space and config.setting("legacy", rules.legacy):
        return
    if [text.removeprefix(SPACE) for text in changed] != texts:
        raise config.refuse_class(path, reason="is read with legacy True alone where the model changes letters")
    scheme: Literal["first", "never"] = "first" if adds_space else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    tokenizer.decoder = _decoder(adds_space=adds_space)


def _add_roles(tokenizer: Tokenizer, rules: SentencePieceRules, config: TokenizerConfig, path: Path) -> None:
    """Add the special tokens that a class puts behind the model's subwords."""
    listed = {token.content for token in config.added.values()}
    known = tokenizer.get_vocab(with_added_tokens=True).keys() | listed
    fixed = [config.role(role, {}) for role in config.roles] if rules.first else []
    for text in (*fixed, *(token.content for token in config.specials)):
        if text is not None and text not in known:
            raise TokenizerError(
                f"{config.folder} has a special token {text!r} without an ID: add an added_tokens.json."
            )
    roles = [config.role(role, rules.roles) for role in rules.roles]
    tokens = [text for text in roles if text is not None and text not in listed]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])


def _decoder(*, adds_space: bool) -> decoders.Decoder:
    """Return the decoder of a SentencePiece model; `adds_space`: it removes a space before the text."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if adds_space else []))


def _add_ends(
    tokenizer: Tokenizer, processor: Any, rules: SentencePieceRules, config: TokenizerConfig, path: Path
) -> None:
    """Let a tokenizer put the tokens of its class around a text.

    Which tokens these are depends on the settings `src_lang`, `add_bos_token` and `add_eos_token`.
    """
    language = config.settings.get("src_lang") or rules.language
    names = {"": language if language in rules.languages else rules.language_form.format(language)}
    starts, ends = rules.starts, rules.ends
    if not language:
        starts, ends = (tuple(each for each in side if each) for side in (starts, ends))
    elif rules.languages and names[""] not in rules.languages:
        raise TokenizerError(f"{path} has no language {language!r}, which src_lang of its tokenizer_config.json names.")
    for role, token_id, adds in (("bos", processor.bos_id(), True), ("eos", processor.eos_id(), False)):
        if role in (*starts, *ends):
            own = {f"{role}_token": processor.id_to_piece(token_id)} if token_id >= 0 else {}
            text = config.role(f"{role}_token", own)
            if text is not None and config.setting(f"add_{role}_token", adds):
                names[role] = text
            else:
                starts, ends = (tuple(each for each in side if each != role) for side in (starts, ends))
    if starts or ends:
        around = [[names.get(each, each) for each in side] for side in (starts, ends)]
        tokenizer.post_processor = template(tokenizer, around[0], around[1], rules.between, path)


def _tokenizer(processor: Any, raw: bytes, vocabulary: _Vocabulary, rules: SentencePieceRules) -> Tokenizer:
    """Build the tokenizer for a SentencePiece model."""
    fields = dict(_fields(raw))
    trainer, normalizer = dict(_fields(fields.get(2, b""))), dict(_fields(fields.get(3, b"")))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError("It holds a word or character model; only BPE and Unigram models can be converted.")
    adds_space = bool(normalizer.get(3, 1))
    return sentencepiece_tokenizer(
        vocabulary.subwords,
        vocabulary.kinds,
        vocabulary.unknown,
        is_unigram=kind == _UNIGRAM,
        normalizer=normalizers.Sequence(
            [
                *_steps(rules.steps),
                sentencepiece_normalizer(
                    normalizer.get(2, b""),
                    adds_space=adds_space,
                    trims=bool(normalizer.get(4, 1)),
                    space=SPACE if normalizer.get(5, 1) else " ",
                ),
            ]
        ),
        adds_space=adds_space,
        normalizes_symbols=not adds_space,
        lstrip=rules.lstrip,
    )


def sentencepiece_tokenizer(
    subwords: Sequence[tuple[str, float]],
    kinds: Sequence[int],
    unknown: int,
    *,
    is_unigram: bool,
    normalizer: normalizers.Normalizer,
    adds_space: bool,
    normalizes_symbols: bool,
    lstrip: Sequence[str] = (),
) -> Tokenizer:
    """Build a tokenizer from the content of a SentencePiece model.

    `adds_space`: the normaliser puts a space before the text, which decoding removes. `normalizes_symbols`:
    user-defined symbols are found in the normalised text. `lstrip`: special tokens that take the spaces before them.
    """
    byte_fallback = BYTE in kinds
    if is_unigram:
        tokenizer = Tokenizer(models.Unigram(list(subwords), unknown, byte_fallback))
    else:
        merged = [i for i, kind in enumerate(kinds) if kind not in (BYTE, CONTROL)]
        tokenizer = Tokenizer(bpe_of_scores(subwords, merged, subwords[unknown][0], byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = _decoder(adds_space=adds_space)
    controls = [subword for (subword, _), kind in zip(subwords, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    symbols = [subword for (subword, _), kind in zip(subwords, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True, lstrip=text in lstrip) for text in controls]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=normalizes_symbols, special=False) for text in symbols])
    return tokenizer


def sentencepiece_normalizer(charsmap: bytes, *, adds_space: bool, trims: bool, space: str) -> normalizers.Normalizer:
    """Return the normaliser that changes a text as SentencePiece does before it splits the text.

    `charsmap` is the compiled character map of the model, such as NFKC, or empty. `trims` removes spaces at both ends
    and makes one space of several. `space` replaces each space: `▁`, or a space to keep them.
    """
    steps: list[normalizers.Normalizer] = []
    if charsmap:
        mapped = normalizers.Precompiled(charsmap)
        folded = ((mapped.normalize_str(text), unicodedata.normalize("NFKC", text)) for text in _NFKC_PROBE)
        if any(found.lower() != nfkc.lower() for found, nfkc in folded):
            steps = [mapped]
        else:
            # In long grapheme clusters `Precompiled` does not compose a letter with its marks. NFKC does, once the two
            # characters that it treats in another way than such a map are hidden from it.
            hidden = {"\u0344": "\ufdd0"}
            if mapped.normalize_str("\uff5e") == "\uff5e":
                hidden["\uff5e"] = "\ufdd1"
            hide = [normalizers.Replace(text, code) for text, code in hidden.items()]
            show = [normalizers.Replace(code, text) for text, code in hidden.items()]
            steps = [*hide, normalizers.NFKC(), *show, mapped]
    if trims:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if adds_space:
        steps.append(normalizers.Prepend(space))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", space)])


def bpe_of_scores(
    entries: Sequence[tuple[str, float]], merged: Iterable[int], unknown: str, *, byte_fallback: bool
) -> models.BPE:
    """Return a BPE model that merges like SentencePiece, which has scores of subwords instead of a list of merges."""
    # SentencePiece merges the two neighbours whose merged subword has the best score. A list of all merges of two
    # entries into a third, ordered by the score of the merged subword, is equivalent.
    ids = {subword: token_id for token_id, (subword, _) in enumerate(entries)}
    merges = []
    for token_id in sorted(merged, key=lambda token_id: (-entries[token_id][1], token_id)):
        subword = entries[token_id][0]
        splits = ((subword[:cut], subword[cut:]) for cut in range(1, len(subword)))
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)


def _check_same_ids(
    path: Path,
    tokenizer: Tokenizer,
    processor: Any,
    ids: Sequence[int],
    texts: Sequence[str],
    steps: normalizers.Normalizer,
) -> None:
    """Raise a `TokenizerError` unless a converted tokenizer gives sample texts the same IDs as SentencePiece."""
    for text in texts:
        ours = encode(tokenizer, text).ids
        theirs = [ids[token_id] for token_id in processor.encode(steps.normalize_str(text))]
        if ours != theirs:
            raise TokenizerError(
                f"{path} has rules that the tokenizers library lacks: {text!r} becomes {ours}, not {theirs}. Use "
                f"the model's tokenizer.json."
            )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a protocol buffer message, and yield the number and the value of each of its fields."""
    # A value is an integer, or bytes: strings, nested messages and fixed-size numbers. Bytes that the end of the
    # message cuts off are yielded as they are.
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise struct.error(f"unknown wire type {wire}")
        size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer of a protocol buffer at offset `at`, and the offset after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def read_llama2c(path: Path) -> Tokenizer:
    """Read llama2.c's `tokenizer.bin` and return a tokenizer that gives the same IDs.

    As llama2.c, it starts a text with `<s>` and puts a space before it, which decoding removes. Characters without a
    token become bytes; then the two neighbours whose merged token has the best score are merged, until no merge is
    left. llama2.c stores `<s>` and `</s>` between line breaks.
    """
    raw, at = read_bytes(path), 4
    entries: list[tuple[str, float]] = []  # token and score of each ID
    try:
        (longest,) = struct.unpack_from("<i", raw)
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            token = raw[at + 8 : at + 8 + length]
            if not 0 <= length <= longest or len(token) != length or not math.isfinite(score):
                raise ValueError(f"token {len(entries)} has length {length} and score {score}")
            entries.append((token.strip(b"\n" if len(entries) in (1, 2) else b"").decode(), score))
            at += 8 + length
    except (struct.error, ValueError) as error:
        raise TokenizerError(f"{path} is not a whole tokenizer of llama2.c ({error}).") from error
    tokens = tuple(token for token, _ in entries)
    if tokens[: len(SPECIAL + BYTES)] != SPECIAL + BYTES or len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{path} is not <unk>, <s>, </s>, 256 bytes, and subwords, each once, as in llama2.c.")
    merged = range(len(SPECIAL) + len(BYTES), len(entries))
    tokenizer = Tokenizer(bpe_of_scores(entries, merged, "<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer
