"""Small GGUF files, written with the package gguf as llama.cpp's converter writes them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizer_kinds import ENGLISH, sentencepiece_bpe
from tokenizers import Tokenizer, normalizers

from embedlayer.families import GGUF_TENSORS
from embedlayer.models.decoder import DecoderLM
from embedlayer.tokenization.train import train_tokenizer

TYPES: type[gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType
WIDTH = 256
QUANTISED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""Types of blocks or of two bytes to which the package gguf can quantise."""

READ = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("IQ4_NL", "IQ4_XS"),
)
"""Types of blocks that it can only dequantise."""


def unigram(text: str = ENGLISH) -> Tokenizer:
    """Return a Unigram tokenizer with the rules that GGUF files can state."""
    tokenizer = train_tokenizer(text, "unigram", vocab_size=60)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = None
    return tokenizer


def wordpiece(text: str = ENGLISH) -> Tokenizer:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    return train_tokenizer(text, "wordpiece", vocab_size=120, special_tokens=special)


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "gpt2": lambda text=ENGLISH: train_tokenizer(text, "bpe", vocab_size=300),
    "llama": sentencepiece_bpe,
    "t5": unigram,
    "bert": wordpiece,
}
"""Kind of the tokenizer of a GGUF file -> function that trains one on a text."""


def blocks(dtype: str, rows: int, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    """Return rows in a type of GGUF files: random numbers, or random blocks where gguf cannot quantise."""
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if dtype in ("F32", *QUANTISED):
        return gguf.quants.quantize(numbers.numpy(), TYPES[dtype]).view(np.uint8)
    size, num_bytes = gguf.GGML_QUANT_SIZES[TYPES[dtype]]
    return np.random.default_rng(seed).integers(0, 60, (rows, width // size * num_bytes), dtype=np.uint8)


def add_tokenizer(writer: gguf.GGUFWriter, kind: str, tokenizer: Tokenizer, pre: str = "gpt-2") -> int:
    """Write the metadata of a tokenizer, and return its size.

    Args:
        writer: The writer.
        kind: `"gpt2"`, `"llama"`, `"t5"` or `"bert"`. Scores of `"llama"` are the order of the merges.
        tokenizer: The tokenizer.
        pre: Name of the pre-tokenizer.
    """
    model, vocabulary = json.loads(tokenizer.to_str())["model"], tokenizer.get_vocab(with_added_tokens=True)
    names, added = sorted(vocabulary, key=vocabulary.__getitem__), tokenizer.get_added_tokens_decoder()
    special = [token in added and added[token].special for token in range(len(names))]
    types = [3 if special[i] else 6 if re.fullmatch("<0x..>", name) else 1 for i, name in enumerate(names)]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    if kind == "bert":
        names = [n if s else n[2:] if n.startswith("##") else f"▁{n}" for n, s in zip(names, special, strict=True)]
    elif kind == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    else:
        place = {"".join(pair): -float(rank) for rank, pair in reversed([*enumerate(model.get("merges", []))])}
        scores = dict(model["vocab"]) if kind == "t5" else place
        writer.add_token_scores([scores.get(name, 0.0) for name in names])
        types[names.index("<unk>")] = 2
    writer.add_token_list(names)
    writer.add_token_types(types)
    for text, add in {"<s>": writer.add_bos_token_id, "</s>": writer.add_eos_token_id}.items():
        if text in vocabulary:
            add(vocabulary[text])
    return len(names)


def write_file(
    path: Path,
    arch: str = "llama",
    *,
    dtype: str = "Q8_0",
    head: str | None = None,
    tokenizer: tuple[str, Tokenizer] | int = 12,
    sizes: Mapping[str, float] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    raw_dtype: gguf.GGMLQuantizationType | None = None,
    alignment: int | None = None,
) -> Path:
    """Write a file with a table, an untied head for `head`, a tokenizer or a number of tokens, and more tensors.

    `tensors` are of the type `raw_dtype`; `None` for that of the arrays.
    """
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_description("a test")
    stated = {"embedding_length": WIDTH, "block_count": 2, "attention.head_count": 4, "context_length": 64}
    for key, value in {**stated, "rope.dimension_count": 64, "rope.freq_base": 1e4, **(sizes or {})}.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{key}", value)
    if isinstance(tokenizer, int):
        rows = tokenizer
        writer.add_token_list([f"t{i}" for i in range(rows)])
    else:
        rows = add_tokenizer(writer, *tokenizer)
        writer.add_vocab_size(rows)
    writer.add_tensor("token_embd.weight", blocks(dtype, rows), raw_dtype=TYPES[dtype])
    if head is not None:
        writer.add_tensor("output.weight", blocks(head, rows, seed=1), raw_dtype=TYPES[head])
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", blocks("Q4_K", 3), raw_dtype=TYPES.Q4_K)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor, raw_dtype=raw_dtype)
    return finish(writer, path)


def write_decoder(path: Path, model: DecoderLM, sizes: Mapping[str, float]) -> Path:
    """Write a decoder whose rotary pairs are interleaved as a model of the architecture `llama`."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in sizes.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    for name, tensor in model.state_dict().items():
        block = re.match(r"blocks\.(\d+)\.", name)
        ours = name if block is None else name.replace(block[0], "blocks.{}.", 1)
        writer.add_tensor(GGUF_TENSORS[ours].format(block[1] if block else ""), tensor.numpy())
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write the file, and return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
