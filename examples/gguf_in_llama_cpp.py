"""Run edited GGUF files in llama.cpp, and compare token IDs and logits with those here.

    python examples/gguf_in_llama_cpp.py MODEL [--write]

MODEL is a small LLaMA-type checkpoint, such as llama2.c's stories260K. It is written as a GGUF file with several types
of tables and a head in F32, tokens are added with `embedlayer.vocab.add_tokens`, and llama.cpp computes the logits of
texts with old and new tokens. It needs the package llama-cpp-python, which builds llama.cpp; no extra installs it.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.families import GGUF_HEAD, GGUF_TABLE, GGUF_TENSORS
from embedlayer.io.gguf_files import quantise
from embedlayer.models.llama import load_llama

PAGE = Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md"
TEXTS = ("Once upon a time, my otters saw sea lions. <|x|> The end", "  otters otters", "xotters é 日本 a\n\nb  c")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0")
FLOAT = 0  # GGML_TYPE_F32, for keys and values


def write_model(path: Path, model: el.DecoderLM, dtype: str) -> None:
    """Write a decoder with interleaved rotary pairs: its table in the type `dtype`, and an untied head in F32."""
    texts = PAGE.with_name("corpora.md").read_text(encoding="utf-8")
    tokenizer = el.train_tokenizer(texts, "bpe", vocab_size=model.table.vocab_size)
    tokens = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    config, state = model.config, dict(model.state_dict())
    state.setdefault("head.weight", state["table.weight"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(model.table.embed_dim)
    writer.add_block_count(config["num_layers"])
    writer.add_head_count(config["num_heads"])
    writer.add_head_count_kv(config["num_kv_heads"] or config["num_heads"])
    writer.add_feed_forward_length(len(state["blocks.0.mlp.up.weight"]))
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_dimension_count(model.position.head_dim)
    writer.add_rope_freq_base(model.position.base)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    for name, tensor in state.items():
        block = re.match(r"blocks\.(\d+)\.", name)
        pattern = name if block is None else name.replace(block[0], "blocks.{}.")
        theirs, kind = GGUF_TENSORS[pattern].format(block[1] if block else ""), gguf.GGMLQuantizationType[dtype]
        if theirs in (GGUF_TABLE, GGUF_HEAD):
            tensor = tensor[: len(tokens)]
        if theirs == GGUF_TABLE:
            found = quantise(tensor, dtype)
            assert found is not None
            writer.add_tensor(theirs, found.numpy(), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(model: el.DecoderLM, dtype: str, folder: Path) -> dict[str, str]:
    """Return a row of the table for one type of the token table."""
    old, new = folder / f"{dtype}.gguf", folder / f"{dtype}-edited.gguf"
    write_model(old, model, dtype)
    el.vocab.add_tokens(old, [" otters", " sea lions"], special=["<|x|>"], out=new)
    opened, ours = el.open_model(new), load_llama(new, dtype=torch.float32)
    theirs = llama_cpp.Llama(str(new), logits_all=True, n_ctx=128, verbose=False, type_k=FLOAT, type_v=FLOAT)
    equal, largest, difference = 0, 0.0, 0.0
    for text in TEXTS:
        ids = opened.encode(text)
        equal += ids == theirs.tokenize(text.encode(), add_bos=False, special=True)
        theirs.reset()
        theirs.eval(ids)
        with torch.no_grad():
            expected = ours(torch.tensor([ids]))[0].numpy()
        difference = max(difference, float(np.abs(theirs.scores[: len(ids)] - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    return {
        "table": dtype,
        "rows": f"{model.table.vocab_size:,} -> {theirs.n_vocab():,}",
        "texts with the same IDs": f"{equal} of {len(TEXTS)}",
        "largest logit": f"{largest:.1f}",
        "largest difference": f"{difference:.0e}",
    }


def main() -> None:
    """Print the table; with --write, put it into docs/checkpoints.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", action="store_true", help="put it into docs/checkpoints.md")
    options = parser.parse_args()
    model = load_llama(options.model)
    with tempfile.TemporaryDirectory() as folder:
        text = markdown_table([compare(model, dtype, Path(folder)) for dtype in TYPES])
    print(text)
    if options.write:
        write_between_markers(PAGE, "llama-cpp", f"\n{text}\n")


if __name__ == "__main__":
    main()
