"""Look-up in tables of 8-bit and 4-bit rows: time, and bytes that are held, beside tables in floating point.

`nn.Embedding` in float32 and bfloat16 is what there is without quantising. The peers are torchao's and bitsandbytes'
embeddings, where these packages are installed; a row without a time says that one is not, or what it cannot do.
Tables in the formats of other libraries have random codes; beside those of MLX stands `mlx.nn.QuantizedEmbedding`.
"""

import copy
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Row, time_alternately
from embedlayer.formats.compressed_tensors import NaiveQuantizedRows, PackQuantizedRows
from embedlayer.formats.gemma import GemmaRows
from embedlayer.formats.gguf import GGUFRows
from embedlayer.formats.mlx import MLXAffineRows, MLXFloatRows
from embedlayer.formats.modelopt import NVFP4Rows
from embedlayer.formats.stored import StoredFormat
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.stored_embedding import StoredEmbedding

GPT2 = {"vocab_size": 50_257, "embed_dim": 768, "batch": 8, "length": 1024}
ONE_TOKEN = "logits of one token"


def tables() -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The competitors, all of the same rows; and why others are not there."""
    torch.manual_seed(0)
    rows = torch.randn(GPT2["vocab_size"], GPT2["embed_dim"]) * 0.02
    int4 = QuantizedEmbedding.from_table(rows, 4, clip=False)
    found: dict[str, nn.Module] = {
        "embedlayer int8": QuantizedEmbedding.from_table(rows, 8, clip=False),
        "embedlayer int4": int4,
        "embedlayer int4, groups of 32": QuantizedEmbedding.from_table(rows, 4, group_size=32, clip=False),
        "embedlayer int4, bfloat16 out": copy.deepcopy(int4).bfloat16(),
        "nn.Embedding float32": nn.Embedding.from_pretrained(rows),
        "nn.Embedding bfloat16": nn.Embedding.from_pretrained(rows.bfloat16()),
    }
    found |= {f"embedlayer, {record.name}": stored_table(len(rows), record) for record in formats(rows.shape[1])}
    missing: dict[str, str] = {}
    for package, make in (("torchao", of_torchao), ("bitsandbytes", of_bitsandbytes), ("mlx", of_mlx)):
        if find_spec(package) is None:
            missing[package] = "not installed"
        else:
            found |= make(rows)
    return found, missing


def formats(width: int) -> list[StoredFormat]:
    """The formats of other libraries that are measured."""
    return [
        MLXAffineRows(width, 4, 64, "BF16"),
        MLXAffineRows(width, 6, 64, "BF16"),
        MLXAffineRows(width, 8, 64, "BF16"),
        MLXFloatRows(width, "mxfp4"),
        PackQuantizedRows(width, 32, "BF16", True, 4),
        PackQuantizedRows(width, 128, "BF16", True, 4),
        NaiveQuantizedRows(width, width, "BF16", True, "I8"),
        NaiveQuantizedRows(width, width, "BF16", True, "F8_E4M3"),
        NVFP4Rows(width),
        GemmaRows(width, 4, width, "embedding_quantized"),
        *(GGUFRows(width, name) for name in ("Q4_K", "Q6_K")),
    ]


def stored_table(vocab_size: int, record: StoredFormat) -> StoredEmbedding:
    """A table of random codes, with finite scales."""
    table = StoredEmbedding(vocab_size, record, dtype=torch.float32)
    for part in table.parts.tensors.values():
        if part.dtype in (torch.float32, torch.bfloat16):
            part.normal_(std=0.02)
        else:  # as bytes: below 64 codes of FP8 are finite
            part.view(torch.uint8).random_(0, 64)
    return table


class MLXTable(nn.Module):
    """A table of MLX: it takes the IDs and returns the vectors as tensors that share the memory."""

    def __init__(self, rows: Tensor, bits: int) -> None:
        from mlx import core
        from mlx.nn.layers.embedding import Embedding

        super().__init__()
        self.core = core
        dense = Embedding(*rows.shape)
        dense.weight = core.array(rows.numpy()).astype(core.bfloat16)
        self.table = dense.to_quantized(64, bits)
        for name, part in self.table.parameters().items():  # for the bytes that are held
            self.register_buffer(name, torch.empty(part.nbytes, dtype=torch.uint8))

    def forward(self, ids: Tensor) -> object:
        """Look up the rows."""
        vectors = self.table(self.core.array(ids.numpy()))
        self.core.eval(vectors)
        return vectors

    def logits(self, hidden: Tensor) -> object:
        """Multiply hidden states by the rows."""
        logits = self.table.as_linear(self.core.array(hidden.numpy()))
        self.core.eval(logits)
        return logits


def of_mlx(rows: Tensor) -> dict[str, nn.Module]:
    """Embeddings of MLX, on the CPU where it has no other device."""
    return {f"mlx, {bits} bits": MLXTable(rows, bits) for bits in (4, 8)}


def of_torchao(rows: Tensor) -> dict[str, nn.Module]:
    """The weight-only quantisation of an `nn.Embedding`, int8 by rows and int4 in groups of 32."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    made: dict[str, nn.Module] = {}
    for name, dtype, granularity in (
        ("torchao int8", torch.int8, PerAxis(0)),
        ("torchao int4, groups of 32", torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    ):
        model = nn.Sequential(nn.Embedding.from_pretrained(rows.clone()))
        config = IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
        quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
        made[name] = model
    return made


def of_bitsandbytes(rows: Tensor) -> dict[str, nn.Module]:
    """The embeddings that quantise when they are moved to a device."""
    from bitsandbytes.nn.modules import Embedding8bit, EmbeddingNF4

    made: dict[str, nn.Module] = {}
    for name, kind in (("bitsandbytes int8", Embedding8bit), ("bitsandbytes NF4", EmbeddingNF4)):
        table = kind(*rows.shape)
        table.load_state_dict({"weight": rows})
        made[name] = table.to("cpu")
    return made


def held_bytes(table: nn.Module) -> int:
    """Bytes of the storages that a table's parameters, buffers and their parts refer to."""
    seen: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        names, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
        for name in names:
            add(getattr(tensor, name))
        if not names:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        state = getattr(tensor, "quant_state", None)
        for part in vars(state).values() if state is not None else ():
            if isinstance(part, Tensor):
                add(part)
        for name in ("CB", "SCB"):
            if isinstance(getattr(tensor, name, None), Tensor):
                add(getattr(tensor, name))

    for tensor in (*table.parameters(), *table.buffers()):
        add(tensor)
    return sum(seen.values())


def run() -> list[Row]:
    vocab_size, width, batch, length = GPT2.values()
    competitors, missing = tables()
    ids = torch.randint(0, vocab_size, (batch, length))
    rows: list[Row] = []

    def looked_up(table: nn.Module) -> Callable[[], object]:
        def look_up() -> object:
            with torch.no_grad():
                return table(ids)

        return look_up

    setting = f"GPT-2: ({batch}, {length}) ids, {vocab_size:,} x {width}"
    rows += timed("look-up", setting, {name: looked_up(table) for name, table in competitors.items()}, competitors)
    hidden = torch.randn(1, width)

    def scored(table: nn.Module) -> Callable[[], object]:
        def score() -> object:
            with torch.no_grad():
                if isinstance(table, QuantizedEmbedding | StoredEmbedding):
                    return table.logits(hidden.to(table.dtype))
                if isinstance(table, MLXTable):
                    return table.logits(hidden)
                weight: Tensor = table.weight  # type: ignore[assignment]
                return hidden.to(weight.dtype) @ weight.T

        return score

    ours = {name: table for name, table in competitors.items() if name.startswith(("embedlayer", "nn.", "mlx"))}
    rows += timed(ONE_TOKEN, setting, {name: scored(table) for name, table in ours.items()}, ours)
    return rows + [
        {"what": "look-up", "competitor": name, "setting": setting, "table_mib": "", "note": why}
        for name, why in missing.items()
    ]


def timed(what: str, setting: str, runs: dict[str, Callable[[], object]], tables: dict[str, nn.Module]) -> list[Row]:
    failed: dict[str, str] = {}
    for name, look_up in list(runs.items()):
        try:
            look_up()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            del runs[name]
    times = time_alternately(runs, rounds=9, warmup=1)
    plain = float(times["nn.Embedding float32"]["time_ms"])
    rows: list[Row] = [
        {
            "what": what,
            "competitor": name,
            "setting": setting,
            "table_mib": round(held_bytes(tables[name]) / 2**20, 1),
            **spread,
            "times_float32": round(float(spread["time_ms"]) / plain, 2),
        }
        for name, spread in times.items()
    ]
    return rows + [
        {"what": what, "competitor": name, "setting": setting, "note": f"does not run: {why}"}
        for name, why in failed.items()
    ]


CASE = Case("Tables of 8-bit and 4-bit rows: look-up, and logits of one token", run)
