"""Rows as documents: JSON lines, Parquet, Arrow and saved data sets give the IDs of each text encoded alone."""

import gzip
import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpus_inputs import (
    WRITERS,
    arrow,
    assert_is,
    lines,
    write_dataset,
    write_datasets,
    write_lines,
    write_parquet,
    write_stream,
)
from covering import cases, looped
from hypothesis import given, settings
from hypothesis import strategies as st

import embedlayer as el
from embedlayer import TokenCorpus
from embedlayer.core.errors import EmbedLayerWarning, FileError, TextError
from embedlayer.data import build_in_shards, build_shard

PROSE = "Dogs love dogs, as they say.  But do cats?\n\n\tNaïve question: «yes»! 犬は犬が好き。\r\n"
TEXTS = [PROSE[: 7 * number % 90] + f" {number}" for number in range(30)]
TOKENIZERS = {
    kind: el.train_tokenizer(PROSE * 20, kind, vocab_size=400) for kind in ("byte", "bpe", "wordpiece", "word")
}


@cases("name, kind", WRITERS, TOKENIZERS)
def test_each_row_is_a_document_with_the_ids_of_its_text_in_any_number_of_shards(name, kind, tmp_path) -> None:
    tokenizer = TOKENIZERS[kind]
    WRITERS[name](tmp_path / name, TEXTS)
    assert_is(TokenCorpus.build([tmp_path / name], tokenizer, tmp_path / "whole"), TEXTS, tokenizer)
    shards = build_in_shards([tmp_path / name], tokenizer, tmp_path / "shards", shards=7, workers=1)
    assert_is(shards, TEXTS, tokenizer)


@given(st.lists(st.text(st.sampled_from('ab é犬\n"\\\t🙂'), max_size=60), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=20, deadline=None)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_rows_of_any_text_in_any_number_of_shards(tmp_path_factory, texts, shards) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("rows"), TOKENIZERS["bpe"]
    (folder / "a.txt").write_text("A text.")
    (folder / "z.txt").write_text("Another text, in some words.")
    write_lines(folder / "b.jsonl", texts)
    write_parquet(folder / "c.parquet", texts)
    sources = [folder / name for name in ("a.txt", "b.jsonl", "c.parquet", "z.txt")]
    built = build_in_shards(sources, tokenizer, folder / "shards", shards=shards, workers=1)
    assert_is(built, ["A text.", *texts, *texts, "Another text, in some words."], tokenizer)


def test_a_row_longer_than_a_chunk_and_a_block_has_the_ids_of_its_text(tmp_path) -> None:
    texts = [PROSE * 3000, "short", PROSE * 300]
    for name in ("t.jsonl", "t.parquet"):
        WRITERS[name](tmp_path / name, texts)
        built = build_in_shards([tmp_path / name], TOKENIZERS["bpe"], tmp_path / f"{name}-3", shards=3, workers=1)
        assert_is(built, texts, TOKENIZERS["bpe"])


def test_blocks_of_short_rows_are_merged_and_a_split_is_close_to_its_fraction(tmp_path) -> None:
    write_lines(tmp_path / "t.jsonl", TEXTS * 40)
    corpus = TokenCorpus.build([tmp_path / "t.jsonl"], TOKENIZERS["byte"], tmp_path / "corpus")
    assert len(corpus.blocks) < corpus.num_bytes / 400
    training, validation = corpus.split(0.1)
    assert len(validation) == pytest.approx(len(corpus) / 10, rel=0.1)
    assert len(training) + len(validation) == len(corpus)


def test_a_build_of_rows_that_was_stopped_continues_to_the_same_bytes(tmp_path) -> None:
    write_lines(tmp_path / "t.jsonl", TEXTS * 20)
    write_stream(tmp_path / "t.arrow", TEXTS * 20)
    sources = [tmp_path / "t.jsonl", tmp_path / "t.arrow"]
    for name, numbers in {"stopped": [3], "hosts": [4, 0, 3, 1, 2]}.items():
        for only in numbers:
            build_shard(sources, TOKENIZERS["bpe"], tmp_path / name, shards=5, only=only)
    build_in_shards(sources, TOKENIZERS["bpe"], tmp_path / "stopped", shards=5, workers=1)
    build_in_shards(sources, TOKENIZERS["bpe"], tmp_path / "once", shards=5, workers=1)
    once, *others = [
        {str(file.relative_to(tmp_path / name)): file.read_bytes() for file in (tmp_path / name).glob("*/*.[nbj]*")}
        for name in ("once", "stopped", "hosts")
    ]
    assert others == [once, once]


@looped("name", ["t.jsonl", "t.txt", "-"])
def test_the_named_field_is_read(name, tmp_path, monkeypatch) -> None:
    raw = lines(TEXTS, "body")
    (tmp_path / "t.jsonl").write_bytes(raw)
    (tmp_path / "t.txt").write_bytes(raw)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
    source = name if name == "-" else tmp_path / name
    corpus = TokenCorpus.build([source], TOKENIZERS["bpe"], tmp_path / "corpus", text_field="body")
    assert_is(corpus, TEXTS, TOKENIZERS["bpe"])
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def built(*sources: Path, **options: str) -> TokenCorpus:
    """The corpus of some sources."""
    return TokenCorpus.build(sources, TOKENIZERS["byte"], sources[0].parent / "built", **options)


# What is refused


GOOD = b'{"text": "one"}\n'


BAD_RECORDS = [
    (GOOD * 40 + b'{"text": "cut\n' + GOOD, "line 41"),
    (GOOD * 40 + b"\n\n[1]\n" + GOOD, "line 43"),
    (GOOD * 40 + b'{"text": "\xff"}\n', "line 41"),
    (GOOD * 40 + b'{"text": "\\ud800"}\n', "line 41"),
    (GOOD * 40 + b'{"body": "x"}\n', r"line 41.*\(it has body\)"),
    (GOOD * 40 + b'{"text": null}\n', "line 41"),
    (GOOD * 40 + b'{"text": ["a"]}\n', "line 41"),
    (b'{"id": 1, "body": "x"}\n' * 3, "id, body.*--text-field"),
    (b"no JSON\n" + GOOD, "line 1"),
]


@looped("raw, words, name", [(*case, name) for case in BAD_RECORDS for name in ("t.jsonl", "rows")])
def test_a_damaged_record_is_named_by_file_and_line_in_every_shard(raw, words, name, tmp_path) -> None:
    """A file that is not named as one of JSON lines is known by its first lines."""
    if name == "rows" and not raw.startswith(GOOD):
        return
    (tmp_path / name).write_bytes(raw)
    for shards in (1, 2, 5):
        with pytest.raises(TextError, match=f"{name}.*{words}"):
            build_in_shards([tmp_path / name], TOKENIZERS["byte"], tmp_path / f"s{shards}", shards=shards, workers=1)


def test_a_damaged_row_of_a_column_is_named(tmp_path) -> None:
    pyarrow = arrow()
    array = pyarrow.array([*TEXTS, "é"], pyarrow.string())
    data = bytearray(array.buffers()[2].to_pybytes())
    data[-1] = 0xFF
    broken = pyarrow.StringArray.from_buffers(len(array), array.buffers()[1], pyarrow.py_buffer(bytes(data)))
    for values in (broken, pyarrow.array([*TEXTS, None])):
        written = pyarrow.table({"text": values})
        with pyarrow.ipc.new_stream(str(tmp_path / "t.arrow"), written.schema) as writer:
            writer.write_table(written)
        with pytest.raises(TextError):
            built(tmp_path / "t.arrow")


@looped(
    "offsets, kind",
    [[0, 7, 13, 20 | 1 << 30], [0, 7, 3, 20], [0, 7, 13, 52]],
    ["file", "stream"],
    pairs=["offsets, kind"],
)
def test_offsets_outside_of_the_texts_are_damage(offsets, kind, tmp_path) -> None:
    pyarrow = arrow()
    path = tmp_path / "t.arrow"
    table = pyarrow.table({"text": ["the cat", "sat on", "the mat"]})
    with getattr(pyarrow.ipc, f"new_{kind}")(str(path), table.schema) as writer:
        writer.write_table(table)
    sound, damaged = (b"".join(each.to_bytes(4, "little") for each in group) for group in ([0, 7, 13, 20], offsets))
    assert path.read_bytes().count(sound) == 1
    path.write_bytes(path.read_bytes().replace(sound, damaged))
    with pytest.raises(FileError, match="t.arrow, row 0"):
        built(path)


def test_a_stream_without_an_end_mark_is_damaged_and_streams_may_be_joined(tmp_path) -> None:
    path = tmp_path / "t.arrow"
    write_stream(path, TEXTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(FileError, match="no end mark"):
        built(path)
    path.write_bytes(whole + whole)
    assert_is(built(path), TEXTS * 2, TOKENIZERS["byte"])


@looped("name", ["t.parquet", "t.arrow", "data-00000-of-00001.arrow", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_truncated_file_is_named(name, tmp_path) -> None:
    WRITERS[name](tmp_path / name, TEXTS * 50)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) * 2 // 3])
    with pytest.raises((FileError, TextError), match=name):
        built(tmp_path / name)
    assert not (tmp_path / "built").exists()


def test_a_parquet_file_without_one_column_of_texts_of_the_name_is_refused(tmp_path) -> None:
    pyarrow = arrow()
    from pyarrow.parquet import write_table

    path = tmp_path / "t.parquet"
    write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(TextError):
        built(path)
    write_table(pyarrow.table({"text": [1, 2], "body": ["a", "b"]}), path)
    for options, words in (({}, "int64"), ({"text_field": "name"}, "text, body")):
        with pytest.raises(TextError, match=words):
            built(path, **options)
    assert_is(built(path, text_field="body"), ["a", "b"], TOKENIZERS["byte"])


def test_what_is_named_as_json_lines_and_is_none_is_refused_by_its_kind(tmp_path) -> None:
    text = lines(TEXTS)
    for raw, words in (
        (text.decode().encode("utf-16"), "iconv -f UTF-16"),
        (text.decode().encode("utf-16-le"), "iconv -f UTF-16LE"),
        (gzip.compress(text), "compressed by gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "compressed by Zstandard"),
    ):
        (tmp_path / "T.JSONL").write_bytes(raw)
        with pytest.raises(TextError, match=rf"(?s)T\.JSONL .*{words}"):
            built(tmp_path / "T.JSONL")
    (tmp_path / "T.JSONL").write_text('{"text": "one line"}\n')
    assert_is(built(tmp_path / "T.JSONL"), ["one line"], TOKENIZERS["byte"])


BLANK = [" \n\t", "\n" * 70_000, "\u3000"]


@looped("name", ["t.txt", "t.jsonl", "t.parquet", "folder"])
def test_white_space_alone_is_no_corpus_and_beside_text_it_is_text(name, tmp_path) -> None:
    path = tmp_path / name
    if name == "t.txt":
        path.write_text("".join(BLANK))
    elif name == "folder":
        path.mkdir()
        for number, text in enumerate(BLANK):
            (path / f"{number}.txt").write_text(text)
    else:
        WRITERS[name](path, BLANK)
    for shards in (1, 3):
        with pytest.raises(TextError):
            build_in_shards([path], TOKENIZERS["byte"], tmp_path / "c", shards=shards, workers=1)
    with pytest.raises(TextError):
        built(path)
    (tmp_path / "z.txt").write_text("z")
    assert built(path, tmp_path / "z.txt").num_bytes == len("".join(BLANK).encode()) + 1


def test_a_data_set_with_several_splits_or_missing_files_is_refused(tmp_path) -> None:
    sets, state = tmp_path / "sets", tmp_path / "state"
    write_datasets(sets, TEXTS)
    write_dataset(sets / "test", TEXTS)
    with pytest.raises(TextError):
        built(sets)
    (sets / "test" / "data-00001-of-00002.arrow").unlink()
    state.mkdir()
    shutil.copy(sets / "test" / "state.json", state)
    for folder, missing in ((sets / "test", "data-00001-of-00002.arrow"), (state, "data-00000-of-00002.arrow")):
        with pytest.raises(FileError, match=f"{missing} is missing"):
            built(folder)
    (sets / "dataset_dict.json").unlink()
    with pytest.raises(TextError):
        built(sets)


def test_rows_without_text_are_counted_in_one_warning(tmp_path) -> None:
    write_lines(tmp_path / "t.jsonl", ["a", "", "b", ""])
    with pytest.warns(EmbedLayerWarning, match=r"2 of 4 rows of .*t\.jsonl"):
        assert built(tmp_path / "t.jsonl").documents.tolist() == [0, 2]


def test_a_folder_with_rows_and_texts_is_read_by_the_kind_with_more_bytes(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "train.jsonl", TEXTS)
    (tmp_path / "texts" / "README.md").write_text("A data set.")
    with pytest.warns(EmbedLayerWarning, match=r"1 of the files in .* are left out, among them .*README\.md"):
        assert_is(built(tmp_path / "texts"), TEXTS, TOKENIZERS["byte"])
    (tmp_path / "texts" / "README.md").write_text("A data set. " * 900)
    with pytest.warns(EmbedLayerWarning, match=r"among them .*train\.jsonl"):
        assert_is(built(tmp_path / "texts"), ["A data set. " * 900], TOKENIZERS["byte"])
