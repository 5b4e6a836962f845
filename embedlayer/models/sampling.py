"""Choose the next token from logits: greedy decoding, or sampling as transformers' `generate` does it."""

import math
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.option_docs import show_options


class SamplingOptions(TypedDict, total=False):
    """Options of `sample`, `generate` and `next_tokens` that choose a token from logits.

    They act in the order of transformers' `generate`: repetition penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0, the default, selects the most likely token, whatever `top_k`, `top_p` and `min_p` are; above 0,
            higher is more random.
        top_k: Sample from the K most likely tokens, and from all that are as likely as the last of these; at least 1,
            or `None` for all.
        top_p: Sample from the most likely tokens that together reach this probability (nucleus sampling); above 0 and
            at most 1, or `None` for all.
        min_p: Sample from the tokens of at least this fraction of the probability of the most likely one; from 0 to 1,
            or `None` for all.
        repetition_penalty: Divide the positive logits of tokens that are in the text by this positive number, and
            multiply the negative ones. Above 1 makes repetition less likely, below 1 more. It also acts at temperature
            0; `None` for 1.
        generator: Random number generator; `None` for torch's own, which `torch.manual_seed` seeds.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    generator: torch.Generator | None


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Choose one token per text from its logits. The attributes are those of `SamplingOptions`.

    Reference: transformers/generation/logits_process.py, and `_get_logits_processor` in generation/utils.py for the
        order. There, greedy decoding is `do_sample=False` instead of temperature 0, and `top_k` is 50 if not passed.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        penalty = self.repetition_penalty
        ranges = {
            "temperature": (0 <= self.temperature < math.inf, "0 or a positive number"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (penalty is None or 0 < penalty < math.inf, "a positive number"),
        }
        for name, (is_valid, values) in ranges.items():
            if not is_valid:
                raise SizeError(f"{name} must be {values}, not {getattr(self, name)}.")

    def sampled(self, processed: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Return one token ID per row of `processed_logits`, the largest at temperature 0, and the largest logit.

        Where a row has NaN or infinity, or only -inf, the largest logit is not finite, and the token has no meaning.
        """
        largest, tokens = processed.max(dim=-1)
        if self.temperature == 0:
            return tokens, largest
        sound = processed.masked_fill(not_finite(largest).unsqueeze(-1), 0.0)  # else an accelerator would stop
        return sound.softmax(dim=-1).multinomial(1, generator=self.generator).squeeze(-1), largest

    @property
    def divisor(self) -> float:
        """Return the number by which logits are divided: the temperature, or 1 for temperature 0."""
        # beyond these bounds float32 gives infinities and NaN
        return min(max(self.temperature, 1e-30), 1e30) if self.temperature else 1.0

    @property
    def only_divides(self) -> bool:
        """Return whether `processed_logits` are the logits divided by `divisor`, and nothing else."""
        if self.repetition_penalty is not None:
            return False
        return self.temperature == 0 or (self.top_k, self.top_p, self.min_p) == (None, None, None)

    def processed_logits(self, logits: Float[Tensor, "B V"], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """Return the float32 logits whose softmax is sampled from; they are -inf for tokens that are excluded.

        `ids` are all tokens of each text so far. At temperature 0 only the repetition penalty is applied.
        """
        logits = logits.float()
        if self.repetition_penalty is not None:
            logits = _penalize_repetition(logits, ids, self.repetition_penalty)
        if self.temperature == 0:
            return logits
        logits = logits / self.divisor
        if self.top_k is not None:
            logits = _keep_top_k(logits, self.top_k)
        if self.top_p is not None and self.top_p < 1:
            logits = _keep_top_p(logits, self.top_p)
        if self.min_p is not None:
            logits = _keep_min_p(logits, self.min_p)
        return logits


@show_options(SamplingOptions)
def sample(
    logits: Float[Tensor, "*batch V"], ids: Int[Tensor, "*batch T"] | None = None, **options: Unpack[SamplingOptions]
) -> Int[Tensor, "*batch"]:
    """Return one token ID for each row of logits, of any model: the most likely, or a sample of the softmax.

    Args:
        logits: Logits of the next token, `(V,)` or `(B, V)`.
        ids: All tokens of each text so far, `(T,)` or `(B, T)`, for `repetition_penalty`; else `None`.
        **options: See `SamplingOptions`.

    Raises:
        SizeError: An option is out of its range, or `repetition_penalty` is passed without `ids`; or, on the CPU, the
            largest logit of a row is NaN or infinite.
        ShapeError: There is not one text for each row of logits.
        TypeError: An option is unknown.

    Example:
        >>> sample(torch.tensor([[0.0, 5.0, 1.0], [3.0, 1.0, 2.0]]))
        tensor([1, 0])
    """
    sampler = Sampler(**options)
    if ids is None:
        if sampler.repetition_penalty is not None:
            raise SizeError("repetition_penalty makes tokens of the text so far less likely: pass them as ids.")
        ids = torch.zeros(*logits.shape[:-1], 0, dtype=torch.long, device=logits.device)
    if ids.shape[:-1] != logits.shape[:-1]:
        raise ShapeError(f"ids {tuple(ids.shape)} have one text for each row of logits {tuple(logits.shape)}.")
    tokens, largest = sampler.sampled(sampler.processed_logits(torch.atleast_2d(logits), torch.atleast_2d(ids)))
    if device_kind(largest) == "cpu" and (rows := not_finite(largest).nonzero()).numel():
        row = int(rows[0])
        raise SizeError(f"The largest logit of row {row} is {largest[row].item()}: no token can be chosen.")
    return tokens.view(logits.shape[:-1])


def not_finite(numbers: Float[Tensor, "*batch"]) -> Bool[Tensor, "*batch"]:
    """Return whether each number is NaN or infinite, by two operations."""
    return numbers - numbers != 0


def _penalize_repetition(logits: Float[Tensor, "B V"], ids: Int[Tensor, "B T"], penalty: float) -> Float[Tensor, "B V"]:
    """Divide the positive logits of the tokens in `ids` by `penalty`, and multiply the negative ones, once per token.

    Reference: Keskar et al., CTRL, 2019, section 4.1; transformers' RepetitionPenaltyLogitsProcessor.
    """
    ids = ids.long()
    seen = logits.gather(-1, ids)
    return logits.scatter(-1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def _keep_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Set the logits below the K-th largest to -inf; all that equal it stay. K above V changes nothing.

    Reference: Fan et al., Hierarchical Neural Story Generation, 2018; transformers' TopKLogitsWarper.
    """
    kth = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -math.inf)


def _keep_top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Set the logits of the least likely tokens to -inf while their total probability is at most `1 - p`.

    The most likely token stays. Of equal logits at the limit, those stay that `torch.sort` sorts last, as in
    transformers.

    Reference: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020; transformers' TopPLogitsWarper.
    """
    ascending, order = logits.sort(dim=-1)
    excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    excluded[:, -1] = False
    return logits.masked_fill(excluded.scatter(-1, order, excluded), -math.inf)


def _keep_min_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Set the logits of tokens to -inf that are less likely than `p` times the most likely one.

    Reference: Nguyen et al., Min-p Sampling, 2024; transformers' MinPLogitsWarper.
    """
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -math.inf)
