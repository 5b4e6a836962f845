"""PEFT on whole tables, on sharded tables, and on tables that torch shards."""

import tempfile
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launches import launched
from processes import PRELOADED
from sharded_tensors import full
from together import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from embedlayer import DecoderLM, OutputHead, RotaryEmbedding, TokenEmbedding
from embedlayer.core.errors import SizeError
from embedlayer.distributed import shard_table
from embedlayer.training.parallel import ParallelContext

PRELOADED.append("peft")

V, D, SCALE = 24, 8, 2.5
CHOICES = {
    "on the table": {"target_modules": ["table"]},
    "beside the table": {"target_modules": ["mixing"]},
    "a copy of the table": {"target_modules": ["mixing"], "modules_to_save": ["table"]},
    "some rows": {"target_modules": ["mixing"], "trainable_token_indices": {"table": [3, 5]}},
}
IDS = torch.arange(V).view(4, 6)


class Plain(nn.Embedding):
    """The oracle: a scaled look-up, under the name that PEFT knows."""

    embed_scale = torch.tensor(SCALE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return SCALE * super().forward(ids)


class Net(nn.Module):
    """The smallest model with a table, a layer and a head."""

    def __init__(self, kind: type[nn.Embedding] = TokenEmbedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table: nn.Module = TokenEmbedding(V, D, scale=SCALE)
        self.mixing, self.head = nn.Linear(D, D), nn.Linear(D, V)
        if kind is Plain:
            plain = Plain(V, D)
            plain.load_state_dict(self.table.state_dict())
            self.table = plain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixing(self.table(ids)).tanh())


def adapted(model: nn.Module, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options))


def loss_and_gradients(model: nn.Module, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_table_is_to_peft_what_a_scaled_embedding_is(choice) -> None:
    model, plain = adapted(Net(), **CHOICES[choice]), adapted(Net(Plain), **CHOICES[choice])
    assert_close(loss_and_gradients(model), loss_and_gradients(plain))
    for each in (model, plain):
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    with torch.no_grad():
        expected = model(IDS)
        torch.testing.assert_close(expected, plain(IDS))
        merged = model.merge_and_unload()
        assert isinstance(merged.table, TokenEmbedding)
        torch.testing.assert_close(merged(IDS), expected)


@pytest.mark.parametrize(
    "choice",
    [
        {"target_modules": ["table"]},
        {"target_modules": ["query"], "modules_to_save": ["table"]},
        {"target_modules": ["query"], "trainable_token_indices": {"table": [3, 5]}},
    ],
)
def test_a_decoder_reads_its_table_through_what_peft_puts_in_its_place(unchecked: None, choice) -> None:
    model, ids = decoder(learns=True, tied=False), IDS.clamp(max=V - 2)
    rows, before = model.table.weight.detach().clone(), model(ids).detach()
    model = adapted(model, **choice)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    with torch.no_grad():
        after = model(ids)
        merged = model.merge_and_unload()
        assert not torch.equal(merged.table.weight, rows)
        assert not torch.allclose(after, before)
        torch.testing.assert_close(merged(ids), after)


PLANS = {
    "rows": RowwiseParallel(input_layouts=Replicate()),
    "columns": ColwiseParallel(output_layouts=Replicate()),
}


def sharded_by_torch(plan: str) -> Net:
    model = Net()
    parallelize_module(model.table, init_device_mesh("cpu", (2,)), PLANS[plan])
    return model


def by_torch(choices: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    found = []
    for plan in PLANS:
        for choice in choices:
            results = loss_and_gradients(adapted(sharded_by_torch(plan), **CHOICES[choice]))
            found += [{name: full(tensor) for name, tensor in results.items()}]
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            adapted(sharded_by_torch(plan), **CHOICES["some rows"])
    return found


def test_a_table_that_torch_shards_by_rows_or_columns_takes_lora_and_a_copy() -> None:
    for results in together(2, CALLS, (by_torch, BY_TORCH)):
        for choice, found in zip(BY_TORCH * len(PLANS), results, strict=True):
            assert_close(found, loss_and_gradients(adapted(Net(), **CHOICES[choice])))


def on_a_sharded_table(choices: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for choice in choices:
        model = Net()
        model.table = shard_table(model.table, mesh)
        model = adapted(model, **CHOICES[choice])
        own = IDS.chunk(mesh.size())[mesh.get_local_rank()]
        results = loss_and_gradients(model, own)
        for name, tensor in results.items():
            if "local" not in name:
                dist.all_reduce(tensor)
                tensor /= mesh.size()
        results = {name.replace("local.", ""): tensor for name, tensor in results.items()}
        found += [results]
        with tempfile.TemporaryDirectory() as folder:
            expected = pytest.raises(SizeError, match="distributed_state") if "copy" in choice else nullcontext()
            with expected:
                model.save_pretrained(folder)
    for choice in ("on the table", "some rows"):
        model = Net()
        model.table = shard_table(model.table, mesh)
        with pytest.raises((ValueError, AttributeError), match="ShardedTable"):
            adapted(model, **CHOICES[choice])
    return found


def test_a_sharded_table_takes_lora_beside_it_and_a_copy_but_none_on_it() -> None:
    results = together(2, CALLS, (on_a_sharded_table, ON_SHARDED))
    for number, choice in enumerate(ON_SHARDED):
        expected = loss_and_gradients(adapted(Net(), **CHOICES[choice]))
        found = [result[number] for result in results]
        for name in [name for name in expected if "table" in name]:
            found[0][name] = torch.cat([each[name] for each in found])
        assert_close(found[0], expected)


def decoder(learns: bool, tied: bool) -> DecoderLM:
    torch.manual_seed(0)
    table = TokenEmbedding(V - 1, D, scale=SCALE)  # a row less for the last of two ranks
    head = None if tied else OutputHead(vocab_size=V - 1, embed_dim=D)
    model = DecoderLM(table, RotaryEmbedding(4), head, num_layers=1, num_heads=2).double()  # ranks sum in another order
    for parameter in model.parameters():
        parameter.requires_grad_(learns)
    return model


def trained_decoder(model: DecoderLM, ranks: ParallelContext | None, learns: bool) -> dict[str, torch.Tensor]:
    """Return losses of a few LoRA steps on the decoder's layers, the rows of the table, and the LoRA weights."""
    ids = IDS.clamp(max=V - 2)
    if ranks is not None:
        ranks.shard(model)
        ids = ids[list(ranks.share(len(ids)))]
    rows = model.table.weight
    model = adapted(model, target_modules=["query", "value", "down"])
    assert not rows.requires_grad
    rows.requires_grad_(learns)
    loss_of = model.loss if ranks is None else ranks.loss_function(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=0.5), []
    for _ in range(3):
        loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() if ranks is None else ranks.sum(loss.detach()) / ranks.size]
    made = {name: p.detach() for name, p in model.named_parameters() if "lora" in name}
    return {"losses": torch.stack(losses), "rows": rows.detach(), **made}


CASES = ((True, True), (False, False))


def all_decoders(cases: tuple[tuple[bool, bool], ...]) -> list[dict[str, torch.Tensor]]:
    with launched() as ranks:
        return [trained_decoder(decoder(*case), ranks, case[0]) for case in cases]


BY_TORCH = ("on the table", "beside the table", "a copy of the table")
ON_SHARDED = ("beside the table", "a copy of the table")
CALLS = ((by_torch, BY_TORCH), (on_a_sharded_table, ON_SHARDED), (all_decoders, CASES))
"""What runs by default on two ranks, which start once."""


def test_lora_on_the_layers_of_a_decoder_learns_equally_where_its_table_is_sharded() -> None:
    results = together(2, CALLS, (all_decoders, CASES))
    for number, case in enumerate(CASES):
        expected = trained_decoder(decoder(*case), None, case[0])
        found = [result[number] for result in results]
        found[0]["rows"] = torch.cat([each["rows"] for each in found])
        assert_close(found[0], expected)
        moved = not torch.equal(expected["rows"], decoder(*case).table.weight)
        assert moved == case[0]
