"""Chats: IDs and mask are those of transformers, and the mask reaches windows, shards, runs and the loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from covering import looped
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer import RunDirectory, TokenCorpus, Trainer, TrainingOptions
from embedlayer.core.errors import FileError, TextError, TokenizerError
from embedlayer.data import MixedSampler, TokenMixture, TokenWindows, WindowSampler, build_in_shards, create_dataloader

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "\n{% endfor %}"
)
CHATS = [
    [
        {"role": "user", "content": f"What does dog {number} love? 犬 é " * (number % 4)},
        {"role": "assistant", "content": "naps. " * (number % 7)},
        {"role": "user", "content": "And\ncats?"},
        {"role": "assistant", "content": f"Dogs love {number} 猫s 🙂."},
    ][: 2 + number % 3]
    for number in range(40)
]


def tokenizer_with(template: str | None):
    backend = el.train_tokenizer(" ".join(json.dumps(chat) for chat in CHATS), "bpe", vocab_size=400)
    backend.add_special_tokens(["<s>", "<|user|>", "<|assistant|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>", chat_template=template
    )


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(TEMPLATE)


def write_chats(path: Path, more: str = "") -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS) + more)
    return path


@pytest.fixture
def chats(tmp_path) -> Path:
    return write_chats(tmp_path / "chats.jsonl")


def expected(tokenizer, chats) -> tuple[list[int], list[int]]:
    """IDs and weights by `apply_chat_template`, with the separator of the corpus between chats."""
    ids: list[int] = []
    weights: list[int] = []
    for chat in chats:
        encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        if ids:
            ids, weights = [*ids, tokenizer.eos_token_id], [*weights, 0]
        ids, weights = ids + list(encoded["input_ids"]), weights + list(encoded["assistant_masks"])
    return ids, weights


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    from pyarrow.parquet import write_table

    rows = [[{**message, "name": None} for message in chat] for chat in CHATS]
    write_table(pyarrow.table({"messages": rows}), path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shards", [1, 3])
def test_ids_and_weights_are_those_of_transformers(kind, shards, tokenizer, chats, tmp_path) -> None:
    source = chats if kind == "jsonl" else tmp_path / "chats.parquet"
    if kind == "parquet":
        write_parquet(source)
    ids, weights = expected(tokenizer, CHATS)
    assert 0 < sum(weights) < len(weights) / 2
    built = [
        TokenCorpus.build([source], tokenizer, tmp_path / "whole"),
        build_in_shards([source], tokenizer, tmp_path / "shards", shards=shards, workers=1),
        TokenCorpus.open(tmp_path / "shards"),
    ]
    for corpus in built:
        assert np.asarray(corpus.ids).tolist() == ids
        assert np.asarray(corpus.token_weights).tolist() == weights
        assert len(corpus.documents) == len(CHATS)


@looped("shards", [1, 2, 3, 7])
def test_texts_beside_chats_count_fully_in_any_number_of_shards(shards, tokenizer, tmp_path) -> None:
    write_chats(tmp_path / "chats.jsonl")
    (tmp_path / "a.txt").write_text("Dogs nap in the sun. " * 60)
    (tmp_path / "z.txt").write_text("Cats do so too. " * 60)
    sources = [tmp_path / name for name in ("a.txt", "chats.jsonl", "z.txt")]
    whole = TokenCorpus.build(sources, tokenizer, tmp_path / "whole")
    built = build_in_shards(sources, tokenizer, tmp_path / "shards", shards=shards, workers=1)
    for name in ("ids", "token_weights", "documents"):
        assert np.asarray(getattr(built, name)).tolist() == np.asarray(getattr(whole, name)).tolist()
    first, second, last = whole.documents[[0, 1, -1]].tolist()
    assert whole.token_weights[first : second - 1].all()
    assert whole.token_weights[last:].all()


def test_a_saved_tokenizer_renders_as_itself_and_the_corpus_keeps_its_template(tokenizer, chats, tmp_path) -> None:
    folder, target = tmp_path / "tokenizer", tmp_path / "shards"
    tokenizer.save_pretrained(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    build_in_shards([chats], tokenizer, target, shards=2, workers=1)
    for source in (folder, folder / "tokenizer.json", target):
        build_in_shards([chats], backend, target, shards=2, workers=1, chat_template=source)
    with pytest.raises(FileError, match="it has chat template .*, not"):
        other = tokenizer_with(TEMPLATE.replace("\n", " "))
        build_in_shards([chats], other, target, shards=2, workers=1)
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, content["merges"])))
    for source in (folder, folder / "vocab.json"):
        build_in_shards([chats], tokenizer.backend_tokenizer, target, shards=2, workers=1, chat_template=source)


def test_windows_carry_the_weights_of_their_targets_and_so_do_the_parts_of_a_split(tokenizer, chats, tmp_path) -> None:
    corpus = build_in_shards([chats], tokenizer, tmp_path / "shards", shards=3, workers=1)
    ids, weights = (np.asarray(values).astype(np.int64) for values in (corpus.ids, corpus.token_weights))
    windows = TokenWindows(corpus, 8, 5)
    inputs, targets, own = windows[3]
    assert (inputs.tolist(), targets.tolist(), own.tolist()) == (
        ids[15:23].tolist(),
        ids[16:24].tolist(),
        weights[16:24].tolist(),
    )
    loaders = [
        create_dataloader(corpus, max_length=8, stride=5, shuffle=False, num_workers=workers) for workers in (0, 2)
    ]
    for one, other in zip(*loaders, strict=True):
        assert len(one) == 3
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for sampler in (
        WindowSampler(corpus, max_length=8, batch_size=4, seed=0),
        MixedSampler([(corpus, 1), (np.arange(500), 1)], max_length=8, batch_size=4, seed=0),
    ):
        inputs, targets, own = sampler.batch(3)
        parts = [sampler.batch(3, rank=rank, ranks=2) for rank in range(2)]
        for whole, part in zip((inputs, targets, own), zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(part))
        assert own.dtype == torch.float32
        assert own.shape == targets.shape
    first, last = corpus.split(0.3)
    assert [*np.asarray(first.token_weights), *np.asarray(last.token_weights)] == weights.tolist()


def loss_of(model, ids, targets, *more) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the weight of each target; those of ignored targets are 0."""
    mask = more[0] if len(more) == 2 else None
    losses = model.loss(ids, targets, attention_mask=mask, reduction="none")
    return losses, torch.where(targets == -100, 0, more[-1])


@pytest.mark.parametrize("documents", [False, True])
def test_the_loss_of_a_run_is_that_of_the_assistant_alone(tokenizer, chats, tmp_path, documents) -> None:
    corpus = TokenCorpus.build([chats], tokenizer, tmp_path / "corpus")
    sizes = {"steps": 1, "max_length": 16, "batch_size": 4, "accumulate": 3}
    options = TrainingOptions(**sizes, precision="float32", documents=documents)
    torch.manual_seed(0)
    model = el.DecoderLM(el.TokenEmbedding(corpus.vocab_size, 16), "rotary", num_layers=1, num_heads=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Trainer(model, *corpus.split(0.2), options)
    first, last = trainer.run()

    model.load_state_dict(before)
    batches = [trainer.sampler.batch(part) for part in range(3)]
    with torch.no_grad():
        parts = [loss_of(model, *batch) for batch in batches]
    losses, weights = (torch.stack(each) for each in zip(*parts, strict=True))
    assert last["loss"] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-5)
    windows = TokenWindows(trainer.validation, 16, 16, documents=documents)
    batch = windows.batch(range(len(windows)))
    with torch.no_grad():
        every, weights = loss_of(model, *batch)
    assert first["validation_loss"] == pytest.approx(float((every * weights).sum() / weights.sum()), rel=1e-5)
    mean = float(every.sum()) / int((batch[1] != -100).sum())
    per_byte = mean / np.log(2) * len(trainer.validation) / trainer.validation.num_bytes
    assert first["validation_bits_per_byte"] == pytest.approx(per_byte, rel=1e-5)


def test_a_mixture_with_chats_weighs_other_texts_fully(tokenizer, chats, tmp_path) -> None:
    backend = tokenizer.backend_tokenizer
    mixture = TokenMixture(
        [
            (TokenCorpus.build([chats], tokenizer, tmp_path / "c"), 1),
            (TokenCorpus.from_text("Cats nap. " * 300, backend), 1),
        ]
    )
    options = TrainingOptions(steps=1, max_length=8, batch_size=4)
    model = el.DecoderLM(el.TokenEmbedding(500, 16), "rotary", num_layers=1, num_heads=2)
    *_, last = Trainer(model, *mixture.split(0.2), options).run()
    assert len(last["validation_losses"]) == 2


def test_train_and_corpus_build_read_chats_with_the_tokenizer_of_a_folder(tokenizer, chats, tmp_path, capsys) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    small = ("--dim", 8, "--heads", 2, "--layers", 1, "--length", 8, "--steps", 2)
    words = ("--tokenizer-from", tmp_path / "tokenizer")
    assert run("train", chats, "-o", tmp_path / "run", *words, *small) == 0
    corpus = RunDirectory(tmp_path / "run").open_corpus()
    assert np.asarray(corpus.token_weights).tolist() == expected(tokenizer, CHATS)[1]
    build = ("corpus", "build", chats, "-o", tmp_path / "c", "--shards", 2, "--workers", 1)
    assert run(*build, "--tokenizer", tmp_path / "tokenizer") == 0
    assert run(*build) == 0  # continues with the tokenizer and the template in the folder
    assert run("train", tmp_path / "c", "-o", tmp_path / "run2", *small) == 0
    capsys.readouterr()
    assert run("corpus", "build", chats, "-o", tmp_path / "d") == 2
    assert "The tokenizer has no chat template" in capsys.readouterr().err


def test_chats_without_a_template_that_marks_the_assistant_are_refused(chats, tmp_path) -> None:
    plain = tokenizer_with(None)
    unmarked = tokenizer_with(TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    for tokenizer in (plain, plain.backend_tokenizer, unmarked):
        with pytest.raises(TokenizerError):
            TokenCorpus.build([chats], tokenizer, tmp_path / "c")
    assert not (tmp_path / "c").exists()


BAD_MESSAGES = [
    '"text"',
    "[]",
    '["a"]',
    '[{"from": "human", "value": "Hi"}]',
    '[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]',
    '[{"role": "user", "content": "Hi"}], "tools": [{"function": {"name": "f"}}]',
    "null",
]
BAD_TEMPLATES = [
    "{{ 1 / (messages|length - messages|length) }}",
    "{% for i in range(200000) %}{% endfor %}",
    "{{ 'a'.encode('foo') }}",
    "{{ '{0}'.format() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@looped("line, more, code", [*((41, bad, "") for bad in BAD_MESSAGES), *((1, "[]", bad) for bad in BAD_TEMPLATES)])
def test_a_chat_that_cannot_be_rendered_is_named(line, more, code, tokenizer, tmp_path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", f'{{"messages": {more}}}\n')
    with pytest.raises(TextError, match=f"line {line}, has a"):
        TokenCorpus.build([chats], tokenizer_with(TEMPLATE + code) if code else tokenizer, tmp_path / "c")


def test_a_template_may_read_contents_that_are_lists_and_columns_of_tools_are_refused(tokenizer, tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    from pyarrow.parquet import write_table

    template = (
        "{% for message in messages %}{% generation %}{% for part in message.content %}{{ part.text }}{% endfor %}"
        "{% endgeneration %}{% endfor %}"
    )
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    corpus = TokenCorpus.build([tmp_path / "chats.jsonl"], tokenizer_with(template), tmp_path / "parts")
    assert corpus.ids.tolist() == tokenizer.backend_tokenizer.encode("Hiyou").ids
    assert corpus.token_weights.tolist() == [1] * len(corpus)
    chat = [{"role": "user", "content": "Hi"}]
    write_table(pyarrow.table({"messages": [chat], "tools": [[{"name": "f"}]]}), tmp_path / "t.parquet")
    with pytest.raises(TextError):
        TokenCorpus.build([tmp_path / "t.parquet"], tokenizer, tmp_path / "c")
