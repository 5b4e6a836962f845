"""Build BPE tokenizers from `vocab.json` and `merges.txt`, by the rules of the tokenizer class that a folder states."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import BPE_CLASSES, SPLITS_DIGITS, BpeRules
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
