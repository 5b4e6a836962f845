"""Damage to the files of this library, for tests: every reader works or raises our error, whatever a file holds."""

import contextlib
import io
import json
import random
import shutil
import struct
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import cli, leave_out_answers
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.analysis.health import table_health
from embedlayer.core.errors import EmbedLayerError
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.opening import open_model
from embedlayer.tokenization import TokenTracer, save_tokenizer
from embedlayer.vocab import merge_adapter
from embedlayer.vocab.receipt import last_receipt

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 60
TRAIN = "--dim 8 --heads 2 --layers 1 --length 8 --batch-size 2 --vocab-size 300 --steps 2 --log-every 1 --json".split()
SOUND: dict[str, Path] = {}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**400, 1.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "16", "\ud800", "a\0b", "../x", "é" * 50),
    *([], [0], [[]], [None] * 3, {}, {"kind": "output_head"}, {"kind": 3}, {"a": {}}),
]


# What is damaged


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, as the keys that lead there."""
    yield at
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:20]):
            yield from places(inner, (*at, key))


def damaged_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place removed, added to, moved, or of another type or size."""
    value = json.loads(json.dumps(value))
    at = rng.choice(list(places(value)))
    if not at:
        return rng.choice([value, [value], *ODD])
    *way, last = at
    outer = value
    for key in way:
        outer = outer[key]
    match rng.randrange(5):
        case 0:
            del outer[last]
        case 1 if isinstance(outer, dict):
            outer[rng.choice(["x", "\ud800", "", "kind"])] = rng.choice(ODD)
        case 2:
            outer[last] = {"x": outer[last]} if rng.random() < 0.5 else [outer[last]]
        case _:
            outer[last] = rng.choice(ODD)
    return value


def dumped(value: Any) -> bytes:
    """JSON as Python writes it, NaN and lone surrogates included, raw where UTF-8 allows it."""
    return json.dumps(value).encode()


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, removed, added, or cut short."""
    match rng.randrange(5):
        case 0:
            return content[: rng.randrange(len(content) + 1)]
        case 1:
            at = rng.randrange(len(content) + 1)
            return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
        case 2:
            at, count = rng.randrange(len(content) + 1), rng.randrange(1, 64)
            return content[:at] + content[at + count :]
        case _:
            changed = bytearray(content or b"\0")
            for _ in range(rng.choice([1, 1, 1, 4])):
                at = rng.randrange(min(len(changed), rng.choice([16, 128, 1024, len(changed)])))
                changed[at] = rng.choice([0, 0xFF, changed[at] ^ (1 << rng.randrange(8)), ord("9"), ord("-")])
            return bytes(changed)


def damaged_tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header, or JSON within its metadata, is damaged."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    inner = header.get("__metadata__", {})
    names = [name for name, value in inner.items() if value.startswith("{")]
    if names and rng.random() < 0.7:
        name = rng.choice(names)
        inner[name] = dumped(damaged_json(json.loads(inner[name]), rng)).decode()
    else:
        header = damaged_json(header, rng)
    raw = dumped(header)
    return struct.pack("<Q", len(raw)) + raw + content[8 + length :]


def damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """A file of JSON lines of which one is damaged."""
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = dumped(damaged_json(json.loads(lines[at]), rng)) + b"\n"
    return b"".join(lines)


def damaged(path: Path, content: bytes, rng: random.Random) -> bytes:
    """Damage of the kind that the file's format is sensitive to, or of any kind."""
    if rng.random() < 0.35:
        return damaged_bytes(content, rng)
    if path.suffix == ".json":
        return dumped(damaged_json(json.loads(content), rng))
    if path.suffix in (".safetensors", ".receipt"):
        return damaged_tensors(content, rng)
    if path.suffix == ".jsonl":
        return damaged_lines(content, rng)
    return damaged_bytes(content, rng)


# What reads it


def command(*arguments: object) -> None:
    """A command, with our errors as exceptions instead of exit codes."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main([str(argument) for argument in arguments], standalone_mode=False)


def use(layer: torch.nn.Module) -> None:
    """Look up some rows."""
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        (layer.input if isinstance(layer, el.EmbeddingLayer) else layer)(ids)


def read_corpus(path: Path) -> None:
    corpus = el.TokenCorpus.open(path)
    corpus.counts(corpus.vocab_size)
    for part in corpus.split(0.3):
        assert len(part.ids[:5].tolist()) <= 5
        assert part.num_bytes >= 0
        windows = el.TokenWindows(part, 4, 4)
        windows.batch(range(min(2, len(windows))))


def continue_corpus(path: Path) -> None:
    text = SOUND["text"]  # a plan knows its sources by name
    build_in_shards([text], el.load_tokenizer(path.parent / "run"), path, shards=2, workers=1)


def read_run(path: Path) -> None:
    run = el.RunDirectory(path)
    run.read_metrics()
    run.initial_model()
    run.open()
    use(el.open_model(path).model)


def resume_run(path: Path) -> None:
    trainer, _, _ = el.RunDirectory(path).resume()
    for _ in trainer.run(on_step=lambda step: trainer.stop()):  # one step: a run may state any number
        pass


def read_page(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        leave_out_answers(patch)
        out_of("explore", "SOURCE", "--export", "OUT")(path)


def read_receipt(path: Path) -> None:
    receipt = last_receipt(path)
    str(receipt)
    receipt.remap(torch.tensor([0, 5, -100]))


def out_of(*arguments: object) -> Callable[[Path], None]:
    """A command that reads the folder (`SOURCE`) and writes elsewhere (`OUT`)."""

    def read(path: Path) -> None:
        with tempfile.TemporaryDirectory() as out:
            places = {"SOURCE": path, "OUT": f"{out}/out", "TEXT": path.parent / "text.txt"}
            command(*(places.get(str(part), part) for part in arguments))

    return read


LAYERS: dict[str, Callable[[], Any]] = {
    "decoder": lambda: el.DecoderLM(el.TokenEmbedding(20, 8), el.RotaryEmbedding(4), num_layers=2, num_heads=2),
    "decoder, scaled rotary": lambda: el.DecoderLM(
        el.QuantizedEmbedding.from_table(torch.randn(20, 8), 4, group_size=4),
        el.RotaryEmbedding(4, scaling=el.positions.YarnScaling(factor=2.0, original_max_seq_len=8)),
        el.OutputHead(vocab_size=20, embed_dim=8, bias=True, softcap=3.0),
        num_layers=1,
        num_heads=2,
    ),
    "factorised": lambda: el.TransformerEmbedding(20, 8, 16, table=el.FactorizedEmbedding(20, 8, 4, padding_idx=0)),
    "sinusoidal": lambda: el.TransformerEmbedding(20, 8, 16, position=el.SinusoidalPositionalEmbedding(16, 8)),
    "gpt": lambda: el.lessons.GPTEmbedding(20, 8, 16),
    "delta": lambda: el.DeltaEmbedding(el.TokenEmbedding(20, 8), [3, 4]),
    "bag": lambda: el.tables.Bag(el.TokenEmbedding(20, 8)),
    "streams": lambda: el.tables.StreamTable(el.TokenEmbedding(20, 8), (2, 3, 15)),
    "layer, learned": lambda: el.EmbeddingLayer(
        el.TokenEmbedding(20, 8, scale="sqrt_dim"),
        el.LearnedPositionalEmbedding(16, 8, offset=2),
        recipe=["types", "position", "norm"],
        types=el.TokenEmbedding(2, 8),
        norm=torch.nn.LayerNorm(8),
        other_positions={"decoder": el.RelativePositionBias(2, num_buckets=8, max_distance=12, bidirectional=False)},
    ),
    "layer, alibi": lambda: el.EmbeddingLayer(el.TokenEmbedding(20, 8), el.AlibiBias(2), family="bloom"),
}


def read_layer(path: Path) -> None:
    use(type(LAYERS[path.name]()).from_pretrained(path))


def read_adapter(path: Path) -> None:
    torch.manual_seed(0)
    use(el.DeltaEmbedding.from_pretrained(path, base=el.TokenEmbedding(20, 8)))


def read_table(path: Path) -> None:
    opened = open_model(path)
    table_health(opened.table, opened.tokenizer)


def merge_peft(path: Path) -> None:
    merge_adapter(el.TokenEmbedding(20, 8), path)


def encode_text(path: Path) -> None:
    tokenizer = el.load_tokenizer(path)
    for text in (TEXT[:200], "", "é\u3042 <x>"):
        assert len(TokenTracer(tokenizer).trace(text).ids) < 100_000
        assert len(el.TokenCorpus.from_text(text, tokenizer).ids) < 100_000


def read_checkpoint(path: Path) -> None:
    layer = el.load(path)
    use(layer)


WITHOUT_TOKENS = ("gpt", "streams")
"""Layers that `open_model` does not take: no table of ours, or one of several streams."""

READERS: dict[str, dict[str, Callable[[Path], None]]] = {
    "peft": {"merge": merge_peft},
    "tokenizer": {"encode": encode_text},
    "checkpoint": {
        "load": read_checkpoint,
        "open_model": read_table,
        "plan": out_of("plan", "--checkpoint", "SOURCE"),
        "compress": out_of("compress", "SOURCE", "--to", "int8", "-o", "OUT"),
    },
    "model": {
        "load": read_checkpoint,
        "open_model": read_table,
        "inspect": out_of("inspect", "SOURCE"),
        "neighbors": out_of("neighbors", "SOURCE", " the"),
        "generate": out_of("generate", "SOURCE", "the", "--tokens", 2),
        "evaluate": out_of("evaluate", "SOURCE", "--text", "TEXT", "--window", 64),
        "compress": out_of("compress", "SOURCE", "--to", "int8", "-o", "OUT"),
        "vocab add": out_of("vocab", "add", "SOURCE", "zebra", "-o", "OUT"),
        "vocab remove": out_of("vocab", "remove", "SOURCE", " the", "-o", "OUT"),
        "positions extend": out_of("positions", "extend", "SOURCE", "--to", 64, "-o", "OUT"),
    },
    **{
        f"layer/{name}": {"from_pretrained": read_layer, "open_model": read_table, "page": read_page}
        for name in LAYERS
        if name not in WITHOUT_TOKENS
    },
    **{f"layer/{name}": {"from_pretrained": read_layer} for name in WITHOUT_TOKENS},
    "adapter": {"from_pretrained": read_adapter},
    "run": {
        "read": read_run,
        "resume": resume_run,
        "open_model": read_table,
        "page": read_page,
        "embed": out_of("embed", "SOURCE", "the cat"),
        "neighbors": out_of("neighbors", "SOURCE", " the"),
        "inspect": out_of("inspect", "SOURCE"),
        "generate": out_of("generate", "SOURCE", "the", "--tokens", 2),
        "report": out_of("report", "SOURCE"),
        "export": out_of("export", "SOURCE", "-o", "OUT", "--format", "npy"),
        "plan": out_of("plan", "--checkpoint", "SOURCE"),
        "compress": out_of("compress", "SOURCE", "--to", "int8", "-o", "OUT"),
        "vocab add": out_of("vocab", "add", "SOURCE", "zebra", "-o", "OUT"),
        "explore": out_of("explore", "SOURCE", "--export", "OUT"),
    },
    "corpus": {"open": read_corpus},
    "shards": {
        "open": read_corpus,
        "continue": continue_corpus,
        "train": out_of("train", "SOURCE", "-o", "OUT", *TRAIN),
    },
    "edited": {"receipt": read_receipt},
}


# Trying


def build_sources(folder: Path) -> None:
    """Write one sound folder of each format."""
    torch.manual_seed(0)
    for name, make in LAYERS.items():
        make().save_pretrained(folder / "layer" / name)
    build_foreign(folder)
    build_model(folder)
    torch.manual_seed(0)
    el.DeltaEmbedding(el.TokenEmbedding(20, 8), [3, 4]).save_adapter(folder / "adapter")
    (folder / "text.txt").write_text(TEXT)
    SOUND["text"] = folder / "text.txt"
    command("train", folder / "text.txt", "-o", folder / "run", *TRAIN)
    tokenizer = el.load_tokenizer(folder / "run")
    el.TokenCorpus.build([folder / "text.txt"], tokenizer, folder / "corpus")
    build_in_shards([folder / "text.txt"], tokenizer, folder / "shards", shards=2, workers=1)
    command("vocab", "add", folder / "run", "zebra", "-o", folder / "edited")


def build_foreign(folder: Path) -> None:
    """Write what other libraries write: an adapter of PEFT, a tokenizer with every part, and a checkpoint."""
    torch.manual_seed(0)
    name = "base_model.model.model.embed_tokens"
    factors = {f"{name}.lora_embedding_A": torch.randn(2, 20), f"{name}.lora_embedding_B": torch.randn(8, 2)}
    config: dict[str, Any] = {"peft_type": "LORA", "r": 9, "lora_alpha": 4, "use_rslora": False}
    config |= {"alpha_pattern": {r"model\.(embed|x)_tokens": 3}, "rank_pattern": {"embed_tokens": 2}}
    config |= {"trainable_token_indices": {"embed_tokens": [3, 5]}, "target_modules": "embed_tokens"}
    (folder / "peft").mkdir()
    (folder / "peft" / "adapter_config.json").write_text(json.dumps(config))
    rows = {f"{name}.token_adapter.trainable_tokens_delta": torch.randn(2, 8)}
    save_file(factors | rows, folder / "peft" / "adapter_model.safetensors")

    content = json.loads(el.train_tokenizer(TEXT, vocab_size=280).to_str())
    replace = {"type": "Replace", "pattern": {"String": "é"}, "content": "e"}
    lower = [{"type": "Prepend", "prepend": "x"}, {"type": "Lowercase"}, {"type": "NFKC"}]
    content["normalizer"] = {"type": "Sequence", "normalizers": [replace, *lower]}
    token, text = {"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"b": {"id": "b", "ids": [5], "tokens": ["b"]}},
    }
    content["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 5, "pad_type_id": 0, "pad_token": "b"}
    content["model"]["dropout"] = 0.1
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    llama = {"model_type": "llama", "rms_norm_eps": 1e-6, "intermediate_size": 8, "max_position_embeddings": 32}
    llama |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, **sizes}
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text(json.dumps(llama | {"tie_word_embeddings": True}))
    tensors = {"model.embed_tokens.weight": torch.randn(20, 8), "model.norm.weight": torch.ones(8)}
    save_file(tensors, folder / "checkpoint" / "model.safetensors")


def build_model(folder: Path) -> None:
    """Write a whole model of transformers, whose class reads every value of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = el.train_tokenizer(TEXT, vocab_size=280)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=280, max_position_embeddings=32, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model" / "tokenizer.json")


def files_of(folder: Path, format: str) -> list[Path]:
    """The files of a format whose damage is tried: not the tokenizer of a run, and not the page."""
    names = ("tokenizer.json", "report.html", "model.safetensors", "text.txt")
    found = [file for file in (folder / format).rglob("*") if file.is_file()]
    if format == "edited":
        return [file for file in found if file.suffix == ".receipt"]
    if format == "model":
        return [folder / format / name for name in ("config.json", "model.safetensors")]
    if format in ("peft", "tokenizer", "checkpoint"):
        return sorted(found)
    return sorted(file for file in found if file.name not in names or (format != "run" and file.name == names[2]))


def attempt(
    reader: Callable[[Path], None],
    folder: Path,
    format: str,
    file: Path,
    content: bytes | Callable[[Path], object],
    *,
    refusing: bool = True,
) -> str | None:
    """Read a folder with one file's content replaced; what went wrong, unless it worked or was our error.

    A function as content puts something else than a file at the path. Without `refusing` our error is raised.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in {format, "run", "text.txt"}:
            source = folder / part
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy / part)
        if isinstance(content, bytes):
            (copy / file.relative_to(folder)).write_bytes(content)
        else:
            (copy / file.relative_to(folder)).unlink()
            content(copy / file.relative_to(folder))
        threads = torch.get_rng_state()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader(copy / format)
        except EmbedLayerError as error:
            if not refusing:
                raise
            said = str(error)
            try:
                said.encode()
            except UnicodeEncodeError:
                return f"the message cannot be printed: {said!r}"
            return None if len(said) < 3000 else f"a message of {len(said)} characters"
        except (KeyboardInterrupt, TimeoutError):
            raise
        except BaseException as error:  # noqa: BLE001  every other one is a fault, a panic too, and told
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "embedlayer" in frame.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            return f"{type(error).__name__} at {where}: {str(error)[:160]!r}"
        finally:
            torch.set_rng_state(threads)
    return None


def trials(folder: Path, count: int, seed: int, only: str = "") -> Iterator[tuple[str, str, Path, bytes]]:
    """Format, reader, file and content: `count` damages of each file, each for one of its readers in turn."""
    for format, readers in READERS.items():
        if not format.startswith(only):
            continue
        for file in files_of(folder, format):
            sound = file.read_bytes()
            for number in range(count):
                name = list(readers)[number % len(readers)]
                rng = random.Random(f"{seed} {file.relative_to(folder)} {number}")
                yield format, name, file, damaged(file, sound, rng)
