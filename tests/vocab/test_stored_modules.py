"""Live models whose tables and heads are stored codes: edited, trained and merged; no other stored byte changes."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from stored_cases import built, rows_of
from stored_tables import KINDS, bytes_of, decoder_of, table_of, tables_in
from torch import Tensor
from vocab_models import close, same

import embedlayer as el
from embedlayer.vocab import VectorsInit, edit_vocabulary, merge_rows, train_only_rows

TRAINED = ["int4", "q8_0", "MLX 2 bits, groups of 32, float32", "float-quantized tensor, float32", "Gemma 2 bits"]
"""Formats with one tensor and several, with scales of rows, of groups and of the whole matrix."""
UNQUANTISED = "GGUF Q4_K"
"""One that nothing is quantised to."""
MERGED = [
    *TRAINED,
    *(UNQUANTISED, "pack-quantized 1 bits, group, symmetric, float32", "MLX nvfp4", "nvfp4-pack-quantized"),
    *("torchao FP8", "AWQ", "GPTQ v2", "bitsandbytes int8", "bitsandbytes nf4, float32"),
]
"""Those, and one of each other way to store rows."""


def trained_rows(model: torch.nn.Module) -> dict[str, el.DeltaEmbedding]:
    """Return the rows that are trained, by the name of their table or head."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, el.DeltaEmbedding)}
    return {name.partition(".")[0]: part for name, part in parts.items()}


def row_bytes(model: torch.nn.Module) -> list[Tensor]:
    return [table.stored_rows.row_bytes.clone() for table in tables_in(model)]


def train(model: el.DecoderLM, steps: int, token: int) -> None:
    """Train on a text with a token: each step changes each number of its row."""
    ids = torch.tensor([[5, token, 7, token, 9, 11]])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "tied"), some(covering(product(MERGED, (True, False))), product(KINDS, (True, False)))
)
def test_kept_rows_keep_their_bytes_and_an_undo_restores_all(kind: str, tied: bool) -> None:
    stored = rows_of(kind)
    model = decoder_of(stored, tied=tied)
    tables, before, config = [*tables_in(model)], bytes_of(model), model.config
    old, kept = row_bytes(model), [*range(40), *range(45, 60), 70]
    ids = torch.tensor([kept[:6], kept[-6:]])
    logits = model(ids)
    receipt = edit_vocabulary(model, keep=kept)
    assert [*tables_in(model)] == tables
    assert all(torch.equal(new, rows[kept]) for new, rows in zip(row_bytes(model), old, strict=True))
    close(model(receipt.remap(ids)), logits[..., kept])
    if stored.format.can_quantise:
        values = 0.01 * torch.randn(20, stored.shape[1])
        added = edit_vocabulary(model, add=20, init=VectorsInit(values))
        assert all(torch.equal(rows[len(kept) :], stored.quantised(values).row_bytes) for rows in row_bytes(model))
        close(model(receipt.remap(ids))[..., : len(kept)], logits[..., kept])
        model.loss(torch.tensor([[3, 70, 4]]), torch.tensor([[70, 4, 75]])).backward()
        added.undo(model)
    receipt.undo(model)
    assert same(bytes_of(model), before)
    assert model.config == config
    assert torch.equal(model(ids), logits)


@pytest.mark.parametrize(
    ("kind", "tied"), some(covering(product([*TRAINED, UNQUANTISED], (True, False))), product(KINDS, (True, False)))
)
def test_trained_rows_alone_are_quantised_and_no_other_byte_changes(kind: str, tied: bool) -> None:
    stored = rows_of(kind)
    model, ids = decoder_of(stored, tied=tied), torch.tensor([[5, 6, 8, 9]])
    before, old, logits = bytes_of(model), row_bytes(model), model(ids)
    train_only_rows(model, [7, 70, 12])
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {*trained_rows(model)} == {"table"} | (set() if tied else {"head"})
    train(model, 1, token=70)
    others = [token for token in range(stored.shape[0]) if token not in (7, 12, 70)]
    assert torch.equal(model(ids)[..., others], logits[..., others])
    assert all(torch.equal(new, rows) for new, rows in zip(row_bytes(model), old, strict=True))
    rows = [part.delta.detach().clone() for part in trained_rows(model).values()]
    if not stored.format.can_quantise:
        with pytest.raises(el.CheckpointError, match="are not quantised to"):
            merge_rows(model)
        train(model, 1, token=70)
        assert not torch.equal(trained_rows(model)["table"].delta, rows[0])
        return
    merge_rows(model)
    for table, was, delta in zip(tables_in(model), old, rows, strict=True):
        numbers = stored.dequantise(torch.float32)
        is_changed = (delta != numbers[[7, 12, 70]]).any(1)
        assert is_changed[2] == numbers.any()  # rows of zeros have no gradient
        changed = torch.tensor([7, 12, 70])[is_changed]
        expected = was.clone()
        expected[changed] = table.stored_rows.quantised(delta[is_changed]).row_bytes
        assert torch.equal(table.stored_rows.row_bytes, expected)
    unchanged = {name for name in before if "table" not in name and "head.rows" not in name}
    assert same({name: bytes_of(model)[name] for name in unchanged}, {name: before[name] for name in unchanged})
    assert not trained_rows(model)
    assert len([*tables_in(model)]) == 2 - tied
    close(model(ids)[..., others], logits[..., others])


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Set the trained rows to random numbers, in place of training."""
    generator = torch.Generator().manual_seed(seed)
    for rows in trained_rows(model).values():
        rows.delta.data = 0.02 * torch.randn(rows.delta.shape, generator=generator)


@cases("kind, tied, merged", TRAINED, (True, False), (True, False), pairs=["tied, merged"])
def test_an_undo_after_training_the_new_rows_restores_every_byte(kind: str, tied: bool, merged: bool) -> None:
    model = decoder_of(rows_of(kind), tied=tied)
    before, trainable = bytes_of(model), [p.requires_grad for p in model.parameters()]
    init = VectorsInit(torch.zeros(3, model.table.embed_dim))
    receipt = el.vocab.add_tokens(model, 3, init=init, train_only_new=True)
    fill(model)
    if merged:
        merge_rows(model)
    receipt.undo(model)
    assert same(bytes_of(model), before)
    assert [p.requires_grad for p in model.parameters()] == trainable


@cases("kind, tied", TRAINED, (True, False))
def test_trained_rows_go_through_an_adapter_and_are_merged_as_they_are_live(kind: str, tied: bool, tmp_path) -> None:
    model = decoder_of(rows_of(kind), tied=tied)
    live, loaded, merged = (copy.deepcopy(model) for _ in range(3))
    train_only_rows(live, [70, 7])
    fill(live)
    el.vocab.save_adapter(live, tmp_path)
    el.vocab.load_adapter(loaded, tmp_path)
    assert same(bytes_of(loaded), bytes_of(live))
    merge_rows(live)
    merge_rows(loaded)
    el.vocab.merge_adapter(merged, tmp_path)
    assert not same(bytes_of(live), bytes_of(model))
    assert same(bytes_of(loaded), bytes_of(live))
    assert same(bytes_of(merged), bytes_of(live))
    delta = el.DeltaEmbedding.from_pretrained(tmp_path, base=table_of(rows_of(kind)), module="table")
    merged_table = delta.merge()
    assert torch.equal(merged_table.stored_rows.row_bytes, live.table.stored_rows.row_bytes)


def test_a_merge_that_one_table_refuses_changes_none(tmp_path) -> None:
    model = decoder_of(rows_of("float-quantized tensor, float32"), tied=False)
    train_only_rows(model, [3, 70])
    fill(model)
    rows = trained_rows(model)["head"]
    with torch.no_grad():
        rows.delta[1, 2] = 1e6
    other = decoder_of(rows_of("float-quantized tensor, float32"), tied=False)
    el.vocab.save_adapter(model, tmp_path)
    state, before = bytes_of(model), bytes_of(other)
    for refused in (lambda: merge_rows(model), lambda: el.vocab.merge_adapter(other, tmp_path)):
        with pytest.raises(el.CheckpointError, match=r"times the largest one .* it would be clipped"):
            refused()
        assert same(bytes_of(model), state)
        assert same(bytes_of(other), before)
    train(model, 1, token=70)
    with torch.no_grad():
        rows.delta[1, 2] = 0.0
    merge_rows(model)
    with pytest.raises(el.SizeError, match="call train_only_rows first"):
        merge_rows(model)


def test_a_merge_does_not_write_into_the_mapped_file(tmp_path) -> None:
    from stored_folders import words, write_folder

    case = built("MLX 4 bits, groups of 64, bfloat16")
    write_folder(tmp_path / "model", case, None)
    words(len(case.rows)).save(str(tmp_path / "model" / "tokenizer.json"))
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    layer = el.load(tmp_path / "model")
    train_only_rows(layer, [3, 70])
    assert trained_rows(layer)["table"].delta.dtype == torch.float32
    fill(layer)
    merge_rows(layer)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    other = el.load(tmp_path / "model").table.stored_rows.row_bytes
    changed = (layer.table.stored_rows.row_bytes != other).any(1).nonzero().flatten().tolist()
    assert changed == [3, 70]


def test_rows_of_a_type_that_nothing_quantises_are_moved_and_none_is_added() -> None:
    model = decoder_of(rows_of("GGUF Q4_K"), tied=True)
    before = bytes_of(model)
    with pytest.raises(el.SizeError, match=r"New rows of table cannot be Q4_K"):
        el.vocab.add_tokens(model, 2)
    assert same(bytes_of(model), before)
    el.vocab.remove_tokens(model, [3]).undo(model)
    assert same(bytes_of(model), before)
    other = el.compress.replace_table(model, el.QuantizedEmbedding.from_table(model.table, 8))
    el.vocab.add_tokens(other, 2)
    assert other.table.vocab_size == model.table.vocab_size + 2


PATCHED = [("bert", "masked"), ("bart", "seq2seq"), ("llama", "causal"), ("t5", "seq2seq")]


def patched(model_type: str, kind: str, **options: Any) -> Any:
    """Return a patched model of transformers with an int8 table in the place of its tied one."""
    from tiny_models import build, quiet

    with quiet():
        model: Any = el.patch(build(model_type, kind, {"tie_word_embeddings": True, **options})[1])
    return el.compress.replace_table(model, el.QuantizedEmbedding.from_table(model.get_input_embeddings(), 8))


@pytest.mark.parametrize(("model_type", "kind"), some(PATCHED[:2], PATCHED))
def test_a_model_of_transformers_with_a_quantised_table_is_edited_and_undone(model_type: str, kind: str) -> None:
    model = patched(model_type, kind)
    vocab_size = model.config.vocab_size
    before = bytes_of(model)
    receipt = edit_vocabulary(model, add=4, remove=[5])
    assert vocab_size not in {size for tensor in model.state_dict().values() for size in tensor.shape}
    assert model.config.vocab_size == vocab_size + 3
    assert {len(table.rows(0, 999)) for table in tables_in(model)} == {vocab_size + 3}
    assert len({id(table.packed) for table in tables_in(model)}) == 1  # look-ups of one table still share its rows
    receipt.undo(model)
    assert same(bytes_of(model), before)
    assert model.config.vocab_size == vocab_size


def test_a_model_of_transformers_with_trained_rows_over_codes_is_saved_by_save_model(tmp_path) -> None:
    from tiny_models import quiet

    model = patched("llama", "causal")
    size = model.config.vocab_size
    el.vocab.add_tokens(model, 2, train_only_new=True)
    fill(model)
    ids = torch.tensor([[5, size, size + 1, 7]])
    logits = model(input_ids=ids).logits
    with pytest.raises(el.CheckpointError, match="save_model"):
        model.save_pretrained(tmp_path / "theirs")
    with quiet():
        el.compress.save_model(model, tmp_path / "ours")
        again: Any = el.compress.load_model(tmp_path / "ours")
    close(again(input_ids=ids).logits, logits)
    merge_rows(model)
    assert torch.equal(model.get_input_embeddings().rows(0, size), again.get_input_embeddings().rows(0, size))
    with pytest.raises(el.CheckpointError, match="save_model"):
        model.save_pretrained(tmp_path / "theirs")
