"""Whether all ranks were given the same: where one was not, all are told which, and in what."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from embedlayer.distributed.exchange import gather_rows
from embedlayer.errors import PeerError


def require_agreement(facts: Mapping[str, Any], group: dist.ProcessGroup | None, device: torch.device | str) -> None:
    """Refuse to go on unless all ranks of a group come with the same facts; each must call it.

    Args:
        facts: What must be alike, by name.
        group: The ranks; `None` for all.
        device: Where the group's tensors are.

    Raises:
        PeerError: On all ranks, naming those that differ from the first, and in what.
    """
    note = torch.frombuffer(bytearray(json.dumps(facts, default=str).encode()), dtype=torch.uint8).to(device)
    notes, lengths = gather_rows(note, group)
    ranks = dist.get_process_group_ranks(group)
    found = [json.loads(bytes(part.tolist())) for part in notes.split(lengths)]
    if said := differences(dict(zip(ranks, found, strict=True))):
        raise PeerError(said)


def differences(everybody: Mapping[int, Mapping[str, Any]]) -> str:
    """What ranks have otherwise than the first of them, in a sentence a rank; empty if nothing.

    Example:
        >>> differences({0: {"--dim": 64}, 1: {"--dim": 64}, 2: {"--dim": 32}})
        'Rank 2 differs from rank 0 in --dim: 32 there, 64 on rank 0. Give all the same.'
    """
    one, *_ = everybody
    first = everybody[one]
    found = []
    for rank, facts in everybody.items():
        names = [name for name in {**first, **facts} if first.get(name) != facts.get(name)]
        parts = [f"{name}: {_short(facts.get(name))} there, {_short(first.get(name))} on rank {one}" for name in names]
        found += [f"Rank {rank} differs from rank {one} in {'; '.join(parts)}."] if parts else []
    return " ".join([*found, "Give all the same."]) if found else ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
