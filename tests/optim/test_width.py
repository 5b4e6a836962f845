"""A step changes the logits alike at every width with muP, and the numbers of the scaling are those of the paper."""

import pytest
import torch

import embedlayer as el
from embedlayer.optim import WidthScaling, param_groups

V, RATE, BATCH, BASE, WIDTHS = 256, 1e-2, (4, 33), 64, (64, 128, 256, 512)


def change_of_logits(width: int, seed: int, *, tied: bool, head_dim: int, mup: bool) -> float:
    """Return the mean absolute change of the logits of a batch in six steps on it; the base has heads of width 16."""
    torch.manual_seed(seed)
    scaling = WidthScaling(width if mup else BASE, base_width=BASE, head_dim=head_dim if mup else 16, base_head_dim=16)
    table = el.TokenEmbedding(V, width, scale=scaling.table_scale if mup else "sqrt_dim")
    ends = (table,) if tied else (width, V)
    head = el.OutputHead(*ends, logit_scale=scaling.logit_scale)
    sizes = {"num_layers": 2, "num_heads": width // head_dim, "query_scale": scaling.query_scale}
    model = el.DecoderLM(table, "rotary", head, **sizes)
    optimizer = el.RowAdamW(param_groups(model, rates=scaling.rates(RATE)), lr=RATE, betas=(0.9, 0.95))
    ids = torch.randint(V, BATCH)
    before = model(ids).detach()
    for _ in range(6):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    return float((model(ids).detach() - before).abs().mean())


def mean_change(width: int, seeds: int, *, tied: bool, head_dim: int = 16, mup: bool = True) -> float:
    changes = [change_of_logits(width, seed, tied=tied, head_dim=head_dim, mup=mup) for seed in range(seeds)]
    return sum(changes) / seeds


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.long), False], ids=["tied", "untied"])
def test_without_it_the_change_grows_with_the_width(tied) -> None:
    narrow, wide = (mean_change(width, 2, tied=tied) for width in (64, 256))
    assert 0.75 <= wide / narrow <= 1.25
    assert mean_change(256, 2, tied=tied, mup=False) / narrow > 1.4


def test_the_numbers_are_those_of_the_widths_and_impossible_ones_are_refused() -> None:
    scaling = WidthScaling(512, base_width=64, head_dim=64, base_head_dim=16)
    assert (scaling.ratio, scaling.table_scale, scaling.logit_scale, scaling.query_scale) == (8.0, 8.0, 0.125, 0.5)
    assert scaling.rates(0.004) == {"matrices": 0.0005}
    assert scaling.matrix_std(0.02) == pytest.approx(0.02 / 8**0.5)
    base = WidthScaling(64, base_width=64)
    assert (base.logit_scale, base.query_scale, base.rates(0.004)) == (1.0, 1.0, {"matrices": 0.004})
    for sizes in ({"base_width": 0}, {"base_width": 64, "head_dim": 16}, {"base_width": 64, "base_head_dim": 16}):
        with pytest.raises(el.SizeError):
            WidthScaling(64, **sizes)
