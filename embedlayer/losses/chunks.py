"""Log-probabilities of the chunks of two aligned token sequences, from the logits of one model."""

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from embedlayer.losses.linear import token_log_probs
from embedlayer.losses.logit_arguments import HasLogits
from embedlayer.tokenization.alignment import Side, TokenAlignment


def chunk_log_probs(
    model: tuple[Float[Tensor, "*rows T D"], HasLogits],
    ids: Int[Tensor, "*rows T"],
    alignment: TokenAlignment,
    *,
    side: Side,
) -> Float[Tensor, "*rows C"]:
    """Return the log-probability of each chunk of a text under a model, in nats: the sum over its tokens, in one pass.

    `sum over the tokens i of the chunk of log p(ids[i] | ids[:i])`, where p follows from the hidden state at `i - 1`.
    The first token of a sequence is not predicted: it counts 0. Over all chunks the sum is the log-probability of the
    text, less that of the remainder. Differentiable.

    Args:
        model: Hidden states at the tokens of the sequence, and the head or table of the model.
        ids: The tokens, `token_spans(...).ids`.
        alignment: The chunks of the text.
        side: `"a"` or `"b"`: which of the two sequences these are.

    Raises:
        ShapeError: There is not one hidden state for each token, or the tokens are not those of the sequence.
        TokenIdError: A token is outside the head.

    Example:
        >>> text, words = "hello hello", train_tokenizer("hello hello hello", vocab_size=300)
        >>> spans = token_spans(words, text)
        >>> alignment = align_tokens(spans, token_spans(train_tokenizer((), "byte"), text))
        >>> hidden, head = torch.randn(2, 8), OutputHead(8, 300)
        >>> chunk_log_probs((hidden, head), spans.ids, alignment, side="a").shape
        torch.Size([2])
    """
    hidden, head = model
    first = min(1, ids.shape[-1])  # an empty text has no token
    return alignment.sum(pad(token_log_probs(hidden[..., :-1, :], head, ids[..., 1:]), (first, 0)), side)
