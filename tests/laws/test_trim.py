"""Which tokens a trim keeps: the same for all ways to say what they are needed for, in every kind of tokenizer."""

import tracemalloc

import numpy as np
import pytest
from covering import looped
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, WRITE_ANY_TEXT, tokenizer_of

import embedlayer as el
from embedlayer.tokenization.ids import table_size
from embedlayer.vocab.token_usage import with_required_tokens

SOME = ENGLISH[:160]
OTHERS = ("dogs love\n", "they begin")


def set_kept(tokenizer, corpus, **options) -> list[str]:
    """The entries that are left of a table trimmed to a corpus."""
    table = el.TokenEmbedding(table_size(tokenizer), 2)
    receipt = el.vocab.trim_vocabulary(table, corpus, tokenizer=tokenizer, **options)
    assert table.vocab_size == receipt.num_tokens[1]
    return sorted(receipt.tokenizer.get_vocab())


@looped("kind, keep_special", BUILDERS, [True, False])
def test_texts_files_ids_and_the_plan_keep_the_same_tokens(kind, keep_special, tmp_path) -> None:
    tokenizer = tokenizer_of(kind)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, (SOME, OTHERS[0]), strict=True):
        file.write_text(text)
    options = {"keep_special": keep_special}
    for texts, paths, whole in (([SOME], files[:1], SOME), ([SOME, OTHERS[0]], files, None)):
        corpus = el.TokenCorpus.build(paths, tokenizer, tmp_path / "corpus")
        kept = set_kept(tokenizer, corpus, **options)
        assert kept == set_kept(tokenizer, paths, **options)
        counts = corpus.counts(corpus.vocab_size)
        by_counts = with_required_tokens(tokenizer, np.flatnonzero(counts).tolist(), keep_special=keep_special)
        assert len(by_counts) == len(kept)
        if keep_special:
            assert kept == set_kept(tokenizer, texts)
            assert kept == set_kept(tokenizer, [texts[0], *paths[1:]])
            assert len(kept) == len(el.vocab.used_tokens(tokenizer, paths))
        if whole is not None:
            assert kept == set_kept(tokenizer, whole, **options)
            assert kept == set_kept(tokenizer, el.TokenCorpus.from_text(whole, tokenizer), **options)


@pytest.mark.parametrize("kind", BUILDERS)
@looped("by_ids", [False, True])
def test_every_text_is_still_read_and_written_after_a_trim(kind, by_ids) -> None:
    old = tokenizer_of(kind)
    corpus = el.TokenCorpus.from_text(SOME, old) if by_ids else SOME
    receipt = el.vocab.trim_vocabulary(el.TokenEmbedding(table_size(old), 2), corpus, tokenizer=old)
    new = receipt.tokenizer
    ids = np.array(old.encode(SOME).ids)
    assert new.encode(SOME).ids == receipt.remap(ids).tolist()
    for text in (*LANGUAGES, *OTHERS):
        read = new.decode(new.encode(text).ids)
        if kind in WRITE_ANY_TEXT or kind == "character BPE":
            assert read == old.decode(old.encode(text).ids)
        if kind in ("byte-level BPE", "bytes"):
            assert read == text


def test_a_corpus_of_ids_with_words_that_wordpiece_gave_up_on_is_refused() -> None:
    tokenizer = tokenizer_of("WordPiece")
    assert el.vocab.used_tokens(tokenizer, f"{SOME} {LANGUAGES[4]}")
    corpus = el.TokenCorpus.from_text(f"{SOME} {LANGUAGES[4]}", tokenizer)
    with pytest.raises(el.VocabularyError, match=r"has \d+ unknown words"):
        el.vocab.used_tokens(tokenizer, corpus)


@looped("wrong", [[ENGLISH, b"bytes"], [3], b"bytes", 7, [None]])
def test_what_is_neither_text_nor_path_is_refused_by_its_type(wrong, unchecked) -> None:
    with pytest.raises(el.TextError, match=r"str.*Path.*not (of )?(bytes|int|NoneType)"):
        el.vocab.used_tokens(tokenizer_of("word"), wrong)


def test_counting_a_mapped_corpus_takes_no_memory_for_its_length(tmp_path) -> None:
    tokenizer = tokenizer_of("bytes")
    length = 1 << 24
    ids = np.memmap(tmp_path / "ids.bin", dtype=np.uint16, mode="w+", shape=(length,))
    corpus = el.TokenCorpus(
        ids,
        np.array([0]),
        np.array([[length, length]]),
        vocab_size=table_size(tokenizer),
        tokenizer_fingerprint=el.TokenCorpus.from_text("dogs", tokenizer).tokenizer_fingerprint,
    )
    tracemalloc.start()
    try:
        assert 0 in el.vocab.used_tokens(tokenizer, corpus)
        assert tracemalloc.get_traced_memory()[1] < length
    finally:
        tracemalloc.stop()
