"""Time until a compiled kernel is ready: at its first use on a machine, and at the first use in a later process.

A fresh process uses every operation that has kernels, in float32 and bfloat16, with an empty cache folder; a second one
with the folder that the first one filled.
"""

import logging
import tempfile

import torch

from benchmarks.harness import Case, Row, run_apart, tell
from embedlayer.heads.output import OutputHead
from embedlayer.inputs.embedding import TransformerEmbedding
from embedlayer.losses import ForwardKL, JensenShannon, ReverseKL, divergence
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.row_sparse import RowSparseEmbedding

PROCESS = "from benchmarks.kernels import report_times; report_times()"


def use_all(dtype: torch.dtype) -> None:
    """Use every operation that has kernels with tensors of this dtype, large enough for them."""
    ids = torch.randint(0, 1000, (8, 512))
    for interleaved in (False, True):
        x = torch.randn(1, 16, 1024, 64).to(dtype)
        RotaryEmbedding(64, interleaved=interleaved).rotate(x, x, torch.arange(1024))
    for row_sparse in (False, True):
        table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(1000, 256, dtype=dtype)
        layer = TransformerEmbedding(1000, 256, 512, table=table).to(dtype)
        layer(ids).sum().backward()
        with torch.no_grad():
            layer.eval()(ids)
    optimizer = RowAdamW(table.parameters())
    for _ in range(3):
        table(ids).sum().backward()
        optimizer.step()
    optimizer.apply_pending_updates()
    for bits in (8, 4):
        QuantizedEmbedding.from_table(table.weight.detach(), bits, dtype=dtype)(ids)
    heads = [OutputHead(TokenEmbedding(5000, 64, dtype=dtype)) for _ in range(2)]
    hidden = torch.randn(600, 64).to(dtype).requires_grad_()
    heads[0].loss(hidden, torch.randint(0, 5000, (600,))).backward()
    found = heads[0].token_statistics(hidden, top_k=3, statistics=("entropy", "sum_squared_probs"))
    assert found.entropy is not None
    found.entropy.sum().backward()
    for kind in (ForwardKL(), ReverseKL(), JensenShannon()):
        student, teacher = (head.uncomputed_logits(hidden) for head in heads)
        divergence(student, teacher, kind).backward()


def report_times() -> None:
    """Print the seconds until each kernel was ready in this process, by kernel and dtype."""
    found: dict[str, float] = {}

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.DEBUG and isinstance(record.args, tuple) and len(record.args) == 3:
                module, name, seconds = record.args
                found[f"{module}.{name} {dtype}"] = found.get(f"{module}.{name} {dtype}", 0.0) + float(str(seconds))

    log = logging.getLogger("embedlayer")
    log.setLevel(logging.DEBUG)
    log.addHandler(Collect())
    for dtype in ("float32", "bfloat16"):
        use_all(getattr(torch, dtype))
    tell(**found)


def run() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiled", "read from the cache"):
            times = run_apart(PROCESS, environment={"NUMBA_CACHE_DIR": folder})
            del times["peak_mib"]
            for kernel, seconds in times.items():
                name, _, dtype = kernel.partition(" ")
                rows.append({"kernel": name, "dtype": dtype, "what": what, "time_ms": round(1000 * float(seconds), 1)})
    return rows


CASE = Case("Time until a compiled kernel is ready", run)
