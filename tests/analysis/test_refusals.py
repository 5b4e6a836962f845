"""What an analysis cannot compute is refused with the class of its error; files and rows are named."""

import re

import pytest
import torch
from covering import looped

import embedlayer as el
from embedlayer import analysis
from embedlayer.analysis import TokenVectors

BYTES = el.train_tokenizer((), "byte")
ROWS, BROKEN = torch.randn(257, 5), torch.randn(257, 5).index_fill(0, torch.tensor(3), torch.nan)
NAMES = [f"w{row}" for row in range(257)]
VECTORS = TokenVectors(ROWS, NAMES)
PAIRS = torch.tensor([[0, 257]])
TEXT = "Once upon a time there was a little table. It had four legs, and a naïve cat sat on it. "
WORDS = {"bao": 0, "dao": 1}


def causal(length: int = 64, broken: bool = False) -> analysis.CausalModel:
    model = el.DecoderLM(el.TokenEmbedding(257, 16), "learned", num_layers=1, num_heads=2, max_seq_len=length)
    if broken:
        torch.nn.init.constant_(model.norm.weight, torch.nan)
    return analysis.CausalModel(model, BYTES, "m", 256, length // 2)


def masked() -> analysis.CausalModel:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tiny_models import build

    return analysis.CausalModel(build("bert", "masked", {"vocab_size": 257})[1], BYTES)


REFUSED = [
    (lambda: analysis.principal_components(torch.zeros(5, 3), 4), el.SizeError, ""),
    (lambda: analysis.principal_components(BROKEN), el.ShapeError, "row 3"),
    (lambda: analysis.table_geometry(torch.zeros(4, 3)), el.SizeError, ""),
    (lambda: analysis.table_health(torch.zeros(3)), el.ShapeError, ""),
    (lambda: analysis.table_health(torch.zeros(3, 2, dtype=torch.int64)), el.ShapeError, ""),
    (lambda: analysis.table_health(ROWS, before=ROWS[1:]), el.ShapeError, ""),
    (lambda: analysis.under_trained_scores(ROWS, torch.ones(3).long()), el.ShapeError, ""),
    (lambda: analysis.align_tables(ROWS, ROWS[1:]), el.ShapeError, "pass pairs"),
    (lambda: analysis.align_tables(torch.zeros(5, 2), torch.randn(5, 2)), el.SizeError, ""),
    (lambda: analysis.row_movement(ROWS, ROWS[:, 1:]), el.ShapeError, "pass alignment"),
    (lambda: analysis.row_movement(ROWS, ROWS, pairs=PAIRS), el.ShapeError, ""),
    (lambda: analysis.position_values(el.Position(), 0), el.SizeError, ""),
    (lambda: analysis.write_atlas("map.parquet", BROKEN, BYTES), el.CheckpointError, "row 3"),
    (lambda: analysis.write_atlas("map.parquet", ROWS[:, :1], BYTES), el.SizeError, ""),
    (lambda: analysis.write_atlas("map.parquet", ROWS[:20], BYTES), el.TokenizerError, ""),
    (lambda: VECTORS[257], el.TokenIdError, "257"),
    (lambda: VECTORS.most_similar([]), el.SizeError, ""),
    (lambda: VECTORS.most_similar("w1", indexer=object()), el.SizeError, ""),
    (lambda: VECTORS.most_similar("w1", clip_start=50, clip_end=20), el.SizeError, ""),
    (lambda: VECTORS.most_similar_cosmul([("w1", 2.0)]), el.SizeError, ""),
    (lambda: VECTORS.similar_by_vector(torch.zeros(4)), el.ShapeError, ""),
    (lambda: TokenVectors(torch.zeros(3), NAMES), el.ShapeError, ""),
    (lambda: TokenVectors(ROWS, NAMES[1:]), el.SizeError, ""),
    (lambda: TokenVectors(ROWS[1:], BYTES), el.TokenizerError, ""),
    (lambda: TokenVectors(el.TokenEmbedding(3, 2)), el.TokenizerError, "open_model"),
    (lambda: TokenVectors(ROWS, str), el.TokenizerError, ""),
    (lambda: TokenVectors(ROWS, BYTES)["cat"], el.TokenizerError, "'c' (#99), 'a' (#97), 't' (#116)"),
    (lambda: analysis.evaluate_positions(causal(), TEXT[:1], 40, trained=10), el.TextError, ""),
    (lambda: analysis.evaluate_positions(causal(), TEXT, 1, trained=10), el.SizeError, ""),
    (lambda: analysis.evaluate_text(causal(), ""), el.TextError, ""),
    (lambda: analysis.evaluate_text(causal(), "cats", window=32), el.TextError, ""),
    (lambda: analysis.evaluate_text(causal(), "nothere.txt"), el.TextError, ""),
    (lambda: analysis.evaluate_text(causal(), TEXT, window=65), el.SizeError, "2 to 64"),
    (lambda: analysis.evaluate_text(causal(), TEXT, window=1), el.SizeError, ""),
    (lambda: analysis.evaluate_text(causal(), TEXT, stride=33), el.SizeError, "1 to the window of 32"),
    (lambda: analysis.evaluate_text(causal(), TEXT, stride=0), el.SizeError, ""),
    (lambda: analysis.evaluate_text(causal(broken=True), TEXT, window=16), el.CheckpointError, ""),
    (lambda: analysis.evaluate_text(masked(), TEXT, window=16), el.CheckpointError, "BertForMaskedLM"),
]


@looped("ask, error, named", REFUSED)
def test_what_cannot_be_computed_is_refused(ask, error, named, tmp_path, monkeypatch, unchecked) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(named) or None):
        ask()
    assert list(tmp_path.iterdir()) == []


FILES = [
    (analysis.evaluate_word_pairs, None, el.FileError, "file"),
    (analysis.evaluate_word_pairs, "bao\tdao\t3\nbao dao 3\n", el.TextError, "line 2"),
    (analysis.evaluate_word_analogies, "bao\tdao\t3\n", el.TextError, "line 1"),
    (analysis.evaluate_word_analogies, ": animals\nzebra horse cow bull\n", el.SizeError, ""),
    (analysis.evaluate_word_analogies, b"\xff\xfe", el.TextError, ""),
    (lambda rows, words, file: analysis.evaluate_text(causal(), file, window=16), "", el.TextError, "file is empty"),
    (lambda rows, words, file: analysis.evaluate_text(causal(), file, window=16), b"\x89PNG\r", el.TextError, "file"),
]


@looped("read, content, error, named", FILES)
def test_files_that_are_something_else_are_refused(read, content, error, named, tmp_path) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=named or None):
        read(ROWS, WORDS, tmp_path / "file")
