"""The training loop."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import looped, some

from embedlayer import (
    CheckpointError,
    DecoderLM,
    OutputHead,
    RotaryEmbedding,
    RowAdamW,
    RowSparseEmbedding,
    SizeError,
    TextError,
    TokenCorpus,
    TokenEmbedding,
    Trainer,
    TrainingOptions,
    clip_grad_norm_,
    train_tokenizer,
)
from embedlayer.data import TokenMixture, TokenWindows
from embedlayer.optim import RowwiseSecondMoment

TEXT = "the cat sat on the mat and the dog sat on the cat . " * 80


@pytest.fixture(scope="module")
def corpus() -> TokenCorpus:
    return TokenCorpus.from_text(TEXT, train_tokenizer(TEXT, "byte"))


def options(**changes) -> TrainingOptions:
    sizes = {"steps": 12, "batch_size": 4, "max_length": 16, "log_every": 5, "validate_every": 2}
    return TrainingOptions(**{**sizes, **changes})


def trainer_of(corpus, *, init_std=0.02, dropout=0.0, **changes) -> Trainer:
    torch.manual_seed(1)
    table = TokenEmbedding(257, 16, scale="sqrt_dim", init_std=init_std)
    model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=2, dropout=dropout)
    training, validation = corpus.split(0.2)
    return Trainer(model, training, validation, options(**changes))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def without_speed(lines):
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def require_equal_when_stopped(build: Callable[[], Trainer], stop_at: int) -> dict[str, torch.Tensor]:
    """Require that a run that is stopped and resumed gives the bits of a whole run; return its state at the stop."""
    whole = build()
    expected = list(whole.run())
    first = build()
    lines = list(first.run(on_step=lambda step: first.stop() if step == stop_at else None))
    tensors, rest = first.state()
    tensors, rest = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(rest))
    state = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.manual_seed(999)
    second = build()
    second.load_state(tensors, rest)
    lines += list(second.run())
    assert without_speed(lines) == without_speed(expected)
    assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(second).items())
    return state


def test_the_first_line_is_step_zero_before_any_update_and_the_last_one_validates(corpus) -> None:
    trainer = trainer_of(corpus)
    before, run = weights(trainer), trainer.run()
    first = next(run)
    assert first["loss"] == pytest.approx(math.log(257), abs=0.3)
    assert first["validation_loss"] == pytest.approx(math.log(257), abs=0.3)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())

    lines = [first, *run]
    assert [line["step"] for line in lines] == [0, 5, 10, 12]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 10, 12]
    for line in lines:
        assert {"step", "loss", "lr", "tokens_per_second", "rows_touched"} <= line.keys()


def test_a_line_says_how_many_rows_its_step_looked_up(corpus) -> None:
    trainer = trainer_of(corpus, accumulate=2)
    first, *lines = trainer.run()
    assert first["rows_touched"] == 0
    for line in lines:
        parts = (2 * line["step"] - 2, 2 * line["step"] - 1)
        read = {int(token) for part in parts for token in trainer.sampler.batch(part)[0].flatten()}
        assert line["rows_touched"] == len(read)


def test_it_learns(corpus) -> None:
    lines = list(trainer_of(corpus, steps=60, learning_rate=1e-2).run())
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"] - 2
    bits = lines[-1]["validation_loss"] / math.log(2)
    assert lines[-1]["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-2)  # a byte a token, and an end of text


def test_the_same_seed_gives_the_same_run_and_another_one_another(corpus) -> None:
    runs = [without_speed(trainer_of(corpus, seed=seed, dropout=0.1).run()) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.fixture(scope="module")
def mixture(corpus) -> TokenMixture:
    other = TokenCorpus.from_text("I love dogs, and dogs love naps in the sun. " * 36, train_tokenizer(TEXT, "byte"))
    return TokenMixture([(corpus, 3), (other, 1)])


def test_a_mixture_has_its_shares_of_the_windows_and_a_loss_for_each_corpus(corpus, mixture) -> None:
    trainer = trainer_of(mixture, validation_tokens=160)
    assert trainer.sampler.counts == (768, 256)
    line = trainer.validate()
    alone = [trainer_of(one, validation_tokens=80).validate() for one in mixture.corpora]
    assert line["validation_losses"] == pytest.approx([one["validation_loss"] for one in alone])
    assert line["validation_loss"] == pytest.approx((3 * alone[0]["validation_loss"] + alone[1]["validation_loss"]) / 4)
    assert "validation_losses" not in alone[0]
    equal = TokenMixture([(each, 1) for each in mixture.corpora])
    with pytest.raises(CheckpointError):
        trainer_of(equal).load_state(*trainer.state())
    with pytest.raises(SizeError):
        Trainer(trainer.model, mixture, corpus, options())
    with pytest.raises(TextError):
        trainer_of(mixture, max_length=len(mixture.split(0.2)[1].corpora[1]))


@pytest.mark.parametrize(
    ("stop_at", "kind", "documents"),
    some(
        [(3, "corpus", False), (5, "mixture", True)],
        [(3, "corpus", False), (5, "mixture", True), (5, "mixture", False), (10, "short", True)],
    ),
)
def test_a_run_that_was_stopped_continues_bit_for_bit(request, stop_at, kind, documents) -> None:
    corpus = request.getfixturevalue(kind)
    require_equal_when_stopped(lambda: trainer_of(corpus, dropout=0.1, documents=documents), stop_at)


def rows_corpus(folder: Path, lengths: Iterable[int]) -> TokenCorpus:
    """A corpus of JSON lines, a document of each length in characters, with an end-of-text token between them."""
    rows = (json.dumps({"text": TEXT[7 * number : 7 * number + length]}) for number, length in enumerate(lengths))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return TokenCorpus.build([folder / "rows.jsonl"], train_tokenizer((), "byte"), folder / "corpus")


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> TokenCorpus:
    """A corpus of documents of 2 to 18 tokens, their end-of-text tokens included."""
    return rows_corpus(tmp_path_factory.mktemp("short"), (1 + 7 * number % 17 for number in range(240)))


def losses_by_document(trainer: Trainer, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The losses of the targets of each document in each window, run by itself."""
    found = []
    for ids, targets, mask in zip(*batch, strict=True):
        for number in mask.unique():
            here = mask == number
            found.append(trainer.decoder.loss(ids[here], targets[here], reduction="none"))
    return found


def test_the_loss_of_each_document_is_that_of_the_document_by_itself_and_so_are_the_updates(short) -> None:
    trainer, alone = (trainer_of(short, documents=True, accumulate=2, steps=4, log_every=1) for _ in range(2))
    for step in range(2):
        batch = trainer.sampler.batch(step)
        assert batch[2].max() > 2, "several documents in a window"
        ids, targets, mask = batch
        packed = trainer.decoder.loss(ids, targets, attention_mask=mask, reduction="none")
        torch.testing.assert_close(packed.flatten(), torch.cat(losses_by_document(trainer, batch)), rtol=0, atol=1e-6)
    first, *lines = trainer.run()
    windows = TokenWindows(alone.validation, 16, 16, documents=True)
    batch = windows.batch(range(len(windows)))
    count = int((batch[1] != -100).sum())
    expected = torch.cat(losses_by_document(alone, batch)).sum().item() / count
    assert first["validation_loss"] == pytest.approx(expected, abs=1e-6)
    per_byte = expected / math.log(2) * len(alone.validation) / alone.validation.num_bytes
    assert first["validation_bits_per_byte"] == pytest.approx(per_byte, abs=1e-6)
    for step, line in enumerate(lines):
        batches = [alone.sampler.batch(2 * step + part) for part in range(2)]
        count = sum(int((targets != -100).sum()) for _, targets, _ in batches)
        loss = torch.cat([loss for batch in batches for loss in losses_by_document(alone, batch)]).sum() / count
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
        loss.backward()
        clip_grad_norm_(alone.model.parameters(), 1.0)
        for group in alone.optimizer.param_groups:
            group["lr"] = line["lr"]
        alone.optimizer.step()
        alone.optimizer.zero_grad()


def test_documents_without_a_target_have_no_loss_and_train_nothing(tmp_path) -> None:
    corpus = rows_corpus(tmp_path, [40] * 40)
    corpus = replace(corpus, documents=np.arange(len(corpus)))  # each token is a document
    trainer = trainer_of(corpus, documents=True)
    before = weights(trainer)
    with pytest.warns(UserWarning, match=r"first loss is 0\.0"):
        lines = list(trainer.run())
    assert all(line["loss"] == 0 for line in lines)
    assert lines[-1]["validation_bits_per_byte"] == 0
    norms = {name for name, tensor in before.items() if torch.equal(tensor, weights(trainer)[name])}
    assert norms >= {"table.weight", "norm.weight"}, "weight decay moves matrices alone"


def test_accumulation_equals_one_larger_batch(corpus) -> None:
    """The mean of two halves' gradients is the gradient of the whole."""
    whole, halves = trainer_of(corpus, batch_size=8), trainer_of(corpus, batch_size=4, accumulate=2)
    assert torch.equal(torch.cat([halves.sampler.batch(0)[0], halves.sampler.batch(1)[0]]), whole.sampler.batch(0)[0])
    list(whole.run())
    list(halves.run())
    for name, tensor in weights(whole).items():
        assert torch.allclose(tensor, weights(halves)[name], atol=2e-4), name


class Clock:
    """A clock that follows the steps of a trainer, so that a test sets the speed of the machine."""

    def __init__(self, seconds_per_step) -> None:
        self.times = [0.0]
        for step in range(20_000):
            self.times.append(self.times[-1] + seconds_per_step(step))
        self.trainer = None
        self.readings = 0

    def perf_counter(self) -> float:
        self.readings += 1
        return self.times[self.trainer.step] + 1e-6 * self.readings  # no two readings are the same


SPEEDS = {
    "steady": lambda step: 0.5,
    "slower after a third": lambda step: 0.5 if step < 40 else 2.5,
    "faster after a third": lambda step: 2.0 if step < 10 else 0.2,
    "up and down": lambda step: 0.2 if step // 15 % 2 else 1.5,
    "slow at first": lambda step: 5.0 if step < 5 else 0.4,
}


def timed(corpus, clock, **changes) -> Trainer:
    clock.trainer = trainer_of(corpus, steps=None, minutes=1.0, validation_tokens=16, **changes)
    return clock.trainer


@pytest.mark.parametrize("speed", some(["slower after a third"], SPEEDS))
def test_a_budget_of_time_is_kept_and_the_schedule_ends_with_it_whatever_the_load(corpus, speed, monkeypatch) -> None:
    clock = Clock(SPEEDS[speed])
    monkeypatch.setattr("embedlayer.training.loop.time", clock)
    trainer = timed(corpus, clock, learning_rate=1e-2)
    lines = list(trainer.run())
    an_interval = max(
        later - earlier for earlier, later in zip(clock.times, clock.times[5 : trainer.step + 1], strict=False)
    )
    assert abs(clock.times[trainer.step] - 60.0) <= an_interval
    assert trainer.step == trainer.steps == lines[-1]["step"]
    assert "validation_loss" in lines[-1]
    for earlier, line in pairwise(lines[1:]):  # the schedule is at most one reading of the clock behind
        share = clock.times[earlier["step"]] / 60
        assert line["lr"] <= 1.001 * trainer.options.learning_rate_at(1000 * max(0.1, share), 1000)
    assert lines[-1]["lr"] == pytest.approx(trainer.options.learning_rate * trainer.options.final_fraction, rel=1e-3)


def test_a_slow_machine_trains_the_smallest_number_of_steps_on_the_whole_schedule(corpus, monkeypatch) -> None:
    clock = Clock(lambda step: 1.0 if step < 10 else 4.0)
    monkeypatch.setattr("embedlayer.training.loop.time", clock)
    trainer = timed(corpus, clock, min_steps=40)
    lines = list(trainer.run())
    assert trainer.step == lines[-1]["step"] == 40
    assert clock.times[40] > 2 * 60
    rates = [line["lr"] for line in lines[2:]]
    assert all(earlier > later for earlier, later in pairwise(rates))
    assert rates[-1] == pytest.approx(trainer.options.learning_rate * trainer.options.final_fraction, rel=1e-3)


@pytest.mark.parametrize("stop_at", some([20], [3, 20, 22]))
def test_a_timed_run_that_was_stopped_continues_bit_for_bit_at_the_same_speed(corpus, stop_at, monkeypatch) -> None:
    speed = SPEEDS["slower after a third"]
    clock = Clock(speed)
    monkeypatch.setattr("embedlayer.training.loop.time", clock)
    require_equal_when_stopped(lambda: timed(corpus, clock, dropout=0.1), stop_at)


def test_a_timed_run_saved_by_a_version_that_fixed_the_steps_at_the_start_goes_on(corpus) -> None:
    first = trainer_of(corpus, steps=None, minutes=0.005)
    next(first.run())
    tensors, rest = first.state()
    rest = {**rest, "steps": 8, "step": 4}
    del rest["time"]
    second = trainer_of(corpus, steps=None, minutes=0.005)
    second.load_state(tensors, rest)
    assert second.budget.used == pytest.approx(0.15)
    assert list(second.run())[-1]["step"] == second.steps


def test_the_number_of_steps_follows_from_the_last_readings_and_leaves_time_for_the_validation(corpus) -> None:
    """Of a budget of 100 seconds: the first guess is replaced by what was measured, and no step is taken back."""

    def budget(minutes: float = 100 / 60, **changes: Any) -> Any:
        empty: Any = trainer_of(corpus, steps=None, minutes=minutes).budget
        return replace(empty, readings=[], reserve=0.0, used=0.0, **changes)

    one = budget()
    assert one.last_step(0, used=20.0, guess=4.0) == 20
    assert one.last_step(10, used=25.0) == 10 + 150
    assert replace(budget(), reserve=30.0).last_step(0, used=0.0, guess=1.0) == 70
    assert budget().last_step(7, used=150.0) == 7
    slow = budget(1000 / 60)
    for step in range(200):
        slow.last_step(step, used=10.0 * min(step, 10) + max(0, step - 10))
    assert slow.last_step(200, used=290.0) == 910
    one = budget(min_steps=50)
    assert one.last_step(0, used=20.0, guess=4.0) == 50
    assert one.last_step(10, used=60.0) == 50
    assert one.expected_seconds == 60.0 + 40 * 4.0
    assert one.progress(30, last_step=50) == pytest.approx(140 / 220)
    assert one.last_step(60, used=230.0) == 60


def test_a_first_loss_far_from_guessing_is_warned_about(corpus) -> None:
    with pytest.warns(UserWarning, match=r"first loss is [\d.]+, and a uniform distribution has ln V = 5.55"):
        next(trainer_of(corpus, init_std=1.0).run())


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    schedule = options(steps=100, learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.1)
    rates = [schedule.learning_rate_at(step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))
    between = [schedule.learning_rate_at(step, 100) for step in (50, 50.5, 51)]
    assert between == sorted(between, reverse=True)


def test_roles_with_a_rate_of_their_own_follow_the_same_schedule_and_the_run_resumes(corpus) -> None:
    whole, first, second = (trainer_of(corpus, rates={"tables": 0.012, "matrices": 0.0}) for _ in range(3))
    before = weights(whole)
    expected = list(whole.run())
    lrs = {group["name"]: group["lr"] for group in whole.optimizer.param_groups}
    assert lrs == pytest.approx({"tables": 4 * expected[-1]["lr"], "norms": expected[-1]["lr"], "matrices": 0.0})
    assert torch.equal(before["blocks.0.mlp.up.weight"], weights(whole)["blocks.0.mlp.up.weight"])
    lines = list(first.run(on_step=lambda step: first.stop() if step == 5 else None))
    second.load_state(*first.state())
    assert without_speed([*lines, *second.run()]) == without_speed(expected)
    with pytest.raises(SizeError):
        trainer_of(corpus, rates={"heads": 0.1})


def test_spare_rows_do_not_move(corpus) -> None:
    model = DecoderLM(TokenEmbedding(257, 16, pad_to_multiple_of=64), RotaryEmbedding(8), num_layers=1, num_heads=2)
    training, validation = corpus.split(0.2)
    list(Trainer(model, training, validation, options()).run())
    assert model.table.weight[257:].eq(0).all()


def test_bfloat16_autocast_stays_near_float32(corpus) -> None:
    losses = [list(trainer_of(corpus, precision=p).run())[-1]["validation_loss"] for p in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


@looped("missing", ["model.norm.weight", "monitor.counts"])
def test_the_state_of_another_run_is_refused(corpus, missing) -> None:
    tensors, rest = trainer_of(corpus, monitor_every=5).state()
    del tensors[missing]
    with pytest.raises(CheckpointError):
        trainer_of(corpus, monitor_every=5).load_state(tensors, rest)


@looped(
    "changes",
    [
        {"steps": None},
        {"minutes": 1.0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"warmup_fraction": -0.1},
        {"beta2": math.nan},
        {"rates": {"head": 0.1}},
        {"weight_decay": -1.0},
        {"precision": "fp8"},
        {"steps": None, "minutes": math.inf},
        {"monitor_every": 7},
    ],
)
def test_options_that_cannot_be_are_refused(changes) -> None:
    with pytest.raises(SizeError):
        options(**changes)


def untied(corpus, *, row_sparse, dropout=0.0, steps=40, **changes) -> Trainer:
    torch.manual_seed(1)
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(257, 16, scale="sqrt_dim")
    head = OutputHead(vocab_size=257, embed_dim=16)
    model = DecoderLM(table, RotaryEmbedding(8), head, num_layers=1, num_heads=2, dropout=dropout)
    training, validation = corpus.split(0.2)
    return Trainer(model, training, validation, options(steps=steps, **changes))


def test_a_row_sparse_table_gives_the_loss_curve_of_the_dense_one(corpus) -> None:
    dense, sparse = (list(untied(corpus, row_sparse=kind).run()) for kind in (False, True))
    for ours, theirs in zip(sparse, dense, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours.get("validation_loss", 0) == pytest.approx(theirs.get("validation_loss", 0), abs=1e-4)


@pytest.mark.parametrize("state", [None, pytest.param(RowwiseSecondMoment(torch.bfloat16), marks=pytest.mark.long)])
def test_a_row_sparse_run_that_was_stopped_continues_bit_for_bit_with_pending_updates(corpus, state) -> None:
    def trainer():
        made = untied(corpus, row_sparse=True, dropout=0.1, steps=14, accumulate=2)
        made.optimizer = RowAdamW(made.optimizer.param_groups, state=state)
        return made

    state = require_equal_when_stopped(trainer, 8)
    assert state["pending_updates.table.weight.value_steps"].unique().numel() > 1


def test_the_monitor_needs_steps_of_lines(corpus) -> None:
    lines = list(trainer_of(corpus, monitor_every=10, accumulate=2).run())
    assert [line["step"] for line in lines if "monitor" in line] == [10]
    alone = trainer_of(corpus, accumulate=2)
    assert without_speed(alone.run()) == without_speed(
        [{k: v for k, v in line.items() if k != "monitor"} for line in lines]
    )
    assert lines[2]["monitor"]["log_z"] > 0
