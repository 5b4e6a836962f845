"""The texts that a user names become a corpus or a mixture, with one tokenizer."""

import numpy as np
import pytest

from embedlayer import TokenCorpus, TokenizerError, train_tokenizer
from embedlayer.cli.texts import TokenizerOptions, learn_tokenizer, prepare_corpus
from embedlayer.data import TokenMixture, build_in_shards
from embedlayer.data.readers.documents import RowOptions
from embedlayer.data.readers.sources import find_sources

DOGS, CATS = "Dogs love dogs, as they say. " * 80, "Cats nap in warm sunlight. " * 80
WORDS = TokenizerOptions(None, "word", 100)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "dogs.txt").write_text(DOGS)
    (tmp_path / "cats.txt").write_text(CATS)
    return [tmp_path / "dogs.txt", tmp_path / "cats.txt"]


def test_a_tokenizer_of_a_mixture_is_trained_on_each_text_in_its_share(texts, monkeypatch) -> None:
    monkeypatch.setattr("embedlayer.cli.texts.TOKENIZER_BYTES", 2000)
    readers = find_sources(texts, RowOptions())
    vocabulary = learn_tokenizer([readers], "word", 100, quiet=True).get_vocab()  # in order: the first fills the bytes
    assert any("Dogs" in token for token in vocabulary)
    assert not any("Cats" in token for token in vocabulary)
    mixed = learn_tokenizer([[reader] for reader in readers], "word", 100, weights=(3, 1), quiet=True).get_vocab()
    assert all(any(word in token for token in mixed) for word in ("Dogs", "Cats"))


def test_sources_are_one_text_or_a_mixture_of_texts_and_corpora(texts, tmp_path) -> None:
    whole, _ = prepare_corpus(texts, None, tmp_path / "whole", WORDS, quiet=True)
    assert isinstance(whole, TokenCorpus)
    mixture, tokenizer = prepare_corpus(texts, (3, 1), tmp_path / "mixture", WORDS, quiet=True)
    assert isinstance(mixture, TokenMixture)
    for corpus, text in zip(mixture.corpora, (DOGS, CATS), strict=True):
        assert np.array_equal(corpus.ids, TokenCorpus.from_text(text, tokenizer).ids)
    built = build_in_shards([texts[1]], train_tokenizer(CATS, "byte"), tmp_path / "built", shards=1, workers=1)
    linked, tokenizer = prepare_corpus([texts[0], tmp_path / "built"], (1, 1), tmp_path / "linked", WORDS, quiet=True)
    assert (tmp_path / "linked" / "1").is_symlink()
    assert linked.corpora[1].tokenizer_fingerprint == built.tokenizer_fingerprint
    assert np.array_equal(linked.corpora[0].ids, TokenCorpus.from_text(DOGS, tokenizer).ids)


def test_corpora_of_two_tokenizers_cannot_be_mixed(texts, tmp_path) -> None:
    for name, kind in (("a", "byte"), ("b", "word")):
        build_in_shards(texts, train_tokenizer(DOGS + CATS, kind), tmp_path / name, shards=1, workers=1)
    both = [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "run").mkdir()
    advice = f"corpus build FILE --tokenizer {both[0]} -o NEW"
    with pytest.raises(TokenizerError, match=f"{both[0]} and {both[1]} were built with different .*{advice}"):
        prepare_corpus(both, (1, 1), tmp_path / "run" / "corpus", WORDS, quiet=True)
    assert not (tmp_path / "run" / "corpus").exists()
