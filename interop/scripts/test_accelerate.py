"""accelerate: empty weights, dispatch with offload, prepare, clip, accumulate, save and load state."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, cpu_offload, init_empty_weights, load_checkpoint_and_dispatch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from interop.substitution import OURS, adamw, embedding, head, patched

IDS = torch.tensor([[1, 5, 7, 2]])
GPT2 = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
T5 = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
MODELS = {"gpt2": (GPT2LMHeadModel, GPT2, {}), "t5": (T5ForConditionalGeneration, T5, {"decoder_input_ids": IDS})}


@pytest.mark.parametrize("name", MODELS)
def test_empty_weights_then_dispatch(name, tmp_path) -> None:
    kind, config, inputs = MODELS[name]
    reference = kind(config).eval()
    reference.save_pretrained(tmp_path)
    with init_empty_weights():
        model = kind(config)
    model = patched(model.eval())
    model.tie_weights()
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "model.safetensors"), device_map={"": "cpu"}).to("cpu")
    torch.testing.assert_close(model(IDS, **inputs).logits, reference(IDS, **inputs).logits)


@pytest.mark.parametrize("name", MODELS)
def test_cpu_offload_hooks(name) -> None:
    kind, config, inputs = MODELS[name]
    model = kind(config).eval()
    expected = model(IDS, **inputs).logits
    torch.testing.assert_close(cpu_offload(patched(model), torch.device("cpu"))(IDS, **inputs).logits, expected)


def model_of(sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(embedding(32, 8, **({"row_sparse": True} if OURS and sparse else {})), head(8, 32))


def train(model, tmp_path, clip=None):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters(), lr=0.05))
    for step in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(IDS + step)[0], IDS[0]))
            accelerator.sync_gradients and clip and accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    return {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}


@pytest.mark.parametrize("clip", [None, 0.1])
def test_prepared_training_equals_dense_training(tmp_path, clip) -> None:
    torch.testing.assert_close(train(model_of(True), tmp_path, clip), train(model_of(False), tmp_path, clip))
