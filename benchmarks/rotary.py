"""Rotary positions as a model calls them: angles of a forward pass once, then queries and keys of all blocks.

transformers does the same with `LlamaRotaryEmbedding` and `apply_rotary_pos_emb`. Without `prepare`, angles are
computed in every block. They are timed for a single block of a large model, with all threads; and with one thread for
reading a text and for one step of cached decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.positions.rotary.embedding import RotaryEmbedding


@dataclass(frozen=True)
class Setting:
    """Sizes of a model and of one call."""

    what: str
    tokens: int
    calls: int
    start: int = 0
    blocks: int = 24
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    dtype: torch.dtype = torch.float32


WHOLE_CALLS = (
    Setting("whole call", tokens=1024, calls=1, blocks=1, kv_heads=32, head_dim=128),
    Setting("whole call", tokens=1024, calls=1, blocks=1, kv_heads=32, head_dim=128, dtype=torch.bfloat16),
)
SETTINGS = (
    Setting("reading a text", tokens=512, calls=1),
    Setting("one step of cached decoding", tokens=1, start=700, calls=50),
)


def measure(setting: Setting) -> list[Row]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    heads, kv_heads, width = setting.heads, setting.kv_heads, setting.head_dim
    config = LlamaConfig(
        hidden_size=heads * width, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width
    )
    theirs, ours = LlamaRotaryEmbedding(config), RotaryEmbedding(width)
    torch.manual_seed(0)
    q, k = (torch.randn(1, setting.tokens, n, width).to(setting.dtype).transpose(1, 2) for n in (heads, kv_heads))
    positions = torch.arange(setting.start, setting.start + setting.tokens)

    def transformers() -> torch.Tensor:
        cos, sin = theirs(q, positions[None])
        for _ in range(setting.blocks):
            last: torch.Tensor = apply_rotary_pos_emb(q, k, cos, sin)[0]
        return last

    def embedlayer() -> torch.Tensor:
        prepared = ours.prepare(positions)
        for _ in range(setting.blocks):
            last, _ = ours.rotate(q, k, prepared)
        return last

    def unprepared() -> torch.Tensor:
        for _ in range(setting.blocks):
            last, _ = ours.rotate(q, k, positions)
        return last

    def quiet(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def quietly() -> torch.Tensor:
            with torch.no_grad():
                for _ in range(setting.calls):
                    last = run()
            return last

        return quietly

    competitors = {
        "embedlayer": embedlayer,
        "embedlayer, angles in each block": unprepared,
        "transformers": transformers,
    }
    atol = 1e-3 if setting.dtype == torch.float32 else 0.1  # their angles are rounded to the dtype of the queries
    assert torch.allclose(embedlayer(), transformers(), atol=atol)
    quietly = {name: quiet(run) for name, run in competitors.items()}
    times = time_alternately(quietly, rounds=15, warmup=2)
    ours_ms = float(times["embedlayer"]["time_ms"])
    blocks = "1 block" if setting.blocks == 1 else f"{setting.blocks} blocks"
    sizes = f"{blocks}, q (1, {heads}, {setting.tokens}, {width}), {kv_heads} key heads"
    return [
        {
            "what": setting.what,
            "competitor": name,
            "setting": sizes,
            "threads": torch.get_num_threads(),
            "dtype": str(setting.dtype).removeprefix("torch."),
            **{unit: round(float(time) / setting.calls, 3) for unit, time in spread.items()},
            "times_ours": round(float(spread["time_ms"]) / ours_ms, 2),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    rows = [row for setting in WHOLE_CALLS for row in measure(setting)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operations are small: with more threads, waiting for them is what is timed
    rows += [row for setting in SETTINGS for row in measure(setting)]
    torch.set_num_threads(threads)
    return rows


CASE = Case("Rotary positions of a whole model: angles, and queries and keys of all blocks", run)
