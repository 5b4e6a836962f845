"""Tables in files look up what tables in memory do, train like them, and survive kill -9 at any moment."""

import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from covering import some
from processes import on_ranks
from row_rules import RULES, train
from safetensors.torch import save_file
from torch import nn

import embedlayer as el
from embedlayer.core.errors import CheckpointError, FileError, SizeError, TokenIdError
from embedlayer.io.safetensors_files import encode_header
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.tables.stored.mapped import MappedEmbedding


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(50, 6)


@pytest.fixture
def file(tmp_path, rows) -> Path:
    save_file({"wte.weight": rows, "other": torch.ones(3)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("kernels", [True, False])
def test_look_ups_are_those_of_a_table_in_memory(tmp_path, dtype, width, kernels) -> None:
    rows, ids = torch.randn(50, width).to(dtype), torch.randint(50, (3, 9))
    save_file({"bias": torch.ones(1, dtype=torch.uint8), "weight": rows}, tmp_path / "model.safetensors")
    save_file({"only": rows}, tmp_path / "only.safetensors")
    named = {"padding_idx": -47, "scale": "sqrt_dim"}
    for name, tensor, options in (("only", None, {}), ("model", "weight", named)):
        table = MappedEmbedding.open(tmp_path / f"{name}.safetensors", tensor, **options)
        memory = el.TokenEmbedding.from_pretrained(rows, **options)
        if kernels:
            assert torch.equal(table(ids), memory(ids))
            assert torch.equal(table(ids.int()), memory(ids))
        else:
            with kernels_disabled():
                assert torch.equal(table(ids), memory(ids))
        assert torch.equal(table.rows(2, 9), memory.weight[2:9])
        assert torch.equal(table.rows(40, 99), memory.weight[40:])
        assert table(ids[:0]).shape == (0, 9, width)


def test_the_vectors_follow_the_module_and_the_rows_do_not(file, rows) -> None:
    table = nn.Sequential(MappedEmbedding.open(file, "wte.weight"))
    assert table.bfloat16()([[1, 2]]).dtype == torch.bfloat16
    assert table.double()([[1, 2]]).dtype == torch.float64
    assert torch.equal(deepcopy(table)([3]), rows[[3]].double())
    assert torch.equal(pickle.loads(pickle.dumps(table))([3]), rows[[3]].double())
    assert table.to("meta")(torch.tensor([1])).is_meta
    assert not table.state_dict()
    assert not list(table.parameters())


def test_bad_ids_and_closed_tables_raise(file) -> None:
    with MappedEmbedding.open(file, "wte.weight") as table:
        with pytest.raises(TokenIdError, match="token id 50 at row 0, column 1"):
            table([[1, 50]])
        with pytest.raises(TokenIdError):
            table.prefetch([[1, -1]])
    for use in (table, table.prefetch):
        with pytest.raises(FileError):
            use([1])


def test_rows_are_not_loaded_into_a_read_only_table(file, rows) -> None:
    table = nn.Sequential(MappedEmbedding.open(file, "wte.weight"))
    table.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        table.load_state_dict({"0.weight": rows})


def test_a_prefetched_batch_is_used_and_another_one_is_read(file, rows) -> None:
    table = MappedEmbedding.open(file, "wte.weight", padding_idx=3)
    for ids in ([[1, 2, 3]], [[4, 4, 3]]):
        table.prefetch([[1, 2, 3]])
        assert torch.equal(table(ids), rows[torch.tensor(ids)])
    table.close()


def test_graphs_contain_one_look_up(file, rows, unchecked) -> None:
    table, ids = MappedEmbedding.open(file, "wte.weight"), torch.tensor([[1, 2], [2, 49]])
    compiled = torch.compile(table, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids), rows[ids])
    assert torch.equal(torch.func.vmap(table)(ids), rows[ids])


@pytest.mark.parametrize(
    ("open_it", "error"),
    [
        (lambda file: MappedEmbedding.open(file), CheckpointError),  # of two tensors
        *((lambda file, name=name: MappedEmbedding.open(file, name), CheckpointError) for name in ("lm_head", "other")),
        (lambda file: MappedEmbedding.open(file.parent / "none"), FileError),
        (lambda file: MappedEmbedding.open(file, "weight", padding_idx=50), SizeError),
        (lambda file: MappedEmbedding.open(file, "weight").requires_grad_(), SizeError),
        (lambda file: MappedEmbedding.open(file, "weight").checkpoint().__enter__(), SizeError),
        (lambda file: MappedEmbedding.resume(file.parent), FileError),
        (lambda file: MappedEmbedding.create(file.parent / "new", 0, 4), SizeError),
        (lambda file: MappedEmbedding.create(file.parent / "new", 5, 4, dtype=torch.int8), SizeError),
        (lambda file: MappedEmbedding.create(file, 5, 4), FileError),
    ],
)
def test_what_cannot_be_is_refused(file, open_it, error) -> None:
    with pytest.raises(error):
        open_it(file)


def test_a_saved_layer_refers_to_the_file_of_a_read_only_table(tmp_path, file, rows) -> None:
    layer = el.TransformerEmbedding(50, 6, 8, dropout=0.0, table=MappedEmbedding.open(file, "wte.weight", scale=2.0))
    layer.save_pretrained(tmp_path / "saved")
    saved = el.TransformerEmbedding.from_pretrained(tmp_path / "saved")
    assert isinstance(saved.table, MappedEmbedding)
    assert torch.equal(saved([[1, 2]]), layer([[1, 2]]))
    with pytest.raises(CheckpointError):
        MappedEmbedding.from_config({**saved.table.config, "foo": 1})
    save_file({"wte.weight": rows[:40]}, file)
    with pytest.raises(CheckpointError):
        el.TransformerEmbedding.from_pretrained(tmp_path / "saved")
    file.unlink()
    with pytest.raises(FileError):
        el.TransformerEmbedding.from_pretrained(tmp_path / "saved")


def test_a_trained_table_is_saved_as_a_table_in_memory_and_loads_its_rows(tmp_path) -> None:
    options = {"padding_idx": 2, "scale": 3.0}
    torch.manual_seed(0)
    memory = el.RowSparseEmbedding(50, 6, **options)
    torch.manual_seed(0)
    with MappedEmbedding.create(tmp_path / "rows", 50, 6, init_std=0.02, **options) as table:
        assert torch.equal(table.weight, memory.weight)
        table.save_pretrained(tmp_path / "saved")
        saved = el.RowSparseEmbedding.from_pretrained(tmp_path / "saved")
        assert saved.config == memory.config
        assert torch.equal(saved.weight, memory.weight)
        table.reset_parameters()
        assert not torch.equal(table.weight, memory.weight)
        table.load_state_dict(saved.state_dict())
        assert torch.equal(table.weight, memory.weight)
        with pytest.raises(RuntimeError, match="size mismatch"):
            table.load_state_dict({"weight": torch.ones(50, 7)})
        with pytest.raises(RuntimeError, match="Missing key"):
            table.load_state_dict({})
        for copy in (deepcopy, pickle.dumps):
            with pytest.raises(SizeError):
                copy(nn.Sequential(table))
        table.half()
        assert table.weight.dtype == torch.float32
        assert table([1]).dtype == torch.float16
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        assert torch.equal(table.weight, memory.weight)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_training_in_a_folder_and_resuming_equals_training_in_memory(tmp_path, name, kernels) -> None:
    if not kernels:
        with kernels_disabled():
            compare_with_memory(tmp_path, RULES[name])
    else:
        compare_with_memory(tmp_path, RULES[name])


def compare_with_memory(folder: Path, optimizer_of: Callable) -> None:
    torch.manual_seed(0)
    memory = el.RowSparseEmbedding(40, 3, padding_idx=1, init_std=1.0)
    torch.manual_seed(0)
    table = MappedEmbedding.create(folder / "rows", 40, 3, padding_idx=1, init_std=1.0, max_resident_bytes=0)
    expected, optimizer = optimizer_of(memory.parameters()), optimizer_of(table.parameters())
    train(memory, expected, range(6))
    train(table, optimizer, range(3))
    with table.checkpoint() as generation:
        pass
    train(table, optimizer, range(3, 5))
    table.close()
    with MappedEmbedding.resume(folder / "rows", generation) as table:
        optimizer = optimizer_of(table.parameters())
        train(table, optimizer, range(3, 6))
        found, wanted = optimizer.state_dict()["state"][0], expected.state_dict()["state"][0]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert torch.equal(table.weight, memory.weight)


def run(folder: Path, steps: int = 4) -> list[torch.Tensor]:
    """Train a table from where it is, with a checkpoint every other step, and return its rows and state."""
    said = folder.with_suffix(".json")
    if said.exists():
        state = json.loads(said.read_text())
        table, first = MappedEmbedding.resume(folder, state["generation"]), state["step"]
    else:
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(0)
        table, first = MappedEmbedding.create(folder, 40, 3, padding_idx=1, init_std=1.0), 0
    optimizer = el.RowAdamW(table.parameters(), lr=0.1)
    for step in range(first, steps):
        train(table, optimizer, range(step, step + 1))
        if step % 2:
            with table.checkpoint() as generation:
                said.with_suffix(".new").write_text(json.dumps({"step": step + 1, "generation": generation}))
                said.with_suffix(".new").replace(said)
    pending, stored = table.weight.pending_updates, table.source.folder("test").weight
    numbers = [each.clone() for each in (stored, *pending.moments, *pending.state()[0].values())]
    table.close()
    return numbers


def run_until_line(folder: Path, line: int) -> int | None:
    """Run in a forked process that kills itself before it executes so many lines, and return how many it executed.

    The result is `None` if it was killed. Lines are those of the modules that write rows or files.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader, "rb") as result:
            told = result.read()
        status = os.waitpid(child, 0)[1]
        assert told or os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        return int(told) if told else None
    executed = 0
    modules = "row_folder folder_files undo_log mapped_rows files safetensors_files pending_updates row_sparse/storage"
    files = tuple(f"{module}.py" for module in modules.split())
    code_is_counted: dict[object, bool] = {}

    def trace(frame, event, _):
        nonlocal executed
        code = frame.f_code
        if code not in code_is_counted:
            code_is_counted[code] = code.co_filename.endswith(files)
        if not code_is_counted[code]:
            return None
        executed += 1
        if executed >= line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    try:
        sys.settrace(trace)
        run(folder)
        sys.settrace(None)
        os.write(writer, str(executed).encode())
    finally:
        os._exit(1)


def kill_everywhere(folder: str, kills: int) -> int:
    """Kill a run and the run that resumes it, at `kills` places each, and compare the end with an undisturbed run."""
    with kernels_disabled():  # their lines cannot be counted
        expected = run(Path(folder) / "undisturbed")
        lines = run_until_line(Path(folder) / "counted", 1 << 40)
        assert lines is not None
        for number in range(kills):
            target = Path(folder) / f"killed-{number}"
            run_until_line(target, 1 + (2 * number + 1) * lines // (2 * kills))
            run_until_line(target, 1 + (number * 389) % (lines // 2))
            assert all(map(torch.equal, run(target), expected)), number
    return kills


@pytest.mark.parametrize("kills", some([6], [6, 24]))
def test_a_run_that_is_killed_anywhere_and_resumed_ends_where_an_undisturbed_one_does(tmp_path, kills) -> None:
    assert on_ranks(1, kill_everywhere, str(tmp_path), kills) == [kills]


def added_mib(path: str) -> float:
    """Look up 60,000 random rows of a file, and return the most resident memory that this added at any time.

    Each row is in 4 KiB of its own, 234 MiB in all.
    """

    def resident(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

    table = MappedEmbedding.open(path)
    table([0])  # imports numba
    before = resident("Rss")
    Path("/proc/self/clear_refs").write_text("5")
    for batch in torch.randint(table.vocab_size, (60_000,)).split(6_000):
        table(batch)
    return resident("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_look_ups_in_a_file_of_100_gb_need_little_memory(tmp_path) -> None:
    shape = (50_000_000, 512)
    header = encode_header({"rows": (torch.float32, shape, 102_400_000_000)}, {})
    (tmp_path / "rows.safetensors").write_bytes(header)
    try:
        os.truncate(tmp_path / "rows.safetensors", len(header) + 102_400_000_000)
    except OSError:
        pytest.skip("this file system has no files of 100 GB with holes")
    assert 0 < on_ranks(1, added_mib, str(tmp_path / "rows.safetensors"))[0] < 200


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of the vectors
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_fused_layer_and_a_compiled_one_train_the_folder(tmp_path, unchecked, compiled) -> None:
    with MappedEmbedding.create(tmp_path / "rows", 40, 6, init_std=1.0) as table:
        layer = el.TransformerEmbedding(40, 6, 8, dropout=0.0, table=table)
        optimizer = el.RowAdamW(layer.parameters(), lr=0.1)
        before = table.weight.detach().clone()
        run = torch.compile(layer, backend="eager") if compiled else layer
        for _ in range(2):
            optimizer.zero_grad()
            run(torch.tensor([[1, 2, 3]])).square().sum().backward()
            optimizer.step()
        changed = (table.weight.detach() != before).any(1)
        assert bool(changed[1:4].all())
        assert torch.equal(table([5]), F.embedding(torch.tensor([5]), table.weight))
