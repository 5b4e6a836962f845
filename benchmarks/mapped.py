"""Tables in files: look-ups beside `F.embedding` in memory, training steps beside tables of other sizes and in memory.

Look-ups: 8,192 Zipf tokens of a table of 1 GB whose file is in the system's page cache. Here the default of
`max_resident_bytes` means no limit; with one below the size of the rows in use, pages are mapped again and again.

Steps: 2,048 Zipf tokens of 1 M rows, the same batches for every table, so that a step of the table of 100 M rows reads
and writes the same rows. Before *later steps* are timed, every batch was trained on twice. A *first step* finds none of
the pages of its new rows in memory. In steps with *every row logged* a checkpoint came before each step, outside the
time; in other steps rows are logged only the first time. *Spread* batches are the same with the IDs times 100: each row
is then on a page of its own in the files of the table of 100 M rows.

The log: its bytes after steps, beside those of the rows that changed, values and state.
"""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.harness import Case, Row, milliseconds, spread, time_alternately
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.optim.row_state import ElementwiseMoments, RowState, RowwiseSecondMoment
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.stored.mapped import MappedEmbedding

LOOKED_UP, STEPPED = (500_000, 512), 16
MILLION, MOST = 1_000_000, 100_000_000
TOKENS_LOOKED_UP, TOKENS, BATCHES, ROUNDS = 8192, 2048, 32, 31
LOG_OFF, LOG_ON, ALL_LOGGED = "log off", "log on", "log on, every row logged"


def batches_of(vocab_size: int, tokens: int) -> list[Tensor]:
    """Batches of Zipf tokens; the tokens are shuffled, so that frequent ones are not neighbours in the file."""
    torch.manual_seed(0)
    chances = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    ranks = torch.multinomial(chances, BATCHES * tokens, replacement=True)
    return list(torch.randperm(vocab_size)[ranks].split(tokens))


def look_ups(folder: Path) -> list[Row]:
    rows, batches = torch.randn(LOOKED_UP), batches_of(LOOKED_UP[0], TOKENS_LOOKED_UP)
    file = folder / "model.safetensors"
    save_file({"weight": rows}, file)
    unlimited, limited = MappedEmbedding.open(file), MappedEmbedding.open(file, max_resident_bytes=1 << 27)
    with safe_open(file, framework="np") as opened:
        stored = opened.get_slice("weight")

        def peer(ids: Tensor) -> object:
            return [stored[int(row) : int(row) + 1] for row in ids[:256]]

        competitors: dict[str, Callable[[Tensor], object]] = {
            "F.embedding in memory": lambda ids: F.embedding(ids, rows),
            "MappedEmbedding": unlimited,
            "MappedEmbedding(max_resident_bytes=128 MiB)": limited,
            "safetensors get_slice, 1/32 of the rows": peer,
        }
        times = time_alternately(
            {name: each_batch(call, batches) for name, call in competitors.items()}, rounds=ROUNDS, warmup=BATCHES
        )
    return compared(f"{TOKENS_LOOKED_UP:,} of {LOOKED_UP[0]:,} rows, width {LOOKED_UP[1]}", times)


def compared(what: str, found: dict[str, Row]) -> list[Row]:
    """Rows for the results: times or sizes, and each beside the first."""
    (unit,) = {"time_ms", "mib"} & next(iter(found.values())).keys()
    first = float(next(iter(found.values()))[unit])
    return [
        {"what": what, "competitor": name, **row, "times_first": round(float(row[unit]) / first, 2)}
        for name, row in found.items()
    ]


def each_batch(call: Callable[[Tensor], object], batches: list[Tensor]) -> Callable[[], object]:
    """A call on the next batch."""
    turns = iter(range(1 << 30))
    return lambda: call(batches[next(turns) % len(batches)])


def step_of(table: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """A step on a batch."""
    upstream = torch.full((TOKENS, STEPPED), 1e-3)

    def step(ids: Tensor) -> None:
        table(ids).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Trained:
    """A mapped table that is trained, with or without its log."""

    def __init__(self, folder: Path, vocab_size: int, log: str, state: RowState | None = None) -> None:
        self.table = MappedEmbedding.create(folder, vocab_size, STEPPED, max_resident_bytes=None)
        self.vocab_size, self.log, self.folder = vocab_size, log, self.table.source.folder("measure")
        optimizer = RowAdamW(self.table.parameters(), state=state or ElementwiseMoments())
        self.step = step_of(self.table, optimizer)
        self.step(torch.zeros(TOKENS, dtype=torch.long))
        with self.table.checkpoint():  # from here on the log has the state too
            pass
        if log == LOG_OFF:
            self.folder.before_write = lambda rows: None  # type: ignore[method-assign]

    def time(self, ids: Tensor) -> float:
        """Milliseconds of a step, after a checkpoint if every row is to be logged."""
        if self.log == ALL_LOGGED:
            with self.table.checkpoint():
                pass
        return milliseconds(lambda: self.step(ids))


def time_steps(competitors: dict[str, Callable[[Tensor], float]], batches: list[Tensor]) -> dict[str, dict[str, Row]]:
    """Time first steps on each batch, and later ones; competitors run in turns."""
    found: dict[str, dict[str, Row]] = {}
    for when in ("first steps", "", "later steps"):
        samples: dict[str, list[float]] = {name: [] for name in competitors}
        gc.collect()
        for ids in batches:
            for name, time in competitors.items():
                samples[name].append(time(ids))
        if when:
            found[when] = {name: spread(times) for name, times in samples.items()}
    return found


def steps(folder: Path) -> list[Row]:
    batches = batches_of(MILLION, TOKENS)
    kinds = [(MILLION, LOG_OFF), (MILLION, LOG_ON), (MILLION, ALL_LOGGED), (MOST, LOG_ON)]
    mapped = {
        f"MappedEmbedding {size // MILLION} M, {log}": Trained(folder / f"{size}-{log}", size, log)
        for size, log in kinds
    }
    rowwise = RowwiseSecondMoment(first_moment=torch.bfloat16)
    name = "MappedEmbedding 100 M, log on, row-wise state"
    mapped[name] = Trained(folder / "rowwise", MOST, LOG_ON, rowwise)
    competitors: dict[str, Callable[[Tensor], float]] = {name: each.time for name, each in mapped.items()}
    memory = RowSparseEmbedding(MILLION, STEPPED, init_std=0.0)
    in_memory = step_of(memory, RowAdamW(memory.parameters()))
    competitors["TokenEmbedding 1 M in memory, RowAdamW"] = lambda ids: milliseconds(lambda: in_memory(ids))
    peer = nn.Embedding.from_pretrained(torch.zeros(MILLION, STEPPED), freeze=False, sparse=True)
    sparse = step_of(peer, torch.optim.SparseAdam(peer.parameters()))
    name = "nn.Embedding(sparse) 1 M in memory, SparseAdam"  # 100 M take 19.2 GB
    competitors[name] = lambda ids: milliseconds(lambda: sparse(ids))
    times = time_steps(competitors, batches)
    spread_out = [ids * (MOST // MILLION) for ids in batches]
    only = {f"{name}, spread": competitors[name] for name in competitors if " 100 M" in name}
    for when, more in time_steps(only, spread_out).items():
        times[when] |= more
    found = [row for when, each in times.items() for row in compared(f"{when}, {TOKENS:,} tokens", each)]
    return found + log_sizes(folder, batches)


def log_sizes(folder: Path, batches: list[Tensor]) -> list[Row]:
    """Bytes of the log after steps, beside those of the rows that changed."""
    trained = Trained(folder / "log", MILLION, LOG_ON)
    for ids in batches:
        trained.step(ids)
    rows = len(torch.cat(batches).unique())
    row_bytes = 3 * STEPPED * 4 + 2 * 4
    log = (trained.folder.path / "undo.log").stat().st_size
    sizes = {f"{rows:,} rows that changed": rows * row_bytes, "the log": log}
    return compared(
        f"bytes, {len(batches)} steps", {name: {"mib": round(size / 2**20, 2)} for name, size in sizes.items()}
    )


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "steps").mkdir()
        return look_ups(Path(folder)) + steps(Path(folder) / "steps")


CASE = Case("Tables in files: look-ups, steps and the log", run)
