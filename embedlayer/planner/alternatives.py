"""Changes to a plan, such as a factorised table or fewer tokens, with the bytes that each saves."""

from dataclasses import dataclass, replace
from typing import Any

from embedlayer.planner.embedding_plan import EmbeddingPlan


@dataclass(frozen=True)
class PlanAlternative:
    """One change to a plan, with the bytes that it saves.

    Args:
        change: Name of the change.
        plan: The plan after the change.
        saved_bytes: Bytes by which `peak_bytes` falls; negative if it grows.
        tradeoff: What else the change costs, in words.
    """

    change: str
    plan: EmbeddingPlan
    saved_bytes: int
    tradeoff: str


def plan_alternatives(now: EmbeddingPlan, *, used: int | None = None, delta_rows: int = 256) -> list[PlanAlternative]:
    """Plan every change that applies to a table and head, and sort the changes by the bytes that they save in a step.

    Args:
        now: The plan to start from.
        used: Number of tokens that would be kept in a trimmed vocabulary; `None` leaves trimming out, and so does a
            number that is not below the vocabulary's.
        delta_rows: Number of trained rows in the alternative that trains only some rows.

    Returns:
        The alternatives, the one that saves most first.

    Example:
        >>> now = plan("gpt2", tokens=4096)
        >>> [alternative.change for alternative in plan_alternatives(now)][:3]
        ['train 256 rows only', 'factorise, rank 192', 'weights in bf16']
    """
    all_rows = {"row_sparse": False, "row_state": "adamw"}
    frozen = {"optimizer": "none", **all_rows, "delta_rows": 0, "group_size": None}
    fewer = min(delta_rows, now.vocab_size)
    quarter = max(1, now.embed_dim // 4)
    trained, dense = now.trained, now.rank is None
    has_head = not now.lookup_only
    can_be_sparse = trained and dense and not ((has_head and now.tied) or now.row_sparse or now.delta_rows)
    can_freeze_rows = trained and not now.delta_rows and fewer < now.vocab_size and now.processes == 1
    can_factorise = dense and not now.quantised and now.embed_dim > quarter
    used_tokens = used or 0
    trimmed = {"vocab_size": used_tokens, "delta_rows": min(now.delta_rows, used_tokens)}
    only_rows, factors = {"delta_rows": fewer, **all_rows}, {"rank": quarter, **all_rows}
    options: list[tuple[bool, str, dict[str, Any], str]] = [
        (has_head and trained and now.plain_loss, "chunked loss", {"plain_loss": False}, "none: same results"),
        (has_head and not now.tied, "tie the head", {"tied": True, **all_rows}, "another model: train again"),
        (has_head and now.tied and dense, "untie the head", {"tied": False}, "same model at the start"),
        (can_be_sparse, "row-sparse table", {"row_sparse": True}, "none: same results"),
        (can_freeze_rows, f"train {fewer:,} rows only", only_rows, "all other rows stay"),
        (can_factorise, f"factorise, rank {quarter:,}", factors, "approximate: train again"),
        (now.dtype == "fp32" and not now.row_sizes, "weights in bf16", {"dtype": "bf16"}, "weights of three digits"),
        (not now.quantised, "int8, nothing trained", {**frozen, "dtype": "int8"}, "rows about 1 % off"),
        (not now.quantised, "int4, nothing trained", {**frozen, "dtype": "int4"}, "rows about 10 % off"),
        (0 < used_tokens < now.vocab_size, f"trim to {used_tokens:,} tokens", trimmed, "other text: more tokens"),
    ]
    alternatives = []
    for applies, change, values, tradeoff in options:
        if applies:
            after = replace(now, **values, name=change)
            alternatives.append(PlanAlternative(change, after, now.peak_bytes - after.peak_bytes, tradeoff))
    return sorted(alternatives, key=lambda alternative: -alternative.saved_bytes)
