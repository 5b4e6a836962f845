"""The table of commands-by-sources.md: `python docs/commands_by_sources.py --write`.

Every command that reads a table is run on a small example of every kind of source. A cell says that the command works,
or has the number of the sentence with which the command refuses the source.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.cli.main import main as embedlayer
from embedlayer.families import GGUF_TENSORS
from embedlayer.io.files import write_json
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.tokenization.read import save_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import write_between_markers

PAGE = Path(__file__).with_suffix("").with_name("commands-by-sources.md")
TEXT = "the cat sat on the mat and the dog sat on the log . "
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log"]
HUB_NAME = "someone/tiny-gpt2"
VOCAB, WIDTH = 300, 8


class Source(NamedTuple):
    """An example of a kind of source: its path or hub name, and a text that is one of its tokens."""

    path: Path | str
    token: str


COMMANDS = {
    "inspect": "inspect SOURCE",
    "neighbors": "neighbors SOURCE TOKEN",
    "embed": "embed SOURCE the|cat|sat",
    "generate": "generate SOURCE the|cat --tokens 2",
    "evaluate": "evaluate SOURCE --text TEXT",
    "explore": "explore SOURCE --export OUT",
    "export": "export SOURCE -o OUT.vec",
    "compress": "compress SOURCE --to int8 -o OUT",
    "plan": "plan --checkpoint SOURCE",
    "report": "report SOURCE",
    "vocab add": "vocab add SOURCE zebra -o OUT",
    "vocab remove": "vocab remove SOURCE TOKEN -o OUT",
    "vocab trim": "vocab trim SOURCE TEXT -o OUT",
    "vocab transplant": "vocab transplant SOURCE OTHER -o OUT",
    "vocab suggest": "vocab suggest SOURCE MORE --count 5",
    "positions extend": "positions extend SOURCE --to 64 --original 16 -o OUT",
}
"""Each command; `|` is a space in an argument; MORE is a text with new words."""

KINDS = {
    "run": "run",
    "saved table": "table",
    "saved layer": "layer",
    "saved model": "saved",
    "GPT-2 folder": "gpt2",
    "BERT folder": "bert",
    "LLaMA folder": "llama",
    "sharded checkpoint": "sharded",
    "safetensors file": "llama/model.safetensors",
    "Meta's layout": "meta",
    "GGUF file": "model.gguf",
    "unknown family": "unknown",
    "word2vec": "word2vec.bin",
    "GloVe": "glove.txt",
    ".npy": "rows.npy",
    "hub name, offline": "",
}
"""Every kind of source, and the file or folder of its example."""

LLAMA = {
    "table.weight": "model.embed_tokens.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
}
META = {
    "table.weight": "tok_embeddings.weight",
    "attention_norm.weight": "attention_norm.weight",
    "attention.query.weight": "attention.wq.weight",
    "attention.key.weight": "attention.wk.weight",
    "attention.value.weight": "attention.wv.weight",
    "attention.out.weight": "attention.wo.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "feed_forward.w1.weight",
    "mlp.up.weight": "feed_forward.w3.weight",
    "mlp.down.weight": "feed_forward.w2.weight",
    "norm.weight": "norm.weight",
}


def make_sources(folder: Path) -> dict[str, Source]:
    """Write an example of every kind of source into a folder, and return them by the name of the kind."""
    torch.manual_seed(0)
    (folder / "text.txt").write_text(TEXT * 40)
    (folder / "more.txt").write_text("a zebra met another zebra by the crossing . " * 200)
    bpe = el.train_tokenizer(TEXT * 40, "bpe", vocab_size=VOCAB)
    specials = ["<unk>", "<pad>", "<|endoftext|>"]
    save_tokenizer(el.train_tokenizer(TEXT, "word", special_tokens=specials), folder / "other.json")
    rows = bpe.get_vocab_size()
    sizes = ["--dim", WIDTH, "--heads", 2, "--layers", 1, "--length", 8, "--vocab-size", VOCAB, "--steps", 2]
    run_command("train", folder / "text.txt", "-o", folder / "run", *sizes, "--json")
    table = el.TokenEmbedding(rows, WIDTH)
    model = el.DecoderLM(table, el.RotaryEmbedding(4), num_layers=1, num_heads=2)
    table.save_pretrained(folder / "table", tokenizer=bpe)
    el.TransformerEmbedding(rows, WIDTH, 16, table=table).save_pretrained(folder / "layer", tokenizer=bpe)
    model.save_pretrained(folder / "saved", tokenizer=bpe)
    for name in ("gpt2", "bert", "llama", "sharded", "meta", "unknown"):
        (folder / name).mkdir()
        save_tokenizer(bpe, folder / name / "tokenizer.json")
    _write_gpt2(folder / "gpt2", rows)
    _write_bert(folder / "bert")
    llama = _renamed(model, LLAMA, "model.layers.0.")
    config = {"model_type": "llama", "vocab_size": rows, "hidden_size": WIDTH, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    config |= {"max_position_embeddings": 16}
    for name in ("llama", "sharded"):
        write_json(folder / name / "config.json", config)
    save_tensors(folder / "llama" / "model.safetensors", llama)
    _write_shards(folder / "sharded", llama)
    write_json(folder / "unknown" / "config.json", {**config, "model_type": "brand_new"})
    save_tensors(folder / "unknown" / "model.safetensors", llama)
    save_tensors(folder / "meta" / "model.safetensors", _renamed(model, META, "layers.0."))
    write_json(folder / "meta" / "params.json", {"n_heads": 2, "norm_eps": 1e-6})
    _write_gguf(folder / "model.gguf", bpe)
    for name in ("word2vec.bin", "glove.txt", "rows.npy"):
        form = "glove" if name == "glove.txt" else None
        el.checkpoints.write_vectors(folder / name, WORDS, torch.randn(len(WORDS), WIDTH), form)
    _fill_hub_cache(folder / "hub", folder / "gpt2")
    paths = {**{kind: folder / name for kind, name in KINDS.items()}, "hub name, offline": HUB_NAME}
    by_words = ("BERT folder", "word2vec", "GloVe", ".npy")
    return {kind: Source(path, "cat" if kind in by_words else " cat") for kind, path in paths.items()}


def _write_gpt2(folder: Path, rows: int) -> None:
    config = {"model_type": "gpt2", "vocab_size": rows, "n_embd": WIDTH, "n_positions": 16, "n_head": 2, "n_layer": 1}
    write_json(folder / "config.json", config)
    tensors = {"wte.weight": torch.randn(rows, WIDTH), "wpe.weight": torch.randn(16, WIDTH)}
    save_tensors(folder / "model.safetensors", tensors)


def _write_bert(folder: Path) -> None:
    tokenizer = el.train_tokenizer(TEXT * 40, "wordpiece", vocab_size=60, special_tokens=["[PAD]", "[UNK]"])
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    sizes = {"word_embeddings": tokenizer.get_vocab_size(), "position_embeddings": 16, "token_type_embeddings": 2}
    tensors = {f"embeddings.{name}.weight": torch.randn(size, WIDTH) for name, size in sizes.items()}
    tensors |= {"embeddings.LayerNorm.weight": torch.ones(WIDTH), "embeddings.LayerNorm.bias": torch.zeros(WIDTH)}
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": sizes["word_embeddings"],
        "hidden_size": WIDTH,
        "pad_token_id": 0,
    }
    write_json(folder / "config.json", {**config, "max_position_embeddings": 16, "type_vocab_size": 2})
    save_tensors(folder / "model.safetensors", tensors)


def _write_gguf(path: Path, tokenizer: Tokenizer) -> None:
    """Write a small LLaMA-type model with a table of Q8_0 blocks, as llama.cpp's converter names its parts."""
    width, rows = 32, tokenizer.get_vocab_size()
    model = el.DecoderLM(el.TokenEmbedding(rows, width), el.RotaryEmbedding(16), num_layers=1, num_heads=2)
    state = {name.replace("blocks.0", "blocks.{}"): tensor.numpy() for name, tensor in model.state_dict().items()}
    vocabulary = tokenizer.get_vocab()
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"embedding_length": width, "block_count": 1, "attention.head_count": 2, "context_length": 16}
    for key, size in sizes.items():
        writer.add_uint32(f"llama.{key}", size)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types(
        [3 if token == "<|endoftext|>" else 1 for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    )
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|endoftext|>"])
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(
        GGUF_TENSORS["table.weight"], gguf.quants.quantize(state.pop("table.weight"), q8_0), raw_dtype=q8_0
    )
    for name, tensor in state.items():
        writer.add_tensor(GGUF_TENSORS[name].replace("{}", "0"), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(model: el.DecoderLM, names: Mapping[str, str], block: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a decoder under another layout's names, where block 0 has the prefix `block`."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        inner = name.removeprefix("blocks.0.")
        renamed[block * (inner != name) + names[inner]] = tensor.clone()
    return renamed


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    names = list(tensors)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_tensors(folder / file, {name: tensors[name] for name in names if files[name] == file})
    write_json(folder / "model.safetensors.index.json", {"weight_map": files})


def _fill_hub_cache(cache: Path, model: Path) -> None:
    """Store a copy of a folder where the hub's client keeps downloads."""
    folder = cache / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())


@contextlib.contextmanager
def offline(folder: Path) -> Iterator[None]:
    """Let the hub's client use the cache in `folder` alone, as `HF_HUB_OFFLINE=1` does."""
    from huggingface_hub import constants

    before = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(folder / "hub"), True
    try:
        yield
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = before


def run_command(*arguments: object) -> str:
    """Run a command line in this process; return the error that it printed, or `""` if it succeeded.

    Of an error that only refers to a warning above it, the result is that warning.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            embedlayer([str(argument) for argument in arguments])
        except SystemExit as stop:
            if not stop.code:
                return ""
    error = re.search(r"^(\w+Error|Error): .*", said.getvalue(), re.MULTILINE | re.DOTALL)
    if error is not None and "the warning above" in error[0]:
        return said.getvalue().splitlines()[0].removeprefix("Warning: ")
    return "It failed without a message." if error is None else " ".join(error[0].split())


def result_of(command: str, source: Source, folder: Path, out: Path) -> str:
    """Return `""` if a command works on a source, else the sentence that it refuses it with."""
    places = {"SOURCE": source.path, "TOKEN": source.token, "OUT": out, "OUT.vec": f"{out}.vec"}
    places |= {
        "TEXT": folder / "text.txt",
        "MORE": folder / "more.txt",
        "OTHER": folder / "other.json",
    }
    words = [places.get(word, word.replace("|", " ")) for word in COMMANDS[command].split()]
    return _general(run_command(*words), command, source)


def _general(said: str, command: str, source: Source) -> str:
    """Return an error without its class, with SOURCE for the path and "the command" for the name of the command.

    The known model types in it, which change with each new family, become an ellipsis.
    """
    said = re.sub(r"nearest known: [^)]*", "nearest known: ...", said).replace(str(source.path), "SOURCE")
    kind, _, sentence = said.partition(": ")
    return (sentence if kind.endswith("Error") else said).replace(f"embedlayer {command}", "the command")


def markdown(results: Mapping[tuple[str, str], str]) -> str:
    """Return the table, and below it the numbered reasons."""
    reasons = list(dict.fromkeys(reason for reason in results.values() if reason))
    lines = [f"| source | {' | '.join(COMMANDS)} |", "|---" * (len(COMMANDS) + 1) + "|"]
    for kind in KINDS:
        cells = [results[command, kind] for command in COMMANDS]
        shown = ["yes" if not cell else str(reasons.index(cell) + 1) for cell in cells]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""])


def read_results(page: str) -> dict[tuple[str, str], str]:
    """Return what `markdown` made the table and the reasons of, from the text of the page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    names = next(row for row in rows if row[1:] == [*COMMANDS])[1:]
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    cells = {row[0]: row[1:] for row in rows if len(row) == len(names) + 1}
    return {
        (command, kind): "" if cell == "yes" else reasons[cell]
        for place, command in enumerate(names)
        for kind in KINDS
        for cell in [cells[kind][place]]
    }


def measured(folder: Path) -> dict[tuple[str, str], str]:
    """Run every command on every kind of source."""
    sources = make_sources(folder)
    with offline(folder):
        return {
            (command, kind): result_of(command, source, folder, folder / f"out-{number}-{place}")
            for number, command in enumerate(COMMANDS)
            for place, (kind, source) in enumerate(sources.items())
        }


def main() -> None:
    """Print the table; with --write, put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into commands-by-sources.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measured(Path(folder))
    text = markdown(results)
    print(text)
    if options.write:
        write_between_markers(PAGE, "commands-by-sources", text)


if __name__ == "__main__":
    main()
