"""GGUF files: headers read as by the package gguf, copies written byte for byte, and damage refused."""

import os
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_models import QUANTISED, READ, TYPES, WIDTH, blocks, write_file

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.gguf_files import NewTensor, read_gguf, write_gguf


@pytest.mark.parametrize("dtype", ["F32", *QUANTISED, *READ])
def test_tensors_of_every_type_and_shape_are_read_as_by_the_package_gguf(tmp_path, dtype) -> None:
    stored = blocks(dtype, 6)
    expected = gguf.quants.dequantize(stored.view(np.float32) if dtype == "F32" else stored, TYPES[dtype])
    if dtype == "F16":
        expected = stored.view(np.float16).astype(np.float32)
    for shape in [(2, 3), (2, 1, 3), (6,)]:
        tensors = {"experts": stored.reshape(*shape, -1)}
        if dtype == "F32":
            tensors = {"experts": stored.view(np.float32).reshape(*shape, -1)}
        path = write_file(tmp_path / "a.gguf", tensors=tensors, raw_dtype=TYPES[dtype])
        read = read_gguf(path).read("experts").float().numpy()
        np.testing.assert_array_equal(read, expected.reshape(*shape, WIDTH))


@pytest.mark.parametrize("alignment", [None, 64])
def test_a_header_is_read_as_by_the_package_gguf_and_a_copy_has_the_same_bytes(tmp_path, alignment) -> None:
    path = write_file(tmp_path / "a.gguf", dtype="Q5_0", head="F16", alignment=alignment)
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    assert file.alignment == reader.alignment
    assert file.metadata == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert (info.dtype, info.start) == (tensor.tensor_type.name, tensor.data_offset)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert file.stored_rows(tensor.name).numpy().tobytes() == tensor.data.tobytes()
    write_gguf(file, tmp_path / "b.gguf", metadata={}, tensors={})
    assert (tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    with pytest.raises(FileError, match="the file that is copied"):
        write_gguf(file, path, metadata={}, tensors={})
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(CheckpointError, match="it was cut short while it was copied"):
        write_gguf(file, tmp_path / "c.gguf", metadata={}, tensors={})
    assert not (tmp_path / "c.gguf").exists()


def test_replaced_tensors_and_values_are_read_back_and_the_rest_stays(tmp_path) -> None:
    path = write_file(tmp_path / "a.gguf")
    new = NewTensor("Q4_0", (5, WIDTH), torch.from_numpy(blocks("Q4_0", 5)))
    write_gguf(
        read_gguf(path),
        tmp_path / "b.gguf",
        metadata={"tokenizer.ggml.tokens": ["ä", "b\0"], "llama.block_count": 7, "unknown": 1},
        tensors={"token_embd.weight": new},
    )
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(tmp_path / "b.gguf")
    assert after.get_field("tokenizer.ggml.tokens").contents() == ["ä", "b\0"]
    assert after.get_field("llama.block_count").contents() == 7
    assert after.get_field("unknown") is None
    first, *rest = after.tensors
    assert (first.tensor_type, first.data.tobytes()) == (TYPES.Q4_0, new.data.numpy().tobytes())
    for old, tensor in zip(before.tensors[1:], rest, strict=True):
        facts = [(each.name, each.tensor_type, each.data.tobytes()) for each in (old, tensor)]
        assert facts[0] == facts[1]
        assert tensor.data_offset % after.alignment == 0


def test_damage_is_a_sentence_and_not_a_traceback(tmp_path) -> None:
    whole = write_file(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "a.gguf"
    place = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    damaged = [b"GGML" + whole[4:], whole[:8] + b"\xff" * 16 + whole[24:]]
    damaged += [b"GGUF" + version + whole[8:] for version in (struct.pack(">I", 3), struct.pack("<I", 9))]
    damaged += [whole[:place] + struct.pack("<I", 250) + whole[place + 4 :]]  # a type that is not known
    for content in (*damaged, whole[:10], *(whole[:cut] for cut in range(24, len(whole) - 1, 97))):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(path)):
            read_gguf(path)


def test_a_part_of_a_split_model_is_refused(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="is one of 2 parts"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")
