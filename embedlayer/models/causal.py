"""One interface to causal language models: a `DecoderLM`, or a patched model of transformers.

`load_causal_model` reads the latter from a folder. `causal_outputs` runs either and returns the hidden states that its
LM head reads, with the loss of the next token. The model of transformers is run as a whole, so whatever it does to
hidden states and logits, such as a soft cap outside of its head, is in the result. It is run to its head alone if that
would compute all logits now, and states what the model does to them: the head of a compressed table, or with rows that
are trained separately.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import CheckpointError, require, transformers_errors
from embedlayer.core.formatting import a_or_an
from embedlayer.core.torch_state import is_observed
from embedlayer.heads.output import OutputHead
from embedlayer.kernels.index_check import check_indices
from embedlayer.losses.logit_arguments import resolve_logits
from embedlayer.losses.options import LogitOptions, Reduction
from embedlayer.losses.uncomputed_logits import UncomputedLogits
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.conversions import as_table
from embedlayer.tables.table import TokenTable

PROBED = 16
"""Number of tokens on which `check_causal` tests a model."""

NAMED = 3
"""Number of tensors that an error of `load_causal_model` names."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}
"""Largest change that rounding may cause, relative to the largest hidden state, by dtype; 0.02 for other dtypes."""


def load_causal_model(folder: Path | str, *, device: torch.device | str = "cpu") -> nn.Module:
    """Load the causal language model of a checkpoint folder with transformers, and `patch` it.

    The model has the dtype of its files, and is in evaluation mode. No pickle is loaded and no code of the folder is
    run.
    """
    from embedlayer.checkpoints.patching import patch

    transformers = require("transformers", extra="hf")
    options = {"local_files_only": True, "trust_remote_code": False}
    with transformers_errors(f"load {folder} as a causal language model"):
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        written = next(iter(config.architectures or ()), None)
        if causal is None or (
            written not in (None, causal.__name__)
            and hasattr(transformers, written)  # else a name that code of the folder or an older release had
            and causal.config_class is type(config)  # else the language model of a multimodal one
        ):
            raise CheckpointError(f"{folder} is no causal language model: {written or f'type {config.model_type}'}.")
        options |= attention_options(config)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **options
        )
    count, names = missing_tensors(loaded)
    if count:
        raise CheckpointError(f"{folder} lacks {count:,} tensors of a whole {type(model).__name__} ({names}).")
    return cast(nn.Module, patch(model.to(device).eval()))


def attention_options(config: Any) -> dict[str, Any]:
    """Return the options with which transformers applies a soft cap on attention scores (Gemma 2).

    Before 5.22 the default of transformers for these models is SDPA, which ignores the cap.
    """
    return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}


def missing_tensors(loaded: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many tensors transformers has filled with random numbers, and the first names as text."""
    missing = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    return len(missing), ", ".join([*missing[:NAMED], *["..."] * (len(missing) > NAMED)])


def causal_outputs(
    model: nn.Module, ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"] | None = None
) -> tuple[Float[Tensor, "B T D"], Callable[..., Tensor]]:
    """Run a causal language model, and return the hidden states that its LM head reads, and its loss.

    The loss is a function `(targets, ignore_index=-100, reduction="mean")` of the target of each place, `(B, T)`, in
    nats. No tensor of all logits is computed for a `DecoderLM`, nor for a patched model whose type is known. The mean
    over no target is 0, or NaN for other models.
    """
    if isinstance(model, DecoderLM):
        hidden = model.hidden(ids, attention_mask=attention_mask)
        return hidden, partial(model.head.loss, hidden)
    head, hidden, logits = _run(model, ids, attention_mask)
    if logits is None:
        return hidden, partial(head.loss, hidden, **_applied(head))

    def loss(targets: Tensor, *, ignore_index: int = IGNORED, reduction: Reduction = "mean") -> Tensor:
        losses = F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction
        )
        return losses.view(targets.shape) if reduction == "none" else losses

    return hidden, loss


def causal_logits(model: nn.Module, ids: Int[Tensor, "B T"]) -> UncomputedLogits:
    """Describe the logits of a causal language model after each token.

    They are computed when something reads them, except in models that compute all logits; see `CausalOutputs`.
    """
    if isinstance(model, DecoderLM):
        return model.head.uncomputed_logits(model.hidden(ids))
    head, hidden, logits = _run(model, ids, None)
    if logits is None:
        return cast(OutputHead, head).uncomputed_logits(hidden, **_applied(head))
    return resolve_logits(logits, None, {})[0]


def _applied(head: OutputHead) -> LogitOptions:
    """Return `logit_scale=1.0` for a head whose model scales the hidden states before it calls the head.

    The scale must not be applied again to those states. For any other head there are no options.
    """
    return {"logit_scale": 1.0} if head.model_options is not None and head.model_options.scales_hidden else {}


class _HeadReached(Exception):
    """Raised by a hook to end the run of a model before its LM head computes logits."""


def _run(model: nn.Module, ids: Tensor, attention_mask: Tensor | None) -> tuple[Any, Tensor, Tensor | None]:
    """Run a model of transformers, to its LM head if that computes all logits and says what the model does to them.

    Return the LM head, the hidden states that it reads, and the logits of the model; `None` for logits that are those
    of the head for these hidden states.
    """
    getter = getattr(model, "get_output_embeddings", None)
    head = None if getter is None else getter()
    if not isinstance(head, nn.Module):
        raise CheckpointError(f"A {type(model).__name__} has no LM head: pass a causal language model.")
    is_enough = isinstance(head, OutputHead) and head.states_model_logits and not head.defers_logits
    is_enough = is_enough and not is_observed(head)  # a hook may change the hidden states that the head reads
    seen: list[Tensor] = []

    def reached(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append(arguments[0])
        if is_enough:
            raise _HeadReached

    mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    handle, logits = head.register_forward_pre_hook(reached), None
    try:
        logits = model(input_ids=ids, **mask).logits
    except _HeadReached:
        pass
    finally:
        handle.remove()
    if len(seen) != 1 or any(each.shape[:-1] != ids.shape for each in (*seen, logits) if each is not None):
        calls = f"it was called {len(seen)} times for {tuple(ids.shape)} tokens"
        raise CheckpointError(f"{a_or_an(model)}: its LM head does not read one hidden state for each token: {calls}.")
    return head, seen[0], logits


def longest_sequence(model: nn.Module) -> int | None:
    """Return the largest number of tokens that a causal language model reads at once, or `None` if it states none."""
    if isinstance(model, DecoderLM):
        return model.position.max_seq_len
    config: Any = model.config
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None  # XLNet states -1


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Context manager: set models to evaluation mode, and restore the mode of each of their modules afterwards."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training


@torch.no_grad()
def check_causal(model: nn.Module, ids: Int[Tensor, " T"]) -> None:
    """Check that a language model predicts each token from those before it.

    The model is run on two short texts that differ only in their last token: the first `PROBED` tokens of `ids`, any
    text. A `DecoderLM` is not run, nor any model on fewer than two tokens.
    """
    name, advice = type(model).__name__, "The loss of the next token, which is computed here, has no meaning for it."
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise CheckpointError(f"{name} is an encoder-decoder, which reads two texts. {advice}")
    if isinstance(model, DecoderLM) or len(ids) < 2:
        return
    one = ids[:PROBED].to(next(model.parameters()).device)
    other = one.clone()
    other[-1] = 0 if one[-1] else 1
    with evaluating(model):
        hidden = causal_outputs(model, torch.stack([one, other]))[0][:, :-1]
    change, size = (hidden[0] - hidden[1]).abs().max(), hidden.abs().max()
    if change > TOLERANCE.get(hidden.dtype, 2e-2) * size:
        raise CheckpointError(f"{name} is no causal language model: hidden states depend on later tokens. {advice}")


class PatchedDecoder(nn.Module):
    """A patched causal language model of transformers, with the methods of `DecoderLM` that a `Trainer` calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def table(self) -> TokenTable:
        """Return the table of the input embeddings."""
        model: Any = self.model
        return as_table(model.get_input_embeddings())

    @property
    def head(self) -> OutputHead | None:
        """Return the LM head; `None` if it is no `OutputHead`, such as a table that is also read as the head."""
        model: Any = self.model
        head = model.get_output_embeddings()
        return head if isinstance(head, OutputHead) else None

    def loss(self, ids: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], *, reduction: Reduction = "mean") -> Tensor:
        """Return the cross entropy of `targets`, the tokens that follow `ids`, in nats."""
        _, loss = causal_outputs(self.model, ids)
        return loss(targets, reduction=reduction)

    def check(self) -> None:
        """Raise the `TokenIdError` of a bad ID that was looked up since the last check, as `Pretrained.check` does."""
        check_indices(self)
