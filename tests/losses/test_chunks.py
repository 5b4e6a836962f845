"""Log-probabilities of the chunks that two tokenizations of a text have in common."""

import pytest
import torch
from tokenizer_kinds import tokenizer_of

import embedlayer as el
from embedlayer.losses import chunk_log_probs
from embedlayer.tokenization import align_tokens, token_spans


@pytest.mark.parametrize("side", ["a", "b"])
def test_they_sum_to_the_log_probability_of_the_text_with_its_gradient(side) -> None:
    texts = ["The small dog loved other small dogs,\n\nand they loved it 🙂 back!", "dogs"]
    tokenizers = [tokenizer_of(kind) for kind in ("byte-level BPE", "SentencePiece BPE with byte fallback")]
    both = [token_spans(tokenizer, texts) for tokenizer in tokenizers]
    alignment, spans = align_tokens(*both), both["ab".index(side)]
    head = el.OutputHead(8, tokenizers["ab".index(side)].get_vocab_size(), dtype=torch.float64)
    hidden = torch.randn(*spans.ids.shape, 8, dtype=torch.float64, requires_grad=True)
    found = chunk_log_probs((hidden, head), spans.ids, alignment, side=side)
    of_next = head(hidden).log_softmax(-1)[:, :-1].gather(-1, spans.ids[:, 1:, None]).squeeze(-1)
    expected = (of_next * spans.in_text[:, 1:]).sum(-1)
    torch.testing.assert_close(found.sum(-1), expected, rtol=0, atol=1e-12 * 200)
    grads = (torch.autograd.grad(each.sum(), [hidden, head.weight]) for each in (found, expected))
    for grad, want in zip(*grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-10)
    empty = token_spans(tokenizers[0], "")
    nothing = chunk_log_probs((hidden[0, :0], head), empty.ids, align_tokens(empty, empty), side=side)
    assert nothing.shape == (0,)
    # text by text
    lengths = spans.in_text.sum(-1).tolist()
    for row, length in enumerate(lengths):
        of_text = align_tokens(*(token_spans(tokenizer, texts[row]) for tokenizer in tokenizers))
        alone = chunk_log_probs((hidden[row, :length], head), spans.ids[row, :length], of_text, side=side)
        torch.testing.assert_close(alone, found[row, : len(alone)], rtol=0, atol=1e-12)


def test_tokens_and_hidden_states_that_do_not_fit_are_refused(unchecked) -> None:
    spans, head = token_spans(tokenizer_of("bytes"), "small dogs"), el.OutputHead(8, 257)
    alignment = align_tokens(spans, spans)
    with pytest.raises(el.ShapeError, match=r"must be int64 or int32"):
        chunk_log_probs((torch.randn(9, 8), head), spans.ids, alignment, side="a")
    with pytest.raises(el.ShapeError, match=r"log_probs of side 'a' must have the shape of its tokens, \(10,\)"):
        chunk_log_probs((torch.randn(9, 8), head), spans.ids[:9], alignment, side="a")
