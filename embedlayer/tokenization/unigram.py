"""Train the subwords of a Unigram tokenizer with SentencePiece, such that equal text gives equal results."""

import io
from collections import Counter
from collections.abc import Mapping

from embedlayer.core.errors import require
from embedlayer.io.partials import temporary_folder

_SPACE = "▁"
_RESERVED = "▅"
"""A character that SentencePiece keeps for unknown ones."""

_MAX_SUBWORD_CHARS = 16
_MAX_WORD_CHARS = 64
_CANDIDATES_PER_SUBWORD = 20


def train_subwords(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """Train a Unigram model with SentencePiece and return its subwords with their log probabilities, best first.

    SentencePiece chooses among candidates that are computed here: all characters, and the frequent substrings of the
    words. Its own candidates are the frequent substrings of the text; with ours the time depends on the number of
    different words. A subword at the start of a word begins with `▁`. Words are cut after 64 characters, and at `▁`,
    `▅` and rare characters. If nothing is left to train on, the result is `[("▁", 0.0)]`.

    SentencePiece runs in one thread, so that equal words give equal results. The trainer of the `tokenizers` library
    adds up in parallel, in the order of a randomly seeded hash table, so its results differ from run to run.

    Args:
        words: Number of occurrences of each word, normalised and without spaces.
        size: Number of subwords; a small text gives fewer. Where the text has more different characters, only the
            most frequent ones get a subword.

    Raises:
        MissingExtraError: The `spm` extra is not installed.

    Reference: Kudo, Subword regularization, 2018.
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
    """Return the candidates among which SentencePiece chooses subwords: all characters and frequent substrings.

    The substrings have 2 to 16 characters and occur at least twice. At most `20 * size` are returned, for `size`
    subwords to train.

    Returns:
        Pairs of a candidate and its number of occurrences: first the characters, then the substrings, sorted by the
        product of length and occurrences, the largest first.
    """
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
