"""Rows as documents: JSON lines, Parquet, Arrow and saved data sets give the IDs of each text encoded alone."""

import gzip
import shutil
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
from covering import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import embedlayer as el
from embedlayer import TokenCorpus
from embedlayer.core.errors import EmbedLayerWarning, FileError, SizeError, TextError
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


def test_a_build_with_another_field_is_not_continued(tmp_path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "body": "b"}\n' * 9)
    build_in_shards([tmp_path / "t.jsonl"], TOKENIZERS["byte"], tmp_path / "c", shards=2, workers=1)
    with pytest.raises(FileError, match="it has text field None, not body"):
        build_in_shards(
            [tmp_path / "t.jsonl"], TOKENIZERS["byte"], tmp_path / "c", shards=2, workers=1, text_field="body"
        )


@pytest.mark.parametrize("name", ["t.jsonl", "t.txt", "-"])
def test_the_named_field_is_read(name, tmp_path, monkeypatch) -> None:
    raw = lines(TEXTS, "body")
    if name == "-":
        import io
        import sys

        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
        source: str | Path = name
    else:
        source = tmp_path / name
        source.write_bytes(raw)
    corpus = TokenCorpus.build([source], TOKENIZERS["bpe"], tmp_path / "corpus", text_field="body")
    assert_is(corpus, TEXTS, TOKENIZERS["bpe"])
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def built(*sources: Path, **options: str) -> TokenCorpus:
    """The corpus of some sources."""
    return TokenCorpus.build(sources, TOKENIZERS["byte"], sources[0].parent / "built", **options)


# What is refused


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (GOOD * 40 + b'{"text": "cut\n' + GOOD, "t.jsonl, line 41, is not JSON: Unterminated string"),
        (GOOD * 40 + b"\n\n[1]\n" + GOOD, "t.jsonl, line 43, is list, not a JSON object"),
        (GOOD * 40 + b'{"text": "\xff"}\n', "t.jsonl, line 41, is not JSON: 'utf-8' codec"),
        (GOOD * 40 + b'{"text": "\\ud800"}\n', r"t.jsonl, line 41, has a text with '\\ud800', half of a surrogate"),
        (
            GOOD * 40 + b'{"body": "x"}\n',
            r"line 41, has no field 'text' \(it has body\), which the first row has: repair",
        ),
        (GOOD * 40 + b'{"text": null}\n', "t.jsonl, line 41, has a field 'text' that is null, and not a text"),
        (GOOD * 40 + b'{"text": ["a"]}\n', "t.jsonl, line 41, has a field 'text' that is a list, and not a text"),
        (b'{"id": 1, "body": "x"}\n' * 3, r"has no field 'text' \(it has id, body\). Name .*--text-field NAME"),
        (b"no JSON\n" + GOOD, "t.jsonl, line 1, is not JSON"),
    ],
)
def test_a_damaged_record_is_named_by_file_and_line_in_every_shard(raw, words, tmp_path) -> None:
    (tmp_path / "t.jsonl").write_bytes(raw)
    for shards in (1, 2, 5):
        with pytest.raises(TextError, match=words):
            build_in_shards(
                [tmp_path / "t.jsonl"], TOKENIZERS["byte"], tmp_path / f"s{shards}", shards=shards, workers=1
            )


def test_a_damaged_row_of_a_column_is_named(tmp_path) -> None:
    pyarrow = arrow()
    array = pyarrow.array([*TEXTS, "é"], pyarrow.string())
    data = bytearray(array.buffers()[2].to_pybytes())
    data[-1] = 0xFF
    broken = pyarrow.StringArray.from_buffers(len(array), array.buffers()[1], pyarrow.py_buffer(bytes(data)))
    for name, values, words in (
        ("utf8", broken, r"t.arrow, row 30 \(counted from 0\), has a text that is not UTF-8"),
        ("null", pyarrow.array([*TEXTS, None]), r"t.arrow, row 30 \(counted from 0\), has a field 'text' that is null"),
    ):
        (tmp_path / name).mkdir()
        written = pyarrow.table({"text": values})
        with pyarrow.ipc.new_stream(str(tmp_path / name / "t.arrow"), written.schema) as writer:
            writer.write_table(written)
        with pytest.raises(TextError, match=words):
            TokenCorpus.build([tmp_path / name / "t.arrow"], TOKENIZERS["byte"], tmp_path / "out")


@pytest.mark.parametrize("offsets", [[0, 7, 13, 20 | 1 << 30], [0, 7, 3, 20], [0, 7, 13, 52]])
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_offsets_outside_of_the_texts_are_damage(offsets, kind, tmp_path) -> None:
    pyarrow = arrow()
    path = tmp_path / "t.arrow"
    table = pyarrow.table({"text": ["the cat", "sat on", "the mat"]})
    with getattr(pyarrow.ipc, f"new_{kind}")(str(path), table.schema) as writer:
        writer.write_table(table)
    sound, damaged = (b"".join(each.to_bytes(4, "little") for each in group) for group in ([0, 7, 13, 20], offsets))
    assert path.read_bytes().count(sound) == 1
    path.write_bytes(path.read_bytes().replace(sound, damaged))
    with pytest.raises(FileError, match=r"t.arrow, at row 0 \(counted from 0\) or after: .* The file is damaged"):
        TokenCorpus.build([path], TOKENIZERS["byte"], tmp_path / "out")


def test_a_stream_without_an_end_mark_is_damaged_and_streams_may_be_joined(tmp_path) -> None:
    pyarrow = arrow()
    path = tmp_path / "t.arrow"
    table = pyarrow.table({"text": [f"row {i}" for i in range(40)]})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(FileError, match="the stream has no end mark, so rows may be missing"):
        TokenCorpus.build([path], TOKENIZERS["byte"], tmp_path / "out")
    path.write_bytes(whole + whole)
    assert len(TokenCorpus.build([path], TOKENIZERS["byte"], tmp_path / "out").documents) == 80


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "data-00000-of-00001.arrow", "t.jsonl.gz", "t.jsonl.zst"])
def test_a_truncated_file_is_named(name, tmp_path) -> None:
    WRITERS[name](tmp_path / name, TEXTS * 50)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) * 2 // 3])
    advice = {".gz": "damaged or not gzipped", ".zst": "damaged or not compressed by Zstandard"}
    with pytest.raises((FileError, TextError), match=f"{name}.*{advice.get(Path(name).suffix, '')}"):
        TokenCorpus.build([tmp_path / name], TOKENIZERS["byte"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_columns_without_texts_are_refused_by_their_type(tmp_path) -> None:
    pyarrow = arrow()
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"text": [1, 2], "body": ["a", "b"]}), tmp_path / "t.parquet")
    with pytest.raises(TextError, match="column 'text' of type int64, and not of texts"):
        built(tmp_path / "t.parquet")
    with pytest.raises(TextError, match=r"has no field 'name' \(it has text, body\)"):
        built(tmp_path / "t.parquet", text_field="name")
    assert_is(built(tmp_path / "t.parquet", text_field="body"), ["a", "b"], TOKENIZERS["byte"])


def test_two_columns_of_one_name_are_refused(tmp_path) -> None:
    pyarrow = arrow()
    from pyarrow.parquet import write_table

    write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(TextError, match=r"t\.parquet has 2 columns 'text': write it with one"):
        built(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (lines(TEXTS).decode().encode("utf-16"), "is not UTF-8 text: byte 0xFF .*iconv -f UTF-16"),
        (lines(TEXTS).decode().encode("utf-16-le"), ".*iconv -f UTF-16LE"),
        (gzip.compress(lines(TEXTS)), "is compressed by gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), "is compressed by Zstandard"),
    ],
)
def test_what_is_named_as_json_lines_and_is_none_is_refused_by_its_kind(raw, words, tmp_path) -> None:
    (tmp_path / "T.JSONL").write_bytes(raw)
    with pytest.raises(TextError, match=rf"(?s)T\.JSONL {words}"):
        built(tmp_path / "T.JSONL")
    (tmp_path / "T.JSONL").write_text('{"text": "one line"}\n')
    assert_is(built(tmp_path / "T.JSONL"), ["one line"], TOKENIZERS["byte"])


def test_a_damaged_line_is_an_error_also_without_the_name_of_json_lines(tmp_path) -> None:
    write_lines(tmp_path / "t.jsonl", [f"text {number}" for number in range(40)])
    lines = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    lines[16] = lines[16][:9] + b"\n"
    for name in ("rows", "rows.jsonl"):
        (tmp_path / name).write_bytes(b"".join(lines))
        with pytest.raises(TextError, match=f"{name}, line 17, is not JSON"):
            TokenCorpus.build([tmp_path / name], TOKENIZERS["byte"], tmp_path / "c")


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.parquet", "folder"])
def test_white_space_alone_is_no_corpus_and_beside_text_it_is_text(name, tmp_path, monkeypatch) -> None:
    blank = [" \n\t", "\n" * 70_000, "\u3000"]
    folder = tmp_path / "folder"
    folder.mkdir()
    if name == "t.txt":
        (tmp_path / name).write_text("".join(blank))
    elif name == "folder":
        for number, text in enumerate(blank):
            (folder / f"{number}.txt").write_text(text)
    else:
        WRITERS[name](tmp_path / name, blank)
    for shards in (1, 3):
        with pytest.raises(TextError, match="There is only white space in .*Pass a file with at least one word"):
            build_in_shards([tmp_path / name], TOKENIZERS["byte"], tmp_path / "c", shards=shards, workers=1)
    with pytest.raises(TextError, match="There is only white space in"):
        TokenCorpus.build([tmp_path / name], TOKENIZERS["byte"], tmp_path / "c")
    (tmp_path / "z.txt").write_text("z")
    built = TokenCorpus.build([tmp_path / name, tmp_path / "z.txt"], TOKENIZERS["byte"], tmp_path / "c")
    assert built.num_bytes == len("".join(blank).encode()) + 1


def test_a_field_without_rows_is_refused(tmp_path) -> None:
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(SizeError, match="'body' names a part of a row, and none of the files has rows"):
        TokenCorpus.build([tmp_path / "t.txt"], TOKENIZERS["byte"], tmp_path / "c", text_field="body")


def test_a_data_set_with_several_splits_or_missing_files_is_refused(tmp_path) -> None:
    write_datasets(tmp_path / "sets", TEXTS)
    write_dataset(tmp_path / "sets" / "test", TEXTS)
    with pytest.raises(TextError, match=r"several splits \(test, train\): pass the folder of one"):
        built(tmp_path / "sets")
    (tmp_path / "sets" / "test" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(FileError, match="not a whole data set: .*data-00001-of-00002.arrow is missing"):
        built(tmp_path / "sets" / "test")
    (tmp_path / "state").mkdir()
    shutil.copy(tmp_path / "sets" / "test" / "state.json", tmp_path / "state")
    with pytest.raises(FileError, match="not a whole data set: .*data-00000-of-00002.arrow is missing"):
        built(tmp_path / "state")
    with pytest.raises(TextError, match=r"test in .* is a data set .*: pass this folder by itself"):
        (tmp_path / "sets" / "dataset_dict.json").unlink()
        built(tmp_path / "sets")


def test_rows_without_text_are_counted_in_one_warning(tmp_path) -> None:
    write_lines(tmp_path / "t.jsonl", ["a", "", "b", ""])
    with pytest.warns(EmbedLayerWarning, match=r"2 of 4 rows of .*t\.jsonl are left out: they have no text"):
        corpus = TokenCorpus.build([tmp_path / "t.jsonl"], TOKENIZERS["byte"], tmp_path / "c")
    assert corpus.documents.tolist() == [0, 2]


def test_a_folder_with_rows_and_texts_is_read_by_the_kind_with_more_bytes(tmp_path) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "train.jsonl", TEXTS)
    (tmp_path / "texts" / "README.md").write_text("A data set.")
    with pytest.warns(EmbedLayerWarning, match=r"1 of the files in .* are left out, among them .*README\.md"):
        assert_is(built(tmp_path / "texts"), TEXTS, TOKENIZERS["byte"])
    (tmp_path / "texts" / "README.md").write_text("A data set. " * 900)
    with pytest.warns(EmbedLayerWarning, match=r"among them .*train\.jsonl"):
        assert_is(built(tmp_path / "texts"), ["A data set. " * 900], TOKENIZERS["byte"])
