"""Row-wise Adagrad. Its rows: `tests/laws/test_pending_updates.py`."""

import pytest
import torch
from torch import nn

from embedlayer import RowAdagrad, SizeError


def test_dense_parameters_take_the_steps_of_torchs_adagrad_after_decoupled_weight_decay() -> None:
    ours, theirs = (nn.Linear(5, 3, dtype=torch.float64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizers = RowAdagrad(ours.parameters(), lr=0.1), torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for step in range(4):
        for group in optimizers[0].param_groups:
            group["weight_decay"] = 0.5 * (step == 3)
        x = torch.randn(7, 5, dtype=torch.float64)
        with torch.no_grad():
            for parameter in theirs.parameters() if step == 3 else ():
                parameter.mul_(1 - 0.1 * 0.5)
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()
        assert all(torch.allclose(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(("option", "words"), [("eps", "eps must be positive"), ("lr", "at least 0")])
def test_options_outside_their_range_are_refused(option, words) -> None:
    with pytest.raises(SizeError, match=words):
        RowAdagrad(nn.Linear(2, 2).parameters(), **{option: -1.0})
