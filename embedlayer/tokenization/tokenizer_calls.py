"""Calls of a tokenizer on text: equal texts give equal IDs, and what the library raises becomes a `TokenizerError`.

A `tokenizer.json` may ask for truncation, padding and BPE dropout, which make the IDs of a text depend on its length,
on other texts or on chance, as Unigram's `alpha` does. Here they are ignored; files that are written from the tokenizer
keep them. A file may also have rules that multiply text: `require_bounded` refuses them.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tokenizers import Encoding, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer

from embedlayer.core.errors import EmbedLayerError, TokenizerError
from embedlayer.core.formatting import shortened

ANCHOR_CHARS = 16
"""Number of characters before a chunk of a text that are encoded with it, so that its IDs are those of the text."""

MOST_GROWTH = 100
"""Most characters that the rules of a file make of one, and most copies of a text or special tokens in a template."""

LONGEST_TRAINED = 10_000
"""Most characters of a pre-token on which a tokenizer is trained."""

_SPACE = re.compile(r"\s")

_LONGEST_STRING = 1000
"""Most characters of a string of a rule, such as the content of `Replace` or the prefix of WordPiece."""

_PROBE_CHARS = 2 * _LONGEST_STRING
_STRINGS = ("content", "prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix")


def as_tokenizer(tokenizer: object) -> Tokenizer:
    """Return a `tokenizers.Tokenizer`: the argument itself, or the one in a fast tokenizer of transformers."""
    for candidate in (tokenizer, getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "_tokenizer", None)):
        if isinstance(candidate, Tokenizer):
            if hasattr(tokenizer, "name_or_path") and tokenizer not in _checked:
                _require_own_steps(tokenizer, candidate)
                _checked.add(tokenizer)
            return candidate
    raise TokenizerError(
        f"A {type(tokenizer).__name__} is not a tokenizer: pass a tokenizers.Tokenizer or a fast one of transformers."
    )


_checked: WeakSet[object] = WeakSet()
"""Objects of transformers that passed `_require_own_steps`, which reads a whole file."""


def _require_own_steps(owner: Any, tokenizer: Tokenizer) -> None:
    """Raise an error if a class of transformers replaced the normalizer or pre-tokenizer of `tokenizer.json`.

    Some classes build these steps by rules of their own. Before transformers 5.20 so do the classes that Granite, OLMo
    2 and DeepSeek name: they split at white space as SentencePiece does, or do not split digits. Without that file, or
    if its vocabulary is another one, the pre-tokenizer must at least fit the vocabulary.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    advice = "Pass embedlayer.tokenization.load_tokenizer(folder) instead."
    if (file := _tokenizer_file(owner.name_or_path)) is not None:
        with tokenizer_errors(f"be read from {file}"):
            original = Tokenizer.from_file(str(file))
        if original.get_vocab(with_added_tokens=False) == vocabulary:
            if _steps(original) != _steps(tokenizer):
                ids = range(0, len(vocabulary), max(len(vocabulary) // 100, 1))
                for text in (*_PROBES, decode(original, [*ids]).strip()):
                    ours, theirs = (encode(each, text).ids for each in (tokenizer, original))
                    if ours != theirs:
                        raise TokenizerError(
                            f"This {type(owner).__name__} of transformers does not split text as {file} says: "
                            f"{shortened(text)!r} gives {shortened(ours)} instead of {shortened(theirs)}. {advice}"
                        )
            return
    steps = json.dumps(_steps(tokenizer))
    has_marks = any(token.startswith("▁") for token in vocabulary)
    if has_marks:
        is_wrong = "ByteLevel" in steps and not vocabulary.keys() >= {*ByteLevel.alphabet()}
    else:
        is_wrong = "Metaspace" in steps and "ByteLevel" not in steps and vocabulary.keys() >= {*ByteLevel.alphabet()}
    if is_wrong:
        raise TokenizerError(
            f"The pre-tokenizer of this {type(owner).__name__} of transformers does not fit its vocabulary, which is "
            f"that of {'SentencePiece' if has_marks else 'byte-level BPE'}. {advice}"
        )


def _tokenizer_file(name: object) -> Path | None:
    """Return the `tokenizer.json` of a folder, or of a repository in the cache of huggingface_hub, or `None`."""
    if not isinstance(name, str) or not name:
        return None
    if (local := Path(name, "tokenizer.json")).is_file():
        return local
    hub = sys.modules.get("huggingface_hub")
    try:
        cached = None if hub is None else hub.try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # not the name of a repository
        cached = None
    return Path(cached) if isinstance(cached, str) else None


def _steps(tokenizer: Tokenizer) -> list[Any]:
    """Return the normalizer and pre-tokenizer, without the settings that `AutoTokenizer.from_pretrained` may change."""

    def without_settings(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: without_settings(value) for key, value in part.items() if key not in _SETTINGS}
        return [*map(without_settings, part)] if isinstance(part, list) else part

    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return [None if part is None else without_settings(json.loads(part.__getstate__())) for part in parts]


_SETTINGS = ("add_prefix_space", "prepend_scheme", "trim_offsets", "lowercase", "strip_accents", "handle_chinese_chars")
_PROBES = (
    *("Hello, world", "two  spaces\n\n\tand tabs", "12345 + 3.14159", "It's DON'T camelCase"),
    *("Straße naïve", "日本語 한국어", "🙂 ∑x²", "a_b-c/d.e"),
)
"""Texts without a space at the start, since `_SETTINGS` decide what is put there."""


def pure_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer without truncation, padding and sampling (`dropout` of BPE, Unigram's `alpha`)."""
    is_random = getattr(tokenizer.model, "dropout", None) or getattr(tokenizer.model, "alpha", None) is not None
    if tokenizer.truncation is None and tokenizer.padding is None and not is_random:
        return tokenizer
    copy = Tokenizer.from_str(tokenizer.to_str())  # a file has no alpha
    copy.no_truncation()
    copy.no_padding()
    if isinstance(model := copy.model, models.BPE):
        model.dropout = None
    return copy


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer, 16 hexadecimal digits, which is equal for equal `tokenizer.json` content."""
    return hashlib.sha256(pure_tokenizer(tokenizer).to_str().encode()).hexdigest()[:16]


@contextmanager
def tokenizer_errors(action: str) -> Iterator[None]:
    """Context manager: turn what the tokenizers library raises in the block into a `TokenizerError`.

    The library raises plain `Exception`, and `PanicException`, a `BaseException`, for faults that it does not expect.
    Errors of embedlayer and `MemoryError` pass unchanged. `action` follows "cannot" in the message.
    """
    try:
        yield
    except (EmbedLayerError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise TokenizerError(
            f"The tokenizer cannot {action}: {shortened(error)}. It is damaged, or of another release of tokenizers."
        ) from error


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encode a text whole, as `pure_tokenizer` does."""
    pure = pure_tokenizer(tokenizer)
    with tokenizer_errors(f"encode {shortened(text)!r}"):
        return pure.encode(text, add_special_tokens=add_special_tokens)


def encode_batch(
    tokenizer: Tokenizer, texts: Iterable[str], *, offsets: bool = False, add_special_tokens: bool = False
) -> list[Encoding]:
    """Encode texts whole, on all cores, as `pure_tokenizer` does; by default without special tokens."""
    pure, texts = pure_tokenizer(tokenizer), list(texts)
    with tokenizer_errors(f"encode {len(texts)} texts, the first of which is {shortened((texts or [''])[0])!r}"):
        call = pure.encode_batch if offsets else pure.encode_batch_fast
        return call(texts, add_special_tokens=add_special_tokens)


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of token IDs, by default without special tokens."""
    return decode_batch(tokenizer, [ids], skip_special_tokens=skip_special_tokens)[0]


def decode_batch(tokenizer: Tokenizer, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
    """Return the text of each sequence of token IDs, by default without special tokens."""
    with tokenizer_errors(f"decode {shortened(str(list(ids[0]) if ids else []))}"):
        texts: list[str] = tokenizer.decode_batch([list(each) for each in ids], skip_special_tokens=skip_special_tokens)
        return texts


def normalized(tokenizer: Tokenizer, text: str) -> str:
    """Return a text as the tokenizer's normalizer changes it; unchanged if the tokenizer has no normalizer."""
    if tokenizer.normalizer is None:
        return text
    with tokenizer_errors(f"normalise {shortened(text)!r}"):
        changed: str = tokenizer.normalizer.normalize_str(text)
        return changed


def pre_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the pre-tokens of a normalised text; the text alone if the tokenizer has no pre-tokenizer."""
    if tokenizer.pre_tokenizer is None:
        return [text]
    with tokenizer_errors(f"split {shortened(text)!r}"):
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def cut_pre_tokens(texts: Iterable[str], steps: PreTokenizer) -> Iterator[str]:
    """Yield texts to train a tokenizer on, cut inside pre-tokens of more than `LONGEST_TRAINED` characters.

    The time of a subword trainer grows with the square of the length of a pre-token, which in DNA or a minified file is
    the whole text. Other texts are unchanged. `steps` is passed because a tokenizer that is being trained is locked.
    """
    half = LONGEST_TRAINED // 2
    for text in texts:
        done = 0
        blocks = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
        # more than `LONGEST_TRAINED` characters in a row may be without or only of white space
        if len(text) > LONGEST_TRAINED and any(block.isspace() or not _SPACE.search(block) for block in blocks):
            with tokenizer_errors(f"split {shortened(text)!r}"):
                spans = [span for _, span in steps.pre_tokenize_str(text)]
            for start, stop in spans:
                for place in range(start + LONGEST_TRAINED, stop, LONGEST_TRAINED):
                    yield text[done:place]
                    done = place
        yield text[done:]


def tokens_of_word(tokenizer: Tokenizer, word: str) -> list[Any]:
    """Return the tokens (`id`, `value`) of a pre-token, by the model of the tokenizer alone."""
    pure = pure_tokenizer(tokenizer)
    with tokenizer_errors(f"split {shortened(word)!r}"):
        return list(pure.model.tokenize(word))


def build_tokenizer(content: Mapping[str, Any]) -> Tokenizer:
    require_bounded(content)
    with tokenizer_errors("be built"):
        return Tokenizer.from_str(json.dumps(content))


def require_bounded(content: Mapping[str, Any]) -> None:
    """Check that the rules of a `tokenizer.json` make a text at most `MOST_GROWTH` times as long."""
    for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
        for rule in _rules(content.get(part)):
            for name in _STRINGS:
                if isinstance(text := rule.get(name), str) and len(text) > _LONGEST_STRING:
                    raise TokenizerError(
                        f"the {name} of a rule in its {part} has {len(text):,} characters, over {_LONGEST_STRING:,}"
                    )
    normalizer = list(_rules(content.get("normalizer")))
    for place, rule in enumerate(normalizer):
        if rule.get("type") in ("Replace", "Prepend"):
            _check_growth(rule, normalizer[place + 1 :])
    decoder = list(_rules(content.get("decoder")))
    for place, rule in enumerate(decoder):
        if rule.get("type") == "Replace":
            _check_growth(rule, [each for each in decoder[place + 1 :] if each.get("type") == "Replace"])
    _check_templates(content.get("post_processor"))


def _check_templates(part: Any) -> None:
    """Raise a `TokenizerError` if templates repeat a text, or add special tokens, over `MOST_GROWTH` times."""
    growth = 1
    for rule in _rules(part):
        if rule.get("type") != "TemplateProcessing":
            continue
        tokens = rule.get("special_tokens")
        added = {name: len(each.get("ids", ())) for name, each in tokens.items()} if isinstance(tokens, Mapping) else {}
        most = 1
        for template in (rule.get("single"), rule.get("pair")):
            pieces = template if isinstance(template, list) else []
            copies = sum("Sequence" in piece for piece in pieces if isinstance(piece, Mapping))
            names = [piece["SpecialToken"].get("id") for piece in pieces if "SpecialToken" in piece]
            most = max(most, copies, sum(added.get(name, 1) for name in names))
        growth *= most
        if growth > MOST_GROWTH:
            raise TokenizerError(f"its template multiplies a text or special tokens by {growth:,}, over {MOST_GROWTH}")


def _rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a part of a `tokenizer.json`, those inside of sequences one by one."""
    if not isinstance(part, Mapping):
        return
    inner = next((part[name] for name in _SEQUENCES if part.get("type") == "Sequence" and name in part), None)
    if not isinstance(inner, list):
        yield part
        return
    for each in inner:
        yield from _rules(each)


_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")


def _check_growth(rule: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error if the text that a rule writes gets longer than `MOST_GROWTH` by the rules after it.

    The text is repeated up to some thousand characters, because a later pattern may span several copies of it.
    """
    content, pattern = rule.get("content", rule.get("prepend")), rule.get("pattern")
    if not isinstance(content, str) or not content:
        return
    written = pattern.get("String") if isinstance(pattern, Mapping) else None
    read = max(len(written), 1) if isinstance(written, str) else 1
    copies = -(-_PROBE_CHARS // len(content))
    text = content * copies
    for each in (None, *later):
        if each is not None:
            if each.get("type") == "Prepend":
                continue
            with tokenizer_errors(f"apply its rule {each.get('type')}"):
                only_rule = json.dumps(json.loads(Tokenizer(models.BPE()).to_str()) | {"normalizer": each})
                text = Tokenizer.from_str(only_rule).normalizer.normalize_str(text)
        if len(text) > MOST_GROWTH * copies * read:
            becomes = f"{shortened(str(written or pattern))!r} becomes {shortened(text)!r}"
            raise TokenizerError(
                f"its rules from {rule.get('type')} on write over {MOST_GROWTH} characters for one: {becomes}"
            )
