"""ONNX by torch's exporter: tables, input embeddings, heads and transformers models, run by onnxruntime."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel

import embedlayer as el
from interop.substitution import OURS, embedding, head, patched

IDS = torch.tensor([[1, 5, 7, 2], [3, 0, 31, 9]])


class Plain(nn.Module):
    """An input embedding and a head of plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions, self.head = embedding(32, 16), nn.Embedding(8, 16), head(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids) * 4.0 + self.positions(torch.arange(ids.shape[-1])))


class Logits(nn.Module):
    """A transformers model from IDs to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        more = {"decoder_input_ids": ids} if self.model.config.is_encoder_decoder else {}
        return self.model(ids, use_cache=False, **more).logits


SMALL = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BUILD = {
    "plain": Plain,
    "gpt2": lambda: Logits(patched(GPT2LMHeadModel(GPT2Config(**SMALL, hidden_size=16, n_positions=16)))),
    "bart": lambda: Logits(patched(BartForConditionalGeneration(BartConfig(**SMALL, d_model=16)))),
}
if OURS:
    BUILD["TransformerEmbedding"] = lambda: el.TransformerEmbedding(32, 16, 8)
    BUILD["DecoderLM"] = lambda: el.DecoderLM(el.TokenEmbedding(32, 16), el.RotaryEmbedding(8), num_heads=2)


@pytest.mark.parametrize("name", BUILD)
def test_onnxruntime_gives_the_same(name, tmp_path) -> None:
    torch.manual_seed(0)
    module = BUILD[name]().eval()
    torch.onnx.export(module, (IDS,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: IDS.numpy()})
    np.testing.assert_allclose(found, module(IDS).detach().numpy(), rtol=1e-4, atol=1e-5)
