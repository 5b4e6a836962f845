"""SentencePiece models, read as SentencePiece reads them."""

import pytest
from tokenizer_kinds import tokenizer_of_file

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.read import load_tokenizer

TEXT = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and naïve beginners begin again; 12 dogs in 2024.\n"
) * 5


@pytest.mark.parametrize("text", ["the-verdict.txt", "tinyshakespeare.txt", "enwiki-plain.txt"])
def test_llama_model_gives_the_ids_of_sentencepiece_and_of_phi3(shared_data, text):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = shared_data / "tokenizers" / "llama2-tokenizer.model"
    real = (shared_data / "text" / text).read_bytes().decode()[:60_000]
    ids = tokenizer_of_file(model).encode(real, add_special_tokens=False).ids
    assert ids == sentencepiece.SentencePieceProcessor(str(model)).encode(real)
    assert ids == tokenizer_of_file(shared_data / "tokenizers" / "phi-3-mini.tokenizer.json").encode(real).ids


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
        {"add_dummy_prefix": False, "normalization_rule_name": "nfkc_cf"},
        {"add_dummy_prefix": False, "user_defined_symbols": ["<sep>", "<cls>"]},
    ],
    ids=["default", "llama", "folding", "symbols"],
)
def test_sentencepiece_models_of_every_making_give_the_same_ids(tmp_path, model_type, options):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "m"),
        model_type=model_type,
        vocab_size=330 if options.get("byte_fallback") else 90,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    (tmp_path / "m.vocab").unlink()
    tokenizer, processor = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(str(tmp_path / "m.model"))
    for text in (
        TEXT,
        "  two  dogs \n",
        "ﬁne DOGS 🙂🙂 begin",
        "a<sep>b <cls> c" if "user_defined_symbols" in options else "",
    ):
        assert tokenizer.encode(text, add_special_tokens=False).ids == processor.encode(text), text


@pytest.mark.parametrize(
    "options", [{"model_type": "char"}, {"model_type": "bpe", "vocab_size": 90, "user_defined_symbols": ["<sep>"]}]
)
def test_sentencepiece_model_that_cannot_be_converted_faithfully_is_refused(tmp_path, options):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), minloglevel=2, **options
    )
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path / "m.model")
