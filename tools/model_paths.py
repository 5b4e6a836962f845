"""Compare all paths to the distribution of a model: one model, one answer.

    differences, refusals = compare_paths(model, embedlayer.load(folder))

The reference is `log_softmax` of the logits of the plain model of transformers. `differences` are the largest absolute
differences of log-probabilities in nats, by path; `refusals` the sentences of paths that refuse, by path. The paths:

- `logits`, `loss`: `model(ids).logits` and `model(ids, labels=labels)` of the patched model;
- `token_log_probs`, `token_statistics`, `divergence` of `outputs.logits` of the patched model;
- `head.loss`, `head.token_log_probs`, `head.token_statistics`, `draft head`: those of the patched head, for the hidden
  states that the decoder returns, or those that enter a head behind a transform;
- `loaded head`: the head of `embedlayer.load(folder)`; `int8 head` the same over a compressed table, compared with the
  logits of its own rows; `exported head` the program of `torch.export`.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers_probe import observe

import embedlayer as el
from embedlayer.compress import compress_table, replace_table
from embedlayer.heads import DraftHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.losses import divergence, token_statistics

IGNORED = -100


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Return token IDs for a model, those of the decoder too if it has one."""
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    return {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if has_decoder else {})}


def compare_paths(
    model: nn.Module, layer: el.EmbeddingLayer, *, export: bool = False
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the differences of all paths, and the refusals; see the docstring of this module.

    Args:
        model: A model of transformers, which is patched and stays patched.
        layer: Its embedding layer, loaded from a folder.
        export: Whether to export the loaded head.

    Raises:
        EmbedLayerError: `patch` does not take the model.
    """
    inputs = inputs_of(model)
    run = observe(model, inputs)
    assert run.logits is not None
    vocab_size = run.logits.shape[-1]
    tokens = torch.randint(0, vocab_size, run.logits.shape[:-1], generator=torch.Generator().manual_seed(2))
    tokens[0, :3] = IGNORED
    exact, plain_loss = log_probs(run.logits, tokens), None
    with suppress(ValueError):  # a model whose own loss needs an image
        plain_loss = loss_of(model, inputs, tokens)
    paths = _Paths(exact)
    el.patch(model)
    head = next((module for module in model.modules() if isinstance(module, el.OutputHead)), None)
    entered: list[Tensor] = []
    hook = None if head is None else head.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach()))
    outputs = model(**inputs)
    if hook is not None:
        hook.remove()
    logits = outputs.logits if hasattr(outputs, "logits") else outputs["prediction_logits"]
    paths.add("token_log_probs", lambda: el.token_log_probs(logits, tokens))
    paths.add("token_statistics", lambda: token_statistics(logits, tokens).log_probs)
    paths.add("divergence", lambda: exact + divergence(logits, run.logits, labels=tokens, reduction="none"))
    paths.add("logits", lambda: log_probs(logits.detach(), tokens))
    paths.differences["logits, bits"] = float(not torch.equal(logits.detach(), run.logits))
    if plain_loss is not None:
        loss = loss_of(model, inputs, tokens)
        paths.differences["loss"] = abs(float("inf") if loss is None else loss - plain_loss)
    has_transform = isinstance(layer.head, PredictionHead)
    hidden = entered[-1] if has_transform and entered else run.hidden
    if head is not None and hidden is not None:
        _add_heads(paths, head, first_stream(hidden, tokens), tokens)
    if layer.head is not None and run.hidden is not None:
        _add_loaded(paths, layer, first_stream(run.hidden, tokens), tokens, export=export)
    return paths.differences, paths.refusals


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token, 0 for `IGNORED`: the definition."""
    return -F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)


def loss_of(model: nn.Module, inputs: dict[str, Tensor], tokens: Tensor) -> float | None:
    """Return the loss of `model(ids, labels=...)`; `None` for a model without one."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    with torch.no_grad():
        loss = getattr(model(**inputs, labels=tokens), "loss", None)
    return None if loss is None else float(loss)


def first_stream(hidden: Tensor, tokens: Tensor) -> Tensor:
    """Return the hidden states of the first of several streams."""
    return hidden[:, 0] if hidden.dim() > tokens.dim() + 1 else hidden


class _Paths:
    """Collect differences and refusals by path."""

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact
        self.differences: dict[str, float] = {}
        self.refusals: dict[str, str] = {}

    def add(self, name: str, path: Callable[[], Any], exact: Tensor | None = None) -> None:
        """Add the largest difference of log-probabilities, or the refusal, of a path."""
        try:
            with torch.no_grad():
                found = path()
        except el.core.errors.EmbedLayerError as error:
            self.refusals[name] = str(error)
            return
        difference = (found - (self.exact if exact is None else exact)).abs().max().item()
        self.differences[name] = difference if difference == difference else float("inf")


def _add_heads(paths: _Paths, head: el.OutputHead, hidden: Tensor, tokens: Tensor) -> None:
    """Add the paths of a patched head."""
    paths.add("head.loss", lambda: -head.loss(hidden, tokens, reduction="none"))
    paths.add("head.token_log_probs", lambda: head.token_log_probs(hidden, tokens))
    paths.add("head.token_statistics", lambda: head.token_statistics(hidden, tokens).log_probs)
    paths.add("hidden and head", lambda: el.token_log_probs(hidden, head, tokens))
    paths.add("draft head", lambda: DraftHead(head, range(head.out_features)).token_log_probs(hidden, tokens))


def _add_loaded(paths: _Paths, layer: el.EmbeddingLayer, hidden: Tensor, tokens: Tensor, *, export: bool) -> None:
    """Add the paths of the loaded head: as it is, over a compressed table, and exported."""
    own = layer.head
    assert own is not None
    paths.add("loaded head", lambda: own.token_log_probs(hidden, tokens))
    if own.tied:
        small = replace_table(layer, compress_table(layer.table, "int8"))
        same = replace_table(layer, el.TokenEmbedding.from_pretrained(small.table.rows(0, small.table.vocab_size)))
        head, dense = small.head, same.head
        assert head is not None
        assert dense is not None
        paths.add("int8 head", lambda: head.token_log_probs(hidden, tokens), log_probs(dense(hidden).detach(), tokens))
    if export:
        program = torch.export.export(own, (hidden,)).module()
        paths.add("exported head", lambda: log_probs(program(hidden), tokens))
