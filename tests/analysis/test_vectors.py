"""Neighbours, checked against a brute-force float64 search."""

import inspect

import numpy as np
import pytest
import torch
from covering import looped
from real_tables import minilm
from tokenizers import Tokenizer, models
from torch import Tensor

from embedlayer.analysis.vectors import TokenVectors
from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.vector_files import write_vectors
from embedlayer.compress.convert import compress_table
from embedlayer.core.errors import (
    CheckpointError,
    TokenizerError,
)
from embedlayer.opening import open_model
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tokenization.train import train_tokenizer

TEXT = (
    "the cat sat on the mat and the dog sat on the log, then the cats and the dogs ran to the first of the logs. " * 5
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(TEXT, "bpe", vocab_size=300)


def words(*entries: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=entries[0]))


def brute_force(
    rows: Tensor, positive: list[int], negative: list[int], topn: int, stop: int
) -> list[tuple[int, float]]:
    """gensim's definition, written out."""
    rows = rows.double()
    unit = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    query = (unit[positive].sum(0) - unit[negative].sum(0)) / (len(positive) + len(negative))
    scores = (unit @ (query / query.norm())).tolist()
    ranked = sorted((-score, index) for index, score in enumerate(scores[:stop]) if index not in positive + negative)
    return [(index, -score) for score, index in ranked[:topn]]


QUERIES = [([260], [], 10, None), ([260, 270], [280], 5, None), ([], [265], 3, None), ([280, 261], [], 400, 270)]


@looped("query, width, dtype", QUERIES, [12, 2048], [torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_equal_a_brute_force_search(bpe, query, width, dtype):
    positive, negative, topn, restrict_vocab = query
    table = torch.randn(bpe.get_vocab_size(), width).to(dtype)
    vectors = TokenVectors(table, bpe)
    found = vectors.most_similar(positive, negative, topn, restrict_vocab=restrict_vocab)
    expected = brute_force(table, positive, negative, topn, restrict_vocab or len(table))
    assert [text for text, _ in found] == [vectors.index_to_key[index] for index, _ in expected]
    exact = pytest.approx([score for _, score in expected], abs=1e-12 if dtype == torch.float64 else 1e-6)
    assert [score for _, score in found] == exact


@looped("make", [TokenEmbedding, lambda v, d: FactorizedEmbedding(v, d, rank=3)])
def test_every_kind_of_table_answers_like_its_rows_written_out(bpe, make):
    table = make(bpe.get_vocab_size(), 8)
    written_out = table.rows(0, bpe.get_vocab_size()).detach()
    by_table, by_rows = TokenVectors(table, bpe), TokenVectors(written_out, bpe)
    assert len(by_table) == bpe.get_vocab_size()
    torch.testing.assert_close(by_table[" the"], by_rows[" the"])
    assert [t for t, _ in by_table.most_similar(" the")] == [t for t, _ in by_rows.most_similar(" the")]
    assert not by_table[" the"].requires_grad
    before = by_table.similarity(" the", " cat")
    with torch.no_grad():  # answers follow a table that is trained further
        (table.weight if isinstance(table, TokenEmbedding) else table.inner.weight)[by_table.id_of(" cat")] *= -1
    assert by_table.similarity(" the", " cat") == pytest.approx(-before)


def test_a_token_goes_by_text_by_id_and_by_bytes(bpe):
    vectors = TokenVectors(torch.randn(bpe.get_vocab_size(), 4), bpe)
    index = bpe.token_to_id("Ġthe")
    assert vectors.id_of(" the") == vectors.id_of("Ġthe") == vectors.id_of(b" the") == vectors.id_of(index) == index
    assert " the" in vectors
    assert "the cat" not in vectors
    assert 10_000 not in vectors


@looped("kind", ["bpe", "wordpiece", "unigram", "word", "byte"])
def test_a_readable_text_that_is_unique_leads_back_to_its_token(kind):
    tokenizer = train_tokenizer(TEXT + " naïve 日本", kind, vocab_size=320)
    vectors = TokenVectors(torch.randn(tokenizer.get_vocab_size(), 4), tokenizer)
    texts = vectors.index_to_key
    lost = [text for text in texts if texts.count(text) == 1 and vectors.id_of(text) != texts.index(text)]
    # a piece at the start of a word and the same letters inside one differ only by SentencePiece's own space
    assert [text for text in lost if f" {text}" not in texts] == []
    if kind == "bpe":
        assert texts[vectors.id_of(b"\xe6")] == "<0xE6>"


def test_spare_rows_and_broken_rows_are_never_an_answer():
    table = torch.tensor([[1.0, 0.0], [1.0, 0.1], [torch.nan, 0.0], [1.0, 0.0], [1.0, 0.0]])
    vectors = TokenVectors(table, words("a", "b", "broken"))
    assert len(vectors) == 3
    assert [text for text, _ in vectors.most_similar("a")] == ["b"]


@pytest.fixture(scope="module")
def keyed():
    """gensim's vectors and ours, of the same words."""
    gensim = pytest.importorskip("gensim.models")
    entries = [f"word{index}" for index in range(120)]
    rows = torch.randn(120, 10, generator=torch.Generator().manual_seed(3))
    theirs = gensim.KeyedVectors(10)
    theirs.add_vectors(entries, rows.numpy())
    return theirs, TokenVectors(rows, words(*entries))


def test_tokens_go_by_id_and_bytes_in_every_verb(bpe):
    vectors = TokenVectors(FactorizedEmbedding(bpe.get_vocab_size(), 8, rank=3), bpe)
    index = vectors.id_of(" the")
    for token in (index, b" the", "Ġthe"):
        assert vectors.rank(token, " cat") == vectors.rank(" the", " cat")
        assert vectors.doesnt_match([token, " cat", 300 - 30]) == vectors.doesnt_match([" the", " cat", 270])
        assert vectors.most_similar_cosmul(token) == vectors.most_similar_cosmul(" the")
    assert vectors.rank(" the", " the") == 1
    low = [each for each in vectors.most_similar_cosmul(" the", topn=300) if vectors.key_to_index[each[0]] < 280]
    assert vectors.most_similar_cosmul(" the", topn=7, restrict_vocab=280) == low[:7]  # gensim ignores it here


def test_minilm_answers_like_a_person():
    layer = minilm()
    vectors = TokenVectors(layer.table, layer.tokenizer)
    assert vectors.most_similar(["king", "woman"], ["man"], topn=1)[0][0] == "queen"
    assert vectors.most_similar_cosmul(["king", "woman"], ["man"], topn=1)[0][0] == "queen"
    assert vectors.doesnt_match(["breakfast", "cereal", "dinner", "lunch"]) == "cereal"


VERBS = {
    "most_similar": lambda kv: kv.most_similar(["word3"], [], 10),
    "most_similar, without a word": lambda kv: kv.most_similar(["word3", "word50"], ["word7"], topn=5),
    "most_similar, of the first": lambda kv: kv.most_similar("word3", None, topn=7, restrict_vocab=40),
    "most_similar, without two words": lambda kv: kv.most_similar(["word1"], ["word2", "word4"], topn=119),
    "most_similar, a word and a vector": lambda kv: kv.most_similar(["word5", np.ones(10, dtype=np.float32)], topn=4),
    "most_similar_cosmul": lambda kv: kv.most_similar_cosmul("word3", topn=10),
    "most_similar_cosmul, without a word": lambda kv: kv.most_similar_cosmul(["word3", "word50"], ["word7"], topn=5),
    "most_similar, weights": lambda kv: kv.most_similar(
        [("word3", 0.25), "word50"], [("word7", -2.0), "word9"], topn=5
    ),
    "most_similar, a weight of the other sign": lambda kv: kv.most_similar(["word3"], [("word7", 0.5)], topn=5),
    "most_similar, an ID": lambda kv: kv.most_similar([3, np.int64(50)], topn=5),
    "most_similar, vectors": lambda kv: kv.most_similar(
        [np.arange(10, dtype=np.float32), ("word3", 0.5), (np.ones(10, dtype=np.float32), 2.0)], topn=5
    ),
    "most_similar, an array of vectors": lambda kv: kv.most_similar(np.eye(10, dtype=np.float32)[:2], topn=5),
    "most_similar, a window of IDs": lambda kv: kv.most_similar("word3", topn=9, clip_start=20, clip_end=30),
    "most_similar, all": lambda kv: kv.most_similar("word3", topn=None),
    "most_similar, all of the first": lambda kv: kv.most_similar("word3", topn=None, restrict_vocab=40),
    "most_similar, none": lambda kv: kv.most_similar("word3", topn=0),
    "most_similar_cosmul, all": lambda kv: kv.most_similar_cosmul(["word3"], ["word4"], topn=None),
    "similar_by_word": lambda kv: kv.similar_by_word("word3", topn=4),
    "similar_by_word, all": lambda kv: kv.similar_by_word("word3", None),
    "similar_by_key": lambda kv: kv.similar_by_key("word3", 4, 50),
    "similar_by_vector": lambda kv: kv.similar_by_vector(np.arange(10, dtype=np.float32), topn=4),
    "similar_by_vector, all": lambda kv: kv.similar_by_vector(np.arange(10, dtype=np.float32), topn=None),
    "closer_than": lambda kv: kv.closer_than("word3", "word50"),
    "most_similar_to_given": lambda kv: kv.most_similar_to_given("word3", ["word1", "word2", "word77"]),
    "get_mean_vector": lambda kv: kv.get_mean_vector(["word1", 7, "missing"]),
    "get_mean_vector, weights": lambda kv: kv.get_mean_vector(["word1", "word2"], weights=[0.5, -2.0]),
    "get_mean_vector, as stored": lambda kv: kv.get_mean_vector(
        ["word1", np.ones(10, dtype=np.float32)], weights=np.array([1.0, 3.0]), pre_normalize=False, post_normalize=True
    ),
    "doesnt_match": lambda kv: kv.doesnt_match(["word9", "word30", "word31", "word77", "word2"]),
    "rank": lambda kv: kv.rank("word9", "word31"),
    "similarity": lambda kv: float(kv.similarity("word9", "word77")),
    "distance": lambda kv: float(kv.distance("word9", "word2")),
    "relative_cosine_similarity": lambda kv: kv.relative_cosine_similarity("word3", "word50", topn=7),
    "distances": lambda kv: kv.distances("word3"),
    "distances, of some": lambda kv: kv.distances("word3", ["word1", "word9"]),
    "distances, of a vector": lambda kv: kv.distances(np.arange(10, dtype=np.float32)),
    "n_similarity": lambda kv: float(kv.n_similarity(["word1", "word5"], ["word9", "word3"])),
    "has_index_for": lambda kv: str([kv.has_index_for(word) for word in ("word9", "zebra")]),
    "get_vector": lambda kv: np.asarray(kv.get_vector("word9")),
    "get_vector, at length 1": lambda kv: np.asarray(kv.get_vector("word9", norm=True)),
    "__getitem__": lambda kv: np.concatenate([kv[index] for index in (["word5", "word9"], [5, 9], np.array([5, 9]))]),
    "__contains__": lambda kv: str(["word9" in kv, "zebra" in kv]),
    "vectors": lambda kv: kv.vectors,
    "index_to_key": lambda kv: kv.index_to_key,
    "key_to_index": lambda kv: str([kv.key_to_index, len(kv), kv.vector_size]),
}


@looped("name", VERBS)
@pytest.mark.filterwarnings("ignore:Call to deprecated `init_sims`:DeprecationWarning")  # gensim calls itself so
def test_every_verb_answers_what_gensim_answers(keyed, name):
    expected, found = (VERBS[name](kv) for kv in keyed)
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    elif isinstance(expected, list) and expected and isinstance(expected[0], tuple):
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-6)
    else:
        assert found == (expected if isinstance(expected, str | list) else pytest.approx(expected, rel=1e-4))


def test_the_arguments_have_gensims_names_order_and_defaults(keyed):
    def arguments(function):
        return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]

    theirs, ours = keyed
    attributes = {"vectors", "index_to_key", "key_to_index", "__getitem__", "__contains__"}
    for name in {verb.split(",")[0] for verb in VERBS} - attributes:
        assert arguments(getattr(ours, name)) == arguments(getattr(theirs, name))


NO_ANSWER = {
    KeyError: [
        lambda kv: kv["missing"],
        lambda kv: kv[["word1", "missing"]],
        lambda kv: kv[1000],
        lambda kv: kv.similarity("word1", "missing"),
        lambda kv: kv.most_similar("missing"),
        lambda kv: kv.most_similar([("missing", 2.0)]),
        lambda kv: kv.similar_by_word("missing"),
        lambda kv: kv.closer_than("word1", "missing"),
        lambda kv: kv.most_similar_to_given("missing", ["word1"]),
        lambda kv: kv.get_mean_vector(["missing"], ignore_missing=False),
        lambda kv: kv.relative_cosine_similarity("missing", "word1"),
    ],
    ValueError: [
        lambda kv: kv.most_similar([]),
        lambda kv: kv.get_mean_vector([]),
        lambda kv: kv.get_mean_vector(["word1"], weights=[1.0, 2.0]),
        lambda kv: kv.relative_cosine_similarity("word1", "word2", topn=0),
        lambda kv: kv.doesnt_match([]),
    ],
}


@looped("error, ask", [(error, ask) for error, asks in NO_ANSWER.items() for ask in asks])
def test_what_has_no_answer_is_the_error_of_gensim(keyed, error, ask):
    for kv in keyed:
        with pytest.raises(error) as raised:
            ask(kv)
    assert str(raised.value) == raised.value.args[0]


@looped(
    "model",
    [
        models.WordLevel({"cat": 0, "dog": 1}),
        models.WordLevel({"cat": 0, "dog": 1, "<unk>": 2}, unk_token="<unk>"),
        models.WordPiece({"cat": 0, "dog": 1}),
        models.Unigram([("cat", -1.0), ("dog", -2.0)]),
        models.BPE({"cat": 0, "dog": 1}, []),
    ],
)
def test_an_unknown_word_is_refused_with_and_without_an_unknown_token(model):
    vectors = TokenVectors(np.eye(3, dtype=np.float32), Tokenizer(model))
    assert vectors.similarity("cat", "dog") == 0.0
    for unknown in ("zebra", ""):
        assert unknown not in vectors
        with pytest.raises(TokenizerError, match=unknown or None):
            vectors.most_similar(unknown)


@looped("source", ["opened", "its table and tokenizer", "its table and tokens", "rows and names"])
def test_what_a_file_of_vectors_holds_goes_by_its_names(tmp_path, source) -> None:
    names, rows = ["cat", "dog", "new york", "fish"], torch.randn(5, 5).bfloat16()
    write_vectors(tmp_path / "v.npy", names, rows[:4].float())
    opened = open_model(tmp_path / "v.npy")
    vectors = {
        "opened": lambda: TokenVectors(opened),
        "its table and tokenizer": lambda: TokenVectors(opened.table, opened.tokenizer),
        "its table and tokens": lambda: TokenVectors(opened.table, opened.tokens),
        "rows and names": lambda: TokenVectors(rows, words(*names)),  # the last row has no token
    }[source]()
    assert vectors.index_to_key[:4] == [*vectors.key_to_index] == names
    assert vectors.index_to_key[4:] == [None] * (vectors.vocab_size - 4)
    np.testing.assert_array_equal(vectors.vectors[:4], rows[:4].float())
    assert vectors.most_similar("new york", topn=9)[0][0] == vectors.most_similar(rows[2], topn=9)[1][0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_is_named(bad) -> None:
    rows = torch.eye(4)
    rows[1, 2] = bad
    vectors = TokenVectors(rows, ["cat", "dog", "cow", "fish"])
    for find in (vectors.most_similar, vectors.most_similar_cosmul):
        with pytest.raises(CheckpointError, match=r"Row 1 \('dog'\) holds NaN or infinity"):
            find(["cat", "dog"])
        with pytest.raises(CheckpointError, match="A vector of the query holds NaN or infinity"):
            find([rows[1]])
        assert [name for name, _ in find("cat")] == ["cow", "fish"]


FILES = ("v.txt", "v.bin", "v.vec", "v.npy", "v.npy.gz", "projector", "float32", "bfloat16", "int8")


@looped("name", FILES)
def test_neighbours_in_what_every_source_holds_are_those_of_a_brute_force_search(tmp_path, name) -> None:
    names = ["cat", *(f"w{row}" for row in range(1, 30)), "café"]
    rows = torch.randn(31, 8, generator=torch.Generator().manual_seed(0))
    if "." in name or name == "projector":
        (tmp_path / "projector").mkdir()
        write_vectors(tmp_path / name, names, rows, "word2vec" if name == "v.txt" else None)
    else:
        dense = TokenEmbedding.from_pretrained(rows)
        table = compress_table(dense, name) if name == "int8" else dense.to(getattr(torch, name))
        EmbeddingLayer(table, family="vectors").save_pretrained(tmp_path / name, tokenizer=words(*names))
        rows = table.rows(0, len(rows)).detach()
    vectors = TokenVectors(open_model(tmp_path / name))
    for query in (0, 7, 30):
        found = vectors.most_similar(names[query])
        expected = brute_force(rows, [query], [], 10, len(rows))
        assert [text for text, _ in found] == [names[index] for index, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
