"""Heads as `patch` leaves them in models of transformers: logits are computed when they are read, or not at all."""

from torch import Tensor

import embedlayer as el
from embedlayer.heads.deferred import DeferredLogits
from embedlayer.heads.logit_source import LogitsReport


def deferred(head: el.OutputHead) -> el.OutputHead:
    """Return the head, whose logits are computed when they are read from now on."""
    head.logits_report = LogitsReport("Model")
    return head


def is_unread(logits: Tensor) -> bool:
    """Return whether logits are not computed yet."""
    return isinstance(logits, DeferredLogits) and logits.is_unread
