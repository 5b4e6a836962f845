"""A corpus in shards: whoever builds it, however often it is stopped, the IDs are those of one process."""

import gzip
import os
import random
import signal
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import looped, some
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import Program, run_program
from tokenizers import Tokenizer

from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, SizeError, TextError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.sharded_build import build_in_shards, build_shard
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.tokenization.train import train_tokenizer

PROSE = "Dogs love dogs, as they say.  But do cats?\n\n\tNaïve question: «yes»! 犬は犬が好き。\r\n"


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return train_tokenizer(PROSE * 20, kind, vocab_size=400)


def assert_same(built: TokenCorpus, expected: TokenCorpus) -> None:
    assert np.array_equal(np.asarray(built.ids), expected.ids)
    assert built.ids.dtype == expected.ids.dtype
    assert np.array_equal(built.documents, expected.documents)
    assert built.num_bytes == expected.num_bytes
    assert built.vocab_size == expected.vocab_size
    assert built.tokenizer_fingerprint == expected.tokenizer_fingerprint
    ends = built.blocks[-1].tolist()
    assert ends == [expected.num_tokens, expected.num_bytes]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def marked_processes(monkeypatch, tmp_path):
    """Mark all processes that this test starts by a variable of their environment."""
    monkeypatch.setenv("STARTED_BY_TEST", str(tmp_path))


def processes_of(folder: Path) -> list[int]:
    """Return all running processes that the test in this folder started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        is_of_multiprocessing = b"resource_tracker" in line or b"forkserver" in line
        if f"STARTED_BY_TEST={folder}".encode() in environment and not is_of_multiprocessing:
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def hasty_disk():
    """Files that are not flushed, where many small ones are written and none has to outlive a fall of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


# The law

TEXTS = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab é犬\n\t.,'\r 🙂<"), max_size=300),
        st.integers(1, 900).map(lambda count: (PROSE * 12)[:count]),
        st.sampled_from(["", "\ufeff", "\ufeffa", " ", "\n\n", "a" * 200, "\ufeff犬 b, c"]),
    ),
    min_size=1,
    max_size=4,
)


@given(
    TEXTS,
    st.integers(1, 9),
    st.sampled_from(["byte", "bpe", "unigram", "word", "wordpiece"]),
    st.integers(0, 15),
)
@example(["a b", "c"], 9, "byte", 0)
@example(["\ufeffDogs love.", "", " \n ", "é犬🙂" * 9 + " x"], 8, "wordpiece", 0)
@example(["\r\n".join(["line"] * 30)], 7, "bpe", 0)
@settings(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.usefixtures("hasty_disk")
def test_the_parts_are_what_one_process_gives(texts, shards, kind, zipped):
    tokenizer = tokenizer_of(kind)
    with tempfile.TemporaryDirectory() as name:
        folder, sources = Path(name), []
        for number, text in enumerate(texts):
            as_zip = zipped >> number & 1
            sources.append(folder / f"{number}.txt{'.gz' * as_zip}")
            sources[-1].write_bytes(gzip.compress(text.encode()) if as_zip else text.encode())
        try:
            expected = TokenCorpus.build(sources, tokenizer, folder / "whole")
        except TextError:
            with pytest.raises(TextError):
                build_in_shards(sources, tokenizer, folder / "parts", shards=shards, workers=1)
            return
        assert_same(build_in_shards(sources, tokenizer, folder / "parts", shards=shards, workers=1), expected)


PUBLISHED = ("gpt2-encoder.json", "t5-small.tokenizer.json", "bert-base-cased-vocab.txt")


@pytest.mark.parametrize("name", some(["bert-base-cased-vocab.txt"], PUBLISHED))
def test_real_text_in_two_processes_is_what_one_process_gives(shared_data, tmp_path, name):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name)
    for text in ("the-verdict.txt", "tinyshakespeare.txt", "enwiki-plain.txt"):
        real = (shared_data / "text" / text).read_bytes()[:80_000].decode(errors="ignore")
        (tmp_path / text).write_bytes(real.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(real[:30_000].encode()))
    sources = sorted(tmp_path.iterdir())
    expected = TokenCorpus.build(sources, tokenizer, tmp_path / "whole")
    built = build_in_shards(sources, tokenizer, tmp_path / "parts", shards=5, workers=2)
    assert_same(built, expected)
    assert len(built.ids.arrays) == 5
    assert_same(TokenCorpus.open(tmp_path / "parts"), expected)
    for fraction in (0.1, 0.7):
        for part, one in zip(built.split(fraction), expected.split(fraction), strict=True):
            assert abs(len(part) - len(one)) < 0.02 * len(expected)
            assert len(part.ids) == part.blocks[-1, 0]
    assert not processes_of(tmp_path)


def test_a_cut_is_looked_for_as_far_as_needed_and_never_falls_into_a_character(tmp_path):
    (tmp_path / "t").write_bytes(("x" + "é" * 100_000 + " end").encode())
    expected = TokenCorpus.build([tmp_path / "t"], tokenizer_of("byte"), tmp_path / "whole")
    for shards in (2, 7):
        path = tmp_path / str(shards)
        assert_same(build_in_shards([tmp_path / "t"], tokenizer_of("byte"), path, shards=shards, workers=1), expected)


def test_documents_without_text_are_named_once_and_left_out(tmp_path):
    for name, text in {"a": "Dogs.", "b": "", "c": "\ufeff", "d": "Cats."}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.warns(EmbedLayerWarning) as caught:
        corpus = build_in_shards([tmp_path], tokenizer_of("byte"), tmp_path / "new" / "parts", shards=3, workers=1)
    told = sorted(str(warning.message).partition(" is left")[0] for warning in caught)
    assert told == [str(tmp_path / "b.txt"), str(tmp_path / "c.txt")]
    assert bytes(token % 256 for token in np.asarray(corpus.ids)) == b"Dogs.\0Cats."


# Interruptions


@pytest.fixture
def long_text(tmp_path):
    words = PROSE.split(" ")
    generator = random.Random(0)
    (tmp_path / "t.txt").write_text(" ".join(generator.choice(words) for _ in range(20_000)))
    return tmp_path / "t.txt"


BUILD = """
import os, sys
from pathlib import Path
from typing import Any
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.tokenization.read import load_tokenizer

def blow(done, total):
    if list(Path(path).glob("shard-*")):
        os.kill(os.getpid(), int(number))

text, tokenizer, path, number = sys.argv[1:]
build_in_shards([text], load_tokenizer(tokenizer), path, shards=6, workers=2, on_progress=blow)
"""


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("blow", some([signal.SIGINT], [signal.SIGKILL, signal.SIGINT]))
def test_a_build_killed_in_the_middle_goes_on_to_the_same_bytes(long_text, tmp_path, blow):
    save_tokenizer(tokenizer_of("bpe"), tmp_path / "bpe.json")
    parts = tmp_path / "parts"
    code, _, errors = run_program("-c", BUILD, long_text, tmp_path / "bpe.json", parts, int(blow))
    assert code == -blow, errors
    wait_until(lambda: not processes_of(tmp_path))
    left = {file.name for file in parts.iterdir()}
    assert 1 <= len([name for name in left if name.startswith("shard-")]) < 6
    lock = {".lock"} if blow == signal.SIGKILL else set()  # nobody is left to remove the file; the lock itself is free
    assert left <= {"corpus.json", "tokenizer.json", *(f"shard-0000{number}" for number in range(6)), *lock}
    with pytest.raises(CheckpointError):
        TokenCorpus.open(parts)
    seen: list[tuple[int, int]] = []
    arguments = ([long_text], tokenizer_of("bpe"))
    build_in_shards(*arguments, parts, shards=6, workers=1, on_progress=lambda *read: seen.append(read))
    assert seen[0][0] > 0
    assert seen[-1] == (long_text.stat().st_size,) * 2
    assert seen == sorted(seen)
    once = build_in_shards(*arguments, tmp_path / "once", shards=6, workers=1)
    assert contents(parts) == contents(tmp_path / "once")
    assert_same(once, TokenCorpus.build(*arguments, tmp_path / "whole"))


def test_what_a_killed_worker_left_is_cleared_away(tmp_path):
    (tmp_path / "t.txt").write_text(PROSE * 50)
    build_in_shards([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts", shards=3, workers=1)
    before = contents(tmp_path / "parts")
    partial = tmp_path / "parts" / ".shard-00001.0123abcd.partial"
    partial.mkdir()
    (partial / "lock").touch()
    (tmp_path / "parts" / "shard-00001").rename(partial / "shard-00001")
    build_in_shards([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts", shards=3, workers=1)
    assert contents(tmp_path / "parts") == before


def test_each_host_can_build_its_own_part(tmp_path):
    (tmp_path / "t.txt").write_text(PROSE * 50)
    arguments = ([tmp_path / "t.txt"], tokenizer_of("bpe"))
    seen: list[tuple[int, int]] = []
    for only in (2, 0, 2):
        build_shard(*arguments, tmp_path / "parts", shards=3, only=only, on_progress=lambda *read: seen.append(read))
        assert seen[-1][0] == seen[-1][1] > 0
        with pytest.raises(CheckpointError):
            TokenCorpus.open(tmp_path / "parts")
    build_shard(*arguments, tmp_path / "parts", shards=3, only=1)
    build_in_shards(*arguments, tmp_path / "once", shards=3, workers=1)
    assert contents(tmp_path / "parts") == contents(tmp_path / "once")


def test_hosts_that_begin_a_folder_at_once_build_it_together(tmp_path):
    """Each a process of its own, as `embedlayer corpus build --only` is on each host; who is first writes the plan."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(PROSE * 300)
    save_tokenizer(tokenizer_of("bpe"), tmp_path / "tokenizer.json")
    command = ["-m", "embedlayer", "corpus", "build", "a.txt", "b.txt", "--tokenizer", "tokenizer.json", "-o", "parts"]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(Program(*command, "--shards", 2, "--only", part, cwd=tmp_path)) for part in range(2)
        ]
        said = [host.communicate() for host in hosts]
        assert [host.wait() for host in hosts] == [0, 0], said
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        build_in_shards(["a.txt", "b.txt"], tokenizer_of("bpe"), "once", shards=2, workers=1)
    assert contents(tmp_path / "parts") == contents(tmp_path / "once")


def test_hidden_files_of_other_hosts_do_not_keep_a_build_from_beginning(tmp_path):
    (tmp_path / "t.txt").write_text("Hello")
    (tmp_path / "parts").mkdir()
    for left in (".nfs0000000000000001", ".corpus.json.x1.partial", ".shard-00000.x1.partial"):
        (tmp_path / "parts" / left).touch()
    corpus = build_in_shards([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts", shards=1, workers=1)
    assert len(corpus) == 5


def test_a_host_that_tries_the_folder_while_another_begins_is_not_in_its_way(tmp_path, monkeypatch):
    """On NFS a temporary file has a name until it is closed, and other hosts see it."""
    (tmp_path / "t.txt").write_text(PROSE)
    arguments = ([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts")
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False, raising=False)
    unlink = os.unlink
    seen = []

    def other_host_begins(*file, **folder):
        monkeypatch.setattr(os, "unlink", unlink)
        seen.extend(os.listdir(tmp_path / "parts"))
        build_shard(*arguments, shards=2, only=1)
        unlink(*file, **folder)

    monkeypatch.setattr(os, "unlink", other_host_begins)
    build_shard(*arguments, shards=2, only=0)
    assert len(seen) == 1
    assert TokenCorpus.open(tmp_path / "parts").num_bytes == len(PROSE.encode())


def test_a_plan_that_appears_while_a_host_looks_around_is_gone_by(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text(PROSE)
    arguments = ([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts")
    looked = Path.iterdir

    def listed_before_the_plan(folder):
        monkeypatch.setattr(Path, "iterdir", looked)
        build_shard(*arguments, shards=2, only=1)
        return (file for file in looked(folder) if file.name != "corpus.json")

    monkeypatch.setattr(Path, "iterdir", listed_before_the_plan)
    build_shard(*arguments, shards=2, only=0)
    assert TokenCorpus.open(tmp_path / "parts").num_bytes == len(PROSE.encode())


# What cannot be built


def test_an_error_in_a_worker_names_the_file_and_what_is_done_stays(tmp_path):
    (tmp_path / "good.txt").write_text(PROSE * 100)
    (tmp_path / "latin1.txt").write_bytes(b"x " * 40_000 + "naïve café. ".encode("latin-1") * 500)
    sources = [tmp_path / "good.txt", tmp_path / "latin1.txt"]
    with pytest.raises(TextError):
        build_in_shards(sources, tokenizer_of("byte"), tmp_path / "parts", shards=4, workers=2)
    assert not processes_of(tmp_path)
    assert not [file for file in (tmp_path / "parts").iterdir() if file.name.endswith(".partial")]


def test_other_arguments_in_the_same_folder_are_refused_by_name(tmp_path):
    texts = {"a.txt": "Dogs love dogs.", "b.txt": "Cats do not.", "c.jsonl": '{"text": "Mice.", "body": "Two."}\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    three, path = [tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl")], tmp_path / "parts"

    def build(sources, kind, shards, **options):
        return build_in_shards(sources, tokenizer_of(kind), path, shards=shards, workers=1, **options)

    build(three, "byte", 2)
    before = contents(path)
    (tmp_path / "d.txt").write_text("Horses.")
    for arguments, options, words in (
        ((three, "byte", 3), {}, "shards 2, not 3"),
        ((three, "bpe", 2), {}, "tokenizer [0-9a-f]+, not [0-9a-f]+"),
        ((three[::2], "byte", 2), {}, r"b\.txt, which was not passed"),
        (([*three, tmp_path / "d.txt"], "byte", 2), {}, r"it has no .*d\.txt"),
        ((three[::-1], "byte", 2), {}, "another order"),
        ((three, "byte", 2), {"text_field": "body"}, "text field None, not body"),
    ):
        with pytest.raises(FileError, match=words):
            build(*arguments, **options)
    (tmp_path / "b.txt").write_text("Cats do.")
    with pytest.raises(FileError, match=r"b\.txt was changed since .*: it has 8 bytes and had 12"):
        build(three, "byte", 2)
    assert contents(path) == before


MEBIBYTE = 1 << 20


@looped("name, whole_folder", [("t.txt", False), ("t.txt.gz", True)])
def test_a_small_source_of_the_same_size_is_known_by_each_of_its_bytes(name, whole_folder, tmp_path):
    source = tmp_path / "texts" / name
    source.parent.mkdir()
    zipped = gzip.compress(b"Dogs. " * 50, mtime=0)
    before = zipped if name.endswith(".gz") else (b"Dogs. " * MEBIBYTE)[:MEBIBYTE]
    source.write_bytes(before)
    arguments = ([source.parent if whole_folder else source], tokenizer_of("byte"), tmp_path / "parts")
    build_shard(*arguments, shards=200, only=0)
    for place in (0, 1, 30_000, MEBIBYTE - 1):
        after = bytearray(before)
        after[min(place, len(after) - 1)] ^= 1
        source.write_bytes(after)
        with pytest.raises(FileError, match=f"{name} was changed since .*: it has {len(before)} bytes as before"):
            build_shard(*arguments, shards=200, only=1)
    with pytest.raises(FileError, match=f"{name} was changed"):
        build_in_shards(*arguments, shards=200, workers=1)
    source.write_bytes(before)
    build_shard(*arguments, shards=200, only=1)


def test_a_large_source_of_the_same_size_is_known_by_pieces_of_all_of_it(tmp_path):
    text = (b"Dogs. " * MEBIBYTE)[: 3 * MEBIBYTE + 5]
    (tmp_path / "t.txt").write_bytes(text)
    arguments = ([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts")
    build_shard(*arguments, shards=500, only=0)
    for place in (0, 3 * MEBIBYTE // 7, 2 * MEBIBYTE, 3 * MEBIBYTE + 4):
        other = bytearray(text)
        other[place : place + (1 << 16)] = (b"Cats. " * MEBIBYTE)[: len(other[place : place + (1 << 16)])]
        (tmp_path / "t.txt").write_bytes(other)
        with pytest.raises(FileError, match=r"t\.txt was changed since"):
            build_shard(*arguments, shards=500, only=1)


def test_a_source_that_changes_during_the_build_is_refused(tmp_path):
    source = tmp_path / "a.txt"
    for text in ("Dogs.", PROSE[::-1] * 20):
        source.write_text(PROSE * 20, newline="")
        with pytest.raises(FileError, match=r"a\.txt was changed"):
            build_in_shards(
                *([source], tokenizer_of("byte"), tmp_path / str(len(text))),
                shards=3,
                workers=1,
                on_progress=lambda done, total, text=text: source.write_text(text, newline=""),
            )


NOT_BUILT: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"shards": 0}, SizeError),
    ({"sources": ["-"]}, FileError),
    ({"sources": [Path("caf\udce9.txt")]}, FileError),
    ({"sources": ["none.txt"]}, FileError),
    ({"path": "photos"}, FileError),
    ({"path": "t.txt"}, FileError),
    ({"text_field": "body"}, SizeError),
]


def test_what_cannot_be_built_is_refused(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    for name in ("photos/dog.png", "t.txt", "caf\udce9.txt"):
        (tmp_path / name).write_text("Hello")
    monkeypatch.chdir(tmp_path)
    for options, error in NOT_BUILT:
        used: dict[str, Any] = {"sources": ["t.txt"], "path": "parts", "shards": 2, "workers": 1, **options}
        with pytest.raises(error):
            build_in_shards(used.pop("sources"), tokenizer_of("byte"), used.pop("path"), **used)
    for only in (-1, 2):
        with pytest.raises(SizeError):
            build_shard(["t.txt"], tokenizer_of("byte"), "parts", shards=2, only=only)


def test_a_corpus_inside_a_source_folder_is_no_source(tmp_path):
    (tmp_path / "t.txt").write_text("Hello")
    for _ in range(2):
        corpus = build_in_shards([tmp_path], tokenizer_of("byte"), tmp_path / "parts", shards=2, workers=1)
        assert len(corpus) == 5


def test_another_tokenizer_in_the_folder_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text(PROSE)
    build_shard([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts", shards=2, only=0)
    save_tokenizer(tokenizer_of("bpe"), tmp_path / "parts" / "tokenizer.json")
    with pytest.raises(CheckpointError):
        build_shard([tmp_path / "t.txt"], tokenizer_of("byte"), tmp_path / "parts", shards=2, only=1)
