"""Training on sharded tables, saved by some ranks and continued or edited by others, against one process."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from covering import some
from processes import on_ranks
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import OutputHead, RowAdamW, RowSparseEmbedding, TokenEmbedding, clip_grad_norm_
from embedlayer.core.errors import SizeError
from embedlayer.distributed.sharded import shard_table
from embedlayer.distributed.state import distributed_state, load_distributed_state
from embedlayer.optim import RowwiseSecondMoment
from embedlayer.tables import MappedEmbedding
from embedlayer.vocab.operations import edit_vocabulary

V, D, TOKENS, STEPS = 29, 4, 12, 2
KINDS = ("free", "row-sparse", "tied")
ALWAYS = ("row-sparse", "tied")  # a row-sparse table is beside one that is not, as both are where neither is
EDIT = {"add": 5, "remove": [0, 7, 20, 21]}
AFTER = {"vocab_size": 30, "padding_idx": 0}

pytestmark = pytest.mark.filterwarnings("ignore")


def model_of(kind: str, *, vocab_size: int = V, padding_idx: int = 1, mesh=None) -> nn.ModuleDict:
    torch.manual_seed(0)
    options = {"padding_idx": padding_idx, "dtype": torch.float64}
    table = (RowSparseEmbedding if kind == "row-sparse" else TokenEmbedding)(vocab_size, D, **options)
    parts: dict[str, nn.Module] = {"table": table}
    parts |= {} if kind == "tied" else {"rows": TokenEmbedding(vocab_size, D, **options)}
    parts["mixing"] = nn.Linear(D, D, dtype=torch.float64)
    for name in ("table", "rows") if mesh is not None else ():
        if name in parts:
            parts[name] = shard_table(parts[name], mesh)
    head = OutputHead(parts.get("rows", parts["table"]), bias=kind == "tied").double()
    return nn.ModuleDict({**parts, "head": head})


def optimizer_of(model: nn.ModuleDict) -> RowAdamW:
    state = RowwiseSecondMoment(torch.float64)  # of row-sparse tables; the others have AdamW's moments
    return RowAdamW(model.parameters(), lr=0.05, weight_decay=0.1, state=state)


def train(model, optimizer, steps, *, rank=0, ranks=1) -> list[float]:
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        size = model["table"].vocab_size
        ids, targets = torch.randint(0, size, (2, TOKENS), generator=generator).tensor_split(ranks, dim=1)[rank]
        optimizer.zero_grad()
        model["head"].loss(model["mixing"](model["table"](ids)), targets).backward()
        if ranks > 1:
            for parameter in model.parameters():
                if not hasattr(parameter, "shard_group"):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= ranks
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return norms


def save(model, optimizer, folder: str, storage: str) -> None:
    writer = HuggingFaceStorageWriter(folder, save_distributed=True) if storage == "safetensors" else None
    dcp.save(distributed_state(model, optimizer), checkpoint_id=folder, storage_writer=writer)


def load(model, optimizer, folder: str, storage: str, *, no_dist: bool = False) -> None:
    reader = HuggingFaceStorageReader(folder) if storage == "safetensors" else None
    state = distributed_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, storage_reader=reader, no_dist=no_dist)
    load_distributed_state(model, optimizer, state)


def storage_of(kind: str) -> str:
    return "torch's default" if kind == "free" else "safetensors"


def sharded(kind: str):
    model = model_of(kind, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, optimizer_of(model)


def first_half(folder: str, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    norms = {}
    for kind in kinds:
        model, optimizer = sharded(kind)
        norms[kind] = train(model, optimizer, range(STEPS), rank=dist.get_rank(), ranks=dist.get_world_size())
        save(model, optimizer, f"{folder}/{kind}", storage_of(kind))
    return norms


def second_half(folder: str, kinds: tuple[str, ...]) -> dict[str, list[torch.Tensor]]:
    """Continue training from the checkpoint, and from a saved edit of it."""
    results = {}
    for kind in kinds:
        for edited in (False, True):
            model, optimizer = sharded(kind)
            load(model, optimizer, f"{folder}/{kind}", storage_of(kind))
            if edited:
                edit_vocabulary(model, **EDIT, optimizer=optimizer)
                save(model, optimizer, f"{folder}/{kind}-edited", "safetensors")
            train(model, optimizer, range(STEPS, 2 * STEPS), rank=dist.get_rank(), ranks=dist.get_world_size())
            results[f"{kind} {edited}"] = ends_of(model)
    return results


def ends_of(model: nn.ModuleDict) -> list[torch.Tensor]:
    size = model["table"].vocab_size
    rows = [model[name].rows(0, size) for name in ("table", "rows") if name in model]
    return [each.detach() for each in (*rows, *model["mixing"].parameters(), *model["head"].parameters())]


def all_of(model, optimizer) -> dict[str, torch.Tensor]:
    state = distributed_state(model, optimizer)
    return {f"{part} {name}": value.clone() for part, its in state.items() for name, value in its.items()}


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Folder, norms and what three processes go on to, of a kind; the kinds that run by default come together."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))

    @functools.cache
    def of(kinds):
        return folder, on_ranks(2, first_half, folder, kinds)[0], on_ranks(3, second_half, folder, kinds)[0]

    return lambda kind: of(ALWAYS if kind in ALWAYS else (kind,))


@pytest.mark.parametrize("kind", some(ALWAYS, KINDS))
def test_two_processes_save_and_three_go_on_as_one_process_would(halves, kind) -> None:
    folder, norms, found = halves(kind)
    model, alone = model_of(kind), model_of(kind)
    optimizer, resumed = optimizer_of(model), optimizer_of(alone)
    assert norms[kind] == pytest.approx(train(model, optimizer, range(STEPS)), rel=1e-9)
    load(alone, resumed, f"{folder}/{kind}", storage_of(kind), no_dist=True)
    for each, its in ((model, optimizer), (alone, resumed)):
        train(each, its, range(STEPS, 2 * STEPS))
        for ours, expected in zip(found[f"{kind} False"], ends_of(each), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", some(ALWAYS, KINDS))
def test_a_checkpoint_edited_by_three_processes_is_what_one_makes_of_it(halves, kind) -> None:
    folder, _, found = halves(kind)
    alone, read = model_of(kind), model_of(kind, **AFTER)
    optimizer, its = optimizer_of(alone), optimizer_of(read)
    load(alone, optimizer, f"{folder}/{kind}", storage_of(kind), no_dist=True)
    receipt = edit_vocabulary(alone, **EDIT, optimizer=optimizer)
    assert (alone["table"].vocab_size, alone["table"].padding_idx, receipt.kept) == (*AFTER.values(), V - 4)
    load(read, its, f"{folder}/{kind}-edited", "safetensors", no_dist=True)
    expected, edited = all_of(alone, optimizer), all_of(read, its)
    assert edited.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in edited.items())
    for each, its_own in ((alone, optimizer), (read, its)):
        train(each, its_own, range(STEPS, 2 * STEPS))
        for ours, theirs in zip(found[f"{kind} True"], ends_of(each), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_files_are_safetensors_and_nothing_else(halves) -> None:
    files = sorted(file.name for file in (Path(halves("tied")[0]) / "tied-edited").iterdir())
    assert files == [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)]


def test_rows_in_files_are_not_read_past_their_log(tmp_path) -> None:
    table = MappedEmbedding.create(tmp_path / "rows", 20, 4)
    with pytest.raises(SizeError, match="weight has its rows in a folder of their own"):
        distributed_state(table, RowAdamW(table.parameters()))
