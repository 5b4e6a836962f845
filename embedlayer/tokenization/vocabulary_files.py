"""Build tokenizers from vocabularies: `vocab.json` and `merges.txt`, `vocab.txt`, or the words of a file of vectors.

The rules of the first two are those of the tokenizer class that a folder states.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import (
    BPE_CLASSES,
    GENERIC_CLASSES,
    SPLITS_DIGITS,
    WORDPIECE_CLASSES,
    BpeRules,
    WordPieceRules,
)
from embedlayer.tokenization.tokenizer_calls import pre_tokens
from embedlayer.tokenization.tokenizer_config import ADVICE, ROLES, TokenizerConfig, add_configured_tokens, template

END_OF_TEXT = "<|endoftext|>"
"""GPT-2's end-of-text token."""

_KNOWN_SPECIALS = (END_OF_TEXT, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ALONE = BpeRules()
"""Rules of a pair of files with nothing beside it: GPT-2's."""

_NORMALIZERS: Mapping[str, Callable[[], normalizers.Normalizer]] = {
    "nfc": normalizers.NFC,
    "clip": lambda: normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    ),
    "lower case": lambda: normalizers.BertNormalizer(lowercase=True),
    "words": lambda: normalizers.BertNormalizer(lowercase=False, strip_accents=False),
}


def bpe_rules(vocabulary: Mapping[str, int], file: Path, config: TokenizerConfig) -> BpeRules:
    """Return the rules by which a pair of `vocab.json` and `merges.txt` is read.

    The rules are those of the class that the files beside the pair state, or of the model type. With nothing beside it
    they are GPT-2's, provided that all entries are written in the byte-level alphabet.
    """
    known = ", ".join(BPE_CLASSES)
    if config.kind is not None and config.kind in BPE_CLASSES:
        if config.kind == "GPT2" and config.model_type in SPLITS_DIGITS:
            raise TokenizerError(
                f"{file}: the rules of {config.model_type} are only in its tokenizer.json. Copy that too."
            )
        return BPE_CLASSES[config.kind]
    if config.kind is not None or config.model_type is not None:
        raise config.refuse_class(file, known)
    letters = byte_level_alphabet().keys()
    foreign = next((entry for entry in vocabulary if entry.endswith("</w>") or not letters >= set(entry)), None)
    if foreign is not None:
        raise TokenizerError(
            f"{file} has {foreign!r} and no class ({known}). See docs/errors.md, Tokenizer files without their class."
        )
    return _ALONE


def bpe_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], rules: BpeRules, config: TokenizerConfig, file: Path
) -> Tokenizer:
    """Build a BPE tokenizer from a vocabulary and merges, by the rules of a class and its other files."""
    unknown = config.role("unk_token", rules.roles) if rules.unknown else None
    optional = {"end_of_word_suffix": rules.end_of_word or None, "unk_token": unknown}
    optional = {name: value for name, value in optional.items() if value is not None}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **optional))
    if rules.normalizer:
        tokenizer.normalizer = _NORMALIZERS[rules.normalizer]()
    adds_space = config.setting("add_prefix_space", rules.adds_space)
    if not rules.is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.BPEDecoder(suffix=rules.end_of_word)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
        if rules.patterns != _ALONE.patterns:
            how: Any = "removed" if rules.drops_rest else "isolated"
            steps = [pre_tokenizers.Split(Regex(each), how, invert=rules.drops_rest) for each in rules.patterns]
            in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=rules.drops_rest)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, in_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        if rules.end_of_word:
            last = decoders.Replace(Regex(rf"{re.escape(rules.end_of_word)}\z"), "")
            spaces = decoders.Replace(rules.end_of_word, " ")
            tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), last, spaces])
    if rules is _ALONE:
        tokenizer.add_special_tokens([token for token in _KNOWN_SPECIALS if token in vocabulary])
    add_configured_tokens(tokenizer, config, rules.roles, file=file, lstrip=rules.lstrip)
    tokenizer.post_processor = _around(tokenizer, rules, config, file)
    return tokenizer


def _around(
    tokenizer: Tokenizer, rules: BpeRules, config: TokenizerConfig, file: Path
) -> processors.PostProcessor | None:
    """Return the processor that puts special tokens around a text; of a byte-level class, also `ByteLevel`'s step."""
    for name in ("language", "task"):
        if config.kind == "Whisper" and config.settings.get(name) is not None:
            advice = ADVICE.format(folder=str(config.folder))
            raise TokenizerError(
                f"{config.folder} sets {name} to {config.settings[name]!r}, which is not read. {advice}."
            )
    starts, ends = rules.starts, rules.ends
    if not starts and not ends:
        starts = ("bos_token",) if config.setting("add_bos_token", False) else ()
        ends = ("eos_token",) if config.setting("add_eos_token", False) else ()

    def texts(names: Iterable[str]) -> list[str]:
        """Return the tokens of roles; a name that is no role is a token itself."""
        tokens = [config.role(name, rules.roles) if name in ROLES else name for name in names]
        return [token for token in tokens if token is not None]

    steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=False)] if rules.is_byte_level else []
    if starts or ends:
        between = None if rules.between is None else texts(rules.between)
        steps.append(template(tokenizer, texts(starts), texts(ends), between, file))
    return steps[0] if len(steps) == 1 else processors.Sequence(steps) if steps else None


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Return the alphabet in which byte-level BPE writes bytes, as in GPT-2."""
    # a printable byte is its own letter; the other bytes have the letters from U+0100 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def component_types(component: Any) -> set[str]:
    """Return the class names of a component of a tokenizer and of the components nested in it."""
    if component is None:
        return set()
    return set(re.findall(r'"type":\s*"(\w+)"', component.__getstate__().decode()))


def bert_tokenizer(
    vocabulary: dict[str, int],
    *,
    lowercase: bool,
    unknown: str = "[UNK]",
    strip_accents: bool | None = None,
    splits_chinese: bool = True,
) -> Tokenizer:
    """Return a WordPiece tokenizer that normalises and splits text as BERT does, without special tokens.

    With `splits_chinese` each Chinese character is a word. With `strip_accents=None` accents are removed where text is
    lower-cased, as in BERT.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=splits_chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def wordpiece_tokenizer(vocabulary: dict[str, int], config: TokenizerConfig, file: Path) -> Tokenizer:
    """Return the tokenizer of a `vocab.txt`: BERT's, by the settings that the files beside it state.

    Without `do_lower_case`, text is lower-cased if a file names the class, which is the default of BERT's classes. If
    no file names one, it is lower-cased if no entry except the bracketed ones has an upper-case letter.
    """
    is_known = config.kind is None or config.kind in (*WORDPIECE_CLASSES, *GENERIC_CLASSES)
    if not is_known:
        raise config.refuse_class(file)
    rules = WORDPIECE_CLASSES.get(config.kind or "", WordPieceRules())
    unknown = config.role("unk_token", rules.roles) or "[UNK]"
    if unknown not in vocabulary:
        raise TokenizerError(f"{file} is not a BERT vocabulary: it has no {unknown}.")
    if not config.setting("do_basic_tokenize", True):
        raise TokenizerError(f"{config.folder} sets do_basic_tokenize to false: put the model's tokenizer.json there.")
    strips = config.settings.get("strip_accents")
    tokenizer = bert_tokenizer(
        vocabulary,
        lowercase=config.setting("do_lower_case", config.names_class or is_lowercased(vocabulary)),
        unknown=unknown,
        strip_accents=None if strips is None else config.setting("strip_accents", False),
        splits_chinese=config.setting("tokenize_chinese_chars", True),
    )
    add_configured_tokens(tokenizer, config, rules.roles, file=file, lstrip=rules.lstrip)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    start, end = (config.role(role, rules.roles) for role in ("cls_token", "sep_token"))
    if start in ids and end in ids:
        pairs = (str(end), ids[str(end)]), (str(start), ids[str(start)])
        tokenizer.post_processor = (
            processors.RobertaProcessing(*pairs, trim_offsets=False, add_prefix_space=False)
            if rules.doubles_separator
            else processors.BertProcessing(*pairs)
        )
    return tokenizer


def is_lowercased(vocabulary: Iterable[str]) -> bool:
    """Return whether no entry except the bracketed ones has an upper-case letter."""
    return not any(entry != entry.lower() for entry in vocabulary if not re.fullmatch(r"\[.*\]", entry))


def word_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of whole words whose vocabulary is the token of each row; a file of vectors has no other.

    A duplicate token has the ID of its first row. Text is split at white space, except inside the longest token that
    matches at a word, such as "new york"; it is not split if a token starts or ends with white space, as those of
    subword tokenizers do. There is no unknown token, so a text with another word cannot be encoded: a row `<unk>` is
    the row of this text only.
    """
    ids: dict[str, int] = {}
    for row, token in enumerate(tokens):
        # tokenizers takes no lone surrogates
        ids.setdefault(token if token.isascii() else token.encode(errors="replace").decode(), row)
    absent = "<unk>"
    while absent in ids:  # the model requires a name, and would return its row for every unknown word
        absent += "_"
    built = Tokenizer(models.WordLevel(ids, unk_token=absent))
    if all(token == token.strip() for token in ids):
        phrases = sorted((token for token in ids if len(token.split()) > 1), key=len, reverse=True)
        either = "|".join([*(rf"{re.escape(phrase)}(?!\S)" for phrase in phrases), r"\S+"])
        split = pre_tokenizers.Split(Regex(rf"(?<!\S)(?:{either})"), "removed", invert=True)
        built.pre_tokenizer = split if phrases else pre_tokenizers.WhitespaceSplit()
    return built


def unknown_word(tokenizer: Tokenizer, text: str) -> str | None:
    """Return the first word of a text that a tokenizer of whole words has no token for; `None` if it has them all."""
    return next((word for word in pre_tokens(tokenizer, text) if tokenizer.token_to_id(word) is None), None)
