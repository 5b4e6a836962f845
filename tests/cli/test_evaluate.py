"""`embedlayer evaluate`, as a person meets it."""

import json

import pytest
import torch
from commands import printed

import embedlayer as el
from embedlayer.analysis import evaluate_text

TEXT = "once upon a time there was a little table. " * 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("models")
    tokenizers = {"one": el.train_tokenizer((), "byte"), "two": el.train_tokenizer(TEXT, "bpe", vocab_size=270)}
    for name, tokenizer in tokenizers.items():
        table = el.TokenEmbedding(tokenizer.get_vocab_size(), 16, init_std=1.0)
        el.DecoderLM(table, "rotary", num_layers=1, num_heads=2).save_pretrained(folder / name, tokenizer=tokenizer)
    table.save_pretrained(folder / "table", tokenizer=tokenizers["two"])
    (folder / "text.txt").write_text(TEXT)
    return folder


def evaluate(folder, *words: object) -> str:
    options = ("--text", folder / "text.txt", "--window", 32)
    return printed("evaluate", *(folder / word if (folder / str(word)).exists() else word for word in words), *options)


def test_one_model_is_shown_with_its_worst_tokens(folder) -> None:
    shown = " ".join(evaluate(folder, "one", "-n", 3).split())
    result = evaluate_text(el.open_model(folder / "one"), folder / "text.txt", window=32)
    assert f"bits per byte {result.model.bits_per_byte:.4f}" in shown
    assert result.context in shown
    worst = result.model.by_token[0]
    assert f"{worst.count} {worst.loss:.3f} {worst.entropy:.3f}" in shown


def test_json_has_every_token(folder) -> None:
    result = json.loads(evaluate(folder, "one", "one", "--json"))
    assert {each["token"] for each in result["model"]["by_token"]} == set(TEXT)
    assert len(result["difference"]["by_token"]) == len(set(TEXT))
    assert result["difference"]["kl"] == pytest.approx(0, abs=1e-6)
    assert result["context"].startswith("Windows of 32 tokens, 16 apart")


def test_two_models_are_shown_side_by_side(folder) -> None:
    shown = evaluate(folder, "one", "one")
    assert "KL(one || one): 0.0000 nats per token" in shown
    assert "The same most likely token at 100.0% of the places" in shown
    shown = evaluate(folder, "one", "two")
    assert "different tokenizers, so only their bits per byte can be compared" in shown
    assert "Tokens that raise the loss of two most" in shown


def test_a_tokenizer_serves_a_model_without_one(folder, tmp_path) -> None:
    el.open_model(folder / "one").model.save_pretrained(tmp_path / "bare")
    tokenizer = ["--tokenizer", folder / "one" / "tokenizer.json"]
    assert "KL(one || bare): 0.0000" in evaluate(folder, "one", tmp_path / "bare", *tokenizer)
