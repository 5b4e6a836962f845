"""Small models of every kind that has a vocabulary, and how to train and compare them."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.optim import RowwiseSecondMoment

V, D = 30, 8


def model(*, table=None, head=None, **options) -> el.DecoderLM:
    table = el.TokenEmbedding(V, D, padding_idx=0, **options) if table is None else table
    return el.DecoderLM(table, el.RotaryEmbedding(4), head, num_layers=1, num_heads=2).eval()


MODELS = {
    "tied": model,
    "padded": lambda: model(pad_to_multiple_of=16),
    "factorised": lambda: model(table=el.FactorizedEmbedding(V, D, 4, padding_idx=0)),
    "free": lambda: model(head=el.OutputHead(vocab_size=V, embed_dim=D, bias=True, padding_idx=0)),
    "tied, with a bias": lambda: biased(),
    "row-sparse": lambda: model(table=el.RowSparseEmbedding(V, D, padding_idx=0), head=el.OutputHead(D, V)),
}
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "RowAdamW": lambda parameters: el.RowAdamW(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "RowAdamW, rowwise": lambda parameters: el.RowAdamW(parameters, lr=0.01, state=RowwiseSecondMoment(torch.bfloat16)),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def biased() -> el.DecoderLM:
    table = el.TokenEmbedding(V, D)
    made = model(table=table, head=el.OutputHead(table, bias=True))
    torch.nn.init.normal_(made.head.bias)
    return made


def train(made, optimizer, ids, steps=3) -> None:
    for step in range(steps):
        batch = ids.roll(step, 0)[:3]
        optimizer.zero_grad()
        made.loss(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()


def state_of(made, optimizer=None) -> dict:
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    if optimizer is not None:
        for name, parameter in made.named_parameters():
            found = optimizer.state.get(parameter, {})
            tensors |= {f"{name}.{key}": value.clone() for key, value in found.items() if torch.is_tensor(value)}
    return tensors


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


IDS = torch.randint(1, V - 5, (8, 7), generator=torch.Generator().manual_seed(1))


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same logits; how a product is summed may depend on how many rows stand beside."""
    tolerance = 1e-2 if one.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def checkpoint(folder: Path, size: int, tokenizer: Tokenizer | None = None, **config: object) -> Path:
    """Write a checkpoint of GPT-2's family that has no blocks, and return its folder."""
    folder.mkdir()
    tensors = {"wte.weight": torch.randn(size, D), "wpe.weight": torch.randn(8, D)}
    save_file(tensors, folder / "model.safetensors")
    sizes = {"vocab_size": size, "hidden_size": D, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **config}))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def interrupt_sets(patch: pytest.MonkeyPatch, number: int) -> None:
    """Interrupt what follows after it has set so many attributes of modules to a whole number, such as a size."""
    original, sets = torch.nn.Module.__setattr__, count(1)

    def set_and_interrupt(module: torch.nn.Module, name: str, value: object) -> None:
        original(module, name, value)
        if isinstance(value, int) and next(sets) == number:
            raise KeyboardInterrupt

    patch.setattr(torch.nn.Module, "__setattr__", set_and_interrupt)
