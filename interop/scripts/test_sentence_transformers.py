"""sentence-transformers: encode, train a step, save and load with a BERT whose table is plain or patched."""

import torch
from sentence_transformers import SentenceTransformer, losses, models
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from interop.substitution import patched

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran"]
TEXTS = ["the cat sat on a mat", "a dog ran"]


def build(folder):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(folder)
    inner = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)
    fast.save_pretrained(folder)
    transformer = models.Transformer(str(folder))
    return SentenceTransformer(modules=[transformer, models.Pooling(16)], device="cpu")


def test_encode_train_and_reload(tmp_path) -> None:
    plain, model = build(tmp_path / "base"), build(tmp_path / "base")
    patched(model[0].auto_model)
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), plain.encode(TEXTS, convert_to_tensor=True))
    loss = losses.MultipleNegativesRankingLoss(model)
    features = [model.preprocess(TEXTS), model.preprocess(TEXTS[::-1])]
    loss(features, torch.zeros(2)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    expected = model.encode(TEXTS, convert_to_tensor=True)
    model.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), expected)
