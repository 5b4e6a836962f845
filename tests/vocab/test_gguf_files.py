"""Edits of GGUF files, checked with the reader of the package gguf."""

import json
import warnings

import gguf
import numpy as np
import pytest
import torch
from commands import run
from covering import some
from gguf_models import QUANTISED, READ, TOKENIZERS, TYPES, WIDTH, blocks, write_file
from tokenizer_kinds import ENGLISH, LANGUAGES

import embedlayer as el
from embedlayer import (
    CheckpointError,
    EmbedLayerWarning,
    FileError,
    TokenizerError,
    VocabularyError,
    load_tokenizer,
    train_tokenizer,
)
from embedlayer.vocab import Receipt, add_tokens, edit_vocabulary, remove_tokens, write_into

SIZE = 300
BPE = train_tokenizer(ENGLISH, "bpe", vocab_size=SIZE)
ENDS = ("token_embd.weight", "output.weight")
OTHER = "A dog asks other dogs why nobody knows; they lovingly began in 2024. (Small dogs!)\n" * 20
EDITED = {f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores", "merges")} | {"llama.vocab_size"}


def by_name(path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def check_rest(old, new) -> None:
    """Check that all tensors but the table and the head have the same bytes, and all metadata but the tokens too."""
    before, after = gguf.GGUFReader(old), gguf.GGUFReader(new)
    assert [tensor.name for tensor in before.tensors] == [tensor.name for tensor in after.tensors]
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert other.data_offset % after.alignment == 0
        if one.name not in ENDS:
            assert (one.tensor_type, one.data.tobytes()) == (other.tensor_type, other.data.tobytes())
    assert list(before.fields) == list(after.fields)
    changed = {key for key, field in before.fields.items() if field.contents() != after.fields[key].contents()}
    assert changed <= EDITED


@pytest.mark.parametrize(
    "dtype", some(("F32", "BF16", "Q4_0"), ("F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4"))
)
def test_kept_rows_keep_their_bytes_and_new_rows_are_quantised(tmp_path, dtype) -> None:
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write_file(old, dtype=dtype, head=dtype, tokenizer=("gpt2", BPE), alignment=64)
    raw = old.read_bytes()
    receipt = edit_vocabulary(old, add=[" otters", " zebras"], remove=[" dogs"], special=["<|x|>"], out=new)
    assert old.read_bytes() == raw
    check_rest(old, new)
    kept = receipt.row_map.sources[receipt.row_map.sources >= 0].numpy()
    size = SIZE - len(receipt.dropped)
    for seed, name in enumerate(ENDS):
        before, after = blocks(dtype, SIZE, seed=seed), by_name(new)[name]
        assert after.tensor_type == TYPES[dtype]
        stored = after.data.reshape(len(after.data), -1).view(np.uint8)
        np.testing.assert_array_equal(stored[:size], before.view(np.uint8)[kept])
        numbers = torch.from_numpy(gguf.quants.dequantize(after.data, TYPES[dtype]).astype(np.float32))
        ids = BPE.encode(" otters").ids
        of = torch.from_numpy(gguf.quants.dequantize(by_name(old)[name].data, TYPES[dtype]).astype(np.float32))
        mean = torch.stack([of[token] for token in ids]).mean(0, keepdim=True)
        if dtype == "F32":
            torch.testing.assert_close(numbers[size : size + 1], mean)
        else:
            encoded = gguf.quants.quantize(mean.numpy(), TYPES[dtype])
            np.testing.assert_array_equal(stored[size : size + 1], encoded.view(np.uint8))
        assert numbers.shape == (size + 3, WIDTH)
    opened = el.open_model(new)
    assert opened.encode("my otters<|x|>")[-2:] == [size, size + 2]
    assert opened.tokenizer.decode([size, size + 1]) == " otters zebras"
    fields = gguf.GGUFReader(new).fields
    types = dict(zip(*(fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type")), strict=True))
    assert (types[" otters"], types["<|x|>"], types["Ġthe"]) == (4, 3, 1)
    assert Receipt.load(f"{new}.receipt").added == receipt.added


@pytest.mark.parametrize("dtype", some(("Q8_0", "F16", "Q6_K"), ("F32", *QUANTISED, *READ)))
def test_a_receipt_says_in_every_form_whether_kept_rows_keep_their_bits(tmp_path, capsys, dtype) -> None:
    old, new = write_file(tmp_path / "old.gguf", dtype=dtype, head="F16", tokenizer=("gpt2", BPE)), tmp_path / "a.gguf"
    fewer = remove_tokens(old, [" dogs"], out=tmp_path / "fewer.gguf")
    assert fewer.stored == {ENDS[0]: (dtype, dtype, 0.0), ENDS[1]: ("F16", "F16", 0.0)}  # whatever the type is
    for arguments in (("-o", new), ("--json", "-o", tmp_path / "b.gguf")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmbedLayerWarning)
            assert run("vocab", "add", old, "otters", *arguments) == 0
    printed, shown = capsys.readouterr().out.split("{", 1)
    shown = json.loads("{" + shown)
    before, after = (by_name(path)[ENDS[0]] for path in (old, new))
    numbers = [gguf.quants.dequantize(tensor.data, tensor.tensor_type)[:SIZE] for tensor in (before, after)]
    change = np.abs(numbers[0] - numbers[1]).max()
    receipt, changed = Receipt.load(f"{new}.receipt"), f"{dtype} -> Q8_0, numbers changed by up to {change:.3g}"
    assert shown["stored"] == {name: rows._asdict() for name, rows in receipt.stored.items()}
    assert receipt.stored[ENDS[0]] == (dtype, after.tensor_type.name, pytest.approx(change))
    assert receipt.stored[ENDS[1]] == ("F16", "F16", 0.0)
    assert shown["extra_space_decoded"] == []
    assert shown["kept_rows_unchanged"] == (change == 0) == (dtype not in READ)
    assert ("Kept     300, unchanged bit for bit" in printed) == (change == 0)
    assert ("Kept     300, not bit for bit:" in printed) == (changed in printed) == (change > 0)
    assert (f"{ENDS[0]} as {changed}" in str(receipt)) == (change > 0)
    assert printed.endswith(f"; the receipt is {new.name}.receipt\n{old} is unchanged; to undo, delete {new}.\n")
    assert str(el.vocab.last_receipt(new)) == str(receipt)


def test_new_rows_in_a_type_that_gguf_cannot_quantise_need_q8_0_and_a_warning_says_so(tmp_path) -> None:
    old = write_file(tmp_path / "old.gguf", dtype="Q6_K", tokenizer=("gpt2", BPE))
    with pytest.warns(EmbedLayerWarning, match=r"is written as Q8_0, 18,600 bytes more for 300 rows"):
        add_tokens(old, [" otters"], out=tmp_path / "more.gguf")
    check_rest(old, tmp_path / "more.gguf")
    found = by_name(tmp_path / "more.gguf")[ENDS[0]]
    rows = gguf.quants.dequantize(blocks("Q6_K", SIZE), TYPES.Q6_K)
    np.testing.assert_array_equal(found.data[:SIZE], gguf.quants.quantize(rows, TYPES.Q8_0))


def test_export_writes_an_edited_table_into_a_copy_and_equal_rows_keep_their_bytes(tmp_path, capsys) -> None:
    original = write_file(tmp_path / "old.gguf", dtype="Q4_0", tokenizer=("gpt2", BPE))
    layer = el.load(original)
    table = el.TokenEmbedding.from_pretrained(layer.table.rows(0, SIZE))
    edited = el.EmbeddingLayer(table, head=el.OutputHead(table))
    receipt = edit_vocabulary(edited, add=[" otters"], tokenizer=load_tokenizer(original))
    with torch.no_grad():
        table.weight[7] = 0.5
    edited.save_pretrained(tmp_path / "folder", tokenizer=receipt.tokenizer)
    assert run("export", tmp_path / "folder", "--into", original, "-o", tmp_path / "new.gguf") == 0
    assert "Wrote 301 rows of 256 numbers as gguf" in capsys.readouterr().out
    check_rest(original, tmp_path / "new.gguf")
    found, before = by_name(tmp_path / "new.gguf")[ENDS[0]].data, blocks("Q4_0", SIZE)
    changed = [row for row in range(SIZE) if found[row].tobytes() != before[row].tobytes()]
    assert changed == [7]
    np.testing.assert_array_equal(found[7:8], gguf.quants.quantize(np.full((1, WIDTH), 0.5, np.float32), TYPES.Q4_0))
    assert el.open_model(tmp_path / "new.gguf").encode("an otters")[-1] == SIZE


def test_a_table_of_kept_rows_is_written_in_a_type_that_gguf_cannot_quantise(tmp_path) -> None:
    original = write_file(tmp_path / "old.gguf", dtype="Q6_K", tokenizer=("gpt2", BPE))
    table, tokenizer = el.load(original).table, load_tokenizer(original)
    assert write_into(table, tokenizer, original, tmp_path / "same.gguf", head=None) == SIZE
    assert (tmp_path / "same.gguf").read_bytes() == original.read_bytes()
    rows = table.rows(0, SIZE)
    rows[3] = 1
    with pytest.warns(EmbedLayerWarning, match="is written as Q8_0"):
        write_into(el.TokenEmbedding.from_pretrained(rows), tokenizer, original, tmp_path / "other.gguf", head=None)
    found = by_name(tmp_path / "other.gguf")[ENDS[0]].data
    np.testing.assert_array_equal(found, gguf.quants.quantize(rows.numpy(), TYPES.Q8_0))


OF_FURTHER_TOKENS = ("nextn.embed_tokens", "nextn.shared_head_head")
"""Tensors of a layer that predicts further tokens: they have rows of tokens."""


def test_names_of_llama_cpp_say_which_tensors_have_rows_of_tokens(tmp_path) -> None:
    names = {name.format(bid=9) for name in gguf.constants.TENSOR_NAMES.values()}
    text = {name for name in names if name.startswith(("blk.", "enc.", "dec.")) or "." not in name}
    further = {f"blk.9.{name}" for name in OF_FURTHER_TOKENS}
    text -= {"token_embd", "output", "output_norm", "per_layer_token_embd", "conv1d", *further}
    rows = np.ones((SIZE, 1), np.float32)  # a width that equals the number of tokens
    old = write_file(tmp_path / "old.gguf", tokenizer=("gpt2", BPE), tensors={f"{name}.weight": rows for name in text})
    add_tokens(old, [" otters"], out=tmp_path / "new.gguf")
    check_rest(old, tmp_path / "new.gguf")
    for name in ("conv1d", *further):
        old = write_file(tmp_path / "other.gguf", tokenizer=("gpt2", BPE), tensors={f"{name}.weight": rows})
        with pytest.raises(CheckpointError, match=f"{name}.weight"):
            add_tokens(old, [" otters"], out=tmp_path / "refused.gguf")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_another_tokenizer_of_the_same_kind_is_written_and_one_of_another_kind_is_refused_by_name(
    tmp_path, kind
) -> None:
    old = write_file(tmp_path / "old.gguf", tokenizer=(kind, TOKENIZERS[kind]()), dtype="F16")
    for other, train in TOKENIZERS.items():
        new = train(OTHER)  # merges in another order, other scores
        if other != kind:
            with pytest.raises(TokenizerError, match=f"of kind {kind!r}"):
                el.vocab.transplant(old, new, out=tmp_path / "refused.gguf")
            continue
        receipt = el.vocab.transplant(old, new, out=tmp_path / "new.gguf")
        written = load_tokenizer(tmp_path / "new.gguf")
        assert receipt.kept < written.get_vocab_size() == new.get_vocab_size()
        for text in (OTHER, ENGLISH, *LANGUAGES):
            assert written.encode(text, add_special_tokens=False).ids == new.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("through", ["edit", "export"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_around_added_tokens_is_decoded_as_before_or_one_warning_and_the_receipt_name_them(
    tmp_path, kind, through
) -> None:
    old, new = write_file(tmp_path / "old.gguf", tokenizer=(kind, TOKENIZERS[kind]()), dtype="F16"), tmp_path / "a.gguf"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        receipt = edit_vocabulary(old, add=[" otter", "sea otter", "zebra"], special=["<|x|>"], out=new)
        if through == "export":
            table = el.load(new).table
            caught.clear()
            write_into(table, receipt.tokenizer, old, new := tmp_path / "b.gguf", head=None)
    written, named = load_tokenizer(new), set(receipt.extra_space_decoded)
    texts = ["an otters nest", "the sea otter dog", "my zebras know", "asea otterb", "the dog<|x|> knows"]
    found = {text: written.encode(text).ids for text in texts}
    assert found == {text: receipt.tokenizer.encode(text).ids for text in texts}
    other = {text for text, ids in found.items() if written.decode(ids) != receipt.tokenizer.decode(ids)}
    assert other == {text for text, ids in found.items() if named & {*ids}}
    assert named == {token for token in receipt.added if kind == "llama" and receipt.added[token] != "<|x|>"}
    messages = [str(one.message) for one in caught]
    assert len(messages) == (kind == "llama")
    for message in messages:
        assert "Text around 3 of the added tokens gets an extra space when it is decoded from the GGUF file" in message
        assert all(repr(receipt.added[token]) in message for token in named)
        assert "'a otterb' becomes 'a otter b'" in message
    assert Receipt.load(f"{tmp_path / 'a.gguf'}.receipt").extra_space_decoded == receipt.extra_space_decoded


def test_what_cannot_be_edited_is_refused_and_nothing_is_written(tmp_path) -> None:
    old = write_file(tmp_path / "old.gguf", tokenizer=("gpt2", BPE), head="Q8_0")
    odd = write_file(
        tmp_path / "odd.gguf", tokenizer=("gpt2", BPE), tensors={"blk.0.map.weight": np.ones(SIZE, np.float32)}
    )
    for name, width in (("narrow", 8), ("alone", WIDTH)):
        el.TokenEmbedding(SIZE, width).save_pretrained(tmp_path / name, tokenizer=BPE)
    (tmp_path / "folder").mkdir()
    write_file(tmp_path / "folder" / "model.gguf", tokenizer=("gpt2", BPE), dtype="F32")
    names = sorted(path.name for path in tmp_path.iterdir())
    out, word = tmp_path / "new.gguf", [" otters"]
    for error, refused in (
        (CheckpointError, lambda: add_tokens(tmp_path / "folder", word, out=tmp_path / "copy")),
        (CheckpointError, lambda: add_tokens(odd, word, out=out)),
        (FileError, lambda: add_tokens(old, word, out=old)),
        (FileError, lambda: add_tokens(old, word)),
        (VocabularyError, lambda: add_tokens(old, [" the"], out=out)),
        (TokenizerError, lambda: el.vocab.transplant(old, train_tokenizer(ENGLISH, "word"), out=out)),
    ):
        with pytest.raises(error):
            refused()
    for code, words in ((2, ("narrow", "--into", old)), (2, ("alone", "--into", old)), (1, ("alone",))):
        assert run("export", tmp_path / words[0], *words[1:], "-o", out) == code
    assert sorted(path.name for path in tmp_path.iterdir()) == names
