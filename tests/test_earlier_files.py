"""Files that an earlier version wrote are read as it read them: layers, training state, a corpus, a run, its edit."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from commands import run
from safetensors.torch import load_file

import embedlayer as el
from embedlayer.data.corpus import TokenCorpus
from embedlayer.optim import RowAdamW
from embedlayer.tables import MappedEmbedding

ARCHIVE = Path(__file__).parent / "earlier" / "5cde341.zip"  # the commit; written by earlier/write_files.py
with zipfile.ZipFile(ARCHIVE) as archive:
    LAYERS = sorted(
        str(Path(name).parent)
        for name in archive.namelist()
        if name.endswith("/model.safetensors") and name.count("/") == 2
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The unpacked archive, with the link from the run to its corpus."""
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    (folder / "run" / "corpus").symlink_to(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def expected(files) -> dict[str, torch.Tensor]:
    return load_file(files / "expected.safetensors")


CLASSES = {
    "tables": el.TokenTable,
    "positions": el.DecoderLM,
    "heads": el.OutputHead,
    "injections": el.DecoderLM,
    "inputs": el.TransformerEmbedding,
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_it_did(files, expected, name) -> None:
    kind = el.lessons.GPTEmbedding if name == "inputs/gpt" else CLASSES[name.partition("/")[0]]
    layer = kind.from_pretrained(files / name).eval()
    inputs = expected["hidden" if name.startswith("heads/") else "ids"]
    torch.testing.assert_close(layer(inputs), expected[name], rtol=1e-5, atol=1e-6)


def step(table, optimizer) -> None:
    optimizer.zero_grad()
    table(torch.tensor([5, 48])).square().sum().backward()
    optimizer.step()


def test_row_sparse_training_goes_on_from_state_in_memory_and_in_files(files, expected, tmp_path) -> None:
    state = torch.load(files / "training/memory.pt", weights_only=True)
    memory = el.RowSparseEmbedding(50, 24, padding_idx=0, scale="sqrt_dim")
    memory.load_state_dict(state["table"])
    optimizer = RowAdamW(memory.parameters(), lr=0.1)
    optimizer.load_state_dict(state["optimizer"])
    step(memory, optimizer)
    torch.testing.assert_close(memory(expected["ids"]), expected["training/memory"], rtol=1e-5, atol=1e-6)

    shutil.copytree(files / "training/mapped", tmp_path / "mapped")
    with MappedEmbedding.resume(tmp_path / "mapped") as mapped:
        step(mapped, RowAdamW(mapped.parameters(), lr=0.1))
        torch.testing.assert_close(mapped(expected["ids"]), expected["training/mapped"], rtol=1e-5, atol=1e-6)


def test_a_corpus_a_run_its_smaller_form_and_its_edit_are_read(files, tmp_path) -> None:
    assert TokenCorpus.open(files / "corpus").num_tokens == 13_556
    shutil.copytree(files / "run", tmp_path / "run", symlinks=True)
    assert run("train", "--resume", "-o", tmp_path / "run") == 0
    for source in ("run", "edited", "int8"):
        assert run("neighbors", files / source, "man", "-n", 2) == 0
    receipt, old = el.vocab.last_receipt(files / "edited"), el.load_tokenizer(files / "run")
    edited = el.load_tokenizer(files / "edited")
    kept = torch.arange(old.get_vocab_size())[receipt.new_ids[: old.get_vocab_size()] >= 0]
    assert receipt.tokenizer.to_str() == edited.to_str()
    assert len(kept) > 0
    assert [edited.id_to_token(i) for i in receipt.remap(kept).tolist()] == [old.id_to_token(i) for i in kept.tolist()]
