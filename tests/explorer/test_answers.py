"""Every answer of the server is of its record, and the types of the page are written from the records."""

import re
from typing import Literal, TypedDict, get_type_hints
from urllib.parse import parse_qsl

import pytest
import torch
from answer_types import check, conforms
from decoders import small
from explorer_requests import stored_answers
from kinds import POSITIONS
from page_types import ANSWERS, FILE, TYPES, declarations, spelled_out

from embedlayer.opening import OpenedModel


def test_every_answer_is_what_its_function_says_for_a_source_that_has_all(ask, of_run, exported_run):
    """As its function says: nothing else names the record of a route."""
    held = [request.partition("?") for request in stored_answers(exported_run)]
    state = torch.get_rng_state()
    for name, answer in ANSWERS.items():
        asked = [dict(parse_qsl(query)) for own, _, query in held if own == name and "other=" not in query][:2]
        other = {"other": "before"} if name.startswith("compare") else {}
        for params in asked or [other | {"plus": "40", "id": "40", "text": "the"}]:
            if name != "column":  # the run has none
                check(ask.raw(of_run, name, **params), answer)
    assert torch.get_rng_state().equal(state)


def test_every_scheme_and_its_steps_are_what_their_records_say(ask):
    facts = get_type_hints(dict(TYPES)["StepFacts"])
    for name in POSITIONS:
        model = small(name)
        source = OpenedModel(name, model.table, model=model)
        check(ask.raw(source, "positions"), ANSWERS["positions"])
        walked = ask.raw(source, "pipeline", text="#3 #7 #3")
        check(walked, ANSWERS["pipeline"])
        for step in walked["steps"]:
            assert conforms(step["facts"], facts[step["name"]]) if step["facts"] else step["name"] not in facts


def test_the_types_of_the_page_are_those_of_the_records_and_leave_nothing_open():
    assert FILE.read_text() == declarations(), "python tools/page_types.py --write"
    for path in FILE.parent.glob("*.d.ts"):
        code = re.sub(r"/\*.*?\*/|//.*", "", path.read_text())
        assert not re.search(r"\bany\b", code), path.name


class Token(TypedDict):
    """A record as the answers have them."""

    id: int
    kind: Literal["text", "byte"]


def test_a_value_of_another_type_is_told_apart():
    token = {"id": 1, "kind": "text"}
    assert conforms(token, Token)
    assert not any(conforms({**token, **change}, Token) for change in ({"id": 1.5}, {"kind": "other"}))
    assert not conforms({"id": 1}, Token)
    assert not conforms([1], tuple[int, int])
    assert spelled_out(list[Token] | None) == "Token[] | null"
    with pytest.raises(TypeError, match="use a record of explorer/answers.py"):
        spelled_out(list)
