"""Whatever is in a file of this library, its readers work or raise our error: see `fuzz.py`."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest
from commands import run
from covering import cases, looped
from processes import run_program

import embedlayer as el
from embedlayer.analysis.evaluation.judgements import evaluate_word_pairs
from embedlayer.checkpoints.vector_files import read_vectors
from embedlayer.data.text_chunks import read_text_chunks

QUICK = ("read", "resume", "page", "report", "open", "continue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    fuzz.build_sources(folder)
    return folder


@pytest.mark.parametrize("format", fuzz.READERS)
def test_what_is_sound_is_read_by_every_reader(folder: Path, format: str, pytestconfig) -> None:
    file = fuzz.files_of(folder, format)[0]
    every = format not in ("run", "shards") or pytestconfig.getoption("--all")
    for reader in (reader for name, reader in fuzz.READERS[format].items() if every or name in QUICK):
        assert fuzz.attempt(reader, folder, format, file, file.read_bytes(), refusing=False) is None


@looped("format", fuzz.READERS)
def test_damage_is_read_or_refused_by_our_error(folder: Path, format: str, pytestconfig) -> None:
    seen, count = 0, 20 if pytestconfig.getoption("--all") else 2
    for kind, reader, file, content in fuzz.trials(folder, count, seed=0, only=format):
        if kind == format:
            seen += 1
            fault = fuzz.attempt(fuzz.READERS[format][reader], folder, format, file, content)
            assert fault is None, (file.name, reader, content[:300])
    assert seen


KEYS_OF_A_MODEL = [
    *("attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_size", "initializer_range", "model_type"),
    *(
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "vocab_size",
    ),
]
OTHER_VALUES: tuple[object, ...] = (None, True, 0, -1, 1.5, "x", [], {})


@cases("key, reader", KEYS_OF_A_MODEL, fuzz.READERS["model"])
def test_a_value_of_another_type_in_a_configuration_of_transformers_is_read_or_refused(
    folder: Path, key: str, reader: str
) -> None:
    """transformers checks the types of some values, and computes with the others as they are."""
    file = folder / "model" / "config.json"
    sound = json.loads(file.read_bytes())
    assert key in sound
    for value in OTHER_VALUES:
        content = json.dumps({**sound, key: value}).encode()
        assert fuzz.attempt(fuzz.READERS["model"][reader], folder, "model", file, content) is None, value


FIELDS = [
    ("run", "config.json", ["table", "vocab_size"], "-1"),
    ("run", "config.json", ["num_layers"], "1e9"),
    ("run", "config.json", ["num_layers"], "1000000000"),
    ("run", "config.json", ["norm_eps"], '"1e-5"'),
    ("run", "config.json", ["position"], "3"),
    ("run", "config.json", ["head", "tied"], None),
    ("run", "config.json", ["kind"], '"\\ud800"'),
    ("run", "config.json", ["\ud800"], "1"),
    ("run", "run.json", ["options", "seed"], "{}"),
    ("run", "run.json", ["options"], None),
    ("run", "run.json", ["model", "table", "embed_dim"], "16000000"),
    ("run", "run.json", ["notes"], "[]"),
    ("run", "run.json", ["notes", "neighbors_before"], '[{"id": "x"}]'),
    ("run", "metrics.jsonl", None, "{"),
    ("run", "metrics.jsonl", None, "[]"),
    ("run", "metrics.jsonl", None, '{"step": "x"}'),
    ("run", "metrics.jsonl", None, '{"loss": 1}'),
    ("run", "metrics.jsonl", None, "\ud800"),
    ("shards", "corpus.json", ["shards"], "2147483648"),
    ("shards", "corpus.json", ["sources"], '[["a", -1, "b"]]'),
    ("corpus", "index.json", ["num_tokens"], "NaN"),
    ("corpus", "index.json", ["dtype"], '["uint16"]'),
    ("corpus", "index.json", ["vocab_size"], "1" + "0" * 400),
]


@pytest.mark.parametrize(("format", "name", "way", "value"), FIELDS, ids=lambda part: ascii(part)[:40])
def test_a_wrong_field_is_named_with_its_file(folder: Path, format: str, name: str, way, value: str | None) -> None:
    """`None` for a field that is missing; of the metrics a line is replaced."""
    file = folder / format / name
    content = file.read_bytes()
    if way is None:
        lines = content.split(b"\n")
        lines[1] = value.encode(errors="surrogatepass")
        damaged = b"\n".join(lines)
    else:
        whole = outer = json.loads(content)
        for key in way[:-1]:
            outer = outer[key]
        if value is None:
            del outer[way[-1]]
        else:
            outer[way[-1]] = "@@"
        damaged = json.dumps(whole).replace('"@@"', str(value)).encode()
    refused = []
    for reader in (reader for name, reader in fuzz.READERS[format].items() if name in QUICK):
        try:
            assert fuzz.attempt(reader, folder, format, file, damaged, refusing=False) is None
        except el.EmbedLayerError as error:
            refused.append(str(error))
    assert refused
    assert all(text.encode() for text in refused)
    assert any(name in text or "saved configuration" in text for text in refused)


def _sparse(path: Path) -> None:
    """A file of a terabyte that takes no space."""
    path.touch()
    os.truncate(path, 1 << 40)


KINDS_OF_PATH = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "bytes": _sparse,
}


@looped("format, kind", fuzz.READERS, KINDS_OF_PATH)
def test_what_is_no_file_of_that_size_is_refused_before_it_is_opened(folder: Path, format: str, kind: str) -> None:
    """Files x readers in turn; a pipe would wait for ever, and a device or a terabyte fill the memory."""

    def too_long(*_: object) -> None:
        raise TimeoutError

    refused, readers = [], list(fuzz.READERS[format].items())
    files = [file for file in sorted((folder / format).rglob("*")) if file.is_file() and file.suffix != ".html"]
    if kind == "bytes":  # of data there may be so many
        files = [file for file in files if file.suffix in (".json", ".jsonl")]
    before = signal.signal(signal.SIGALRM, too_long)
    try:
        for number, file in enumerate(files):
            name, reader = readers[number % len(readers)]
            signal.alarm(60)
            try:
                fault = fuzz.attempt(reader, folder, format, file, KINDS_OF_PATH[kind], refusing=False)
                assert fault is None, (file, name)
            except el.EmbedLayerError as error:
                refused.append(str(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not files or any(kind in text for text in refused), refused


READ_ALONE: dict[str, Callable[[Path], object]] = {
    "vectors.txt": read_vectors,
    "vectors.bin": read_vectors,
    "vectors.txt.gz": read_vectors,
    "text.txt": lambda path: list(read_text_chunks(path)),
    "tokenizer.json": el.load_tokenizer,
    "vocab.txt": el.load_tokenizer,
    "vocab.json": el.load_tokenizer,
    "spm.model": el.load_tokenizer,
    "tokenizer.bin": el.load_tokenizer,
    "questions.txt": lambda path: evaluate_word_pairs(el.TokenEmbedding(3, 2), {"a": 0}, path),
    "open.gguf": el.open_model,
    "open.safetensors": el.open_model,
    "open.txt": el.open_model,
}


@looped("name", READ_ALONE)
def test_a_reader_of_one_file_refuses_pipes_and_devices(name: str, tmp_path: Path) -> None:
    for kind in ("a named pipe", "a device"):
        path = tmp_path / kind / name
        path.parent.mkdir()
        KINDS_OF_PATH[kind](path)
        with pytest.raises(el.FileError, match=f"{kind}, and a file is expected"):
            READ_ALONE[name](path)


def test_a_last_line_that_was_cut_short_is_passed_over(folder: Path) -> None:
    file = folder / "run" / "metrics.jsonl"
    content = file.read_bytes()
    for name, cut in (("read", b'{"step": 2, "lo'), ("resume", b'{"text": "\xc3'), ("report", b"{"), ("page", b"[")):
        reader = fuzz.READERS["run"][name]
        assert fuzz.attempt(reader, folder, "run", file, content + cut, refusing=False) is None


COMMANDS = [
    ["inspect", "{0}"],
    ["embed", "{0}", "the"],
    ["neighbors", "{0}", "the"],
    ["generate", "{0}", "the"],
    ["report", "{0}"],
    ["train", "--resume", "-o", "{0}"],
    ["export", "{0}", "-o", "{0}.vec"],
    ["plan", "--checkpoint", "{0}"],
    ["compress", "{0}", "--to", "int8", "-o", "{0}.out"],
    ["vocab", "add", "{0}", "zebra", "-o", "{0}.out"],
    ["explore", "{0}", "--export", "{0}.html"],
    ["corpus", "build", "{0}", "--tokenizer", "{0}", "-o", "{0}.out"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_folder_that_cannot_be_read_is_one_line(folder: Path, monkeypatch, capsys, command: list[str]) -> None:
    """The system refuses to look into it, as to another user; the superuser is never refused, so here it is told so."""
    closed = str(folder / "run")

    def refusing(real):
        def call(path, *arguments, **options):
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(closed):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path, *arguments, **options)

        return call

    for name in ("stat", "lstat", "scandir", "listdir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    code = run(*(part.format(closed) for part in command))
    said = capsys.readouterr().err.strip()
    assert code in (1, 2)
    assert "Error: " in said
    assert "Traceback" not in said


def test_the_command_line_prints_one_line_for_damage(folder: Path, tmp_path: Path) -> None:
    """As a process: what is printed of a lone surrogate must not fail either."""
    (tmp_path / "config.json").write_text('{"format_version": 1, "kind": "decoder_lm", "\\ud800": {"kind": "\\udfff"}}')
    code, _, errors = run_program("-m", "embedlayer", "inspect", tmp_path)
    assert code == 2
    assert errors.startswith("CheckpointError: ")
    assert len(errors.splitlines()) == 1
