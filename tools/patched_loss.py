"""Compare a patched model with the plain one: logits, loss, gradients, and operations as large as all logits.

`compare_patched` takes a model in float32. `loss` is the relative difference to the loss that transformers computes in
float32. `gradients` is the largest relative difference of a gradient in float64, to the same forward where logits are
not rounded to float32. `large operations` are those of a training step whose result has tokens x V numbers: none, if
the model trains without logits.
"""

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers_probe import in_float64

import embedlayer as el

TEXTS, TOKENS = 5, 16
"""More tokens together than a model is wide, so that no gradient of a weight is as large as all logits."""

LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-10


@dataclass
class Patched:
    """Result for one model.

    Attributes:
        differences: What was compared -> largest relative difference.
        large: Operation with tokens x V numbers -> how often it ran in a training step of the patched model.
        reader: Function that read the logits, by the log; empty if none did.
        left_out: What was not compared -> why.
    """

    differences: dict[str, float] = field(default_factory=dict)
    large: dict[str, int] = field(default_factory=dict)
    reader: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def without_logits(self) -> bool:
        """Return whether the model trains without logits."""
        return not self.large and not self.left_out


class LargeOperations(TorchDispatchMode):
    """Count operations whose result has a dimension of the vocabulary and at least as many numbers as all logits."""

    def __init__(self, tokens: int, vocab_size: int, model: nn.Module) -> None:
        super().__init__()
        self.tokens, self.vocab_size = tokens, vocab_size
        self.weights = {each.shape for each in model.parameters()}
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is not Tensor or self.vocab_size not in each.shape or each.shape in self.weights:
                continue
            if each.is_meta:  # shape without memory
                continue
            if each.numel() >= self.tokens * self.vocab_size:
                self.found[str(func)] += 1
        return result


class UnroundedLogits(TorchFunctionMode):
    """Leave logits in float64 where transformers casts them to float32."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func is Tensor.float or (func is Tensor.to and torch.float32 in args[1:])
        if casts and args[0].dtype == torch.float64 and args[0].shape[-1:] == (self.vocab_size,):
            return args[0]
        return func(*args, **(kwargs or {}))


class Readers(logging.Handler):
    """Collect the functions that read logits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(str(record.args[1]) if isinstance(record.args, tuple) else "")


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return `max |ours - theirs| / max |theirs|`; infinity for different shapes or NaN."""
    if ours.shape != theirs.shape:
        return float("inf")
    difference = ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30)).item()
    return difference if difference == difference else float("inf")


def gradient_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference of a gradient, relative to the largest number of that parameter's gradient.

    A gradient that is 0 by theory, such as that of a key's bias, is relative to the mean of all largest numbers.
    """
    expected = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    found = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
    if expected.keys() != found.keys():
        return float("inf")
    sizes = {name: each.abs().max().item() for name, each in expected.items()}
    floor = 1e-4 * sum(sizes.values()) / max(len(sizes), 1)
    worst = 0.0
    for name, each in expected.items():
        difference = (found[name] - each).abs().max().item() / max(sizes[name], floor, 1e-300)
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def batch() -> dict[str, Tensor]:
    """Return token IDs and labels, of which some are ignored."""
    ids = torch.randint(5, 100, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def logits_of(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output["prediction_logits"]


def compare_patched(model: nn.Module) -> Patched:
    """Compare a model with its patched copy; the model is converted to float64."""
    result, readers = Patched(), Readers()
    with suppress(Exception):  # models without experts; the fast ones have no float64
        model.set_experts_implementation("eager")
    patched = el.patch(copy.deepcopy(model))
    inputs: dict[str, Any] = batch()
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad():
        theirs, ours = model(**inputs), patched(**inputs)
    if getattr(theirs, "loss", None) is None:
        result.left_out["patched loss"] = "forward computes no loss"
        return result
    result.differences["patched loss"] = relative(ours.loss, theirs.loss)
    result.differences["patched logits"] = relative(logits_of(ours), logits_of(theirs))
    vocab_size = logits_of(theirs).shape[-1]
    model.double()
    widen: Callable[[], AbstractContextManager[None]] = nullcontext
    try:
        with torch.no_grad():
            model(**inputs)
    except RuntimeError:  # XGLM's mask is in float32
        widen = in_float64
    patched.double()
    logger = logging.getLogger("embedlayer")
    before = logger.level
    logger.addHandler(readers)
    logger.setLevel(logging.INFO)
    try:
        counted = patched if widen is nullcontext else el.patch(copy.deepcopy(model).float())
        with LargeOperations(TEXTS * (TOKENS - 1), vocab_size, counted) as operations:
            counted(**inputs).loss.backward()
        if counted is not patched:
            with widen():
                patched(**inputs).loss.backward()
    except AssertionError as error:  # Reformer has gradients in training mode alone, where it is random
        result.left_out["patched gradients"] = f"transformers: {error}"
        return result
    finally:
        logger.removeHandler(readers)
        logger.setLevel(before)
    result.large, result.reader = dict(operations.found), ", ".join(readers.names)
    with widen(), UnroundedLogits(vocab_size):
        loss = model(**inputs).loss
    loss.backward()
    result.differences["patched gradients"] = gradient_difference(patched, model)
    return result
