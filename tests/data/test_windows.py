"""Windows: the notebook's batches without its list, and an order that knows every step."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from covering import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from embedlayer.core.errors import ShapeError, SizeError, TextError, TokenizerError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.memmap import ConcatenatedArray
from embedlayer.data.mixture import MixedSampler
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.data.windows import TokenWindows, WindowSampler, create_dataloader
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer

BYTES = train_tokenizer((), "byte")
TEXT = "In the beginning there was a small dog, and the small dog loved other dogs. " * 20


def notebook_windows(ids, max_length, stride):
    """What the notebook's `create_dataloader_v1` holds in its lists."""
    starts = range(0, len(ids) - max_length, stride)
    return [(ids[s : s + max_length], ids[s + 1 : s + max_length + 1]) for s in starts]


def as_lists(batches):
    return [(x.tolist(), y.tolist()) for x, y in batches]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    return TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus")


def test_the_notebooks_first_batch_is_cut_as_by_hand(shared_data):
    text = (shared_data / "text" / "the-verdict.txt").read_text()
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "gpt2-encoder.json")
    loader = create_dataloader(text, tokenizer, batch_size=8, max_length=4, stride=4, shuffle=False)
    inputs, targets = next(iter(loader))
    ids = tokenizer.encode(text).ids
    assert inputs.shape == targets.shape == (8, 4)
    assert inputs.tolist() == [ids[start : start + 4] for start in range(0, 32, 4)]
    assert targets.tolist() == [ids[start : start + 4] for start in range(1, 33, 4)]
    assert inputs[0].tolist() == [40, 367, 2885, 1464]  # printed in the notebook: "I HAD always"


@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 15), st.integers(1, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_batches_equal_those_of_the_notebooks_list(count, max_length, stride, batch_size, drop_last):
    ids = np.random.default_rng(count).integers(0, 60_000, count + max_length).astype(np.uint16)
    expected: DataLoader[Any] = DataLoader(
        [tuple(map(torch.tensor, window)) for window in notebook_windows(ids.tolist(), max_length, stride)],
        batch_size=batch_size,
        drop_last=drop_last,
    )
    corpus = TokenCorpus(
        ids, np.array([0]), np.array([[len(ids), len(ids)]]), vocab_size=60_000, tokenizer_fingerprint=""
    )
    options = {"batch_size": batch_size, "max_length": max_length, "stride": stride, "drop_last": drop_last}
    if len(expected) == 0:  # the notebook's loader is empty, and its reader gets a StopIteration
        with pytest.raises(TextError):
            create_dataloader(corpus, shuffle=False, **options)
        return
    loader = create_dataloader(corpus, shuffle=False, **options)
    assert as_lists(loader) == as_lists(expected)
    assert len(loader) == len(expected)


def test_single_windows_and_a_plain_dataloader_over_them_agree(corpus):
    windows = TokenWindows(corpus, max_length=7, stride=3)
    plain = DataLoader(windows, batch_size=5)
    assert as_lists(plain) == as_lists(create_dataloader(corpus, batch_size=5, max_length=7, stride=3, shuffle=False))
    assert as_lists([windows[-1]]) == as_lists([windows[len(windows) - 1]])
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_workers_give_the_same_batches_in_the_same_order(corpus):
    options: dict[str, Any] = {"max_length": 32, "stride": 8, "shuffle": True}
    here, there = (
        create_dataloader(corpus, **options, num_workers=workers, generator=torch.Generator().manual_seed(1))
        for workers in (0, 1)
    )
    assert as_lists(here) == as_lists(there)


def test_the_global_seed_fixes_the_order_and_each_pass_has_its_own(corpus):
    def passes():
        torch.manual_seed(5)
        loader = create_dataloader(corpus, max_length=8, stride=8)
        return as_lists(loader), as_lists(loader)

    first, second = passes()
    assert first != second
    assert passes() == (first, second)


def test_a_mapped_corpus_travels_to_another_process_as_a_file_name(corpus):
    train, validation = corpus.split(0.4)
    for part in (train, validation):
        windows = TokenWindows(part, max_length=8, stride=2)
        packed = pickle.dumps(windows)
        assert len(packed) < part.ids.nbytes
        again = pickle.loads(packed)
        assert isinstance(again.ids, np.memmap)
        assert as_lists(again[i] for i in range(len(again))) == as_lists(windows[i] for i in range(len(windows)))


def test_a_text_its_path_and_its_corpus_give_the_same(corpus, tmp_path):
    options: dict[str, Any] = {"max_length": 16, "stride": 16, "shuffle": False}
    expected = as_lists(create_dataloader(corpus, **options))
    assert as_lists(create_dataloader(TEXT, BYTES, **options)) == expected
    assert as_lists(create_dataloader(tmp_path / "t.txt", BYTES, **options)) == expected


# The order of training


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 40), st.integers(-3, 2**64), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_a_step_is_the_same_whatever_came_before(extra, max_length, batch_size, seed, step):
    ids = np.arange(extra + max_length, dtype=np.uint16)
    options = {"max_length": max_length, "batch_size": batch_size, "seed": seed}
    fresh, used = WindowSampler(ids, **options), WindowSampler(ids, **options)
    used.batch(0)
    used.batch(step + 3)
    inputs, targets = fresh.batch(step)
    assert inputs.shape == (batch_size, max_length)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(max_length))
    assert torch.equal(inputs, used.batch(step)[0])


def starts_of_epoch(sampler: WindowSampler, epoch: int) -> list[int]:
    first = epoch * sampler.num_windows
    return [int(sampler.batch(step)[0][0, 0]) for step in range(first, first + sampler.num_windows)]


def test_every_epoch_takes_each_window_of_its_own_cut_once():
    ids, phases, orders = np.arange(1000, dtype=np.uint16), set(), set()
    for seed in (3, 4):
        sampler = WindowSampler(ids, max_length=16, batch_size=1, seed=seed)
        for epoch in range(8):
            starts = starts_of_epoch(sampler, epoch)
            assert np.array_equal(np.diff(sorted(starts)), np.full(sampler.num_windows - 1, 16))
            phases.add(min(starts))
            orders.add(tuple(np.argsort(starts)))
    assert len(phases) > 3
    assert len(orders) == 16


def test_a_batch_across_the_end_of_an_epoch_goes_on_in_the_next():
    ids = np.arange(101, dtype=np.uint16)
    single = WindowSampler(ids, max_length=10, batch_size=1, seed=0)
    wide = WindowSampler(ids, max_length=10, batch_size=25, seed=0)
    expected = [single.batch(step)[0][0].tolist() for step in range(50)]
    assert [*wide.batch(0)[0].tolist(), *wide.batch(1)[0].tolist()] == expected


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 30))
def test_the_ranks_together_see_the_batch_of_one_process(batch_size, ranks, step):
    ids = np.arange(200, dtype=np.uint16)
    sampler, alone = (WindowSampler(ids, max_length=7, batch_size=batch_size, seed=1) for _ in range(2))
    shares = [sampler.batch(step, rank=rank, ranks=ranks) for rank in range(ranks)]
    for parts, whole in zip(zip(*shares, strict=True), alone.batch(step), strict=True):
        assert torch.equal(torch.cat(parts), whole)
    sizes = [len(inputs) for inputs, _ in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.fixture
def in_parts(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    return build_in_shards([tmp_path / "t.txt"], BYTES, tmp_path / "parts", shards=5, workers=1)


def test_windows_of_a_corpus_in_parts_are_those_of_the_corpus_in_one(corpus, in_parts):
    assert len(in_parts.ids.arrays) == 5
    for max_length, stride in ((30, 7), (700, 100)):
        sizes: dict[str, Any] = {"max_length": max_length, "stride": stride, "batch_size": 3}
        loaders = [create_dataloader(each, **sizes, shuffle=False) for each in (corpus, in_parts)]
        assert as_lists(loaders[0]) == as_lists(loaders[1])
    samplers = [WindowSampler(each, max_length=16, batch_size=4, seed=2) for each in (corpus, in_parts)]
    for step in range(0, 60, 7):
        assert as_lists([samplers[0].batch(step)]) == as_lists([samplers[1].batch(step)])
    windows = TokenWindows(in_parts, max_length=8, stride=8)
    assert len(pickle.dumps(windows)) < in_parts.ids.nbytes


IDS = [5, 3, 8, 1, 9, 2, 7]
HOLDERS: dict[str, Callable[[], Any]] = {
    "list": lambda: IDS,
    "tuple": lambda: tuple(IDS),
    "range": lambda: range(7),
    "int32 array": lambda: np.array(IDS, dtype=np.int32),
    "tensor": lambda: torch.tensor(IDS),
    "int32 tensor": lambda: torch.tensor(IDS, dtype=torch.int32),
    "encoding": lambda: BYTES.encode("dogs lo"),
}


@looped("holder", HOLDERS)
def test_ids_are_taken_from_whatever_holds_them(holder) -> None:
    held = HOLDERS[holder]()
    ids = np.asarray(getattr(held, "ids", held))
    expected = TokenWindows(ids, 3, 2)
    loaded: Any = create_dataloader(held, max_length=3, stride=2, batch_size=1).dataset
    for windows in (TokenWindows(held, 3, 2), loaded):
        assert len(windows) == len(expected) == 2
        for place in range(2):
            assert all(torch.equal(*pair) for pair in zip(windows[place], expected[place], strict=True))
    one, other = (WindowSampler(given, max_length=2, batch_size=2, seed=0).batch(1) for given in (held, ids))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


NO_IDS: list[tuple[Any, type[Exception]]] = [
    ([1.0, 2.0, 3.0], ShapeError),
    (torch.randn(9), ShapeError),
    (np.zeros(9, dtype=bool), ShapeError),
    ([[1, 2, 3], [4, 5, 6]], ValueError),
    (np.zeros((2, 2), np.int64), ValueError),
    ([[1], [2, 3]], ValueError),
    (None, ShapeError),
    (["a text"], TextError),
    (b"bytes", TextError),
    ([5], TextError),
]


@pytest.mark.filterwarnings("ignore")
def test_what_gives_no_window_is_refused(unchecked, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("dogs love dogs")
    calls: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: create_dataloader("Hello", BYTES, max_length=5), TextError),
        (lambda: create_dataloader("", BYTES), TextError),
        (lambda: create_dataloader(str(tmp_path / "a.txt"), BYTES, max_length=2), TextError),
        (lambda: create_dataloader("Hello"), TokenizerError),
        (lambda: TokenWindows("a text", 1, 1), TextError),
        (lambda: WindowSampler(IDS, max_length=0, batch_size=1, seed=0), SizeError),
        (lambda: WindowSampler(IDS, max_length=1, batch_size=0, seed=0), SizeError),
        (lambda: TokenWindows(IDS, 1, 0), SizeError),
    ]
    for ids, error in NO_IDS:
        calls += [
            (lambda ids=ids: TokenWindows(ids, 1, 1).batch([0]), error),
            (lambda ids=ids: WindowSampler(ids, max_length=1, batch_size=1, seed=0).batch(0), error),
            (lambda ids=ids: next(iter(create_dataloader(ids, max_length=1, stride=1, batch_size=1))), error),
        ]
    sampler = WindowSampler(IDS, max_length=1, batch_size=2, seed=1)
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        calls += [(lambda rank=rank, ranks=ranks: sampler.batch(0, rank=rank, ranks=ranks), SizeError)]
    for call, error in calls:
        with pytest.raises(error):
            call()


# Documents


def corpus_of(lengths: list[int], *, first: int = 0, weighted: bool = False) -> TokenCorpus:
    """Documents of these lengths, in two arrays; the ID of a token is its index, from `first`."""
    ids = np.arange(first, first + sum(lengths), dtype=np.uint16)
    parts = [part for part in np.split(ids, [len(ids) // 3]) if len(part)]
    return TokenCorpus(
        ConcatenatedArray(parts),
        np.cumsum([0, *lengths[:-1]]),
        np.array([[len(ids), len(ids)]]),
        vocab_size=1 << 16,
        tokenizer_fingerprint="",
        token_weights=(ids % 2).astype(np.uint8) if weighted else None,
    )


def loaded(corpus: TokenCorpus, length: int) -> list[Any]:
    sizes: dict[str, Any] = {"max_length": length, "stride": length, "batch_size": 3, "drop_last": False}
    return list(create_dataloader(corpus, **sizes, documents=True))


def mixed(corpus: TokenCorpus, length: int) -> list[Any]:
    parts = [(corpus, 3), (corpus_of([5, 1, 9, length], first=500), 1)]
    return list(map(MixedSampler(parts, max_length=length, batch_size=3, seed=1, documents=True).batch, range(4)))


def sampled(corpus: TokenCorpus, length: int) -> list[Any]:
    sampler = WindowSampler(corpus, max_length=length, batch_size=3, seed=1, documents=True)
    return [sampler.batch(step, rank=rank, ranks=2) for step in range(4) for rank in range(2)]


BATCHES: dict[str, Callable[[TokenCorpus, int], list[Any]]] = {
    "TokenWindows": lambda corpus, length: [TokenWindows(corpus, length, 1, documents=True).batch([0])],
    "create_dataloader": loaded,
    "WindowSampler": sampled,
    "MixedSampler": mixed,
}


def documents_alone(inputs: list[int], starts: set[int]) -> tuple[list[int], list[int]]:
    """The mask and the targets of a window of a `corpus_of` by their definition, token by token."""
    mask, targets = [1], []
    for token in inputs[1:]:
        mask.append(mask[-1] + (token in starts))
    for token in inputs:
        targets.append(-100 if token + 1 in starts else token + 1)
    return mask, targets


@pytest.mark.parametrize("path", BATCHES)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_token_is_predicted_from_another_document(path, lengths, length, weighted) -> None:
    corpus = corpus_of([*lengths, length], weighted=weighted)
    starts = {int(place) for place in corpus.documents} | {500, 505, 506, 515}
    for inputs, targets, mask, *weights in BATCHES[path](corpus, length):
        assert mask.dtype == inputs.dtype == torch.int64
        for row in range(len(inputs)):
            assert (mask[row].tolist(), targets[row].tolist()) == documents_alone(inputs[row].tolist(), starts)
        assert len(weights) == weighted
        for own in weights:
            assert torch.equal(own, torch.where(inputs >= 500, 1.0, (inputs + 1) % 2))


def test_ids_without_documents_are_refused_where_documents_are_requested() -> None:
    for refused in (
        lambda: TokenWindows(IDS, 1, 1, documents=True),
        lambda: WindowSampler(IDS, max_length=1, batch_size=1, seed=0, documents=True),
        lambda: create_dataloader(IDS, max_length=1, stride=1, documents=True),
        lambda: MixedSampler([(IDS, 1)], max_length=1, batch_size=1, seed=0, documents=True),
    ):
        with pytest.raises(TextError):
            refused()
    assert len(next(iter(create_dataloader(TEXT, BYTES, max_length=8, documents=True)))) == 3
