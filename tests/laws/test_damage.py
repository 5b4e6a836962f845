"""Whatever is in a file of this library, its readers work or raise our error."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import struct
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import cli, leave_out_answers, refused
from covering import cases, looped
from kinds import SAVED
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.analysis.health import table_health
from embedlayer.analysis.judgements import evaluate_word_pairs
from embedlayer.checkpoints.vector_files import read_vectors
from embedlayer.core.errors import EmbedLayerError
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.data.text_chunks import read_text_chunks
from embedlayer.opening import open_model
from embedlayer.tokenization import TokenBytes, save_tokenizer, token_spans
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


def read_layer(path: Path) -> None:
    use(type(SAVED[path.name]()).from_pretrained(path))


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
        assert len(token_spans(TokenBytes(tokenizer), text).starts) < 100_000
        assert len(el.TokenCorpus.from_text(f"the {text}", tokenizer).ids) < 100_000


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
        for name in SAVED
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


def build_sources(folder: Path) -> None:
    """Write one sound folder of each format."""
    torch.manual_seed(0)
    for name, make in SAVED.items():
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
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
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


QUICK = ("read", "resume", "page", "report", "open", "continue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    build_sources(folder)
    return folder


@pytest.mark.parametrize("format", READERS)
def test_what_is_sound_is_read_by_every_reader(folder: Path, format: str, pytestconfig) -> None:
    file = files_of(folder, format)[0]
    every = format not in ("run", "shards") or pytestconfig.getoption("--all")
    for reader in (reader for name, reader in READERS[format].items() if every or name in QUICK):
        assert attempt(reader, folder, format, file, file.read_bytes(), refusing=False) is None


@looped("format", READERS)
def test_damage_is_read_or_refused_by_our_error(folder: Path, format: str, pytestconfig) -> None:
    seen, count = 0, 20 if pytestconfig.getoption("--all") else 2
    for kind, reader, file, content in trials(folder, count, seed=0, only=format):
        if kind == format:
            seen += 1
            fault = attempt(READERS[format][reader], folder, format, file, content)
            assert fault is None, (file.name, reader, content[:300])
    assert seen


KEYS_OF_A_MODEL = [
    *("attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_size", "initializer_range", "model_type"),
    *("num_attention_heads", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    "vocab_size",
]
OTHER_VALUES: tuple[object, ...] = (None, -1, 1.5, "x", [])


@cases("key, reader", KEYS_OF_A_MODEL, READERS["model"])
def test_a_value_of_another_type_in_a_configuration_of_transformers_is_read_or_refused(
    folder: Path, key: str, reader: str
) -> None:
    """transformers checks the types of some values, and computes with the others as they are."""
    file = folder / "model" / "config.json"
    sound = json.loads(file.read_bytes())
    assert key in sound
    for value in OTHER_VALUES:
        content = json.dumps({**sound, key: value}).encode()
        assert attempt(READERS["model"][reader], folder, "model", file, content) is None, value


FIELDS = [
    ("run", "config.json", ["table", "vocab_size"], "-1"),
    ("run", "config.json", ["num_layers"], "1000000000"),
    ("run", "config.json", ["position"], "3"),
    ("run", "config.json", ["head", "tied"], None),
    ("run", "config.json", ["\ud800"], "1"),
    ("run", "run.json", ["options", "seed"], "{}"),
    ("run", "run.json", ["model", "table", "embed_dim"], "16000000"),
    ("run", "run.json", ["notes", "neighbors_before"], '[{"id": "x"}]'),
    ("run", "metrics.jsonl", None, "{"),
    ("run", "metrics.jsonl", None, '{"step": "x"}'),
    ("run", "metrics.jsonl", None, "\ud800"),
    ("shards", "corpus.json", ["shards"], "2147483648"),
    ("shards", "corpus.json", ["sources"], '[["a", -1, "b"]]'),
    ("corpus", "index.json", ["dtype"], '["uint16"]'),
    ("corpus", "index.json", ["vocab_size"], "1" + "0" * 400),
]


@pytest.mark.parametrize(("format", "name", "way", "value"), FIELDS, ids=lambda part: ascii(part)[:40])
def test_a_wrong_field_is_named_with_its_file(folder: Path, format: str, name: str, way, value: str | None) -> None:
    """`None` for a field that is missing; of the metrics a line is replaced."""
    file = folder / format / name
    content = file.read_bytes()
    if way is None:
        lines = content.split(b"\n")
        lines[1] = value.encode(errors="surrogatepass")
        damaged = b"\n".join(lines)
    else:
        whole = outer = json.loads(content)
        for key in way[:-1]:
            outer = outer[key]
        if value is None:
            del outer[way[-1]]
        else:
            outer[way[-1]] = "@@"
        damaged = json.dumps(whole).replace('"@@"', str(value)).encode()
    said = []
    for reader in (reader for name, reader in READERS[format].items() if name in QUICK):
        try:
            assert attempt(reader, folder, format, file, damaged, refusing=False) is None
        except el.EmbedLayerError as error:
            said.append(str(error))
    assert said
    assert all(text.encode() for text in said)
    assert any(name in text or "saved configuration" in text for text in said)


def _sparse(path: Path) -> None:
    """A file of a terabyte that takes no space."""
    path.touch()
    os.truncate(path, 1 << 40)


KINDS_OF_PATH = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "bytes": _sparse,
}


@looped("format, kind", READERS, KINDS_OF_PATH)
def test_what_is_no_file_of_that_size_is_refused_before_it_is_opened(folder: Path, format: str, kind: str) -> None:
    """Files x readers in turn; a pipe would wait for ever, and a device or a terabyte fill the memory."""

    def too_long(*_: object) -> None:
        raise TimeoutError

    said, readers = [], list(READERS[format].items())
    files = [file for file in sorted((folder / format).rglob("*")) if file.is_file() and file.suffix != ".html"]
    if kind == "bytes":  # of data there may be so many
        files = [file for file in files if file.suffix in (".json", ".jsonl")]
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number, file in enumerate(files):
            name, reader = readers[number % len(readers)]
            signal.alarm(60)
            try:
                fault = attempt(reader, folder, format, file, KINDS_OF_PATH[kind], refusing=False)
                assert fault is None, (file, name)
            except el.EmbedLayerError as error:
                said.append(str(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not files or any(kind in text for text in said), said


READ_ALONE: dict[str, Callable[[Path], object]] = {
    "vectors.txt": read_vectors,
    "vectors.bin": read_vectors,
    "vectors.txt.gz": read_vectors,
    "text.txt": lambda path: list(read_text_chunks(path)),
    "tokenizer.json": el.load_tokenizer,
    "vocab.txt": el.load_tokenizer,
    "vocab.json": el.load_tokenizer,
    "spm.model": el.load_tokenizer,
    "tokenizer.bin": el.load_tokenizer,
    "questions.txt": lambda path: evaluate_word_pairs(el.TokenEmbedding(3, 2), {"a": 0}, path),
    "open.gguf": el.open_model,
    "open.safetensors": el.open_model,
    "open.txt": el.open_model,
}


@looped("name", READ_ALONE)
def test_a_reader_of_one_file_refuses_pipes_and_devices(name: str, tmp_path: Path) -> None:
    for kind in ("a named pipe", "a device"):
        path = tmp_path / kind / name
        path.parent.mkdir()
        KINDS_OF_PATH[kind](path)
        with pytest.raises(el.FileError, match=f"{kind}, and a file is expected"):
            READ_ALONE[name](path)


def test_a_last_line_that_was_cut_short_is_passed_over(folder: Path) -> None:
    file = folder / "run" / "metrics.jsonl"
    content = file.read_bytes()
    for name, cut in (("read", b'{"step": 2, "lo'), ("resume", b'{"text": "\xc3'), ("report", b"{"), ("page", b"[")):
        reader = READERS["run"][name]
        assert attempt(reader, folder, "run", file, content + cut, refusing=False) is None


@looped("name", [name for name in READERS["run"] if name not in ("read", "resume")])
def test_a_folder_that_may_not_be_read_is_our_error(folder: Path, monkeypatch, name: str) -> None:
    """The system refuses to look into it, as to another user; the superuser is never refused, so here it is told so."""
    closed = str(folder / "run")

    def refusing(real):
        def call(path, *arguments, **options):
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(closed):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path, *arguments, **options)

        return call

    for call in ("stat", "lstat", "scandir", "listdir", "open"):
        monkeypatch.setattr(os, call, refusing(getattr(os, call)))
    with pytest.raises(EmbedLayerError):
        READERS["run"][name](folder / "run")


def test_the_command_line_prints_one_line_for_damage(folder: Path, tmp_path: Path) -> None:
    """What is printed of a lone surrogate must not fail either."""
    (tmp_path / "config.json").write_text('{"format_version": 1, "kind": "decoder_lm", "\\ud800": {"kind": "\\udfff"}}')
    errors = refused("inspect", tmp_path)
    assert errors.startswith("CheckpointError: ")
    assert len(errors.splitlines()) == 1
