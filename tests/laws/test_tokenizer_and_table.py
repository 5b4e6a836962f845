"""A tokenizer with more IDs than a table has rows is refused in the same words wherever the two meet."""

import json

import pytest
import torch
from commands import run
from covering import looped
from kinds import EMBED_DIM, TABLES, VOCAB_SIZE
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.analysis.atlas import write_atlas
from embedlayer.opening import OpenedModel, open_model
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.train import train_tokenizer

MISMATCH = rf"IDs up to 256 and the table has {VOCAB_SIZE} rows: {257 - VOCAB_SIZE} tokens have none"
LARGE = train_tokenizer((), "byte")

MEETINGS = {
    "TokenVectors": lambda table, _: el.analysis.TokenVectors(table, LARGE),
    "atlas": lambda table, folder: write_atlas(folder / "map.parquet", table, LARGE),
    "add_tokens": lambda table, _: el.vocab.add_tokens(table, ["zebra"], tokenizer=LARGE),
    "trim_vocabulary": lambda table, _: el.vocab.trim_vocabulary(table, "dogs", tokenizer=LARGE),
    "transplant": lambda table, _: el.vocab.transplant(table, train_tokenizer((), "byte"), tokenizer=LARGE),
    "OpenedModel": lambda table, _: OpenedModel("a table", table, tokenizer=LARGE).require_tokenizer(),
    "open_model": lambda table, folder: open_model(saved(table, folder), folder / "large.json"),
    "a saved table": lambda table, folder: open_model(saved(table, folder, tokenizer=LARGE)),
}


KINDS = ("dense", "factorised", "int4")
NOT_EDITED = {("int4", "add_tokens"), ("int4", "trim_vocabulary"), ("int4", "transplant")}


def saved(table, folder, **options):
    save_tokenizer(LARGE, folder / "large.json")
    table.save_pretrained(folder / "saved", **options)
    return folder / "saved"


@looped(
    "meeting, name", [(meeting, name) for meeting in MEETINGS for name in KINDS if (name, meeting) not in NOT_EDITED]
)
def test_a_tokenizer_with_more_ids_than_rows_is_refused(meeting, name, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("dogs")
    if meeting == "atlas":
        pytest.importorskip("pyarrow")
    with pytest.raises((el.TokenizerError, el.VocabularyError), match=MISMATCH):
        MEETINGS[meeting](TABLES[name](), tmp_path)


@looped("command", ["inspect", "export", "explore", "plan", "vocab trim"])
def test_the_commands_say_so_too(command, tmp_path, capsys) -> None:
    folder = saved(el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM), tmp_path)
    (tmp_path / "text.txt").write_text("dogs")
    beside = ("--tokenizer", tmp_path / "large.json")
    arguments = {
        "inspect": ("inspect", folder, *beside),
        "export": ("export", folder, "-o", tmp_path / "out.vec", *beside),
        "explore": ("explore", folder, *beside, "--export", tmp_path / "page"),
        "plan": ("plan", "--checkpoint", checkpoint(tmp_path), "--text", tmp_path / "text.txt"),
        "vocab trim": ("vocab", "trim", checkpoint(tmp_path), tmp_path / "text.txt", "-o", tmp_path / "new"),
    }[command]
    assert run(*arguments) != 0
    assert f"IDs up to 256 and the table has {VOCAB_SIZE} rows" in capsys.readouterr().err.replace("\n", " ")


def checkpoint(folder):
    made = folder / "checkpoint"
    made.mkdir(exist_ok=True)
    config = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 8, "n_positions": 16, "n_head": 2}
    (made / "config.json").write_text(json.dumps(config))
    tensors = {"wte.weight": torch.randn(VOCAB_SIZE, 8), "wpe.weight": torch.randn(16, 8)}
    save_file(tensors, made / "model.safetensors")
    save_tokenizer(LARGE, made / "tokenizer.json")
    return made
