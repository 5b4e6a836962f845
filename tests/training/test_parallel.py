"""Several processes train one model with the result of one process, and continue each other's runs."""

import contextlib
import functools
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from commands import run
from launches import SIZES, free_port, launched, meet
from memory import Memory
from processes import PRELOADED, on_ranks
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.distributed.tensor import DTensor

from embedlayer import (
    DecoderLM,
    FactorizedEmbedding,
    FileError,
    LearnedPositionalEmbedding,
    OutputHead,
    PeerError,
    RotaryEmbedding,
    RowSparseEmbedding,
    RunDirectory,
    SizeError,
    TokenCorpus,
    TokenEmbedding,
    Trainer,
    TrainingOptions,
    open_model,
    train_tokenizer,
)
from embedlayer.data.mixture import TokenMixture
from embedlayer.inputs import GatedEmbedding, NgramEmbedding, NgramHash, ValueEmbedding
from embedlayer.io import safetensors_files
from embedlayer.training.parallel import parallel_context

PRELOADED += ["benchmarks.operator_counter", "embedlayer.cli.main"]

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 60
OTHER = "I love dogs, and dogs love naps in the sun. " * 40
V, HALF, STEPS = 257, 2, 3


def dense(kind=TokenEmbedding, **options):
    return kind(V, 8, scale="sqrt_dim", padding_idx=3, **options)


def free_head():
    return OutputHead(vocab_size=V, embed_dim=8, bias=True, padding_idx=3, head_dtype=torch.float32)


def added_tables():
    """Return value embeddings and a hashed n-gram table, whose rows are sharded like those of the token table."""
    hash = NgramHash.for_rows(300, V, heads=2)
    return [
        ValueEmbedding(RowSparseEmbedding(V, 8), 2, blocks=[0], gate_channels=4),
        GatedEmbedding(NgramEmbedding.dense(hash, 8, row_sparse=True), 8, block=0),
    ]


CASES = {
    "tied": lambda: DecoderLM(dense(pad_to_multiple_of=64), RotaryEmbedding(4), num_layers=1, num_heads=2),
    "row-sparse-documents": lambda: DecoderLM(
        dense(RowSparseEmbedding, pad_to_multiple_of=64),
        RotaryEmbedding(4),
        free_head(),
        num_layers=1,
        num_heads=2,
        injections=added_tables(),
    ),
    "factorised-documents-mixture": lambda: DecoderLM(
        FactorizedEmbedding(V, 8, 3), LearnedPositionalEmbedding(8, 8), num_layers=1, num_heads=2
    ),
    "dropout": lambda: DecoderLM(dense(), RotaryEmbedding(4), num_layers=1, num_heads=2, dropout=0.2),
}
EQUAL = [case for case in CASES if case != "dropout"]
ALWAYS = [case for case in EQUAL if case != "tied"]  # the factorised one is tied too


def mixed_corpora(folder: Path, text: Path) -> tuple[Tokenizer, TokenMixture]:
    """Write a text, and chats, in which a few tokens count, those of the assistant; return their tokenizer too."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    chats = []
    for number in range(30):
        turns = [("user", OTHER[:40]), ("assistant", OTHER[40:60]), ("user", f"{OTHER[60:70]}{number}")]
        chats.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}))
    (text.parent / "chats.jsonl").write_text("\n".join(chats))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer((), "byte"), chat_template=template
    )
    plain = TokenCorpus.build([text], tokenizer, folder / "0")
    answers = TokenCorpus.build([text.parent / "chats.jsonl"], tokenizer, folder / "1")
    return tokenizer.backend_tokenizer, TokenMixture([(plain, 1), (answers, 2.5)])


def start(folder: Path, case: str) -> None:
    """Return the folder of a run before its first step."""
    tokenizer = train_tokenizer((), "byte")
    directory = RunDirectory(folder / case)
    directory.path.mkdir(parents=True)
    documents = "documents" in case
    if documents:  # each sentence is a document, and some are one token
        rows = [*TEXT.strip(" .").split(" . "), *"abc", *OTHER.split(", ")]
        (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (folder / "text.txt").write_text(TEXT)
    text = folder / ("text.jsonl" if documents else "text.txt")
    corpus: TokenCorpus | TokenMixture
    if case.endswith("mixture"):
        tokenizer, corpus = mixed_corpora(directory.corpus, text)
    else:
        corpus = TokenCorpus.build([text], tokenizer, directory.corpus)
    torch.manual_seed(0)
    accumulate = 1 if case.startswith("row-sparse") else 2
    options = TrainingOptions(
        steps=STEPS,
        batch_size=3,
        accumulate=accumulate,
        max_length=8,
        log_every=3,
        validation_tokens=40,  # a full batch and one of two windows
        documents=documents,
        max_grad_norm=0.5,
        monitor_every=3 if case.startswith(("tied", "row-sparse")) else None,
    )
    training, validation = corpus.split(0.2)
    trainer = Trainer(CASES[case](), training, validation, options)
    directory.start(trainer, tokenizer, validation_fraction=0.2)


def train(folder: Path, ranks=None, *, half: Path | None = None) -> list[dict]:
    """Train to the end, and copy the folder to `half` on the way."""
    directory = RunDirectory(folder)
    trainer, tokenizer, _ = directory.resume("cpu", ranks)
    lines = list(trainer.run(on_step=lambda step: trainer.stop() if half and step == HALF else None))
    if half:
        directory.save_checkpoint(trainer)
        if trainer.parallel.is_first:
            shutil.copytree(folder, half)
        lines += trainer.run()
    directory.save_checkpoint(trainer)
    directory.finish(trainer, tokenizer)
    return lines


def whole_and_half(folder: Path, cases: list[str], vocab_parallel_size: int | None = None) -> list[str]:
    """Train from the start, and from the copies of other runs; return the lines of both as JSON."""
    safetensors_files.CHUNK_BYTES = 127 * 32  # of the 128 rows of rank 1, one is left over
    found = []
    with launched(vocab_parallel_size) as ranks:
        for case in cases:
            found += [json.dumps(train(folder / case, ranks, half=folder / f"{case}-half"))]
            found += [json.dumps(train(folder / f"{case}-foreign", ranks))]
    return found


def assert_equal(folder: Path, lines: list[dict], expected: Path, its: list[dict]) -> None:
    """Compare losses and tables to 1e-5; Adam enlarges rounding errors of tiny gradients, so a few may differ more."""
    for ours, theirs in zip(lines, [line for line in its if line["step"] >= lines[0]["step"]], strict=True):
        for name in ("step", "loss", "lr", "validation_loss", "validation_losses"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5)
        assert_same_monitor(ours.get("monitor"), theirs.get("monitor"))
    for read in (lambda run: load_file(run / "model.safetensors"), everything):
        tensors, theirs = read(folder), read(expected)
        assert tensors.keys() == theirs.keys()
        for name, tensor in tensors.items():
            tolerance = {"atol": 1e-5 if "table" in name or "head" in name else 5e-5, "rtol": 1e-5}
            said = f"{folder} {name}: "
            torch.testing.assert_close(tensor, theirs[name], **tolerance, msg=lambda text, said=said: said + text)


def assert_same_monitor(ours: dict | None, theirs: dict | None) -> None:
    """Compare what monitors say; the standard deviation of logits is that of 16 tokens of each rank."""
    assert (ours is None) == (theirs is None)
    for name in (ours or {}).keys() - {"logit_std"}:
        values, expected = [x if isinstance(x, list) else [x] for x in (ours[name], theirs[name])]
        for x, y in zip(values, expected, strict=True):
            assert x == (None if y is None else pytest.approx(y, rel=1e-3, abs=1e-5)), name


def everything(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint after its pending updates, since which rows have some depends on the number of ranks."""
    trainer, _ = RunDirectory(folder).open()
    trainer.optimizer.apply_pending_updates()
    left_out = ("generator", "pending_updates")
    return {name: tensor for name, tensor in trainer.state()[0].items() if not name.startswith(left_out)}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Return the folder of the runs of one process, and a function that trains a case there and returns its lines."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def lines(case):
        start(folder, case)
        return train(folder / case, half=folder / f"{case}-half")

    return folder, lines


@pytest.mark.parametrize(
    ("cases", "launches"),
    [
        pytest.param(ALWAYS, [(4, 2)], id="four"),
        pytest.param(EQUAL, [(1, None), (2, None), (3, None), (4, 2), (2, 1)], id="all", marks=pytest.mark.long),
    ],
)
def test_one_to_four_processes_end_where_one_ends_and_go_on_from_each_other(one, tmp_path, cases, launches) -> None:
    before, lines = one[0], {case: one[1](case) for case in cases}
    for ranks, vocab_parallel_size in launches:
        folder = tmp_path / f"{ranks}-{vocab_parallel_size}"
        for case in cases:
            start(folder, case)
            shutil.copytree(before / f"{case}-half", folder / f"{case}-foreign")
        results = on_ranks(ranks, whole_and_half, folder, cases, vocab_parallel_size)
        assert all(len(result) == len(results[0]) for result in results)
        for number, case in enumerate(cases):
            whole, half = (json.loads(text) for text in results[0][2 * number : 2 * number + 2])
            assert_equal(folder / case, whole, one[0] / case, lines[case])
            assert_equal(folder / f"{case}-foreign", half, one[0] / case, lines[case])
            model = open_model(folder / case).model
            assert model.table.vocab_size == V
        before = folder
    for case in cases:
        assert_equal(before / f"{case}-half", train(before / f"{case}-half"), one[0] / case, lines[case])


def dropout_twice(folder: Path) -> bool:
    with launched() as ranks:
        whole = train(folder / "dropout", ranks, half=folder / "half")
        half = train(folder / "half", ranks)
        kept = ranks.loss_function(CASES["tied"]())
    assert not hasattr(kept, "reducer")  # freed after the process group, it waits for a thread that waits for the GIL
    return [line["loss"] for line in whole[-len(half) :]] == [line["loss"] for line in half]


def test_dropout_goes_on_bit_for_bit_with_as_many_processes(tmp_path) -> None:
    start(tmp_path, "dropout")
    assert on_ranks(2, dropout_twice, tmp_path) == [True, True]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("dropout", "half"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def commands(port: int, folder: Path) -> list[tuple[int, str]]:
    """Train with another width on rank 2; then as one launch, as a part of it with another machine, and as another."""
    rank, found = dist.get_rank(), []
    meet()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os._exit = sys.exit  # type: ignore[assignment]  # how a command of torchrun ends
    for launch, width in ("a", 32 if rank == 2 else 24), ("a", 24), ("ab"[rank > 0], 24), ("b", 24):
        os.environ["TORCHELASTIC_RUN_ID"] = launch
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = run("train", folder / "text.txt", "-o", folder / "run", *SIZES, "--steps", 1, "--dim", width)
        found.append((code, said.getvalue()))
    return found


def test_a_run_is_of_one_command_and_goes_on_for_who_began_it_and_for_nobody_else(tmp_path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    store = dist.TCPStore("127.0.0.1", port := free_port(), is_master=True, wait_for_workers=False)
    for rank, (other_width, first, again, others) in enumerate(on_ranks(3, commands, port, tmp_path)):
        assert other_width[0] == others[0] == 1
        assert "PeerError: Rank 2 differs from rank 0 in --dim: 32 there, 24 on rank 0." in other_width[1]
        assert first[0] == again[0] == 0
        assert ("The run is complete at step 1" in again[1]) == (rank == 0)
        assert "FileError" in others[1]
    del store


def other_folders(folders: list[Path]) -> list[str]:
    found = []
    with launched() as ranks:
        for number, folder in enumerate(folders):
            with pytest.raises(PeerError) as error:
                RunDirectory(folder if ranks.rank == 1 else folders[number - 1]).resume("cpu", ranks)
            found += [str(error.value)]
    return found


def test_a_process_with_another_tokenizer_text_or_configuration_is_refused_by_name(tmp_path) -> None:
    start(tmp_path, "tied")
    for name in ("tokenizer", "text", "configuration"):
        shutil.copytree(tmp_path / "tied", tmp_path / name)
    train_tokenizer((), "byte", special_tokens=["<a>"]).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    ids = tmp_path / "text" / "corpus" / "ids.bin"
    ids.write_bytes(bytes(reversed(ids.read_bytes())))
    ids.write_bytes(ids.read_bytes()[1:] + ids.read_bytes()[:1])
    run = tmp_path / "configuration" / "run.json"
    description = json.loads(run.read_text())
    run.write_text(json.dumps({**description, "options": {**description["options"], "seed": 7}}))
    folders = [tmp_path / name for name in ("tied", "tokenizer", "text", "configuration")]
    found = on_ranks(2, other_folders, folders)
    assert found[0] == found[1]
    for said, what in zip(found[0], ("configuration of options", "tokenizer: ", "text: ", "options"), strict=True):
        assert what in said


def test_without_torchrun_there_is_one_process_and_no_group(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with parallel_context("cpu", 1.0) as parallel:
        assert (parallel.is_first, parallel.size, parallel.launch_id) == (True, 1, "")
        assert not torch.distributed.is_initialized()
        parallel.wait_for_first()
    for arguments in (("cpu", 0.0), ("cpu", 1.0, 2)):
        with pytest.raises(SizeError), parallel_context(*arguments):
            pass


def of_rank(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def frozen_and_back(folder: Path) -> bool:
    model = CASES["tied"]()
    model.table.requires_grad_(False)
    with launched() as ranks:
        ranks.shard(model)
        before = model.state_dict()
        ranks.save(folder / "file", before)
        ranks.wait_for_first()
        after, _ = ranks.load(folder / "file")
        ranks.sum(torch.ones(1))  # rank 0, which has the store, leaves last
        if ranks.is_first:
            with pytest.raises(FileError, match="Cannot write"):
                ranks.save(folder / "nowhere" / "file", before)
        return all(torch.equal(of_rank(value), of_rank(after[name])) for name, value in before.items())


def test_a_frozen_table_is_saved_and_loaded_like_any_other(tmp_path) -> None:
    assert on_ranks(2, frozen_and_back, tmp_path) == [True, True]


LARGE, WIDTH = 60_000, 48


def test_no_process_ever_has_the_whole_table() -> None:
    whole = LARGE * WIDTH * 4
    for peaks in on_ranks(3, peaks_of_a_large_table):
        for peak in peaks:  # its third; a piece that is drawn; what the three send and get for some tokens
            assert peak < 0.75 * whole


def peaks_of_a_large_table() -> list[int]:
    """Return the peak memory while a tied model, and then an untied model, is built, per table."""
    peaks = []
    with launched() as ranks:
        for free in (False, True):
            head = OutputHead(vocab_size=LARGE, embed_dim=WIDTH) if free else None
            with torch.device("meta"):
                model = DecoderLM(TokenEmbedding(LARGE, WIDTH), RotaryEmbedding(24), head, num_layers=1, num_heads=2)
            with Memory() as memory:
                model = ranks.build({"kind": "decoder_lm", **model.config}, "cpu")
            peaks.append(memory.peak // (1 + free))
            assert model.head.tied or len(model.head.rows.weight) == LARGE // 3
    return peaks
