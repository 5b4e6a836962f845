"""A training step with less optimizer state: `RowAdamW` beside its row-wise rules and `RowAdagrad`; 2,048 Zipf tokens.

The tables are 10,000 steps old, as in `row_adamw`. The bytes are those of the tensors, step numbers included, divided
by the number of rows; `times_adam` compares them with the 8 D bytes of Adam's two moments. `bfloat16` is the dtype of
the first moments; the table is float32.
"""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import Case, Row, time_alternately
from benchmarks.row_adamw import FRESH_BATCHES, TOKENS, WARMUP, Setting, aged, step_of, zipf
from embedlayer.optim import RowwiseSecondMoment
from embedlayer.optim.row_adagrad import RowAdagrad
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.optim.row_optimizer import RowOptimizer

ADAMW = "RowAdamW"
RULES: dict[str, Callable[[list[nn.Parameter]], RowOptimizer]] = {
    ADAMW: RowAdamW,
    "RowAdamW, RowwiseSecondMoment()": lambda p: RowAdamW(p, state=RowwiseSecondMoment()),
    "RowAdamW, RowwiseSecondMoment(bfloat16)": lambda p: RowAdamW(p, state=RowwiseSecondMoment(torch.bfloat16)),
    "RowAdamW, RowwiseSecondMoment(None)": lambda p: RowAdamW(p, state=RowwiseSecondMoment(None)),
    "RowAdagrad": lambda p: RowAdagrad(p, weight_decay=1e-2),
}
SETTINGS = (
    Setting("GPT-2", 50_257, 768, (), rounds=25),
    Setting("Llama 3.2 1B", 128_256, 2048, (), rounds=25),
)


def measure(setting: Setting) -> list[Row]:
    torch.manual_seed(0)
    batches = list(torch.multinomial(zipf(setting.vocab_size), FRESH_BATCHES * TOKENS, replacement=True).split(TOKENS))
    runs = {name: aged(setting, build) for name, build in RULES.items()}
    steps = {name: step_of(table, optimizer, batches) for name, (table, optimizer) in runs.items()}
    times = time_alternately(steps, rounds=setting.rounds, warmup=WARMUP)
    rows: list[Row] = []
    for name, (table, optimizer) in runs.items():
        state = (optimizer.state_bytes() - optimizer.state[table.weight]["step"].nbytes) / setting.vocab_size
        rows.append(
            {
                "competitor": name,
                "model": setting.model,
                "vocab_size": setting.vocab_size,
                "embed_dim": setting.embed_dim,
                "tokens": TOKENS,
                "dtype": "float32",
                **times[name],
                "times_row_adamw": round(float(times[name]["time_ms"]) / float(times[ADAMW]["time_ms"]), 2),
                "state_bytes_per_row": round(state, 2),
                "times_adam": round(state / (8 * setting.embed_dim), 4),
            }
        )
    return rows


def run() -> list[Row]:
    return [row for setting in SETTINGS for row in measure(setting)]


CASE = Case("One step of a token table by rule of the optimizer state: time, and bytes of state a row", run)
