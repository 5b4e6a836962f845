"""A run's own sentences come first, and each of their words is one token."""

from embedlayer import (
    DecoderLM,
    RotaryEmbedding,
    RunDirectory,
    TokenCorpus,
    TokenEmbedding,
    Trainer,
    TrainingOptions,
    train_tokenizer,
)
from embedlayer.explorer.example_tokens import TEXTS, example_texts
from embedlayer.opening import OpenedModel, open_model
from embedlayer.tokenization.ids import table_size

OWN = "A man likes dogs and other dogs."
TEXT = "The first words. Rarely does a zyzzyva xylograph occur. A man (that is, a person) walks: he walks. Short. " + (
    f"A cat sleeps on the mat. {OWN} " * 60
)


def run_of(text, tmp_path):
    tokenizer = train_tokenizer(text, "bpe", vocab_size=420)
    (tmp_path / "text.txt").write_text(text)
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    corpus = TokenCorpus.build([tmp_path / "text.txt"], tokenizer, directory.corpus)
    table = TokenEmbedding(table_size(tokenizer), 8, scale="sqrt_dim")
    options = TrainingOptions(steps=1, batch_size=1, max_length=8)
    trainer = Trainer(DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=1), *corpus.split(0.5), options)
    directory.start(trainer, tokenizer, validation_fraction=0.5, notes={"neighbors_before": []})
    for line in trainer.run():
        directory.add_metrics(line)
    directory.finish(trainer, tokenizer)
    return open_model(directory.path)


def test_sentences_of_a_run_whose_words_are_tokens_come_first(tmp_path) -> None:
    source = run_of(TEXT, tmp_path)
    own = example_texts(source)[: -len(TEXTS)]
    assert own[0] == OWN  # a word occurs twice in it
    assert "A cat sleeps on the mat." in own
    for sentence in own:
        assert len(source.tokenizer.encode(sentence).ids) == len(sentence[:-1].split()) + 1


def test_other_sources_have_the_fixed_texts_that_their_tokenizer_can_read(tmp_path) -> None:
    table = TokenEmbedding(300, 4)
    assert example_texts(OpenedModel("bytes", table, tokenizer=train_tokenizer((), "byte"))) == list(TEXTS)
    assert all(text.startswith("#0 #1 ") for text in example_texts(OpenedModel("no tokenizer", table)))
