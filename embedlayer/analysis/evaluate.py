"""How well a table's rows agree with people: similarity of word pairs, and analogies.

Both files are gensim's and the field's: `wordsim353.tsv` has two words and a number a line, `questions-words.txt` has
four words a line under headings that begin with `:`. A word counts if it is one token; how many did is always said.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.rows import Rows
from embedlayer.analysis.token_kinds import token_kinds
from embedlayer.errors import FileError, SizeError, TextError
from embedlayer.tables.dense import TableLike
from embedlayer.data.tokenizer import token_text

QUESTIONS_AT_ONCE = 1024
FEWEST_PAIRS = 20
"""Pairs from which a correlation is computed: of fewer, the 95 % interval of no correlation is wider than +-0.45."""


@dataclass(frozen=True)
class WordPairScores:
    """How a table's similarities go with those that people gave.

    Attributes:
        spearman: Correlation of the two orders, from -1 to 1; `None` where fewer than `FEWEST_PAIRS` can be used.
        pearson: Correlation of the two numbers, or `None` likewise.
        used: Pairs of which both words are one token.
        total: Pairs in the file.
        missing: Words that are not one token, in the order of the file.
    """

    spearman: float | None
    pearson: float | None
    used: int
    total: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class AnalogySection:
    """The questions under one heading: how many, how many could be asked, how many were answered rightly."""

    name: str
    correct: int
    used: int
    total: int


@dataclass(frozen=True)
class AnalogyScores:
    """Answers to questions `a is to b as c is to ?`.

    Attributes:
        sections: By heading.
        candidates: Words among which the answer was looked for.
        missing: Words that are not one token, in the order of the file.
    """

    sections: tuple[AnalogySection, ...]
    candidates: int
    missing: tuple[str, ...]

    @property
    def correct(self) -> int:
        """Questions answered rightly."""
        return sum(section.correct for section in self.sections)

    @property
    def used(self) -> int:
        """Questions whose four words are one token each."""
        return sum(section.used for section in self.sections)

    @property
    def total(self) -> int:
        """Questions in the file."""
        return sum(section.total for section in self.sections)

    @property
    def accuracy(self) -> float:
        """`correct / used`."""
        return self.correct / self.used


def whole_words(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """The words that are one token, in lower case and without the space in front, with the first ID of each."""
    found: dict[str, int] = {}
    for token, kind in enumerate(token_kinds(tokenizer, vocab_size)):
        if kind == "word":
            found.setdefault(token_text(tokenizer, token).strip().lower(), token)
    return found


def evaluate_word_pairs(table: TableLike, words: Mapping[str, int], file: Path | str) -> WordPairScores:
    """Compare cosines with a file of pairs that people judged: `word<TAB>word<TAB>number`, `#` before remarks.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        words: The row of each word, see `whole_words`.
        file: The pairs.

    Raises:
        FileError: The file cannot be read.
        TextError: A line is none of these; it is named.
    """
    rows = Rows(table)
    pairs: list[tuple[str, str, float]] = []
    for number, line in _lines(file):
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        try:
            pairs.append((fields[0].strip().lower(), fields[1].strip().lower(), float(fields[2])))
        except (IndexError, ValueError):
            raise TextError(f"{file}, line {number}: {line[:60]!r} is not two words and a number with tabs.") from None
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
    """Ask `a is to b as c is to ?`: right if the whole word nearest to `b - a + c`, none of the three, is the fourth.

    Rows are taken at length 1, letters in lower case, and only whole words are candidates.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        words: The row of each word, see `whole_words`.
        file: Four words a line, under headings that begin with `:`.
        restrict_vocab: Look only at the first so many IDs, in questions and answers.

    Raises:
        FileError: The file cannot be read.
        TextError: A line is none of these; it is named.
        SizeError: No question can be used.
    """
    rows = Rows(table)
    words = {word: row for word, row in words.items() if row < (restrict_vocab or len(rows))}
    names, questions, section_of = _questions(file)
    used = [place for place, question in enumerate(questions) if all(word in words for word in question)]
    if not used:
        raise SizeError(f"Of the {len(questions)} questions in {file}, none is made of four tokens.")
    ids = torch.tensor([[words[word] for word in questions[place]] for place in used])
    candidates = torch.zeros(len(rows), dtype=torch.bool)
    candidates[list(words.values())] = True
    right = _answers(rows, ids[:, :3], candidates) == ids[:, 3]
    where = torch.tensor([section_of[place] for place in used])
    sections = [
        AnalogySection(name, int(right[where == number].sum()), int((where == number).sum()), section_of.count(number))
        for number, name in enumerate(names)
    ]
    missing = _missing((word for question in questions for word in question), words)
    return AnalogyScores(tuple(section for section in sections if section.total), len(words), missing)


def _questions(file: Path | str) -> tuple[list[str], list[list[str]], list[int]]:
    """Headings, questions in lower case, and the heading that each stands under."""
    names, questions, section_of = ["questions"], [], []
    for number, line in _lines(file):
        if line.startswith(":"):
            names.append(line[1:].strip())
            continue
        question = line.lower().split()
        if len(question) != 4:
            raise TextError(
                f"{file}, line {number}: {line[:60]!r} is not four words, nor a heading such as ': family'."
            )
        questions.append(question)
        section_of.append(len(names) - 1)
    return names, questions, section_of


@torch.no_grad()
def _answers(rows: Rows, asked: Int[Tensor, "Q 3"], candidates: Bool[Tensor, " V"]) -> Int[Tensor, " Q"]:
    """For each question `a, b, c` the candidate nearest to `b - a + c` that is none of them."""
    a, b, c = (F.normalize(rows.take(column).float(), dim=1) for column in asked.T)
    queries = b - a + c
    best, answers = torch.full((len(asked),), -torch.inf), torch.zeros(len(asked), dtype=torch.int64)
    for start, chunk in rows.chunks():
        ids = torch.nonzero(candidates[start : start + len(chunk)])[:, 0]
        if not len(ids):
            continue
        units = F.normalize(chunk[ids.to(chunk.device)].to("cpu", torch.float32), dim=1)
        for first in range(0, len(asked), QUESTIONS_AT_ONCE):
            part = slice(first, first + QUESTIONS_AT_ONCE)
            scores = queries[part] @ units.T
            own = asked[part] - start
            place = torch.searchsorted(ids, own).clamp_max(len(ids) - 1)
            question, word = torch.nonzero(ids[place] == own, as_tuple=True)
            scores[question, place[question, word]] = -torch.inf
            highest, nearest = scores.max(dim=1)
            nearer = highest > best[part]
            best[part] = highest.where(nearer, best[part])
            answers[part] = (ids[nearest] + start).where(nearer, answers[part])
    return answers


def _lines(file: Path | str) -> list[tuple[int, str]]:
    """Numbered lines that are not empty."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"Cannot read {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 text ({error}).") from error
    return [(number, line.rstrip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _missing(asked: Iterable[str], words: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in asked if word not in words))


def ranks(values: Float[Tensor, " N"] | Sequence[float]) -> Float[Tensor, " N"]:
    """The place of each value in their order, from 1; equals share the mean of their places.

    Example:
        >>> ranks(torch.tensor([3.0, 1.0, 3.0])).tolist()
        [2.5, 1.0, 2.5]
    """
    _, place, counts = torch.as_tensor(values).unique(return_inverse=True, return_counts=True)
    places: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return places[place]


def correlation(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    """Pearson's, from -1 to 1; of `ranks` it is Spearman's. 0 where one of the two does not vary."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    scale = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return float(a @ b) / scale if scale > 0 else 0.0
