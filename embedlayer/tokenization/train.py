"""Train tokenizers on text. Every tokenizer is a plain `tokenizers.Tokenizer`."""

import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from embedlayer.core.errors import SizeError, TextError, TokenizerError, require
from embedlayer.io.partials import temporary_folder
from embedlayer.tokenization.tokenizer_calls import cut_pre_tokens
from embedlayer.tokenization.vocabulary_files import END_OF_TEXT, bert_tokenizer, byte_level_alphabet

TokenizerKind = Literal["bpe", "wordpiece", "unigram", "word", "byte"]

_Trainer = Callable[[Iterable[str], int, list[str], int], Tokenizer]
"""From texts, the largest number of entries, special tokens, which get the first IDs, and `min_frequency`."""

_LONGEST_PATH = 4096
_PATH = re.compile(r"(?:~|\.{1,2})?/\S*\w\S*|[A-Za-z]:\\\S+|\S+\.(?:txt|md|jsonl?|csv|tsv|gz|zip|parquet)")
_WORDS = r"\w+(?:['’]\w+)*|[^\w\s]"


def train_tokenizer(
    texts: Iterable[str] | str,
    kind: TokenizerKind = "bpe",
    *,
    vocab_size: int = 4096,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    min_frequency: int | None = None,
) -> Tokenizer:
    """Train a tokenizer. Equal texts give equal `tokenizer.json` files, byte for byte.

    | kind | a token is | decoding returns |
    |---|---|---|
    | `"bpe"` | bytes merged by frequency, as in GPT-2 | every text exactly |
    | `"wordpiece"` | a word or, marked `##`, the rest of one, as in (cased) BERT | words, spaces guessed |
    | `"unigram"` | a subword of the most likely split (SentencePiece) | the text in NFKC, with single spaces |
    | `"word"` | a whole word or a punctuation mark | words, spaces guessed |
    | `"byte"` | one byte: its ID is its value | every text exactly |

    `"wordpiece"`, `"unigram"` and `"word"` replace text that they do not know by the unknown token.

    Args:
        texts: One string or an iterable of strings, not paths; `read_text_chunks(path)` reads a file. The iterable is
            read once; `"wordpiece"` keeps its strings in memory. For training, `"bpe"` and `"wordpiece"` cut text
            without spaces, such as DNA, every 10,000 characters; it is encoded whole.
        kind: See the table. `"unigram"` needs the `spm` extra.
        vocab_size: Largest number of entries, including special tokens. A small text gives fewer. `"byte"` always
            has 256 and the special tokens, and `"wordpiece"` keeps all single characters, also beyond this number.
        special_tokens: Tokens that are never split. An unknown token is added for the kinds that need one: `"[UNK]"`
            for `"wordpiece"`, `"<unk>"` for `"unigram"` and `"word"`.
        min_frequency: Fewest occurrences of a merged pair, or of a whole word; by default 2, and 1 for `"word"`.
            `"unigram"` and `"byte"` have no such limit.

    Raises:
        SizeError: `vocab_size` is too small for the special tokens and the smallest alphabet.
        TextError: The texts are empty (except for `"byte"`), are not strings, or the first one is probably a path.
        TokenizerError: `min_frequency` is passed for a kind without one.
        MissingExtraError: `"unigram"` needs `pip install 'embedlayer[spm]'`.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs", kind="word")
        >>> tokenizer.encode("dogs love").tokens
        ['dogs', 'love']
        >>> train_tokenizer((), kind="byte").encode("Hi").ids
        [72, 105]
    """
    if min_frequency is not None and kind in ("unigram", "byte"):
        raise TokenizerError(f"A {kind} tokenizer has no min_frequency ({min_frequency} was passed). Leave it out.")
    specials = list(dict.fromkeys(special_tokens))
    texts = _checked_texts(texts, need_words=kind != "byte")
    if kind == "byte":
        next(texts, None)  # nothing is learned, and a path is refused all the same
        ids = byte_level_alphabet()
        letters = models.BPE(vocab={letter: ids[letter] for letter in sorted(ids, key=ids.__getitem__)}, merges=[])
        tokenizer = _byte_level(letters, use_regex=False)
        tokenizer.add_special_tokens(specials)
        return tokenizer

    trainers_by_kind: dict[str, _Trainer] = {
        "bpe": _train_bpe,
        "wordpiece": _train_wordpiece,
        "unigram": _train_unigram,
        "word": _train_word,
    }
    train = trainers_by_kind[kind]
    unknown = {"bpe": None, "wordpiece": "[UNK]", "unigram": "<unk>", "word": "<unk>"}[kind]
    if unknown is not None and unknown not in specials:
        specials.append(unknown)
    smallest = len(specials) + (256 if kind == "bpe" else 1)
    if vocab_size < smallest:
        raise SizeError(f"vocab_size {vocab_size} is below {smallest}, which {kind} and its special tokens need.")
    if min_frequency is None:
        min_frequency = 1 if kind == "word" else 2
    return train(texts, vocab_size, specials, min_frequency)


def raise_if_path(text: str) -> None:
    """Raise an error if a string that should be a text is probably a path."""
    if len(text) > _LONGEST_PATH or not text.isprintable():
        return
    exists = os.path.isfile(text) or ("/" in text and text.strip("/.~") != "" and os.path.exists(text))
    if exists or _PATH.fullmatch(text):
        raise TextError(
            f"{text!r} {'names a file' if exists else 'looks like a path'}, see docs/errors.md, Paths and texts."
        )


def _checked_texts(texts: Iterable[str] | str, *, need_words: bool) -> Iterator[str]:
    """Yield the strings of `texts`, the training text of `train_tokenizer`, and check each of them."""
    has_words = not need_words
    for place, text in enumerate([texts] if isinstance(texts, str) else texts):
        if not isinstance(text, str):
            raise TextError(f"Text {place} is {type(text).__name__}, not str; read_text_chunks(path) reads files.")
        if place == 0:
            raise_if_path(text)
        has_words = has_words or not (text == "" or text.isspace())
        yield text
    if not has_words:
        raise TextError("There is no text to train a tokenizer on: all of it is empty. Pass at least a few words.")


def _byte_level(model: models.BPE, *, use_regex: bool = True) -> Tokenizer:
    """Return a tokenizer around a BPE model of which the entries are written in `byte_level_alphabet`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_bpe(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer as in GPT-2."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(cut_pre_tokens(texts, tokenizer.pre_tokenizer), trainer)
    return tokenizer


def _train_wordpiece(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    """Train a WordPiece tokenizer as in cased BERT; the text is kept in memory."""
    texts = list(cut_pre_tokens(texts, bert_tokenizer({"[UNK]": 0}, lowercase=False).pre_tokenizer))
    # The trainer numbers the letters that continue a word in the order of a randomly seeded hash table, and ties
    # between pairs are broken by these numbers. So learn the letters first, and hand them back sorted.
    alphabet = _wordpiece_vocabulary(texts, 0, specials, min_frequency)
    continuing = sorted(letter for letter in alphabet if letter.startswith("##") and letter not in specials)
    vocabulary = _wordpiece_vocabulary(texts, vocab_size, specials + continuing, min_frequency)
    tokenizer = bert_tokenizer(vocabulary, lowercase=False)
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _wordpiece_vocabulary(texts: list[str], vocab_size: int, first: list[str], min_frequency: int) -> dict[str, int]:
    """Run the WordPiece trainer of the `tokenizers` library once, and return the ID of each entry of the vocabulary."""
    tokenizer = bert_tokenizer({"[UNK]": 0}, lowercase=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=first, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


def _train_unigram(texts: Iterable[str], vocab_size: int, specials: list[str], _: int) -> Tokenizer:
    """Train a Unigram tokenizer as in SentencePiece; text is NFKC-normalised."""
    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    words: Counter[str] = Counter()
    for text in texts:
        words.update(normalizer.normalize_str(text).split())
    subwords = train_subwords(words, vocab_size - len(specials))
    entries = [(special, 0.0) for special in specials]
    entries += [(subword, score) for subword, score in subwords if subword not in specials]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=specials.index("<unk>"), byte_fallback=False))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _train_word(texts: Iterable[str], vocab_size: int, specials: list[str], min_frequency: int) -> Tokenizer:
    """Train a tokenizer of which the tokens are whole words and punctuation marks."""
    tokenizer = Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" (?=[.,;:!?)\]}…%])"), ""),
            decoders.Replace(Regex(r"(?<=[(\[{]) "), ""),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_SPACE = "▁"
_RESERVED = "▅"
"""A character that SentencePiece keeps for unknown ones."""

_MAX_SUBWORD_CHARS = 16
_MAX_WORD_CHARS = 64
_CANDIDATES_PER_SUBWORD = 20


def train_subwords(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """Train a Unigram model with SentencePiece and return its subwords with their log probabilities, best first.

    SentencePiece chooses among candidates that are computed here, all characters and the frequent substrings of the
    words, so the time depends on the number of different words; its own candidates come from the whole text. It runs in
    one thread, so that equal words give equal results: the trainer of the `tokenizers` library adds up in the order of
    a randomly seeded hash table, and its results differ from run to run.
    """
    sentencepiece = require("sentencepiece", extra="spm")
    letters: Counter[str] = Counter()
    for word, count in words.items():
        letters.update(dict.fromkeys(word, count))
    rare = sorted(letters, key=lambda letter: (-letters[letter], letter))[size - 1 :]
    separators = str.maketrans(dict.fromkeys([_RESERVED, _SPACE, *rare], " "))
    parts: Counter[str] = Counter()
    for word, count in words.items():
        for part in word.translate(separators).split():
            for start in range(0, len(part), _MAX_WORD_CHARS):
                parts[part[start : start + _MAX_WORD_CHARS]] += count
    if not parts:
        return [(_SPACE, 0.0)]
    model = io.BytesIO()
    with temporary_folder() as folder:
        seeds = folder / "seeds.tsv"
        seeds.write_text("".join(f"{seed}\t{count}\n" for seed, count in _candidates(parts, size)), "utf-8")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([f"{part}\t{count}" for part, count in sorted(parts.items())]),
            input_format="tsv",
            seed_sentencepieces_file=str(seeds),
            model_writer=model,
            model_type="unigram",
            vocab_size=size + 1,  # and <unk>
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            max_sentencepiece_length=_MAX_SUBWORD_CHARS,
            split_by_unicode_script=False,
            split_by_number=False,
            bos_id=-1,
            eos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # Ten digits survive being written to tokenizer.json and read again; all seventeen do not.
    subwords = [(trained.id_to_piece(i), round(trained.get_score(i), 10)) for i in range(1, len(trained))]
    return sorted(subwords, key=lambda subword: (-subword[1], subword[0]))


def _candidates(words: Mapping[str, int], size: int) -> list[tuple[str, int]]:
    """Return the candidates among which SentencePiece chooses subwords: all characters and frequent substrings."""
    letters: Counter[str] = Counter()
    longer: Counter[str] = Counter()
    for word, count in words.items():
        word = _SPACE + word
        for start in range(len(word)):
            letters[word[start]] += count
            for stop in range(start + 2, min(len(word), start + _MAX_SUBWORD_CHARS) + 1):
                longer[word[start:stop]] += count
    frequent = [seed for seed in longer.items() if seed[1] > 1]
    frequent.sort(key=lambda seed: (-seed[1] * len(seed[0]), seed[0]))
    return sorted(letters.items()) + frequent[: _CANDIDATES_PER_SUBWORD * size]
