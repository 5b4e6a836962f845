"""Evaluate a table on human judgements: word similarity (`wordsim353.tsv`) and analogies (`questions-words.txt`).

Both files have gensim's format: two words and a number per line, and four words per line under headings that start with
`:`. Only words that are a single token count; the results say how many did.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.token_classes import token_kinds
from embedlayer.core.errors import SizeError, TextError
from embedlayer.io.files import MOST_BYTES, file_errors, require_file
from embedlayer.tables.conversions import TableLike
from embedlayer.tokenization.bytes import row_texts

FEWEST_PAIRS = 20
"""Least number of pairs for a correlation; with fewer, the 95 % interval of zero correlation exceeds +-0.45."""


@dataclass(frozen=True)
class WordPairScores:
    """The correlation between a table's cosine similarities and human scores of word pairs.

    Attributes:
        spearman: Rank correlation, from -1 to 1; `None` if fewer than `FEWEST_PAIRS` pairs are usable.
        pearson: Linear correlation, from -1 to 1; `None` likewise.
        used: Number of pairs whose words are both a single token.
        total: Number of pairs in the file.
        missing: Words that are not a single token, in the order of the file.
    """

    spearman: float | None
    pearson: float | None
    used: int
    total: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class AnalogySection:
    """The result for the questions under one heading of an analogy file.

    Attributes:
        name: The heading; `"questions"` for questions above the first heading.
        correct: Number of questions with the right answer.
        used: Number of questions whose four words are a single token each.
        total: Number of questions under this heading.
    """

    name: str
    correct: int
    used: int
    total: int


@dataclass(frozen=True)
class AnalogyScores:
    """The result for questions `a is to b as c is to ?`.

    Attributes:
        sections: One result per heading.
        candidates: Number of words among which the answer was searched.
        missing: Words that are not a single token, or whose ID is excluded by `restrict_vocab`, in the order of the
            file.
    """

    sections: tuple[AnalogySection, ...]
    candidates: int
    missing: tuple[str, ...]

    @property
    def correct(self) -> int:
        """Return the number of questions with the right answer."""
        return sum(section.correct for section in self.sections)

    @property
    def used(self) -> int:
        """Return the number of questions whose four words are a single token each."""
        return sum(section.used for section in self.sections)

    @property
    def total(self) -> int:
        """Return the number of questions in the file."""
        return sum(section.total for section in self.sections)

    @property
    def accuracy(self) -> float:
        """Return `correct / used`: the share of right answers among the questions that could be asked."""
        return self.correct / self.used


def whole_words(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """Return the words that are a single token each: word -> row ID.

    Words are in lower case and without the leading space. They are the tokens that `token_kinds` calls `"word"`:
    letters at the start of a word. If several tokens give the same word, the lowest ID counts.
    """
    rows: dict[str, int] = {}
    kinds, texts = token_kinds(tokenizer, vocab_size), row_texts(tokenizer, vocab_size)
    for token, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
        if kind == "word":
            rows.setdefault(text.strip().lower(), token)
    return rows


def evaluate_word_pairs(table: TableLike, words: Mapping[str, int], file: Path | str) -> WordPairScores:
    """Correlate the cosine similarity of word pairs with human scores.

    Each line of the file is `word<TAB>word<TAB>number`; lines that start with `#` are comments.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        words: Word -> row ID, see `whole_words`. Pairs with a word that is not a key are skipped.
        file: The file of pairs.

    Raises:
        FileError: The file cannot be read.
        TextError: A line has another format; the error names it.
    """
    rows = RowReader(table)
    pairs: list[tuple[str, str, float]] = []
    for number, line in _lines(file):
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        try:
            pairs.append((fields[0].strip().lower(), fields[1].strip().lower(), float(fields[2])))
        except (IndexError, ValueError):
            format_ = "two words and a number, separated by tabs"
            raise TextError(f"{file}, line {number}: {line[:60]!r} is not {format_}.") from None
    usable = [(words[one], words[other], score) for one, other, score in pairs if one in words and other in words]
    spearman = pearson = None
    if len(usable) >= FEWEST_PAIRS:
        ids = torch.tensor([pair[:2] for pair in usable])
        judged = torch.tensor([pair[2] for pair in usable], dtype=torch.float64)
        cosines = F.cosine_similarity(rows.take(ids[:, 0]).double(), rows.take(ids[:, 1]).double(), dim=1)
        spearman, pearson = correlation(ranks(cosines), ranks(judged)), correlation(cosines, judged)
    return WordPairScores(
        spearman=spearman,
        pearson=pearson,
        used=len(usable),
        total=len(pairs),
        missing=_missing((word for pair in pairs for word in pair[:2]), words),
    )


def evaluate_word_analogies(
    table: TableLike, words: Mapping[str, int], file: Path | str, *, restrict_vocab: int | None = None
) -> AnalogyScores:
    """Answer analogy questions `a is to b as c is to ?` by the word nearest to `b - a + c`.

    Rows are normalised to length 1, and words are compared in lower case. The three words of a question are not
    candidates.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        words: Word -> row ID, see `whole_words`; these words are the candidates for an answer.
        file: Four words per line, under headings that start with `:`.
        restrict_vocab: Use only IDs below this number, in questions and answers; `None` or 0 for all.

    Raises:
        SizeError: No question has four words that are all in `words`.
        FileError: The file cannot be read.
        TextError: A line has another format; the error names it.
    """
    rows = RowReader(table)
    words = {word: row for word, row in words.items() if row < (restrict_vocab or len(rows))}
    heading = "questions"
    questions: list[tuple[str, list[str]]] = []
    for number, line in _lines(file):
        if line.startswith(":"):
            heading = line[1:].strip()
        elif len(question := line.lower().split()) == 4:
            questions.append((heading, question))
        else:
            raise TextError(f"{file}, line {number}: {line[:60]!r} is neither four words nor a heading (': family').")
    usable = [(heading, question) for heading, question in questions if all(word in words for word in question)]
    if not usable:
        raise SizeError(f"None of the {len(questions)} questions in {file} has four words of a single token each.")
    ids = torch.tensor([[words[word] for word in question] for _, question in usable])
    candidates = torch.zeros(len(rows), dtype=torch.bool)
    candidates[list(words.values())] = True
    a, b, c = (F.normalize(rows.take(column).float(), dim=1) for column in ids[:, :3].T)
    answers = nearest_rows(table, b - a + c, 1, candidates=candidates, exclude=ids[:, :3])
    right = (answers.ids[:, 0] == ids[:, 3]).tolist()
    total, used = Counter(heading for heading, _ in questions), Counter(heading for heading, _ in usable)
    correct = Counter(compress((heading for heading, _ in usable), right))
    sections = tuple(AnalogySection(name, correct[name], used[name], total[name]) for name in total)
    return AnalogyScores(sections, len(words), _missing((word for _, each in questions for word in each), words))


def _lines(file: Path | str) -> list[tuple[int, str]]:
    """Return the non-empty lines of a text file as `(line number from 1, line)`."""
    try:
        require_file(file, most=MOST_BYTES)
        with file_errors(f"read {file}"):
            text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text ({error}).") from error
    return [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _missing(all_words: Iterable[str], words: Mapping[str, int]) -> tuple[str, ...]:
    """Return the words in `all_words` that are not keys of `words`, each once, in the order of `all_words`."""
    return tuple(dict.fromkeys(word for word in all_words if word not in words))


def ranks(values: Float[Tensor, " N"] | Sequence[float]) -> Float[Tensor, " N"]:
    """Return the rank of each value, from 1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = torch.as_tensor(values).unique(return_inverse=True, return_counts=True)
    places: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return places[place]


def correlation(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    """Return Pearson's correlation, from -1 to 1; 0 if an input is constant or has NaN. Of `ranks` it is Spearman's."""
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].nan_to_num(0.0))
