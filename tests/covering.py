"""Which cases of a law run always, and which ones `make test-all` adds: those are marked `long`.

`@cases("head, kind, reduction", HEADS, KINDS, ("mean", "none"))` runs a law over the product of its axes. Always run is
a part of the product in which each value of each axis occurs. Axes that meet in the code are named in `pairs`: each
pair of their values occurs as well. `@looped("path", PATHS)` runs a law over cases in one test.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import ExitStack
from heapq import heapify, heapreplace
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

LONG = pytest.mark.long


def cases(names: str, *axes: Iterable[Any], pairs: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a law over the product of `axes`; the cases beyond a covering part are `long`.

    Args:
        names: Names of the axes, separated by commas.
        *axes: The values of each axis; a `pytest.param` has one value, whose marks its cases get. If it is `long`, all
            its cases are, and the covering part is one of the other values.
        pairs: Axes that meet in the code, as `"head, kind"`.
    """
    order = [name.strip() for name in names.split(",")]
    values = [[each if isinstance(each, ParameterSet) else pytest.param(each) for each in axis] for axis in axes]
    groups = [tuple(order.index(name.strip()) for name in pair.split(",")) for pair in pairs]
    whole = list(product(*map(range, map(len, values))))
    short = [[k for k, each in enumerate(axis) if not {"long"} & {mark.name for mark in each.marks}] for axis in values]
    always = covering(product(*short), groups)
    params = []
    for case in whole:
        parts = [axis[place] for axis, place in zip(values, case, strict=True)]
        marks = [mark for part in parts for mark in part.marks] + ([] if case in always else [LONG])
        params.append(pytest.param(*(value for part in parts for value in part.values), marks=marks))
    return pytest.mark.parametrize(names, params)


def looped(names: str, *axes: Iterable[Any], pairs: Iterable[str] = ()) -> Callable[..., Callable[..., None]]:
    """Run a law over `cases` in one test, for cases of a few milliseconds; a failure names all cases that failed.

    Each case has the state of a new test, an empty `tmp_path` and a `monkeypatch` that is undone; it shares other
    fixtures. `--case TEXT` runs the cases with this text among their values.
    """
    if len(axes) == 1 and "," in names:
        axes = ([value if isinstance(value, ParameterSet) else pytest.param(*value) for value in axes[0]],)
    params, order = cases(names, *axes, pairs=pairs).args[1], [name.strip() for name in names.split(",")]
    assert all(mark.name == "long" for param in params for mark in param.marks), "a case has another mark than `long`"

    def decorate(law: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(law)
        def every_case(*, request: pytest.FixtureRequest, own_state: Callable[[], None], **fixtures: Any) -> None:
            config, errors, skipped = request.config, list[BaseException](), pytest.skip.Exception("no case")
            is_run = False
            for number, param in enumerate(params):
                values = dict(zip(order, param.values, strict=True))
                said = f"case {number}: {', '.join(str(getattr(x, '__name__', x)) for x in values.values())}"
                if (param.marks and not config.getoption("--all")) or config.getoption("--case") not in said:
                    continue
                own_state()
                try:
                    with ExitStack() as stack:
                        if "monkeypatch" in fixtures:
                            values["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                        if "tmp_path" in fixtures:
                            values["tmp_path"] = fixtures["tmp_path"] / str(number)
                            values["tmp_path"].mkdir()
                        law(**{**fixtures, **values})
                        is_run = True
                except pytest.skip.Exception as reason:
                    skipped = reason
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  raised below
                    error.add_note(said)
                    errors.append(error)
            if errors:
                raise errors[0] if len(errors) == 1 else BaseExceptionGroup(f"{len(errors)} cases failed", errors)
            if not is_run:
                raise skipped

        fixtures = [each for name, each in inspect.signature(law).parameters.items() if name not in order]
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", "own_state")]
        every_case.__signature__ = inspect.Signature([*fixtures, *own])
        return every_case

    return decorate


def some(always: Collection[Hashable], values: Iterable[Hashable]) -> list[Any]:
    """Return the values of one axis, or cases of several, with those that are not in `always` marked `long`."""
    values = list(values)
    assert not set(always) - set(values), f"not among the values: {set(always) - set(values)}"
    return [
        value if value in always else pytest.param(*value if isinstance(value, tuple) else [value], marks=LONG)
        for value in values
    ]


def covering(whole: Iterable[tuple[Hashable, ...]], pairs: Iterable[tuple[int, ...]] = ()) -> set[tuple[Hashable, ...]]:
    """Return cases of `whole` in which all values of each axis occur, and all pairs of values of axes that meet.

    Of the cases that cover most of what is missing, the next one is that whose values occurred least.
    """
    whole = list(whole)
    meeting = dict.fromkeys(pair for axes in pairs for pair in combinations(axes, 2))
    groups = [*((axis,) for axis in range(len(whole[0]))), *meeting]
    number: dict[tuple[Hashable, ...], int] = {}  # of a value of an axis, or of a pair of values
    covers = [
        [number.setdefault((group, *[case[axis] for axis in group]), len(number)) for group in groups] for case in whole
    ]
    bits = [sum(1 << part for part in parts) for parts in covers]
    missing, used = (1 << len(number)) - 1, [0] * len(number)
    chosen = set()
    ranked = [(-len(groups), 0, place) for place in range(len(whole))]
    heapify(ranked)
    while missing:
        place = ranked[0][2]
        rank = (-(bits[place] & missing).bit_count(), sum([used[part] for part in covers[place]]), place)
        if heapreplace(ranked, rank) == rank:  # the others, ranked in earlier rounds, are no better now
            chosen.add(whole[place])
            missing &= ~bits[place]
            for part in covers[place]:
                used[part] += 1
    return chosen
