"""Tables in the files that word vectors travel in."""

import contextlib
import gzip
import json
import re
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedlayer import (
    CheckpointError,
    EmbedLayerError,
    EmbedLayerWarning,
    FactorizedEmbedding,
    FileError,
    ShapeError,
    SizeError,
    TokenEmbedding,
    open_model,
)
from embedlayer.checkpoints import read_vectors, write_vectors
from embedlayer.checkpoints.vector_formats import streams

FILES = {
    "word2vec": "v.txt",
    "word2vec-binary": "v.bin",
    "glove": "v.txt",
    "fasttext": "v.vec",
    "npy": "v.npy",
    "projector": "v",
}
WORDS = [name for name in FILES if name not in ("npy", "projector")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
WORD = TEXT.filter(lambda word: word and not set(word) & set(" \t\n\r\v\f"))
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
FAST = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tables(words):
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 4))
    return sizes.flatmap(
        lambda size: st.tuples(
            st.lists(words, min_size=size[0], max_size=size[0], unique=True),
            st.lists(st.lists(FINITE, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]),
        )
    )


def bits(rows):
    return rows.contiguous().view(torch.int32)


@pytest.mark.parametrize("format", FILES)
@FAST
@given(data=st.data())
def test_what_was_written_is_read_back_bit_for_bit(tmp_path, format, data) -> None:
    tokens, numbers = data.draw(tables(WORD if format in WORDS else TEXT))
    rows = torch.tensor(numbers, dtype=torch.float32)
    file = tmp_path / FILES[format]
    write_vectors(file, tokens, rows, format)
    again, found = read_vectors(file, format)
    assert again == tokens
    assert torch.equal(bits(found), bits(rows))
    if format != "projector":
        write_vectors(f"{file}.gz", tokens, rows, format)
        again, found = read_vectors(f"{file}.gz", format)
        assert (again, bits(found).tolist()) == (tokens, bits(rows).tolist())


def test_any_float32_survives_its_decimals(tmp_path) -> None:
    patterns = torch.randint(-(2**31), 2**31, (300, 100)).int().view(torch.float32)
    rows = torch.where(patterns.isfinite(), patterns, -0.0)
    write_vectors(tmp_path / "v.txt", [str(n) for n in range(300)], rows, "word2vec")
    assert torch.equal(bits(read_vectors(tmp_path / "v.txt")[1]), bits(rows))


READS = [(False, streams.BYTES_AT_ONCE), *((True, size) for size in (1, 70, streams.BYTES_AT_ONCE))]
"""Whether a file is binary, and the bytes that one read takes: less than a row, some rows, all."""


@pytest.mark.parametrize(("binary", "at_once"), READS)
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # gensim's, with no_header
@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_gensim_reads_what_is_written_and_the_other_way_round(tmp_path, monkeypatch, binary, at_once, ending) -> None:
    monkeypatch.setattr(streams, "BYTES_AT_ONCE", at_once)
    gensim = pytest.importorskip("gensim.models", reason="the dev extra is not installed")
    tokens = ["the", "naïve", "日本", "x" * 40, "a_b"]
    rows = torch.randn(5, 7)
    ours, theirs = tmp_path / f"ours{ending}", tmp_path / f"theirs{ending}"
    format = "word2vec-binary" if binary else "word2vec"
    write_vectors(ours, tokens, rows, format)
    found = gensim.KeyedVectors.load_word2vec_format(str(ours), binary=binary)
    assert found.index_to_key == tokens
    assert np.array_equal(found.vectors, rows.numpy())
    found.save_word2vec_format(str(theirs), binary=binary)
    again, read = read_vectors(theirs, format)
    assert again == tokens
    assert torch.equal(read, rows)
    if not binary:
        write_vectors(ours, tokens, rows, "glove")
        assert gensim.KeyedVectors.load_word2vec_format(str(ours), no_header=True).index_to_key == tokens


@pytest.mark.parametrize(("binary", "at_once"), READS)
def test_twice_the_same_token_and_bad_utf8_are_read_as_gensim_reads_them(
    tmp_path, monkeypatch, binary, at_once
) -> None:
    monkeypatch.setattr(streams, "BYTES_AT_ONCE", at_once)
    gensim = pytest.importorskip("gensim.models", reason="the dev extra is not installed")
    entries = [(b"cat", [1, 2]), (b"caf\xc3", [3, 4]), (b"cat", [5, 6]), (b"dog", [7, 8])]
    if binary:
        body = b"".join(word + b" " + np.array(row, "<f4").tobytes() + b"\n" for word, row in entries)
    else:
        body = b"".join(word + b" %d %d \n" % tuple(row) for word, row in entries)  # a space at the end, as fastText
    file, format = tmp_path / "v", "word2vec-binary" if binary else "word2vec"
    file.write_bytes(b"4 2\n" + body)
    with pytest.raises(CheckpointError, match=r"(line 3|row 2): the token b'caf.*' is not UTF-8.*errors=\"replace\""):
        read_vectors(file, format, errors="strict")
    for errors in ("ignore", "replace"):
        peer = gensim.KeyedVectors.load_word2vec_format(str(file), binary=binary, unicode_errors=errors)
        with (
            pytest.warns(EmbedLayerWarning, match="an earlier row has, 1 in all, first 'cat' at (line 4|row 3)"),
            pytest.warns(EmbedLayerWarning, match=r"1 tokens that are not UTF-8, first b'caf.* at (line 3|row 2): "),
        ):
            tokens, rows = read_vectors(file, format, errors=errors)
        assert tokens == peer.index_to_key[:3]  # past them gensim has a None and a row of zeros
        assert np.array_equal(rows.numpy(), peer.vectors[:3])


def test_a_table_is_read_by_chunks_and_without_its_scale(tmp_path) -> None:
    tokens = [str(n) for n in range(9000)]
    for table in (TokenEmbedding(9000, 8, scale="sqrt_dim").bfloat16(), FactorizedEmbedding(9000, 8, 2)):
        write_vectors(tmp_path / "v.npy", tokens, table)
        assert torch.equal(read_vectors(tmp_path / "v.npy")[1], table.rows(0, 9000).float())
        assert np.load(tmp_path / "v.npy").shape == (9000, 8)


def test_the_name_tells_the_format(tmp_path, unchecked) -> None:
    rows, tokens = torch.eye(2), ["a", "b"]
    for format, name in FILES.items():
        write_vectors(tmp_path / name, tokens, rows, format)
        assert read_vectors(tmp_path / name)[0] == tokens
    write_vectors(tmp_path / "v" / "tensors.tsv", tokens, rows)
    assert read_vectors(tmp_path / "v" / "tensors.tsv")[0] == tokens
    assert (tmp_path / "v" / "metadata.tsv").read_text() == "a\nb\n"  # one column has no header
    for call in (write_vectors, tmp_path / "v.txt", tokens, rows), (read_vectors, tmp_path / "v.data"):
        with pytest.raises(SizeError, match="does not tell the format"):
            call[0](*call[1:])
    with pytest.raises(SizeError, match="no file format 'csv'"):
        read_vectors(tmp_path / "v.txt", "csv")


def test_tokens_with_spaces_are_read_from_the_right_and_not_written(tmp_path) -> None:
    file = tmp_path / "v.txt"
    file.write_text("the 0.5 1e-3\n. . . 1 2\nat name@domain.com 3 -4\n7 8 9\n")
    tokens, rows = read_vectors(file)
    assert tokens == ["the", ". . .", "at name@domain.com", "7"]
    assert rows.tolist() == [[0.5, pytest.approx(1e-3)], [1, 2], [3, -4], [8, 9]]
    for token in (". .", "a\nb", "", "a", "\ud800"):  # the last one is no UTF-8
        with pytest.raises(CheckpointError, match="Row 1: the token"):
            write_vectors(file, ["a", token], torch.eye(2), "glove")
    with pytest.raises(CheckpointError, match="Row 0"):
        write_vectors(tmp_path, ["\ud800"], torch.eye(1), "projector")
    assert read_vectors(file)[0] == tokens  # what could not be written has left the file as it was


def test_a_projector_with_more_columns_has_a_header_and_the_first_is_the_token(tmp_path) -> None:
    (tmp_path / "tensors.tsv").write_text("1\t2\n3\t4\n")
    (tmp_path / "metadata.tsv").write_text("word\tcount\ncat\t5\na\\tb\t6\n")
    tokens, rows = read_vectors(tmp_path)
    assert tokens == ["cat", "a\tb"]
    assert rows.tolist() == [[1, 2], [3, 4]]
    for metadata in ("word\ncat\na\n", "cat\n", "cat\ndog\tx\n", "a\nb\nc\nd\n"):
        (tmp_path / "metadata.tsv").write_text(metadata)
        with pytest.raises(CheckpointError, match="metadata.tsv"):
            read_vectors(tmp_path)


def test_a_byte_order_mark_is_no_part_of_labels_or_numbers(tmp_path) -> None:
    write_vectors(tmp_path, ["a", "b"], torch.eye(2), format="projector")
    for name in ("tensors.tsv", "metadata.tsv"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    tokens, rows = read_vectors(tmp_path)
    assert tokens == ["a", "b"]
    assert torch.equal(rows, torch.eye(2))


ZEROS = bytes(8)
WRONG = {
    "a.txt": [
        *(b"2 3\na 1 2 3\nb 1 2\n", b"2 3\na 1 2 3\nb 1 2 3 4\n", b"a 1 2\nb 3\n", b"3 2\na 1 2\nb 3 4\n"),
        *(b"1 2\na 1 2\nb 3 4\n", b"2 2\na 1 2\nb 3 nan\n", b"a 1 2\nb -inf 1e60\n", b"2 2\na 1 2\nb 3 4_0\n"),
        *(b"2 2\na 1 2\nb x 4\n", b"2 2\na 1 2\n\nb 3 4\n", b"2 2\n 1 2\nb 3 4\n", b"", b"0 5\n", b"word\n"),
        *(b"1 99999999\na 1\n", b"cat 1 2\rdog 3 4\r", b"2 2\rcat 1 2\rdog 3 4\r", b"2 2\ncat 1 2\rdog 3 4\r"),
    ],
    "a.vec": [b"a 1 2\n", b"2 2\r\ncat 1 2\rdog 3 4\r"],
    "a.bin": [
        *(b"\x80\x02}q\x00.", b"2 2\na " + ZEROS + b"b " + bytes(7), b"2 2", b"2 2\na " + ZEROS),
        *(b"1 2\na " + ZEROS + b"rest", b"1 1\n" + bytes(70_000), b"1 1\n " + bytes(4), b"1 1\na \x00\x00\xc0\x7f"),
        *(b"2 2\na b \0\0\xc0?\0\0\x11\xdfc " + ZEROS, b"2 2\ncat 1 2\rdog 3 4\r"),
    ],
    "a.txt.gz": [gzip.compress(b"1 1\na 1\n", mtime=0)[:-9], b"1 1\na 1\n"],
    "a.npy": [b"\x93NUMPY\x02\x00"],
}
"""Name of a file -> contents that are refused."""


def test_what_is_wrong_in_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "a.tokens.json").write_text('["a"]')
    for name, contents in WRONG.items():
        for content in contents:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=re.escape(name)):
                read_vectors(tmp_path / name)


@pytest.mark.parametrize("dtype", ["<f4", "<f8", ">f4", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_numpy_in_any_order_are_read(tmp_path, dtype, order) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=(3, 4)), dtype, order=order)
    np.save(tmp_path / "v.npy", array)
    (tmp_path / "v.tokens.json").write_text(json.dumps(["a", "b", "c"]))
    with pytest.warns(EmbedLayerWarning, match="rounded to float32") if dtype == "<f8" else contextlib.nullcontext():
        assert np.array_equal(read_vectors(tmp_path / "v.npy")[1].numpy(), array.astype(np.float32))


def test_an_array_that_does_not_fit_is_refused(tmp_path) -> None:
    file, tokens = tmp_path / "v.npy", tmp_path / "v.tokens.json"
    np.save(file, np.eye(2, dtype="f4"))
    whole, names = file.read_bytes(), b'["a", "b"]'
    wrong = [(whole, b'["a"]'), (whole, b"[1, 2]"), (whole, b"["), (whole[:-1], names), (whole + b"x", names)]
    wrong += [(whole.replace(b"(2, 2)", b"(2, 9)"), names), (whole.replace(b"<f4", b"|O8"), names)]
    for content, content_of_tokens in wrong:
        file.write_bytes(content)
        tokens.write_bytes(content_of_tokens)
        with pytest.raises(CheckpointError):
            read_vectors(file)


def test_what_cannot_be_written_is_refused(tmp_path) -> None:
    for tokens, rows in ((["a"], torch.eye(2)), (["a", "b"], torch.ones(2)), ([], torch.zeros(0, 2))):
        with pytest.raises(ShapeError):
            write_vectors(tmp_path / "v.vec", tokens, rows)
    with pytest.raises(CheckpointError, match="Row 1"):
        write_vectors(tmp_path / "v.vec", ["a", "b"], torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(FileError):
        write_vectors(tmp_path / "none" / "v.vec", ["a"], torch.eye(1))
    with pytest.raises(FileError):
        read_vectors(tmp_path / "v.vec")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("v.txt", b"999999999999 3\n"),
        ("v.txt", b"3 1048576\n"),
        ("v.bin", b"999999999999 3\n"),
        ("v.bin", b"999999999999 1000000\n"),
        (
            "v.npy",
            b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1, 999999999999)}     \n",
        ),
    ],
)
def test_a_header_that_lies_costs_no_memory(tmp_path, name, head) -> None:
    (tmp_path / name).write_bytes(head + b"a " + bytes(100))
    (tmp_path / "v.tokens.json").write_text('["a"]')
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_vectors(tmp_path / name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize("name", ["v.npy", "projector"])
def test_rows_and_tokens_are_replaced_together_or_not_at_all(tmp_path, name) -> None:
    path = tmp_path / name
    path.mkdir() if name == "projector" else None
    write_vectors(path, ["a", "b"], torch.eye(2))
    broken = torch.eye(9000)[:, :8].clone()
    broken[8999] = torch.nan
    with pytest.raises(CheckpointError, match="Row 8999"):
        write_vectors(path, [str(row) for row in range(9000)], broken)
    tokens, rows = read_vectors(path)
    assert tokens == ["a", "b"]
    assert torch.equal(rows, torch.eye(2))


def test_a_model_of_fasttext_is_named_and_the_call_of_the_page_converts_it(tmp_path) -> None:
    fasttext = pytest.importorskip("gensim.models.fasttext")
    model = fasttext.FastText([["cat", "dog", "cat"]] * 3, vector_size=4, min_count=1, bucket=8, workers=1, epochs=1)
    path = tmp_path / "model.bin"
    fasttext.save_facebook_model(model, str(path))
    with pytest.raises(CheckpointError, match="is a whole model of fastText"):
        read_vectors(path)
    vectors = fasttext.load_facebook_vectors(str(path))
    vectors.save_word2vec_format(str(path.with_suffix(".vec")))
    tokens, rows = read_vectors(tmp_path / "model.vec")
    assert sorted(tokens) == ["cat", "dog"]
    torch.testing.assert_close(rows, torch.tensor(np.stack([vectors[token] for token in tokens])))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ["v.kv", "v.bin", "v.vec"])
def test_what_gensim_saved_is_never_unpickled(tmp_path, monkeypatch, name, protocol) -> None:
    gensim = pytest.importorskip("gensim.models", reason="the dev extra is not installed")
    model = gensim.Word2Vec([["cat", "dog", "cat"]] * 3, vector_size=4, min_count=1, workers=1, epochs=1)
    for saved in (model.wv, model):
        saved.save(str(tmp_path / name), pickle_protocol=protocol)
        with monkeypatch.context() as patched:
            for function in ("load", "loads", "Unpickler"):
                patched.setattr(f"pickle.{function}", None)
            for read in (open_model, *([] if name == "v.kv" else [read_vectors])):
                with pytest.raises(CheckpointError, match="is a pickle"):
                    read(tmp_path / name)


@pytest.mark.parametrize("opened", ["", "vectors.tsv", "other.tsv"])
def test_a_table_of_the_projector_under_another_name_is_named_and_reads_when_renamed(tmp_path, opened) -> None:
    name = opened or "vectors.tsv"
    (tmp_path / name).write_text("1\t2\n3\t4\n")
    (tmp_path / "metadata.tsv").write_text("cat\ndog\n")
    path = tmp_path / opened if opened else tmp_path
    for read in (read_vectors, open_model):
        with pytest.raises(CheckpointError, match=f"{name}: rename it to tensors.tsv"):
            read(path)
    (tmp_path / name).rename(tmp_path / "tensors.tsv")
    assert read_vectors(tmp_path)[0] == ["cat", "dog"]
    assert open_model(tmp_path).encode("dog") == [1]


@pytest.mark.parametrize("format", FILES)
@FAST
@given(data=st.data())
def test_no_damage_ends_otherwise_than_in_our_error(tmp_path, format, data) -> None:
    file = tmp_path / FILES[format]
    write_vectors(file, ["cat", "dog", "日本"], torch.arange(6.0).view(3, 2) / 7, format)
    for part in file.iterdir() if file.is_dir() else [file]:
        raw = bytearray(part.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(b"0 \n\t\x00\xff-eE.N9_"))
        part.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    with warnings.catch_warnings(), contextlib.suppress(EmbedLayerError):
        warnings.simplefilter("ignore", EmbedLayerWarning)
        tokens, rows = read_vectors(file, format, errors=data.draw(st.sampled_from(["strict", "ignore", "replace"])))
        assert rows.shape[0] == len(tokens) > 0
        assert rows.isfinite().all()
