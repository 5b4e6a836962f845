"""A table on two processes: a training step of the input end, and the loss of the output end with its gradients.

The input: look-up of 1,024 Zipf tokens on each process, backward, optimizer. Ours divides the rows by `shard_table`,
with row-sparse gradients and `RowAdamW`. Beside it stand an `nn.Embedding` under `DistributedDataParallel`, whose dense
gradient is summed over the network, and one that torch divides by `RowwiseParallel`, where every rank looks up the
tokens of all and the vectors are summed; both with fused AdamW.

The output: cross entropy of 256 tokens on each, and backward. Ours is `ShardedTable.loss`. Beside it stand a whole
`nn.Linear` under `DistributedDataParallel`, and one that torch divides by `ColwiseParallel` under `loss_parallel`, for
which the hidden states of all are gathered.

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
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Case, Row, spread
from benchmarks.row_adamw import zipf

RANKS = 2
SETTINGS = {"GPT-2": (50_257, 768), "Llama 3.2 1B": (128_256, 2048)}
TOKENS = {"training step of the table": 1024, "loss and its gradients": 256}
ROUNDS, WARMUP = 9, 3
Step = Callable[[Tensor], None]


def ours(vocab_size: int, embed_dim: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    from embedlayer import RowAdamW, RowSparseEmbedding
    from embedlayer.distributed import shard_table

    mesh = init_device_mesh("cpu", (RANKS,))
    table = shard_table(RowSparseEmbedding(vocab_size, embed_dim), mesh)
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
    upstream = torch.full((RANKS * TOKENS[STEP], embed_dim), 1e-3)

    def step(ids: Tensor) -> None:
        table(of_all(ids)).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of(table: nn.Module, optimizer: torch.optim.Optimizer, embed_dim: int) -> Step:
    """One step on a rank's own tokens."""
    upstream = torch.full((TOKENS[STEP], embed_dim), 1e-3)

    def step(ids: Tensor) -> None:
        table(ids).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_all(part: Tensor) -> Tensor:
    """The parts of all ranks."""
    everybody = [torch.empty_like(part) for _ in range(RANKS)]
    dist.all_gather(everybody, part)
    return torch.cat(everybody)


def our_loss(vocab_size: int, embed_dim: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    from embedlayer import TokenEmbedding
    from embedlayer.distributed import shard_table

    mesh = init_device_mesh("cpu", (RANKS,))
    with torch.device("meta"):
        rows = TokenEmbedding(vocab_size, embed_dim)
    table = shard_table(rows, mesh)

    def step(targets: Tensor) -> None:
        table.loss(states(targets, embed_dim), targets).backward()
        table.zero_grad()

    return step


def loss_of_all_rows(vocab_size: int, embed_dim: int) -> Step:
    head = nn.parallel.DistributedDataParallel(nn.Linear(embed_dim, vocab_size, bias=False))

    def step(targets: Tensor) -> None:
        F.cross_entropy(head(states(targets, embed_dim)), targets).backward()
        head.zero_grad()

    return step


def loss_parallel(vocab_size: int, embed_dim: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    head = nn.Linear(embed_dim, vocab_size, bias=False)
    plan = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, init_device_mesh("cpu", (RANKS,)), plan)

    def step(targets: Tensor) -> None:
        everybody = of_all(states(targets, embed_dim).detach()).requires_grad_()
        with loss_parallel():
            F.cross_entropy(head(everybody), of_all(targets)).backward()
        head.zero_grad()

    return step


def states(targets: Tensor, embed_dim: int) -> Tensor:
    """Hidden states, of the size that a norm gives them."""
    return torch.randn(len(targets), embed_dim, requires_grad=True)


STEP, LOSS = TOKENS
COMPETITORS = {
    STEP: {
        "embedlayer shard_table, RowAdamW": ours,
        "nn.Embedding, DistributedDataParallel": data_parallel,
        "nn.Embedding, RowwiseParallel": rowwise_parallel,
    },
    LOSS: {
        "embedlayer ShardedTable.loss": our_loss,
        "nn.Linear, DistributedDataParallel": loss_of_all_rows,
        "nn.Linear, ColwiseParallel, loss_parallel": loss_parallel,
    },
}


def sent_bytes() -> int:
    """What this machine has sent so far, by its own counters."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def on_this_rank(what: str, competitor: str, model: str) -> None:
    """What each process does; rank 0 prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = SETTINGS[model]
    step, tokens = COMPETITORS[what][competitor](*sizes), TOKENS[what]
    torch.manual_seed(1 + dist.get_rank())
    batches = torch.multinomial(zipf(sizes[0]), (ROUNDS + WARMUP) * tokens, replacement=True).split(tokens)
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
    for what, model in [(STEP, "GPT-2"), (STEP, "Llama 3.2 1B"), (LOSS, "GPT-2")]:
        vocab_size, embed_dim = SETTINGS[model]
        found = {competitor: measured(what, competitor, model) for competitor in COMPETITORS[what]}
        ours_ms = float(found[next(iter(found))]["time_ms"])
        rows += [
            {
                "what": what,
                "competitor": competitor,
                "model": model,
                "vocab_size": vocab_size,
                "embed_dim": embed_dim,
                "ranks": RANKS,
                "tokens": TOKENS[what],
                "dtype": "float32",
                **numbers,
                "times_ours": round(float(numbers["time_ms"]) / ours_ms, 2),
            }
            for competitor, numbers in found.items()
        ]
    return rows


def measured(what: str, competitor: str, model: str) -> Row:
    """One competitor, in processes of its own: they cannot take turns with another's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks.sharded", what, competitor, model],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"The measured processes failed:\n{done.stderr}")
    numbers: Row = json.loads(done.stdout.splitlines()[-1])
    return numbers


CASE = Case("A table on two processes: a step of the input end, the loss of the output end; what a rank sends", run)

if __name__ == "__main__":
    on_this_rank(*sys.argv[1:])
