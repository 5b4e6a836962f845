"""Every answer of the server is of its record, and the types of the page are written from the records."""

import re
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from answer_types import check, conforms
from decoders import small
from kinds import POSITIONS
from page_types import FILE, declarations, spelled_out

from embedlayer.explorer import pipeline, positions
from embedlayer.explorer.answers import Cluster
from embedlayer.explorer.routes import PAIRS, ROUTES, answer, manifest
from embedlayer.explorer.text_answers import ShownToken, StepFacts
from embedlayer.explorer.user_columns import UserColumn, UserColumns, add_user_columns
from embedlayer.opening.opened_model import OpenedModel


def test_every_answer_is_what_its_function_says_for_a_source_that_has_all(of_run):
    of_run = replace(of_run)
    add_user_columns(of_run, UserColumns((UserColumn("own", torch.zeros(of_run.table.vocab_size)),)))
    for name, route in ROUTES.items():
        asked = [dict(params) for params in route.exported(of_run)] or [{"plus": "40", "id": "40", "text": "the"}]
        for params in asked[:2]:
            check(answer([of_run], name, params), route.answer)
    for name, function in PAIRS.items():
        check(answer([of_run], name, {"other": "before", "plus": "40"}), function)
    check(manifest([of_run]), manifest)


@pytest.mark.parametrize("name", POSITIONS)
def test_every_scheme_and_its_steps_are_what_their_records_say(name):
    model = small(name)
    source = OpenedModel(name, model.table, model=model)
    check(answer([source], "positions", {}), positions.answer)
    walked = answer([source], "pipeline", {"text": "#3 #7 #3"})
    check(walked, pipeline.answer)
    facts = get_type_hints(StepFacts)
    for step in walked["steps"]:
        assert conforms(step["facts"], facts[step["name"]]) if step["facts"] else step["name"] not in facts


def test_the_types_of_the_page_are_those_of_the_records():
    assert FILE.read_text() == declarations(), "python tools/page_types.py --write"


def test_the_types_of_the_page_leave_nothing_open():
    for path in FILE.parent.glob("*.d.ts"):
        code = re.sub(r"/\*.*?\*/|//.*", "", path.read_text())
        assert not re.search(r"\bany\b", code), path.name


def test_a_value_of_another_type_is_told_apart():
    token = {"id": 1, "decoded": "a", "text": "a", "kind": "text"}
    assert conforms(token, ShownToken)
    assert not any(conforms({**token, **change}, ShownToken) for change in ({"id": 1.5}, {"kind": "other"}))
    assert not conforms({"id": 1}, ShownToken)
    assert not conforms([1], tuple[int, int])


def test_a_type_that_says_nothing_has_no_type_in_the_page():
    assert spelled_out(list[Cluster] | None) == "Cluster[] | null"
    with pytest.raises(TypeError, match="use a record of explorer/answers.py"):
        spelled_out(list)
