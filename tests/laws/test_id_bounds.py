"""IDs are bounded before anything is allocated for them, in every file that states IDs."""

import json
import tracemalloc

import numpy as np
import pytest
from covering import looped
from tokenizer_kinds import BUILDERS, ENGLISH, tokenizer_of

import embedlayer as el
from embedlayer.tokenization.ids import table_size

MAX_TOKEN_IDS = 1 << 24
TOO_LARGE = (2**31, 2**32 - 1)


@pytest.fixture
def small_memory():
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("large", TOO_LARGE)
@looped("kind", [kind for kind in BUILDERS if kind != "Unigram"])  # whose IDs are places in a list
def test_an_id_that_no_vocabulary_has_is_refused_in_a_tokenizer_file(kind, large, tmp_path, small_memory) -> None:
    content = json.loads(tokenizer_of(kind).to_str())
    content["model"]["vocab"]["Zz"] = large
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(el.TokenizerError, match=f"tokenizer.json: 'Zz' has the ID {large:,}"):
        el.load_tokenizer(tmp_path)


@looped("large", [*TOO_LARGE, 2**40, -1, 1.5, True])
def test_an_id_that_no_vocabulary_has_is_refused_in_gpt2s_files(large, tmp_path, small_memory) -> None:
    model = json.loads(tokenizer_of("byte-level BPE").to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps({**model["vocab"], "Zz": large}))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    with pytest.raises(el.TokenizerError, match=r"vocab.json|merges.txt"):
        el.load_tokenizer(tmp_path)


def test_the_largest_id_is_read_and_costs_no_rows(tmp_path) -> None:
    content = json.loads(tokenizer_of("word").to_str())
    content["model"]["vocab"]["Zz"] = MAX_TOKEN_IDS - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert table_size(el.load_tokenizer(tmp_path)) == MAX_TOKEN_IDS


@looped("stated", [*TOO_LARGE, 2**62, 0, -5])
def test_a_corpus_that_states_a_vocabulary_of_no_model_is_refused(stated, tmp_path, small_memory) -> None:
    (tmp_path / "a.txt").write_text(ENGLISH)
    el.TokenCorpus.build([tmp_path / "a.txt"], tokenizer_of("bytes"), tmp_path / "corpus")
    index = tmp_path / "corpus" / "index.json"
    stated += stated == MAX_TOKEN_IDS  # this one is the largest that may be stated
    index.write_text(json.dumps({**json.loads(index.read_text()), "vocab_size": stated}))
    with pytest.raises(el.CheckpointError, match=f"vocab_size is {stated}, outside 1 to {MAX_TOKEN_IDS}"):
        el.TokenCorpus.open(tmp_path / "corpus")


@pytest.mark.parametrize("large", [257, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_refused_before_it_is_counted(large, small_memory) -> None:
    ids = np.array([1, 2, large], dtype=np.uint32)
    corpus = el.TokenCorpus(
        ids, np.array([0]), np.array([[3, 3]]), vocab_size=257, tokenizer_fingerprint="none of a tokenizer"
    )
    with pytest.raises(el.TokenIdError, match=rf"token id {large} at token 2 .* outside 0\.\.256"):
        corpus.counts(257)
