"""Whether two tables are related."""

import pytest
import torch
from covering import looped
from tokenizer_kinds import BUILDERS, tokenizer_of, tokenizer_of_file

from embedlayer.analysis.movement import align_tables, row_movement, shared_tokens
from embedlayer.analysis.relation import table_relation
from embedlayer.analysis.vectors import TokenVectors
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.vocab.tokenizer_edit import edit_tokenizer


def rotation(width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, width)).Q


@looped("sizes, offset", [(400, 16), (1000, 200), (3000, 300)], [0.0, 2.0])
def test_random_tables_are_unrelated_though_their_alignment_looks_like_one(sizes, offset) -> None:
    """With a common direction too."""
    one, other = (torch.randn(sizes) + offset * torch.randn(sizes[1]) for _ in range(2))
    found = table_relation(one, other)
    assert found.verdict == "unrelated"
    assert found.held_out is not None
    assert found.shuffled is not None
    assert abs(found.held_out - found.shuffled) < 0.05 * (1 - found.shuffled)
    fitted = row_movement(one, other, alignment=align_tables(one, other)).cosines.mean()
    assert fitted > found.held_out + 0.02
    assert found.headline().startswith("Unrelated: ")
    assert f"have a mean cosine of {found.held_out:.3f}" in found.sentence()


@looped("noise", [0.1, 1.0])
def test_a_rotated_table_is_related_and_one_that_moved_is_the_same(noise) -> None:
    rows = torch.randn(2000, 48)
    moved = 3 * (rows + noise * torch.randn(2000, 48))
    assert table_relation(rows, moved).verdict == "changed"
    turned = table_relation(rows, moved @ rotation(48))
    assert turned.verdict == "related"
    assert turned.headline().startswith("Related: ")
    assert turned.held_out == pytest.approx(1 / (1 + noise**2) ** 0.5, abs=0.03)
    wider = table_relation(rows, torch.cat([moved, torch.zeros(2000, 8)], 1) @ rotation(56))
    assert (wider.verdict, wider.as_stored) == ("related", None)


def test_few_tokens_are_too_few_to_say_unrelated() -> None:
    assert table_relation(torch.randn(10, 4), torch.randn(10, 4)).verdict == "unknown"
    found = table_relation(torch.randn(80, 64), torch.randn(80, 64))
    assert found.verdict == "unknown"
    assert found.sentence().startswith("Cannot tell whether they are related: 80 common tokens are too few.")
    assert "in 64 dimensions" in found.sentence()
    pairs = torch.stack([torch.arange(500), torch.arange(500).flip(0)], dim=1)
    rows = torch.randn(500, 8)
    assert table_relation(rows, rows.flip(0), pairs=pairs).verdict == "same"
    broken = rows.clone()
    broken[:20], broken[20:40] = 0.0, torch.nan
    assert table_relation(rows, broken).tokens == 460


def test_rows_that_are_equal_exchanged_or_overwritten_are_counted() -> None:
    rows = torch.randn(3000, 24)
    assert table_relation(rows, rows.clone()).sentence() == "The same table: all 3,000 rows are equal."
    spoiled = rows.clone()
    spoiled[500:530] = spoiled[7]
    spoiled[900:910] *= 8
    found = table_relation(rows, spoiled)
    assert (found.verdict, found.equal, found.exchanged, found.shift) == ("changed", 2960, 30, 0)
    assert found.sentence().startswith(
        "Changed in part: 2,960 of 3,000 common rows are equal. 40 differ, with a mean cosine of "
    )
    assert found.sentence().endswith("; 30 rows of B are equal to the row of another token in A.")
    spoiled[5] = torch.nan
    assert table_relation(rows, spoiled).shared == 3000
    order = torch.randperm(3000)
    assert table_relation(rows, rows[order]).verdict == "changed"  # though cosines are as those of shuffled tokens
    rolled = table_relation(rows, rows.roll(2, 0))
    assert rolled.shift == 2
    assert rolled.sentence("old", "new").endswith(
        "; 3,000 rows of new are equal to the row of another token in old, "
        "in nearly all cases 2 places later than there."
    )
    assert table_relation(rows, rows @ rotation(24)).sentence().startswith("Rotated: ")


def test_rows_without_a_direction_are_named_and_in_no_mean() -> None:
    rows = torch.randn(2000, 16)
    rows[3], rows[4] = 0.0, torch.nan  # in both tables: equal
    spoiled = rows.clone()
    spoiled[300] = -rows[300]
    spoiled[400], spoiled[500], spoiled[600] = rows[401], 0.0, torch.nan
    found = table_relation(rows, spoiled)
    assert (found.equal, found.differing, found.exchanged, found.shift) == (1996, 2, 1, 0)
    assert found.differing_cosine == pytest.approx(float(torch.cosine_similarity(rows[400:401], rows[401:402]) - 1) / 2)
    assert (found.no_direction_before, found.no_direction_after) == ((), (500, 600))
    shown = found.sentence()
    assert "4 differ; 2 have a direction in both tables, with a mean cosine of " in shown
    assert shown.endswith(
        "; 1 row of B is equal to the row of another token in A. 2 rows have no direction in B: 500, 600 (zero or NaN)."
    )
    assert found.to_json(1)["no_direction_after"] == {"rows": 2, "ids": [500]}
    turned = table_relation(spoiled, rows @ rotation(16))
    assert turned.sentence().startswith("Related: ")
    assert (turned.no_direction_before, turned.no_direction_after) == ((500, 600), ())
    pairs = torch.stack([torch.arange(2000), torch.arange(2000).flip(0)], dim=1)
    assert table_relation(rows, spoiled.flip(0), pairs=pairs).no_direction_after == (1499, 1399)


def test_tables_are_the_same_only_if_all_rows_of_both_are_equal() -> None:
    rows = torch.randn(60, 8)
    for count in (5, 60):  # few tokens, too
        assert table_relation(rows[:count], rows[:count].clone()).sentence() == (
            f"The same table: all {count} rows are equal."
        )
    pairs = torch.arange(50)[:, None].expand(-1, 2)
    found = table_relation(rows, torch.cat([rows, torch.randn(300, 8)]), pairs=pairs)
    assert (found.verdict, found.only_before, found.only_after) == ("changed", 10, 310)
    assert found.sentence() == "All 50 common rows are equal. 10 rows only in A, 310 rows only in B."
    assert found.sentence("old", "new").endswith(" 10 rows only in old, 310 rows only in new.")
    for spoiled in (rows.roll(1, 0), 3 * rows + torch.randn(60, 8), rows.index_fill(0, torch.tensor(3), 0.0)):
        assert "same table" not in table_relation(rows, spoiled).sentence().lower()


@looped("kind", BUILDERS)
def test_of_an_edited_tokenizer_each_old_token_is_compared_with_itself(kind) -> None:
    old = tokenizer_of(kind)
    edit = edit_tokenizer(old, add=["zzebra", "otterzz"], special=["<tool>"])
    size, pairs = old.get_vocab_size(), shared_tokens(old, edit.tokenizer)
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    assert sorted(pairs[:, 0].tolist()) == sorted(old.get_vocab().values())
    rows = torch.randn(edit.tokenizer.get_vocab_size(), 8)
    spoiled = rows.clone()
    bytes_and_letters = [token for token, entry in TokenBytes(old).entries.items() if len(entry) == 1 or "<0x" in entry]
    spoiled[bytes_and_letters] = 99.0  # the rows that a comparison by readable text leaves out
    found = table_relation(rows[:size], spoiled, pairs=pairs)
    assert found.shared - found.equal == len(bytes_and_letters)
    assert (found.only_before, found.only_after) == (0, len(rows) - size)
    assert found.sentence().endswith(f" {len(rows) - size} rows only in B.")


@looped("one, other", BUILDERS, BUILDERS)
def test_no_token_is_compared_twice_and_bytes_are_compared_with_bytes(one, other) -> None:
    old, new = TokenBytes(tokenizer_of(one)), TokenBytes(tokenizer_of(other))
    pairs = shared_tokens(old.tokenizer, new.tokenizer)
    assert all(len(column.unique()) == len(pairs) for column in pairs.T)
    if old.convention == new.convention:
        names = {(old.entries[a], new.entries[b]) for a, b in pairs.tolist()}
        assert {(name, name) for name in old.vocabulary.keys() & new.vocabulary.keys()} <= names
        if all(any(map(each.is_byte, each.entries)) for each in (old, new)):  # a letter may be a byte of the other
            assert all(old.is_byte(a) == new.is_byte(b) for a, b in pairs.tolist())


def test_letters_are_compared_with_letters_of_a_tokenizer_that_writes_bytes_in_another_way(shared_data) -> None:
    folder = shared_data / "tokenizers"
    gpt2, phi = (tokenizer_of_file(folder / file) for file in ("gpt2-encoder.json", "phi-3-mini.tokenizer.json"))
    found = dict(shared_tokens(gpt2, phi).tolist())
    assert [phi.id_to_token(found[gpt2.token_to_id(name)]) for name in ("A", "Ċ", "Ġdog")] == ["A", "<0x0A>", "▁dog"]


def test_a_file_of_vectors_is_compared_with_the_tokens_that_it_was_written_from() -> None:
    tokenizer = tokenizer_of("byte-level BPE")
    size = tokenizer.get_vocab_size()
    texts = TokenVectors(torch.zeros(size, 1), tokenizer).index_to_key
    pairs = shared_tokens(tokenizer, texts)
    words = [row for row, text in enumerate(texts) if text.strip().isascii() and text.strip().isalpha()]
    assert {(row, row) for row in words} <= {tuple(pair) for pair in pairs.tolist()}
    assert shared_tokens(texts, texts).tolist() == [[row, row] for row in range(size)]
