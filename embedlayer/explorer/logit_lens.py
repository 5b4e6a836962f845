"""The logit lens: what a decoder would predict if its blocks ended after the first, the second, and so on."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.explorer import pipeline, text_answers
from embedlayer.explorer.pipeline_steps import longest, packed
from embedlayer.explorer.text_ids import shown_tokens, text_ids
from embedlayer.explorer.tokens import token_ids
from embedlayer.losses.largest import top_k
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import OpenedModel

TOP_TOKENS = 8
LOGITS_AT_ONCE = 2**22


class LogitLens(NamedTuple):
    """The next token as read from each of the L + 1 hidden states of T tokens, with K tokens listed."""

    top_ids: Int[Tensor, "layers T K"]
    top_probs: Float[Tensor, "layers T K"]
    entropy: Float[Tensor, "layers T"]
    next_probs: Float[Tensor, "layers following"]
    next_ranks: Int[Tensor, "layers following"]


@torch.no_grad()
def logit_lens(model: DecoderLM, ids: Int[Tensor, " T"], k: int = TOP_TOKENS) -> LogitLens:
    """Compute `softmax(head(norm(x)))` for the hidden state after every block, with the model's norm and head."""
    following = torch.cat([ids[1:], ids[-1:]]).long()  # that of the last token is not known; it is cut off below
    chunk = max(1, LOGITS_AT_ONCE // model.table.vocab_size)
    layers = []
    for state in model.hidden_states(ids):
        pairs = zip(model.norm(state).split(chunk), following.split(chunk), strict=True)
        parts = [_read(model.head(hidden), after, k) for hidden, after in pairs]
        layers.append([torch.cat(part) for part in zip(*parts, strict=True)])
    top_ids, top_probs, entropy, probs, ranks = (torch.stack(part) for part in zip(*layers, strict=True))
    return LogitLens(top_ids, top_probs, entropy, probs[:, :-1], ranks[:, :-1])


def _read(
    logits: Float[Tensor, "C V"], following: Int[Tensor, " C"], k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the attributes of `LogitLens` for one layer and a few tokens, from their logits."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probs, column = logits.softmax(-1), following.unsqueeze(-1)
    ids = top_k(logits, min(k, logits.shape[-1]))[1]
    own = logits.gather(-1, column)
    is_before = torch.arange(logits.shape[-1], device=logits.device) < column  # of equal logits
    ranks = 1 + ((logits > own) | ((logits == own) & is_before)).sum(-1)
    entropy = torch.special.entr(probs).sum(-1)
    return ids, probs.gather(-1, ids), entropy, probs.gather(-1, column).squeeze(-1), ranks


def answer(source: OpenedModel, params: Mapping[str, str]) -> text_answers.LogitLens:
    """Answer a request of the page: the logit lens of the token IDs in the parameter `ids`, such as `17,40`."""
    model, vocabulary = pipeline.requested_model(source, params)
    if not isinstance(model, DecoderLM):
        model = source.require_decoder()
    ids = token_ids(params, "ids", model.table.vocab_size)
    most = longest(model.position)
    if not 1 <= len(ids) <= most:
        raise SizeError(f"The logit lens reads from 1 to {most} tokens, not {len(ids)}.")
    lens = logit_lens(model, torch.tensor(ids, device=model.table.device))
    return {
        "top_ids": lens.top_ids.tolist(),
        "top_probs": packed(lens.top_probs.flatten(0, 1)),
        "entropy": packed(lens.entropy),
        "next_probs": packed(lens.next_probs),
        "next_ranks": lens.next_ranks.tolist(),
        "tokens": list(shown_tokens(vocabulary, lens.top_ids.unique().tolist())),
    }


def exported_requests(source: OpenedModel) -> list[dict[str, str]]:
    """Return the parameters of those logit-lens requests whose answers an exported page stores."""
    requests = []
    for params in pipeline.exported_requests(source):
        model, vocabulary = pipeline.requested_model(source, params)
        if isinstance(model, DecoderLM):
            size, special = model.table.vocab_size, source.adds_special_tokens
            ids = text_ids(vocabulary, params["text"], size, add_special_tokens=special).ids[: longest(model.position)]
            others = {name: value for name, value in params.items() if name != "text"}
            requests.append({**others, "ids": ",".join(map(str, ids))})
    return requests
