"""The import paths of the optimizers."""

import pytest

import embedlayer


def test_optimizers_and_their_options_can_be_imported_together() -> None:
    from embedlayer.optim import RowAdagrad, RowAdamW, RowwiseSecondMoment, StochasticRounding

    assert (RowAdagrad, RowAdamW) == (embedlayer.RowAdagrad, embedlayer.RowAdamW)
    assert StochasticRounding is embedlayer.tables.StochasticRounding
    assert RowwiseSecondMoment is embedlayer.optim.RowwiseSecondMoment
    with pytest.raises(AttributeError, match="No embedlayer.optim attribute RowAdam"):
        _ = embedlayer.optim.RowAdam
