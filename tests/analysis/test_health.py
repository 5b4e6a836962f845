"""Rows that something is wrong with."""

import json
from functools import cache

import pytest
import torch
from covering import looped
from real_tables import stories
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis import row_reader as rows_module
from embedlayer.analysis.health import table_health
from embedlayer.heads.output import OutputHead
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer


@looped("numbers_at_once, dtype", [7, 1 << 21], [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zero_broken_and_equal_rows_are_named(monkeypatch, numbers_at_once, dtype) -> None:
    monkeypatch.setattr(rows_module, "NUMBERS_AT_ONCE", numbers_at_once)
    rows = torch.randn(20, 3).to(dtype)
    rows[4] = rows[11] = 0.0
    rows[2, 1], rows[3, 0] = torch.nan, -torch.inf
    rows[17] = rows[5] = rows[9]
    rows[6] = -rows[7]  # opposite is not equal
    rows[8, 0], rows[10] = 0.0, rows[8]
    rows[10, 0] = -0.0
    found = table_health(rows)
    assert found.zero_rows == (4, 11)
    assert found.nonfinite_rows == (2, 3)
    equal = (rows[:, None] == rows[None]).all(-1)  # -0.0, too
    assert sorted(found.duplicates) == [(5, 9, 17), *([(8, 10)] if equal[8, 10] else [])]
    assert found.never_touched is None
    assert found.kinds is None
    assert found.by_kind == ()
    torch.testing.assert_close(found.norms[5], rows[5].float().norm(), rtol=1e-2, atol=0)


def test_rows_that_only_decay_were_never_touched() -> None:
    table = RowSparseEmbedding(60, 8, padding_idx=0)
    before = table.weight.detach().clone()
    head = OutputHead(vocab_size=60, embed_dim=8)
    optimizer = RowAdamW(
        [{"params": [table.weight], "weight_decay": 0.1}, {"params": list(head.parameters())}], lr=1e-2
    )
    for _ in range(30):
        ids = torch.randint(1, 25, (4, 6))
        head.loss(table(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = table_health(table, before=before)
    assert found.never_touched == tuple(range(25, 60))
    assert table_health(torch.randn(60, 8), before=before).never_touched == ()
    assert found.zero_rows == (0,)
    assert table.weight[30].norm() < before[30].norm()


def test_a_free_head_tells_what_its_table_cannot() -> None:
    table, head = torch.randn(600, 24), torch.randn(600, 24)
    head[:60] = torch.randn(24) + 0.1 * torch.randn(60, 24)
    assert not table_health(table).under_trained.flagged.any()
    found = table_health(table, head=head)
    assert found.under_trained.flagged.nonzero()[:, 0].tolist() == list(range(60))
    torch.testing.assert_close(found.norms, table.norm(dim=1))


def test_byte_pieces_of_stories_are_reported_by_kind(shared_data) -> None:
    table, _ = stories(shared_data)
    found = table_health(table, load_tokenizer(shared_data / "models" / "tok512.bin"))
    counts = {count.kind: (count.rows, count.under_trained) for count in found.by_kind}
    assert counts["byte"] == (256, 225)
    assert counts["special"] == (3, 2)
    assert counts["word"][1] == counts["part"][1] - 1 == 0
    first = found.findings(3, kind="byte")
    assert [row.text for row in first] == ["<0x00>", "<0x01>", "<0x02>"]
    assert all(row.score > 0.99 for row in first)
    assert sum(map(len, found.duplicates)) < 512


def test_the_result_is_json() -> None:
    tokenizer = train_tokenizer((), "byte")
    rows = torch.randn(260, 16)
    rows[128:256] = torch.randn(16) + 0.01 * torch.randn(128, 16)
    rows[0], rows[1] = 0.0, torch.nan
    content = json.loads(json.dumps(table_health(rows, tokenizer).to_json(limit=5), allow_nan=False))
    assert content["zero_rows"] == {"rows": 1, "ids": [0]}
    assert len(content["under_trained"]["cones"]) == 1
    assert content["under_trained"]["cones"][0]["rows"] == 128
    unlearned = content["verdicts"]["not_learned"]["rows"] + content["verdicts"]["never_seen"]["rows"]
    assert content["under_trained"]["rows"] == unlearned >= 128
    assert len(content["under_trained"]["tokens"]) == 5
    assert content["under_trained"]["by_kind"][0]["kind"] in ("word", "part")
    assert content["norms"]["min"] <= content["norms"]["median"] <= content["norms"]["max"]
    empty = table_health(torch.full((3, 2), torch.nan))
    assert json.loads(json.dumps(empty.to_json(), allow_nan=False))["norms"] is None


def words_of(count: int) -> list[str]:
    """Words in singular and plural, all of letters."""
    letters = "bcdfghjklmnp"
    stems = [f"{a}a{b}e{c}" for a in letters for b in letters for c in letters]
    return [each for stem in stems[: count // 2] for each in (stem, stem + "s")]


def related_rows(count: int, width: int) -> torch.Tensor:
    """Rows in which the two forms of each of `words_of` are similar."""
    return torch.randn(count // 2, width).repeat_interleave(2, 0) + 0.4 * torch.randn(count, width)


FAULTS = {  # those of whole tables are in test_verdicts.py
    "zero": (lambda rows: rows[7].fill_(0.0), "1 row is zero (1 word: 'babecs')."),
    "equal": (lambda rows: rows[40:60].copy_(rows[200:220]), "40 rows equal another row (40 words: "),
    "nearly equal": (
        lambda rows: rows[40:44].copy_(1.002 * rows[200:204]),
        "8 rows are nearly equal to another row, within 1 %",
    ),
    "resized": (
        lambda rows: rows[-60:].copy_(rows[:-60].mean(0) * (1 + 1e-3 * torch.randn(60, 32))),
        "60 rows are equal to the mean of the others within 1 %, as a resize adds them untrained (60 words: ",
    ),
    "resized to the mean": (lambda rows: rows[-60:].copy_(rows[:-60].mean(0)), "60 rows are equal to the mean of the"),
    "scaled": (lambda rows: rows[300:320].mul_(8.0), "20 rows are longer than all others by a gap: norms of "),
    "shrunk": (lambda rows: rows[300:320].mul_(0.05), "20 rows are shorter than all others by a gap: norms of "),
    "exchanged": (
        lambda rows: rows[:400].copy_(rows[torch.randperm(400)]),
        "Part of the rows do not fit the ",
    ),
}


@cache
def sound_rows() -> tuple[Tensor, list[int | None], Tokenizer]:
    """Rows in which nothing is wrong, the IDs of words, and their tokenizer."""
    words = words_of(1200)
    tokenizer = train_tokenizer(" ".join(words), "word", vocab_size=2000)
    ids = [tokenizer.token_to_id(word) for word in words]
    rows = torch.randn(tokenizer.get_vocab_size(), 32)
    rows[ids] = related_rows(1200, 32)
    sound = table_health(rows, tokenizer)
    assert sound.summary().startswith("Sound.")
    assert sound.is_sound
    return rows, ids, tokenizer


@looped("fault", FAULTS)
def test_a_planted_fault_is_the_first_sentence_of_the_summary(fault) -> None:
    rows, ids, tokenizer = sound_rows()
    spoil, sentence = FAULTS[fault]
    rows, spoiled = rows.clone(), rows[ids]
    spoil(spoiled)
    rows[ids] = spoiled
    found = table_health(rows, tokenizer)
    assert not found.is_sound
    first = found.summary()
    assert first.startswith("Faulty. " + sentence.partition("(")[0]), first
    assert first == found.to_json()["summary"]


@pytest.mark.parametrize("overwritten", [False, True])
def test_rows_that_rounding_to_4_bits_made_equal_are_no_fault_unless_they_learned(overwritten) -> None:
    rows, ids, tokenizer = sound_rows()
    rows = rows.clone()
    rows[ids[:40]] = torch.randn(32) + 0.01 * torch.randn(40, 32)  # unused
    assert table_health(rows, tokenizer).duplicates == ()
    if overwritten:
        rows[ids[100:110]] = rows[ids[200:210]]
    scale = rows.abs().amax(1, keepdim=True) / 7
    found = table_health((rows / scale).round() * scale.half().float(), tokenizer)
    assert found.is_coarse
    assert "by rounding to 4 bits." in found.summary()
    assert found.state == ("faulty" if overwritten else "sound")
    assert found.summary().startswith("Faulty. 20 rows equal another row (20 words" if overwritten else "Sound. ")


@pytest.mark.parametrize(("words_absent", "state"), [(100, "sound"), (900, "faulty")])
def test_a_run_of_which_many_words_never_occur_is_not_sound(words_absent, state) -> None:
    rows, ids, tokenizer = sound_rows()
    counts = torch.ones(len(rows)).long()
    counts[ids[:words_absent]] = 0
    found = table_health(rows, tokenizer, counts=counts)
    assert (found.state, len(found.absent)) == (state, words_absent)
    assert (f"{words_absent} of 1,200 words never occur in the training text" in found.summary()) == (state == "faulty")


def test_equal_rows_of_words_are_not_counted_as_not_learned() -> None:
    rows, ids, tokenizer = sound_rows()
    rows = rows.clone()
    rows[ids[:40]] = rows[ids[0]].clone()
    found = table_health(rows, tokenizer)
    assert int(found.under_trained.flagged.sum()) == 40  # equal rows are a cone without width
    assert {found.verdicts.of(row) for row in ids[:40]} == {
        ("cannot tell", "It equals another row, so nothing shows whether it was trained.")
    }
    assert not {row.id for row in found.findings()} & {*ids[:40]}


def test_rows_that_were_not_learned_are_counted_beside_sound_ones() -> None:
    words = torch.randn(900, 16) @ torch.randn(16, 64) + torch.randn(900, 64)
    rows = torch.cat([words, 4 * torch.randn(64) + 0.4 * torch.randn(50, 64)])
    assert table_health(rows).summary() == (
        "Not decided, because no tokenizer says which rows should be similar. 50 rows are not learned."
    )
    counts = torch.ones(950, dtype=torch.int64)
    assert table_health(rows, counts=counts).summary() == (
        "Not decided, because no tokenizer says which rows should be similar. "
        "50 rows in one narrow group cannot be told from clusters of trained tokens."
    )
    padded = rows.clone()
    padded[0] = 0.0
    assert table_health(padded).state == "undecided"  # one zero row is a padding row


@looped("share, is_sound", [(1.05, False), (0.81, False), (0.79, True), (0.3, True)])
def test_a_run_whose_loss_is_hardly_below_that_of_token_frequencies_is_not_sound(share, is_sound) -> None:
    rows, counts = related_rows(400, 32), torch.randint(1, 1000, (400,))
    entropy = torch.distributions.Categorical(counts.double()).entropy().item()
    found = table_health(rows, counts=counts, validation_loss=share * entropy)
    assert found.loss.unigram_entropy == pytest.approx(entropy)
    assert found.loss.gain == pytest.approx(1 - share)
    assert found.is_sound is is_sound
    assert found.summary().startswith(
        "Sound."
        if is_sound
        else f"Faulty. Barely trained: the run recorded a loss on held-out text of {share * entropy:.2f}"
    )
    assert found.to_json()["loss"]["gain"] == pytest.approx(1 - share)


def test_what_a_run_learned_is_not_judged_without_its_loss_or_its_corpus() -> None:
    rows, counts = related_rows(400, 32), torch.randint(1, 1000, (400,))
    assert table_health(rows, counts=counts).loss is None
    assert table_health(rows, validation_loss=6.0).loss is None
    one_token = torch.eye(400, dtype=torch.int64)[0]
    assert table_health(rows, counts=one_token, validation_loss=0.0).loss.gain == 0.0
