"""Parameters that DeepSpeed's ZeRO-3 has partitioned are refused by name in every entry that reads or changes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.analysis import nearest_rows, table_geometry, table_health
from embedlayer.core.errors import SizeError
from embedlayer.distributed import distributed_state, shard_table, tie_stages
from embedlayer.training import EmbeddingMonitor
from embedlayer.vocab.row_training import train_only_rows

V, D = 10, 4


def partition(module: nn.Module) -> nn.Module:
    """Give each parameter what ZeRO-3 gives it: no numbers, and its shape and its part in attributes."""
    for number, parameter in enumerate(module.parameters()):
        each: Any = parameter
        each.ds_id, each.ds_shape, each.ds_tensor = number, parameter.shape, parameter.data.flatten().clone()
        parameter.data = parameter.data.new_empty(0)
    return module


def gather(module: nn.Module) -> None:
    """Do what `deepspeed.zero.GatheredParameters` does when it is entered."""
    for parameter in module.parameters():
        each: Any = parameter
        parameter.data = each.ds_tensor.view(each.ds_shape)


def ends() -> nn.ModuleDict:
    torch.manual_seed(0)
    table = el.TokenEmbedding(V, D)
    return nn.ModuleDict({"table": table, "head": el.OutputHead(table, bias=True)})


def hidden() -> Tensor:
    return torch.ones(3, D)


READING: dict[str, Callable[[Any, Path], object]] = {
    "look-up": lambda model, _: model["table"](torch.tensor([1, 2])),
    "rows": lambda model, _: model["table"].rows(0, 3),
    "logits": lambda model, _: model["head"](hidden()),
    "loss": lambda model, _: model["head"].loss(hidden(), torch.tensor([1, 2, 3])),
    "log-probabilities": lambda model, _: model["head"].token_log_probs(hidden(), torch.tensor([1, 2, 3])),
    "analysis": lambda model, _: table_geometry(model["table"]),
    "health": lambda model, _: table_health(model["table"]),
    "neighbours": lambda model, _: nearest_rows(model["table"], model["table"].rows(0, 1), 2),
    "save": lambda model, folder: model["table"].save_pretrained(folder / "table"),
}
CHANGING: dict[str, Callable[[Any, Path], object]] = {
    "edit": lambda model, _: el.vocab.edit_vocabulary(model, remove=[3]),
    "train only rows": lambda model, _: train_only_rows(model, [3]),
    "RowAdamW": lambda model, _: el.RowAdamW(model.parameters()),
    "RowAdagrad": lambda model, _: el.RowAdagrad(model.parameters()),
    "clip": lambda model, _: el.clip_grad_norm_(model.parameters(), 1.0),
    "shard_table": lambda model, _: shard_table(model["table"], init_device_mesh("cpu", (1,))),
    "tie_stages": lambda model, _: tie_stages(model, init_device_mesh("cpu", (1,))),
    "monitor": lambda model, _: EmbeddingMonitor(model, torch.optim.AdamW(model.parameters())),
    "distributed_state": lambda model, _: distributed_state(model, torch.optim.AdamW(model.parameters())),
}


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_partitioned_parameters_are_refused_by_name(tmp_path) -> None:
    for entry, call in (READING | CHANGING).items():
        model = partition(ends())
        with pytest.raises(SizeError, match="DeepSpeed's ZeRO-3 has partitioned.*fully_shard") as caught:
            call(model, tmp_path)
        assert ("GatheredParameters" in str(caught.value)) == (entry in READING), entry
        assert not any(tmp_path.iterdir()), entry


def test_gathered_parameters_are_read_as_any_others_and_not_changed(tmp_path) -> None:
    for entry, read in READING.items():
        model, whole = partition(ends()), ends()
        gather(model)
        ours, expected = (read(each, tmp_path) for each in (model, whole))
        assert not isinstance(ours, Tensor) or torch.equal(ours, expected), entry
    for change in CHANGING.values():
        model = partition(ends())
        gather(model)
        with pytest.raises(SizeError, match="before deepspeed.initialize"):
            change(model, tmp_path)


def test_models_of_others_are_refused_too() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = partition(GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=8, n_embd=D, n_layer=1, n_head=2)))
    with pytest.raises(SizeError, match="has partitioned transformer.wte.weight \\(10, 4\\)"):
        el.patch(model)
    for read in (el.TokenEmbedding.from_embedding, table_geometry):
        with pytest.raises(SizeError, match="ZeRO-3 has partitioned"):
            read(model.get_input_embeddings())
    untied = partition(el.OutputHead(D, V))
    for call in (untied, lambda states: untied.loss(states, torch.tensor([1, 2, 3]))):
        with pytest.raises(SizeError, match="ZeRO-3 has partitioned"):
            call(hidden())
