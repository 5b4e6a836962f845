"""Agreement with people: against gensim, SciPy, and figures that are known for MiniLM's table."""

import numpy as np
import pytest
import torch
from covering import looped
from tokenizers import Tokenizer, models, pre_tokenizers

from embedlayer.analysis import TokenVectors, evaluate_word_pairs, whole_words
from embedlayer.tokenization.train import train_tokenizer

WORDS = [f"{first}{second}o" for first in "bdfgklmnprst" for second in "aeiu"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({word: row for row, word in enumerate(["<unk>", *WORDS])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.fixture
def files(tmp_path):
    draw = np.random.default_rng(0)
    pairs, questions = tmp_path / "pairs.tsv", tmp_path / "questions.txt"
    lines = ["# a remark"]
    lines += [f"{one.title()}\t{other}\t{draw.integers(0, 8)}" for one, other in draw.choice(WORDS, (40, 2))]
    pairs.write_text("\n".join([*lines, "bao\tzebra\t3", ""]))
    lines = []
    for section in ("one", "two"):
        lines.append(f": {section}")
        lines += [" ".join(draw.choice(WORDS, 4, replace=False)).title() for _ in range(200)]
        lines.append("Bao dao zebra fao")
    questions.write_text("\n".join(lines))
    return pairs, questions


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(1 + len(WORDS), 3)  # narrow, so that some analogies come out


def test_both_scores_are_gensims(tokenizer, files, rows) -> None:
    keyed = pytest.importorskip("gensim.models").KeyedVectors(3)
    keyed.add_vectors(WORDS, rows[1:].numpy())
    vectors = TokenVectors(rows, tokenizer)
    pearson, spearman, unknown = keyed.evaluate_word_pairs(str(files[0]))
    found = vectors.evaluate_word_pairs(files[0])
    assert found.pearson == pytest.approx(pearson[0], abs=1e-6)
    assert found.spearman == pytest.approx(spearman[0], abs=1e-6)
    assert (found.used, found.total, found.missing) == (40, 41, ("zebra",))
    assert unknown == pytest.approx(100 / 41)
    accuracy, sections = keyed.evaluate_word_analogies(str(files[1]))
    answered = vectors.evaluate_word_analogies(files[1])
    assert 0 < answered.accuracy == pytest.approx(accuracy)
    assert [section.correct for section in answered.sections] == [len(section["correct"]) for section in sections[:2]]
    assert (answered.used, answered.total, answered.candidates) == (400, 402, len(WORDS))
    fewer, _ = keyed.evaluate_word_analogies(str(files[1]), restrict_vocab=30)
    assert vectors.evaluate_word_analogies(files[1], restrict_vocab=31).accuracy == pytest.approx(fewer)


def test_words_are_found_with_and_without_their_space() -> None:
    tokenizer = train_tokenizer("The cats and the Dogs and the cats", vocab_size=290, min_frequency=1)
    words = whole_words(tokenizer, 300)
    assert words["the"] == tokenizer.token_to_id("Ġthe")
    assert words["dogs"] == tokenizer.token_to_id("ĠDogs")
    assert "ts" not in words


@looped("usable", [0, 1, 2, 19, 20])
def test_too_few_pairs_give_no_coefficient_and_equal_scores_correlate_with_nothing(tmp_path, usable) -> None:
    rows, words = torch.randn(1 + len(WORDS), 3), {word: row for row, word in enumerate(WORDS)}
    lines = [f"{WORDS[place]}\t{WORDS[place + 1]}\t4" for place in range(usable)]
    (tmp_path / "pairs").write_text("\n".join([*lines, "bao\tzebra\t3"]))
    found = evaluate_word_pairs(rows, words, tmp_path / "pairs")
    assert (found.used, found.total) == (usable, usable + 1)
    assert found.spearman == found.pearson == (None if usable < 20 else 0.0)
