"""Lightning: fit, clip, accumulate, average weights, checkpoint and resume; plain `nn.Embedding` + AdamW, or ours."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

from interop.substitution import OURS, adamw, embedding, head

ROW_SPARSE = {"row_sparse": True} if OURS else {}


class Model(L.LightningModule):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = embedding(20, 8, **(ROW_SPARSE if sparse else {})), head(8, 20)

    def training_step(self, batch, _):
        return F.cross_entropy(self.head(self.table(batch)).flatten(0, 1), batch.roll(-1, 1).flatten())

    def configure_optimizers(self):
        return adamw(self.parameters(), lr=0.05)


def fit(model, folder, *callbacks, epochs=3, checkpoint=None, **options):
    data = torch.utils.data.DataLoader(list(torch.arange(64).remainder(11).view(16, 4)), batch_size=4)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        default_root_dir=folder, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=checkpoint, weights_only=False if checkpoint else None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fresh(sparse=True):
    return Model(sparse)


@pytest.mark.parametrize("callback", [None, EMAWeightAveraging, StochasticWeightAveraging])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_equals_dense_training(tmp_path, callback, accumulate) -> None:
    make = {None: list, EMAWeightAveraging: lambda: [EMAWeightAveraging(decay=0.9)],
            StochasticWeightAveraging: lambda: [StochasticWeightAveraging(swa_lrs=0.01)]}[callback]  # fmt: skip
    runs = [fit(fresh(sparse), tmp_path, *make(), accumulate_grad_batches=accumulate) for sparse in (True, False)]
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradient_clipping(tmp_path, sparse) -> None:
    torch.testing.assert_close(
        fit(fresh(sparse), tmp_path, gradient_clip_val=0.1), fit(fresh(False), tmp_path, gradient_clip_val=0.1)
    )


def test_a_resumed_run_equals_one_that_went_through(tmp_path) -> None:
    fit(fresh(), tmp_path, ModelCheckpoint(tmp_path, filename="half"), epochs=2)
    torch.testing.assert_close(fit(fresh(), tmp_path, checkpoint=tmp_path / "half.ckpt"), fit(fresh(), tmp_path))
