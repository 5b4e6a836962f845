"""Unigram training by SentencePiece, beside the trainer of the tokenizers library."""

from pydoc_data.topics import topics

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, trainers

from embedlayer.tokenization.train import train_tokenizer

END_OF_TEXT = "<|endoftext|>"


def test_unigram_spends_fewer_tokens_on_its_text_than_the_trainer_of_the_tokenizers_library():
    text = "\n".join(topics[name] for name in sorted(topics))[:40_000]
    ours = train_tokenizer(text, "unigram", vocab_size=600)
    theirs = Tokenizer(models.Unigram())
    theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT, "<unk>"], unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator([text], trainer)
    assert len(ours.encode(text).ids) <= 1.01 * len(theirs.encode(text).ids)


def test_every_character_of_the_text_keeps_a_piece_of_its_own():
    tokenizer = train_tokenizer("abc abd naïve " * 50, "unigram", vocab_size=30)
    assert {"a", "b", "c", "d", "ï"} <= tokenizer.get_vocab().keys()
    assert tokenizer.get_vocab()["<unk>"] not in tokenizer.encode("abc naïve dab").ids


@given(st.text("ab 0▁\0▅\t\n<>?é犬🙂", min_size=1).filter(str.strip), st.integers(3, 40))
@settings(max_examples=100, deadline=None)
def test_any_text_and_size_train_and_equal_text_gives_equal_tokenizers(text, size):
    text += "."
    trained = train_tokenizer(text, "unigram", vocab_size=size)
    assert trained.get_vocab_size() <= size
    assert trained.to_str() == train_tokenizer([text], "unigram", vocab_size=size).to_str()


def test_where_letters_are_more_than_the_vocabulary_the_frequent_ones_stay():
    trained = train_tokenizer("aaa bbb c d e f g h", "unigram", vocab_size=5)
    assert set(trained.get_vocab()) == {END_OF_TEXT, "<unk>", "▁", "a", "b"}
