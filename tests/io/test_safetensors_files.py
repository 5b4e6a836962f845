"""Tensors in safetensors files: what is read, what is refused."""

import json
import os
import resource
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import run_program
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(11, 4),
        "model.norm.weight": torch.randn(4).bfloat16(),
        "model.scalar": torch.tensor(7),
        "model.empty": torch.empty(0, 4),
    }


def write_raw(path, header: object, body: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)


def info(shape: object, offsets: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_those_that_safetensors_wrote(tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = Checkpoint.open(tmp_path)
    assert set(stored.names) == set(tensors)
    for name, tensor in tensors.items():
        read = stored.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    assert stored.read("model.norm.weight", dtype=torch.float64).dtype == torch.float64
    assert stored.headers["model.safetensors"].metadata == {"format": "pt"}


def test_writing_to_what_was_read_does_not_change_the_file(tmp_path, tensors) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    Checkpoint.open(tmp_path).read("model.embed_tokens.weight").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_only_what_is_asked_for_is_read(tmp_path) -> None:
    table = torch.randn(10, 4)
    huge = 1 << 40
    header = {"other": info([huge // 4], [0, huge]), "wte.weight": info([10, 4], [huge, huge + 160])}
    path = tmp_path / "model.safetensors"
    write_raw(path, header)
    start = path.stat().st_size
    with path.open("r+b") as file:  # a file of a tebibyte with a hole where the other tensor is
        file.seek(start + huge)
        file.write(table.numpy().tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stored = Checkpoint.open(tmp_path)
    assert torch.equal(stored.read("wte.weight"), table)
    assert stored.bytes_read == start + 160
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_table_larger_than_memory_is_read_by_rows(tmp_path) -> None:
    """100 GB, which torch cannot map copy-on-write; the pages between the rows are a hole in the file."""
    rows, width = 25_000_000, 1000
    nbytes = rows * width * 4
    header = {"wte.weight": info([rows, width], [0, nbytes]), "bias": info([], [nbytes, nbytes + 4])}
    path = tmp_path / "model.safetensors"
    write_raw(path, header)
    start = path.stat().st_size
    known = {0: torch.randn(width), 12_345_678: torch.randn(width), rows - 1: torch.randn(width)}
    with path.open("r+b") as file:
        try:
            os.truncate(path, start + nbytes + 4)
        except OSError:
            pytest.skip("this file system has no files of 100 GB with holes")
        for row, values in known.items():
            file.seek(start + row * width * 4)
            file.write(values.numpy().tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stored = Checkpoint.open(tmp_path)
    table = stored.info("wte.weight")
    assert torch.equal(table.read_rows(torch.tensor([*known])), torch.stack([*known.values()]))
    assert torch.equal(table.read_rows(slice(12_345_677, 12_345_679))[1], known[12_345_678])
    assert stored.read("bias") == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_rows_are_those_of_the_whole_tensor(tmp_path, dtype) -> None:
    stored = {"a": torch.randn(5, 2, 3).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    stored["empty"] = torch.empty(0, 4).to(dtype)
    save_file(stored, tmp_path / "model.safetensors")
    weights = Checkpoint.open(tmp_path)
    picked = torch.tensor([4, 0, 4])
    assert torch.equal(weights.info("a").read_rows(picked).float(), stored["a"].float()[picked])
    assert torch.equal(weights.info("a").read_rows(slice(1, 3)).float(), stored["a"].float()[1:3])
    assert weights.info("scalar").read_rows(slice(None)).shape == (1,)
    assert weights.info("empty").read_rows(slice(None)).shape == (0, 4)


def test_a_tensor_at_an_odd_offset_is_read(tmp_path) -> None:
    values = torch.randn(3)
    raw = json.dumps({"x": info([3], [0, 12])}).encode()
    write_raw(tmp_path / "a.safetensors", raw.ljust(len(raw) // 8 * 8 + 9), values.numpy().tobytes())
    read = Checkpoint.open(tmp_path / "a.safetensors").read("x")
    assert torch.equal(read, values)
    assert read.data_ptr() % 4 == 0


def shards(folder, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_of_a_sharded_checkpoint_only_the_shards_with_the_tensor_are_opened(tmp_path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").write_bytes(b"not opened")
    shards(tmp_path, a="one.safetensors", b="two.safetensors", c="three.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        stored = Checkpoint.open(source)
        assert stored.names == ("a", "b", "c")
        assert stored.read("a").sum() == 3
    with pytest.raises(el.CheckpointError, match=r"two.safetensors is not a whole safetensors file"):
        stored.read("b")
    with pytest.raises(el.CheckpointError, match=r"lacks its shard three.safetensors"):
        stored.read("c")
    with pytest.raises(el.CheckpointError, match=r"no tensor 'd'"):
        stored.read("d")


def test_a_shard_outside_the_folder_and_a_pickle_are_refused(tmp_path) -> None:
    outside = ("../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "a\\b.safetensors", "", "\0")
    for name in (*outside, "pytorch_model-1.bin"):
        shards(tmp_path, a=name)
        with pytest.raises(el.CheckpointError, match="names the shard"):
            Checkpoint.open(tmp_path)


def test_an_index_that_is_none_is_refused(tmp_path) -> None:
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff"):
        (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(el.CheckpointError):
            Checkpoint.open(tmp_path)


def test_pickles_are_refused(tmp_path) -> None:
    for name in ("pytorch_model.bin", "renamed.safetensors"):
        torch.save({"wte.weight": torch.randn(5, 2)}, tmp_path / name)
        for path in (tmp_path, tmp_path / name):
            with pytest.raises(el.CheckpointError, match="is a pickle"):
                Checkpoint.open(path).names  # noqa: B018
        (tmp_path / name).unlink()


@pytest.mark.parametrize("length", [0x80, 0x0280, 0x0480, 0x4B50])
def test_a_header_whose_length_looks_like_a_pickle_is_a_header(tmp_path, length) -> None:
    raw = json.dumps({"a": info([4], [0, 4], "U8")}).encode().ljust(length)
    write_raw(tmp_path / "model.safetensors", raw, b"1234")
    assert Checkpoint.open(tmp_path).read("a").tolist() == [49, 50, 51, 52]
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    with pytest.raises(el.CheckpointError, match="cut short"):
        Checkpoint.open(tmp_path / "cut.safetensors").names  # noqa: B018


def test_a_folder_of_no_file_or_of_several_without_an_index_is_refused(tmp_path) -> None:
    with pytest.raises(el.FileError):
        Checkpoint.open(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(el.CheckpointError):
        Checkpoint.open(tmp_path)


NO_HEADERS: list[object] = [b"{]", b"[" * 100_000, b"\xff\xfe", [], {"a": 1}, {"__metadata__": 1}]
DAMAGED: list[tuple[object, bytes]] = [
    *((header, b"") for header in NO_HEADERS),
    ({"a": info([1], [0, 4])}, b""),
    *(({"a": info([1], offsets)}, b"1234") for offsets in ([-4, 0], [4, 0], [0])),
    *(({"a": info(shape, [0, 4])}, b"1234") for shape in ([True], [2**62, 2**62], [1] * 17)),
    ({"a": info([4], [0, 4], "U8"), "b": info([2], [2, 4], "U8")}, b"1234"),
]


def test_a_header_that_cannot_be_is_refused(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    cases: list[tuple[object, bytes, int | None]] = [(header, body, None) for header, body in DAMAGED]
    for header, body, length in (*cases, (b"", b"", 1), (b"{}", b"", 1 << 62)):
        write_raw(path, header, body, length)
        with pytest.raises(el.CheckpointError, match=str(path)):
            Checkpoint.open(path).names  # noqa: B018


def test_a_header_over_the_formats_limit_is_refused_unread(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, b"{}", length=2_000_000_000)
    os.truncate(path, 3_000_000_000)
    tracemalloc.start()
    with pytest.raises(el.CheckpointError, match="header too large"):
        Checkpoint.open(path).names  # noqa: B018
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_type_that_is_not_known_is_refused_only_when_it_is_asked_for(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": info([8], [0, 4], "F4")}, b"1234")
    stored = Checkpoint.open(path)
    assert stored.info("a").nbytes == 4
    with pytest.raises(el.CheckpointError, match="stored as F4"):
        stored.read("a")


def read_everything(path) -> None:
    """Open and read all of it, allowing only our own errors, and no more memory than a file of this size can need."""
    if memory_of_reading(path) >= 2_000_000:  # with what the first one imports
        assert memory_of_reading(path) < 2_000_000


def memory_of_reading(path) -> int:
    tracemalloc.start()
    try:
        stored = Checkpoint.open(path)
        for name in stored.names:
            stored.read(name).sum()
    except el.EmbedLayerError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
sizes = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64, 10**40]), st.floats())
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "BOOL", "U16", "F4", ""]), st.none()),
        "shape": st.one_of(st.lists(sizes, max_size=4), st.none()),
        "data_offsets": st.one_of(st.lists(sizes, max_size=3), st.text(max_size=3)),
    }
)


@fuzzed
@given(st.dictionaries(st.text(max_size=4), st.one_of(entries, st.integers()), max_size=4), st.binary(max_size=64))
def test_no_header_crashes_the_reader(tmp_path, header, body) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, header, body)
    read_everything(path)


@fuzzed
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6), st.integers(0, 10_000))
def test_no_flipped_or_missing_byte_crashes_the_reader(tmp_path, flips, kept) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"wte.weight": torch.arange(12.0).view(3, 4), "n": torch.ones(3).half()}, path)
    raw = bytearray(path.read_bytes())
    for place, value in flips:
        raw[place % len(raw)] = value
    path.write_bytes(raw[: kept % (len(raw) + 1)])
    read_everything(path)


@fuzzed
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path, raw) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    read_everything(tmp_path / "model.safetensors")


def test_a_file_of_another_kind_and_a_place_with_nothing_are_said_to_be_so(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint at all")
    with pytest.raises(el.CheckpointError, match="notes.txt"):
        Checkpoint.open(tmp_path / "notes.txt").names  # noqa: B018
    for path in (tmp_path / "nowhere", Path("a" * 5000)):
        with pytest.raises(el.FileError):
            Checkpoint.open(path)


def test_a_full_disk_leaves_the_old_tensors(tmp_path: Path) -> None:
    """A process that may write 64 kB at most is a disk that is full after 64 kB."""
    table = el.TokenEmbedding(4, 2)
    table.save_pretrained(tmp_path / "table")
    before = sorted(os.listdir(tmp_path / "table"))
    code = f"""
import resource, signal
import embedlayer as el
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    el.TokenEmbedding(1000, 100).save_pretrained({str(tmp_path / "table")!r})
except el.FileError as error:
    print("refused:", error)
"""
    exit_code, shown, errors = run_program("-c", code)
    assert exit_code == 0, errors
    assert "refused: Cannot write" in shown
    assert torch.equal(el.TokenEmbedding.from_pretrained(tmp_path / "table").weight, table.weight)
    assert sorted(os.listdir(tmp_path / "table")) == before


def test_a_damaged_or_missing_file_of_a_layer_is_named_and_an_unknown_device_is_neither(tmp_path: Path) -> None:
    el.OutputHead(2, 64).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with pytest.raises(RuntimeError, match="foo"):
        el.OutputHead.from_pretrained(tmp_path, device="foo")
    whole = file.read_bytes()
    for damaged in (whole[:50], whole[:-8], b"\xff" * 8 + whole[8:], b""):
        file.write_bytes(damaged)
        with pytest.raises(el.CheckpointError, match="not a whole safetensors file"):
            el.OutputHead.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(el.FileError, match="Cannot read"):
        el.OutputHead.from_pretrained(tmp_path)
