"""Our Unigram trainer, beside the one of the tokenizers library."""

from pydoc_data.topics import topics

from tokenizers import Tokenizer, models, trainers

from embedlayer.data.tokenizer import END_OF_TEXT, train_tokenizer


def test_unigram_spends_fewer_tokens_on_its_text_than_the_trainer_of_the_tokenizers_library():
    text = "\n".join(topics[name] for name in sorted(topics))[:100_000]
    ours = train_tokenizer(text, "unigram", vocab_size=1000)
    theirs = Tokenizer(models.Unigram())
    theirs.normalizer, theirs.pre_tokenizer = ours.normalizer, ours.pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=1000, special_tokens=[END_OF_TEXT, "<unk>"], unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator([text], trainer)
    assert len(ours.encode(text).ids) <= 1.01 * len(theirs.encode(text).ids)


def test_every_character_of_the_text_keeps_a_piece_of_its_own():
    tokenizer = train_tokenizer("abc abd naïve " * 50, "unigram", vocab_size=30)
    assert {"a", "b", "c", "d", "ï"} <= tokenizer.get_vocab().keys()
    assert tokenizer.get_vocab()["<unk>"] not in tokenizer.encode("abc naïve dab").ids
