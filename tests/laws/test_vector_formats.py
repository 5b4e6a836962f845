"""A file of vectors with rows that are not finite is refused where numbers are needed, and opens to be diagnosed."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from covering import looped

import embedlayer as el
from embedlayer.checkpoints.vector_files import read_vectors, write_vectors
from embedlayer.opening import open_model

TOKENS = ["cat", "dog", "nan", "inf", "tree", "sun"]
ROWS = torch.randn(len(TOKENS), 4, generator=torch.Generator().manual_seed(0)).numpy()
ROWS[1, 2], ROWS[4, 0], ROWS[4, 3] = np.nan, np.inf, -np.inf


def gensims(path: Path, **options: bool) -> None:
    import gensim

    vectors = gensim.models.KeyedVectors(ROWS.shape[1])
    vectors.add_vectors(TOKENS, ROWS)
    vectors.save_word2vec_format(str(path), **options)


def npy(path: Path, tokens: list[str] | None = TOKENS) -> None:
    np.save(path, ROWS)
    if tokens is not None:
        path.with_name(f"{path.stem}.tokens.json").write_text(json.dumps(tokens))


def projector(path: Path) -> None:
    path.mkdir()
    np.savetxt(path / "tensors.tsv", ROWS, delimiter="\t", fmt="%.9g")
    (path / "metadata.tsv").write_text("".join(f"{token}\n" for token in TOKENS))


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "word2vec": ("v.txt", gensims),
    "word2vec-binary": ("v.bin", lambda path: gensims(path, binary=True)),
    "glove": ("v.txt", lambda path: gensims(path, write_header=False)),
    "fasttext": ("v.vec", gensims),
    "npy": ("v.npy", npy),
    "npy without names": ("v.npy", lambda path: npy(path, None)),
    "projector": ("v", projector),
}
NAMED = [name for name in WRITERS if name != "npy without names"]


FILES = [*WRITERS, *(f"{name}, compressed" for name in WRITERS if name != "projector")]


@pytest.fixture(params=FILES)
def written(request, tmp_path: Path) -> tuple[Path, list[str]]:
    """A file of another library's making, and the tokens that it names."""
    kind, _, compressed = request.param.partition(", ")
    name, write = WRITERS[kind]
    path = tmp_path / name
    write(path)
    if compressed:
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        path = path.with_name(f"{name}.gz")
    return path, TOKENS if kind in NAMED else [str(row) for row in range(len(TOKENS))]


def test_rows_that_are_not_finite_are_refused_by_name_or_kept_with_a_warning(written) -> None:
    path, tokens = written
    with pytest.raises(el.CheckpointError, match=f"2 of 6 rows hold NaN, .*{tokens[1]!r}.*{tokens[4]!r}"):
        read_vectors(path)
    with pytest.warns(el.EmbedLayerWarning, match=f"2 of 6 rows hold NaN, .*{tokens[1]!r}.*{tokens[4]!r}"):
        found, rows = read_vectors(path, nonfinite="keep")
    assert found == tokens
    assert np.allclose(rows.numpy(), ROWS, rtol=1e-6, equal_nan=True)


NOT_UTF8 = [b"cat", b"caf\xc3", b"dog", b"\xff"]


def broken_tokens(folder: Path, kind: str) -> Path:
    """Write a file of four rows, two of whose tokens are not UTF-8."""
    numbers = np.eye(4, dtype="<f4")
    if kind == "projector":
        folder.mkdir()
        np.savetxt(folder / "tensors.tsv", numbers, delimiter="\t")
        (folder / "metadata.tsv").write_bytes(b"".join(b"%s\n" % token for token in NOT_UTF8))
        return folder
    suffix = {"word2vec-binary": ".bin", "fasttext": ".vec"}.get(kind, ".txt")
    rows = [row.tobytes() if suffix == ".bin" else " ".join(map(str, row)).encode() for row in numbers]
    body = b"".join(b"%s %s\n" % line for line in zip(NOT_UTF8, rows, strict=True))
    file = folder.with_suffix(suffix)
    file.write_bytes(body if kind == "glove" else b"4 4\n" + body)
    return file


@looped("kind", ["word2vec", "word2vec-binary", "glove", "fasttext", "projector"])
def test_tokens_that_are_not_utf8_are_read_alike_in_python_and_by_commands_with_their_count(
    kind, tmp_path, capsys
) -> None:
    path = broken_tokens(tmp_path / "vectors", kind)
    said = r"holds 2 tokens that are not UTF-8, first b.caf\\xc3. at (line|row) \d: .* are replaced by U\+FFFD"
    for read in (lambda: read_vectors(path)[0], lambda: el.open_model(path).tokens):
        with pytest.warns(el.EmbedLayerWarning, match=said):
            assert read() == ["cat", "caf\ufffd", "dog", "\ufffd"]
    with pytest.warns(el.EmbedLayerWarning, match="holds 2 tokens .* are left out"):
        assert read_vectors(path, errors="ignore")[0] == ["cat", "caf", "dog", ""]
    with pytest.raises(el.CheckpointError, match=r"the token b'caf.*' is not UTF-8"):
        read_vectors(path, errors="strict")
    for words in (("neighbors", path, "caf\ufffd", "-n", 2), ("inspect", path), ("inspect", path, path)):
        assert run(*words) == 0
        assert len(re.findall(said, capsys.readouterr().err)) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{0}", "{0}", "--json"],
        ["export", "{0}", "-o", "{1}/out.vec"],
        ["compress", "{0}", "--to", "int8", "-o", "{1}/out"],
        ["compress", "{0}", "--compare", "--json"],
        ["explore", "{0}", "--export", "{1}/page.html"],
    ],
    ids=lambda command: " ".join(command[::2]),
)
@looped("kind", ["word2vec", "npy without names"])
def test_other_commands_work_or_refuse_in_one_line(tmp_path, capsys, kind, command) -> None:
    path = tmp_path / WRITERS[kind][0]
    WRITERS[kind][1](path)
    code = run(*(part.format(path, tmp_path) for part in command))
    said = [line for line in capsys.readouterr().err.splitlines() if "Error" in line]
    assert (code, len(said)) in ((0, 0), (1, 1), (2, 1))


BOM = b"\xef\xbb\xbf"
TEXT_FILES = {
    "bom.txt": BOM + b"2 2\ncat 1 2\ndog 3 4\n",
    "bom without header.txt": BOM + b"cat 1 2\ndog 3 4\n",
    "bom.vec": BOM + b"2 2\r\ncat 1 2\r\ndog 3 4\r\n",
    "tabs.txt": b"2\t2\ncat\t1\t2\ndog\t3\t4\n",
    "tabs without header.txt": b"cat\t1\t2\ndog 3\t4\n",
    "double spaces.vec": b"2 2\ncat  1  2\ndog 3   4 \n",
    "text.bin": b"2 2\ncat 1 2\ndog 3 4\n",
}


@looped("name", TEXT_FILES)
def test_text_that_other_programs_write_is_read(name, tmp_path) -> None:
    (tmp_path / name).write_bytes(TEXT_FILES[name])
    tokens, rows = read_vectors(tmp_path / name)
    assert (tokens, rows.tolist()) == (["cat", "dog"], [[1, 2], [3, 4]])


def test_float64_that_float32_changes_is_said(tmp_path) -> None:
    np.save(tmp_path / "v.npy", np.array([[0.1, 0.2]]))
    with pytest.warns(el.EmbedLayerWarning, match=r"v\.npy holds float64, and its numbers are rounded to float32"):
        assert torch.equal(read_vectors(tmp_path / "v.npy")[1], torch.tensor([[0.1, 0.2]]))


@pytest.mark.parametrize("unknown", ["<unk>", "fish"])
def test_a_word_without_a_row_is_an_error_and_a_name_with_a_space_is_found_in_a_text(unknown, tmp_path) -> None:
    names = ["cat", "dog", unknown, "new york", "new york city", "a.b c"]
    write_vectors(tmp_path / "v.npy", names, torch.eye(6))
    opened = open_model(tmp_path / "v.npy")
    assert opened.encode(f"cat new york  new york city dog {unknown}") == [0, 3, 4, 1, 2]
    assert opened.encode("a.b c") == [5]
    for text in ("cat zebra", "new yorker", "renew york", "axb c"):
        with pytest.raises(el.UnknownTokenError, match="is not among the 6 tokens of"):
            opened.encode(text)
