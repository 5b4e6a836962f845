"""Input embedding: look-up, scale, positions and dropout; and rotary positions on queries and keys.

The plain composition is that of textbooks: `dropout(embedding(ids) * sqrt(D) + position_embedding(arange))`. Rotary is
compared with `apply_rotary_pos_emb` of transformers, of LLaMA (half-split) and of GPT-J (interleaved). All have
cosines and sines that are computed before the timing.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.inputs.embedding import TransformerEmbedding
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.rotation import ROTATE
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.row_sparse import RowSparseEmbedding

GPT2 = {"vocab_size": 50_257, "embed_dim": 768, "batch": 8, "length": 1024}
LLAMA = {"batch": 1, "heads": 32, "length": 1024, "head_dim": 128}


class Textbook(nn.Module):
    """The textbook input embedding, operation by operation."""

    def __init__(self, vocab_size: int, embed_dim: int, max_seq_len: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(max_seq_len, embed_dim)
        self.scale = math.sqrt(embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute `dropout(embedding(ids) * sqrt(D) + position_embedding(arange))`."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x: Tensor = self.dropout(self.tokens(ids) * self.scale + self.positions(places))
        return x


def trained(layer: nn.Module, ids: Tensor, upstream: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward once."""

    def run() -> None:
        layer(ids).backward(upstream)
        layer.zero_grad(set_to_none=True)

    return run


def embedding_rows() -> list[Row]:
    vocab_size, width, batch, length = GPT2.values()
    torch.manual_seed(0)
    ids = torch.randint(0, vocab_size, (batch, length))
    upstream = torch.randn(batch, length, width)
    textbook = Textbook(vocab_size, width, length, 0.1)
    table = TokenEmbedding(vocab_size, width, scale="sqrt_dim")
    ours = TransformerEmbedding(vocab_size, width, length, 0.1, table=table)
    row_table = RowSparseEmbedding(vocab_size, width, scale="sqrt_dim")
    row_sparse = TransformerEmbedding(vocab_size, width, length, 0.1, table=row_table)

    def no_grad(layer: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                result: Tensor = layer(ids)
            return result

        return run

    def look_up() -> Tensor:
        with torch.no_grad():
            return F.embedding(ids, table.weight)

    rows = []
    for what, competitors in {
        "evaluation": {
            "embedlayer": no_grad(ours),
            "textbook": no_grad(textbook),
            "F.embedding alone": look_up,
        },
        "training, forward": {"embedlayer": lambda: ours(ids), "textbook": lambda: textbook(ids)},
        "training, forward and backward": {
            "embedlayer": trained(ours, ids, upstream),
            "embedlayer, row-sparse": trained(row_sparse, ids, upstream),
            "textbook": trained(textbook, ids, upstream),
        },
    }.items():
        for layer in (ours, row_sparse, textbook):
            layer.train(what != "evaluation")
        rows += timed(what, "GPT-2: (8, 1024) ids, 50,257 x 768, dropout 0.1", competitors)
    return rows


def rotary_rows() -> list[Row]:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as of_gptj
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_llama

    batch, heads, length, width = LLAMA.values()
    torch.manual_seed(0)
    q, k = (torch.randn(batch, heads, length, width) for _ in range(2))
    cos, sin = RotaryEmbedding(width).cos_sin(torch.arange(length))
    whole_cos, whole_sin = (torch.cat([table, table], dim=-1).unsqueeze(0) for table in (cos, sin))
    theirs_q, theirs_k = (x.transpose(1, 2).contiguous() for x in (q, k))  # GPT-J has heads after the sequence

    def no_grad(run: Callable[[], object]) -> Callable[[], object]:
        def quiet() -> object:
            with torch.no_grad():
                return run()

        return quiet

    setting = "LLaMA-2 7B: q and k of (1, 32, 1024, 128)"
    half_split = {
        "embedlayer": no_grad(lambda: (ROTATE(q, cos, sin, False), ROTATE(k, cos, sin, False))),
        "transformers": no_grad(lambda: of_llama(q, k, whole_cos, whole_sin)),
        "a copy alone": no_grad(lambda: (q.clone(), k.clone())),
    }
    interleaved = {
        "embedlayer": no_grad(
            lambda: (
                ROTATE(q, cos, sin, True),
                ROTATE(k, cos, sin, True),
            )
        ),
        "transformers": no_grad(
            lambda: (of_gptj(theirs_q, sin[None], cos[None]), of_gptj(theirs_k, sin[None], cos[None]))
        ),
        "a copy alone": no_grad(lambda: (q.clone(), k.clone())),
    }
    assert torch.allclose(half_split["embedlayer"]()[0], half_split["transformers"]()[0], atol=1e-5)  # type: ignore[index]
    ours, theirs = interleaved["embedlayer"]()[0], interleaved["transformers"]()[0]  # type: ignore[index]
    assert torch.allclose(ours, theirs.transpose(1, 2), atol=1e-5)
    return timed("rotary, half-split", setting, half_split) + timed("rotary, interleaved", setting, interleaved)


def timed(what: str, setting: str, competitors: dict[str, Callable[[], object]]) -> list[Row]:
    times = time_alternately(competitors, rounds=15, warmup=3)
    ours = float(times["embedlayer"]["time_ms"])
    return [
        {
            "what": what,
            "competitor": name,
            "setting": setting,
            "dtype": "float32",
            **spread,
            "times_ours": round(float(spread["time_ms"]) / ours, 2),
        }
        for name, spread in times.items()
    ]


def run() -> list[Row]:
    return embedding_rows() + rotary_rows()


CASE = Case("Input embedding: look-up, scale, positions, dropout; and rotary positions", run)
