"""Agreement with people: against gensim, SciPy, and figures that are known for MiniLM's table."""

import numpy as np
import pytest
import torch
from covering import looped
from real_tables import minilm
from tokenizers import Tokenizer, models, pre_tokenizers

from embedlayer.analysis import TokenVectors, evaluate_word_analogies, evaluate_word_pairs, whole_words
from embedlayer.compress.convert import compress_table
from embedlayer.core.errors import FileError, SizeError, TextError
from embedlayer.tables.dense import TokenEmbedding
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


@pytest.mark.long  # gensim has the law for made vectors
def test_minilm_has_the_known_figures(shared_data, tmp_path) -> None:
    layer = minilm()
    vectors = TokenVectors(layer.table, layer.tokenizer)
    pairs = vectors.evaluate_word_pairs(shared_data / "benchmarks" / "wordsim353.gensim.tsv")
    assert 0.77 <= pairs.spearman <= 0.78
    assert (pairs.used, pairs.total) == (329, 353)
    assert "cucumber" in pairs.missing
    lines = (shared_data / "benchmarks" / "questions-words.txt").read_text().splitlines()
    some = tmp_path / "some.txt"
    some.write_text("\n".join(line for number, line in enumerate(lines) if line.startswith(":") or number % 24 == 0))
    analogies = vectors.evaluate_word_analogies(some)
    assert analogies.accuracy == pytest.approx(0.755, abs=0.04)
    assert analogies.used / analogies.total == pytest.approx(12154 / 19544, abs=0.03)
    assert [section.name for section in analogies.sections][:2] == ["capital-common-countries", "capital-world"]


def test_words_are_found_with_and_without_their_space() -> None:
    tokenizer = train_tokenizer("The cats and the Dogs and the cats", vocab_size=290, min_frequency=1)
    words = whole_words(tokenizer, 300)
    assert words["the"] == tokenizer.token_to_id("Ġthe")
    assert words["dogs"] == tokenizer.token_to_id("ĠDogs")
    assert "ts" not in words


@looped("to", ["rank=2", "int8", "int4", "int4-g2"])
def test_any_table_is_asked(tokenizer, files, to) -> None:
    table = compress_table(TokenEmbedding(1 + len(WORDS), 8), to)
    written_out = table.rows(0, table.vocab_size).detach()
    words = whole_words(tokenizer, table.vocab_size)
    assert evaluate_word_pairs(table, words, files[0]).spearman == pytest.approx(
        evaluate_word_pairs(written_out, words, files[0]).spearman
    )
    assert (
        evaluate_word_analogies(table, words, files[1]).used
        == evaluate_word_analogies(written_out, words, files[1]).used
    )


@looped("usable", [0, 1, 2, 19, 20])
def test_too_few_pairs_give_no_coefficient_and_equal_scores_correlate_with_nothing(tmp_path, usable) -> None:
    rows, words = torch.randn(1 + len(WORDS), 3), {word: row for row, word in enumerate(WORDS)}
    lines = [f"{WORDS[place]}\t{WORDS[place + 1]}\t4" for place in range(usable)]
    (tmp_path / "pairs").write_text("\n".join([*lines, "bao\tzebra\t3"]))
    found = evaluate_word_pairs(rows, words, tmp_path / "pairs")
    assert (found.used, found.total) == (usable, usable + 1)
    assert found.spearman == found.pearson == (None if usable < 20 else 0.0)


def test_files_that_are_something_else_are_refused_by_line(tmp_path, tokenizer, rows) -> None:
    file = tmp_path / "file"
    words = whole_words(tokenizer, len(rows))
    with pytest.raises(FileError, match="Cannot read"):
        evaluate_word_pairs(rows, words, file)
    file.write_text("bao\tdao\t3\nbao dao 3\n")
    with pytest.raises(TextError, match="line 2: 'bao dao 3' is not two words and a number"):
        evaluate_word_pairs(rows, words, file)
    with pytest.raises(TextError, match="line 1: .* is not four words"):
        evaluate_word_analogies(rows, words, file)
    file.write_text("zebra\thorse\t3\n")
    found = evaluate_word_pairs(rows, words, file)
    assert (found.used, found.total, found.spearman, found.pearson) == (0, 1, None, None)
    file.write_text(": animals\nzebra horse cow bull\n")
    with pytest.raises(SizeError, match="Of the 1 questions"):
        evaluate_word_analogies(rows, words, file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(TextError, match="not UTF-8"):
        evaluate_word_analogies(rows, words, file)
