"""TRL: its losses with `token_statistics` instead of its own kernel.

TRL gives each model a forward that returns log-probabilities (`add_fused_lm_head`, in TRL 1.14
`_patch_chunked_ce_lm_head`). The model of a patched trainer gets a copy of that function in which the kernel's name
refers to ours. Shift, masks, temperature, scale and auxiliary losses stay TRL's, and other trainers stay as they are.
"""

import weakref
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.model_loss import accept_token_weights, refuse_token_weights
from embedlayer.core.devices import autocast_dtype
from embedlayer.core.errors import CheckpointError, SizeError, VersionError, release
from embedlayer.core.own_attributes import unwrapped
from embedlayer.heads.output import OutputHead
from embedlayer.integrations.accelerate import forward_of, prepared_again, sharding_by
from embedlayer.integrations.peft import base_model, learns_prompts
from embedlayer.losses.statistics import Statistic, token_statistics_of
from embedlayer.losses.uncomputed_logits import LinearLogits, UncomputedLogits
from embedlayer.tables.computed_weight import ComputedWeight

OLDEST, NEWEST = (1, 14), (1, 16)
KERNEL, CROSS_ENTROPY = "_ChunkedLogProbFunction", "_chunked_cross_entropy_loss"
METHODS = ("_get_per_token_logps_and_entropies", "_chunked_logps")
"""Methods of the trainers of TRL 1.14 that call its kernel."""
STATISTICS: Mapping[str, Statistic] = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logits",
    "is_top1": "is_argmax",
}


def is_trl(trainer: object) -> bool:
    return any(base.__module__.partition(".")[0] == "trl" for base in type(trainer).__mro__)


def replace_losses(trainer: Any) -> None:
    """Compute the losses of a trainer of TRL with `token_statistics`: those of its policy and reference model."""
    installed = version("trl")
    if not OLDEST <= release(installed) <= NEWEST:
        raise VersionError(f"TRL {installed} is installed; patch_trainer replaces the losses of TRL 1.14 to 1.16.")
    if sharding := sharding_by(trainer):
        raise SizeError(f"patch_trainer replaces TRL's losses in one process and under DDP, not with {sharding}.")
    models = [base_model(trainer.model)]
    if getattr(trainer, "ref_model", None) is not None:
        models.append(base_model(trainer.accelerator.unwrap_model(trainer.ref_model)))
    if release(installed) == OLDEST and any(hasattr(trainer, name) for name in METHODS):
        _replace_methods(trainer, models)
        return
    functions = [_forward_of(model) for model in models]
    for model, function in zip(models, functions, strict=True):
        if isinstance(function.__globals__.get(KERNEL), HeadKernel):
            continue
        is_patched = isinstance(vars(model)["forward"], partial)
        refuse_token_weights(model)
        with prepared_again(trainer, model):  # a reference model is prepared already
            model.forward = MethodType(_with_kernel(function, HeadKernel([model])), model)
            if is_patched:
                accept_token_weights(model)


class HeadKernel:
    """Replace TRL's `ChunkedLogProbFunction`, for the heads of some models."""

    # A patched head is called itself, so that PEFT's adapters and `head_dtype` apply; any other gives its weight.

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = [weakref.ref(model) for model in models]

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities, entropy, log of the sum of p², mean logit, and whether the target is the argmax."""
        # The last three have no gradient, as in TRL. Without `outputs`, as in TRL 1.14, the result is the first two.
        options = {"temperature": temperature, "softcap": final_logit_softcapping, "logit_scale": logit_scale}
        logits = self._logits(hidden, weight, bias, options)
        names = ("entropy",) if outputs is None else outputs
        wanted = tuple(STATISTICS[name] for name in STATISTICS if name in names)
        found = token_statistics_of(logits, targets, statistics=("log_probs", *wanted))
        results = (
            found.log_probs,
            found.entropy,
            None if found.sum_squared_probs is None else found.sum_squared_probs.detach().log(),
            None if found.mean_logits is None else found.mean_logits.detach(),
            found.is_argmax,
        )
        return results[:2] if outputs is None else results

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> UncomputedLogits:
        """Return the logits of TRL's head, not computed."""
        is_cast = autocast_dtype(hidden) is not None or hidden.dtype == weight.dtype
        for model in (each() for each in self.models):
            head: Any = None if model is None else model.get_output_embeddings()  # type: ignore[operator]
            if not isinstance(head, OutputHead) or not head.states_model_logits:
                continue
            own = head.weight  # rows that are computed are a new tensor at each read
            is_its_weight = own is weight or (isinstance(weight, ComputedWeight) and weight.is_of(own))
            if is_its_weight and (is_cast or head.head_dtype is not None):
                logits: UncomputedLogits = head.uncomputed_logits(hidden, **options)
                return logits
        if not is_cast:  # as TRL: products are in the dtype of the hidden states
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        return LinearLogits(hidden, weight, bias=bias, **options)

    def cross_entropy(
        self,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        chunk_size: int,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logit_scale: float = 1.0,
        final_logit_softcapping: float | None = None,
        lm_head_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Replace `_chunked_cross_entropy_loss` of TRL 1.14: loss, right tokens, sum of entropies, counted tokens."""
        if shift_labels is None:
            assert labels is not None
            hidden_states, shift_labels = hidden_states[..., :-1, :], labels[..., 1:]
        mask = shift_labels != -100
        log_probs, entropy, _, _, is_top1 = self.apply(
            hidden_states[mask],
            lm_head_weight,
            lm_head_bias,
            shift_labels[mask],
            1.0,
            chunk_size,
            final_logit_softcapping,
            logit_scale,
            ("entropy", "is_top1"),
        )
        assert log_probs is not None and entropy is not None and is_top1 is not None  # noqa: PT018
        counted = mask.sum()
        divisor = counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -log_probs.sum() / torch.as_tensor(divisor, device=log_probs.device)
        return loss, is_top1.sum().float(), entropy.detach().sum(), counted


def _forward_of(model: Any) -> FunctionType:
    """Return TRL's forward of a model, also if accelerate has wrapped it in autocast since."""
    forward = forward_of(model)
    if isinstance(forward, partial):  # around it is the forward of a patched model
        forward = getattr(forward, "__wrapped__", None)
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType) or not {KERNEL, CROSS_ENTROPY} & {*function.__code__.co_names}:
        raise CheckpointError(
            f"The forward of this {type(model).__name__} is not TRL's for losses without logits: call patch_trainer "
            f"after the trainer is built, for SFT, DPO, KTO, GRPO or RLOO (with TRL 1.14: SFT with "
            f"loss_type='chunked_nll', DPO, KTO, GRPO)."
        )
    return function


def _with_kernel(function: FunctionType, kernel: HeadKernel) -> FunctionType:
    """Return a copy of a function of TRL that calls our kernel."""
    ours = {KERNEL: kernel, CROSS_ENTROPY: kernel.cross_entropy, "_use_triton": _always}
    names = {**function.__globals__, **ours}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def _always(device: torch.device) -> bool:
    """Replace `_use_triton`, by which TRL decides to score counted tokens only: our kernel takes any number of them."""
    return True


def _replace_methods(trainer: Any, models: list[nn.Module]) -> None:
    """Set the methods of a DPO, KTO or GRPO trainer of TRL 1.14 that compute log-probabilities."""
    # In TRL 1.14 these are the methods of `use_liger_kernel`, which calls no kernel of Liger there; we make its checks.
    head = models[0].get_output_embeddings()  # type: ignore[operator]
    methods = {name: getattr(type(trainer), name, None) for name in METHODS}
    functions = {
        name: method
        for name, method in methods.items()
        if isinstance(method, FunctionType) and KERNEL in method.__code__.co_names
    }
    reasons = {
        "this trainer": not functions,
        "use_weighting": getattr(trainer, "use_weighting", False),
        "compute_metrics": trainer.compute_metrics is not None,
        "router_aux_loss_coef": getattr(trainer, "aux_loss_enabled", False),
        "an adapter of the LM head": unwrapped(head) is not head,
        "prompt learning": learns_prompts(trainer.model),
    }
    found = [name for name, applies in reasons.items() if applies]
    if found:
        raise SizeError(
            f"{type(trainer).__name__} of TRL 1.14 computes all logits for {', '.join(found)}: use TRL 1.16."
        )
    from trl.models.utils import _ForwardRedirection

    trainer.use_liger_kernel, trainer._forward_redirection = True, _ForwardRedirection()
    kernel = HeadKernel(models)
    for name, function in functions.items():
        setattr(trainer, name, MethodType(_with_kernel(function, kernel), trainer))
