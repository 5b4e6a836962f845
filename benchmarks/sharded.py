"""A training step of a table on two processes: look-up of 1,024 Zipf tokens on each, backward, optimizer.

Ours divides the rows by `shard_table`, with row-sparse gradients and `RowAdamW`. Beside it stand an `nn.Embedding`
under `DistributedDataParallel`, whose dense gradient is summed over the network, and one that torch divides by
`RowwiseParallel`, where every rank looks up the tokens of all and the vectors are summed; both with fused AdamW.

The processes talk through gloo on one machine. What a rank sends is read from the machine's network counters, so it
holds all that the engine adds.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Case, Row, spread
from benchmarks.row_adamw import zipf

RANKS = 2
TOKENS = 1024
SETTINGS = {"GPT-2": (50_257, 768), "Llama 3.2 1B": (128_256, 2048)}
ROUNDS, WARMUP = 9, 3
Step = Callable[[Tensor], None]


def ours(vocab_size: int, embed_dim: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    from embedlayer import RowAdamW, TokenEmbedding, shard_table

    mesh = init_device_mesh("cpu", (RANKS,))
    table = shard_table(TokenEmbedding(vocab_size, embed_dim, row_sparse=True), mesh)
    optimizer = RowAdamW(table.parameters())
    return step_of(table, optimizer, embed_dim)


def data_parallel(vocab_size: int, embed_dim: int) -> Step:
    table = nn.parallel.DistributedDataParallel(nn.Embedding(vocab_size, embed_dim))
    return step_of(table, torch.optim.AdamW(table.parameters(), fused=True), embed_dim)


def rowwise_parallel(vocab_size: int, embed_dim: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    table = nn.Embedding(vocab_size, embed_dim)
    parallelize_module(table, mesh, RowwiseParallel(input_layouts=Replicate()))
    optimizer = torch.optim.AdamW(table.parameters(), fused=True)
    upstream = torch.full((RANKS * TOKENS, embed_dim), 1e-3)

    def step(ids: Tensor) -> None:
        everybody = [torch.empty_like(ids) for _ in range(RANKS)]
        dist.all_gather(everybody, ids)
        table(torch.cat(everybody)).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of(table: nn.Module, optimizer: torch.optim.Optimizer, embed_dim: int) -> Step:
    """One step on a rank's own tokens."""
    upstream = torch.full((TOKENS, embed_dim), 1e-3)

    def step(ids: Tensor) -> None:
        table(ids).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return step


COMPETITORS = {
    "embedlayer shard_table, RowAdamW": ours,
    "nn.Embedding, DistributedDataParallel": data_parallel,
    "nn.Embedding, RowwiseParallel": rowwise_parallel,
}


def sent_bytes() -> int:
    """What this machine has sent so far, by its own counters."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def on_this_rank(competitor: str, model: str) -> None:
    """What each process does; rank 0 prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = SETTINGS[model]
    step = COMPETITORS[competitor](*sizes)
    torch.manual_seed(1 + dist.get_rank())
    batches = torch.multinomial(zipf(sizes[0]), (ROUNDS + WARMUP) * TOKENS, replacement=True).split(TOKENS)
    times = []
    for number, ids in enumerate(batches):
        if number == WARMUP:
            dist.barrier()
            before = sent_bytes()
        start = time.perf_counter()
        step(ids)
        times.append(1000 * (time.perf_counter() - start))
    dist.barrier()
    mib = (sent_bytes() - before) / (ROUNDS * RANKS * 2**20)
    if dist.get_rank() == 0:
        print(json.dumps({**spread(times[WARMUP:]), "sent_mib": round(mib, 2)}))
    dist.destroy_process_group()


def run() -> list[Row]:
    rows: list[Row] = []
    for model, (vocab_size, embed_dim) in SETTINGS.items():
        found = {competitor: measured(competitor, model) for competitor in COMPETITORS}
        fastest = float(found[next(iter(COMPETITORS))]["time_ms"])
        rows += [
            {
                "competitor": competitor,
                "model": model,
                "vocab_size": vocab_size,
                "embed_dim": embed_dim,
                "ranks": RANKS,
                "tokens": TOKENS,
                "dtype": "float32",
                **numbers,
                "times_ours": round(float(numbers["time_ms"]) / fastest, 2),
            }
            for competitor, numbers in found.items()
        ]
    return rows


def measured(competitor: str, model: str) -> Row:
    """One competitor, in processes of its own: they cannot take turns with another's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks.sharded", competitor, model],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"The measured processes failed:\n{done.stderr}")
    numbers: Row = json.loads(done.stdout.splitlines()[-1])
    return numbers


CASE = Case("One step of a table on two processes: look-up, backward, optimizer; what a rank sends", run)

if __name__ == "__main__":
    on_this_rank(*sys.argv[1:])
