"""A text is evaluated as its definition says: each token once, from the tokens of its window, without all logits."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F

import embedlayer as el
from embedlayer.analysis import CausalModel, evaluate_text

TEXT = "Once upon a time there was a little table. It had four legs, and a naïve cat sat on it. "
BYTES = el.train_tokenizer((), "byte")
START = 256


def decoder(seed: int = 0, **options: object) -> el.DecoderLM:
    torch.manual_seed(seed)
    table = el.TokenEmbedding(257, 16, init_std=1.0)
    return el.DecoderLM(table, el.RotaryEmbedding(8), num_layers=2, num_heads=2, dropout=0.5, **options)


def log_probs(model: torch.nn.Module, window: list[int]) -> torch.Tensor:
    """The log-probabilities after the last token of a window, by all logits in float64."""
    logits = model(torch.tensor([window]))
    return (logits if isinstance(logits, torch.Tensor) else logits.logits)[0, -1].double().log_softmax(-1)


def by_definition(model: torch.nn.Module, ids: list[int], window: int, stride: int, start: int | None) -> list[tuple]:
    """For each token that is predicted its ID and the distribution before it, one forward pass for each token."""
    ids = ids if start is None else [start, *ids]
    found, begin = [], 0
    for place in range(1, len(ids)):
        if place > begin + window:  # the next window, or the last one, which ends with the text
            begin = min(begin + stride, len(ids) - 1 - window)
        first = ids[begin : begin + 1] if start is None else [start]
        found.append((ids[place], log_probs(model, [*first, *ids[begin + 1 : place]])))
    return found


@pytest.mark.parametrize(("start", "window", "stride"), [(START, 13, 5), (None, 80, 40)])
def test_each_token_is_predicted_once_from_its_window(start, window, stride) -> None:
    model = decoder()
    result = evaluate_text(CausalModel(model, BYTES, start_id=start), TEXT, window=window, stride=stride)
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = by_definition(model, BYTES.encode(TEXT).ids, window, stride, start)
    losses = [-float(p[token]) for token, p in expected]
    scores, num_bytes = result.model, len(TEXT.encode()) - (start is None)
    assert (scores.tokens, scores.bytes) == (len(losses), num_bytes)
    assert scores.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / num_bytes, abs=1e-5)
    assert scores.loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert scores.entropy == pytest.approx(
        sum(-float((p.exp() * p).sum()) for _, p in expected) / len(losses), abs=1e-5
    )
    assert scores.accuracy == sum(int(p.argmax()) == token for token, p in expected) / len(losses)
    e = next(each for each in scores.by_token if each.token == "e")
    of_e = [loss for (token, _), loss in zip(expected, losses, strict=True) if token == ord("e")]
    assert (e.id, e.count, e.loss) == (ord("e"), len(of_e), pytest.approx(sum(of_e) / len(of_e), abs=1e-5))
    raised = [each.count * (each.loss - scores.loss) for each in scores.by_token]
    assert raised == sorted(raised, reverse=True)


def test_two_models_are_compared_at_each_place() -> None:
    one, two = decoder(0).eval(), decoder(1).eval()
    result = evaluate_text(CausalModel(one, BYTES), TEXT, CausalModel(two, BYTES), window=16)
    ids = BYTES.encode(TEXT).ids
    with torch.no_grad():
        first, second = (by_definition(model, ids, 16, 8, None) for model in (one, two))
    pairs = [(token, p, q) for (token, p), (_, q) in zip(first, second, strict=True)]
    kl = [float((p.exp() * (p - q)).sum()) for _, p, q in pairs]
    assert result.difference.kl == pytest.approx(sum(kl) / len(kl), abs=1e-5)
    assert result.difference.agreement == sum(int(p.argmax()) == int(q.argmax()) for _, p, q in pairs) / len(kl)
    most = result.difference.by_token[0]
    changes = {token: sum(float(p[t] - q[t]) for t, p, q in pairs if t == token) for token in set(ids[1:])}
    assert most.id == max(changes, key=lambda token: abs(changes[token]))
    assert most.count * (most.other_loss - most.loss) == pytest.approx(changes[most.id], abs=1e-4)
    starting = CausalModel(one, BYTES, start_id=START)  # the other one reads the same tokens
    same = evaluate_text(starting, TEXT, CausalModel(one, BYTES), window=16).difference
    assert (same.kl, same.agreement) == (pytest.approx(0, abs=1e-6), 1)


def test_models_with_other_tokens_are_compared_by_bits_per_byte() -> None:
    bpe = el.train_tokenizer(TEXT, "bpe", vocab_size=280)
    other = el.DecoderLM(el.TokenEmbedding(bpe.get_vocab_size(), 16), el.RotaryEmbedding(8), num_layers=1, num_heads=2)
    result = evaluate_text(CausalModel(decoder(), BYTES, start_id=START), TEXT, CausalModel(other, bpe), window=16)
    assert result.difference is None
    assert "different tokenizers" in result.no_difference
    assert result.other.tokens < result.model.tokens
    assert result.other.bits_per_byte == pytest.approx(
        result.other.loss * result.other.tokens / math.log(2) / result.other.bytes
    )
    wider = el.DecoderLM(el.TokenEmbedding(300, 16), el.RotaryEmbedding(8), num_layers=1, num_heads=2)
    result = evaluate_text(CausalModel(decoder(), BYTES), TEXT, CausalModel(wider, BYTES), window=16)
    assert result.no_difference == "The models have 257 and 300 logits, so their distributions cannot be compared."


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "cohere"])
def test_a_folder_of_transformers_is_evaluated_as_its_model_says(family, tmp_path, caplog) -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tiny_models import build

    _, plain = build(family, "causal", {"vocab_size": 257, "bos_token_id": START})
    plain.save_pretrained(tmp_path)
    BYTES.save(str(tmp_path / "tokenizer.json"))
    text = TEXT[:64]  # four windows
    with caplog.at_level(logging.INFO):
        result = evaluate_text(el.open_model(tmp_path), text, window=16, stride=16)
    assert "reads the logits" not in caplog.text  # patched, and no tokens x V numbers
    targets = torch.tensor(BYTES.encode(text).ids).view(4, 16)
    inputs = torch.cat([torch.full((4, 1), START), targets[:, :-1]], 1)
    with torch.no_grad():
        logits = plain(input_ids=inputs).logits.double()
    assert result.model.loss == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), targets.flatten())), abs=1e-4)


def test_a_model_that_is_not_patched_is_evaluated_from_its_logits() -> None:
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from tiny_models import build

    _, plain = build("gpt2", "causal", {"vocab_size": 257})
    before = evaluate_text(CausalModel(plain, BYTES), TEXT, window=16).model
    after = evaluate_text(CausalModel(el.patch(plain), BYTES), TEXT, window=16).model
    assert before.bits_per_byte == pytest.approx(after.bits_per_byte, abs=1e-6)


def limited(length: int) -> el.DecoderLM:
    return el.DecoderLM(el.TokenEmbedding(257, 16), "learned", num_layers=1, num_heads=2, max_seq_len=length)


def test_defaults_are_the_trained_length_or_the_longest_sequence() -> None:
    text = TEXT * 12  # 1,068 bytes
    models = {32: (decoder(), 32), 64: (limited(64), None), 1024: (limited(2048), None), 256: (decoder(), None)}
    for window, (model, trained) in models.items():
        result = evaluate_text(CausalModel(model, BYTES, "m", START, trained), text)
        assert (result.window, result.stride) == (window, window // 2)
        assert f"from {window // 2:,} to {window - 1:,} tokens before it" in result.context
    one, other = CausalModel(decoder(), BYTES, trained_length=64), CausalModel(limited(48), BYTES)
    assert evaluate_text(one, text, other).window == 48


def test_text_that_the_tokenizer_cannot_encode_is_counted() -> None:
    words = el.train_tokenizer("the cat sat on the mat", "word")
    model = el.DecoderLM(el.TokenEmbedding(words.get_vocab_size(), 16), "rotary", num_layers=1)
    assert evaluate_text(CausalModel(model, words), "the dog sat on the dog " * 4, window=8).model.unknown == 8
    unigram = el.train_tokenizer("the cat sat on the mat " * 40, "unigram", vocab_size=40)
    model = el.DecoderLM(el.TokenEmbedding(unigram.get_vocab_size(), 16), "rotary", num_layers=1)
    assert evaluate_text(CausalModel(model, unigram), "the cat sat on the ζ " * 4, window=8).model.unknown == 4
