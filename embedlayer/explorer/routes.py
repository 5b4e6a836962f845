"""Which data the page can ask for, and what of it a file for sending away holds.

The page asks `GET /data/NAME?params`; an exported page finds the same answers baked in.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from embedlayer.errors import SizeError
from embedlayer.explorer import compare, health, pipeline, positions, tokens, training
from embedlayer.explorer.source_facts import page_facts
from embedlayer.sources import OpenedModel

Params = Mapping[str, str]
Answer = Any
"""Bytes, or what JSON can hold."""


def once_without_params(source: OpenedModel) -> Iterable[Params]:
    """Baked as one answer."""
    return ({},)


def nothing(source: OpenedModel) -> Iterable[Params]:
    """Not baked."""
    return ()


@dataclass(frozen=True)
class Route:
    """One kind of data.

    Attributes:
        answer: The data, for a source and what the page asked with. What cannot be answered is an `EmbedLayerError`.
        baked: With which params an exported page holds the answer.
        needs: What a source must have (`page_facts(source)["has"]`), or there is no answer.
    """

    answer: Callable[[OpenedModel, Params], Answer]
    baked: Callable[[OpenedModel], Iterable[Params]] = once_without_params
    needs: str = "vectors"


ROUTES: dict[str, Route] = {
    "tokens": Route(tokens.texts),
    "axes": Route(tokens.axes),
    "coordinates": Route(tokens.coordinates, tokens.baked_coordinates),
    "layout": Route(tokens.layout, tokens.baked_layout),
    "norms": Route(tokens.norms),
    "frequencies": Route(tokens.frequencies, needs="frequency"),
    "neighbors": Route(tokens.neighbors, nothing),
    "along": Route(tokens.along, nothing),
    "vectors": Route(tokens.vectors, tokens.baked_vectors),
    "nearest": Route(tokens.nearest, tokens.baked_nearest),
    "pipeline": Route(pipeline.answer, pipeline.baked, needs="tokenizer"),
    "positions": Route(positions.answer),
    "health": Route(health.found),
    "scores": Route(health.scores),
    "spectrum": Route(health.shares),
    "metrics": Route(training.metrics, needs="metrics"),
}
"""Every kind of data, by the name the page asks for."""


PAIRS: dict[str, Callable[[OpenedModel, OpenedModel, Params], Answer]] = {
    "compare": compare.summary,
    "compare-places": compare.places,
    "compare-neighbors": compare.other_neighbors,
}
"""Data about two sources: `other` among the params is the number of the second, or `before` for before training."""

BAKED_PAIRS = ("compare", "compare-places")


def others(sources: list[OpenedModel], source: OpenedModel) -> list[str]:
    """What `source` can be compared with: `before`, and the numbers of other sources."""
    numbers = [str(number) for number, other in enumerate(sources) if other is not source]
    return ["before", *numbers] if "before" in page_facts(source)["has"] else numbers


def answer(sources: list[OpenedModel], name: str, params: Params) -> Answer:
    """The data that `/data/NAME?params` stands for; `source` among the params is the number of a source.

    Raises:
        EmbedLayerError: There is no such data, or the params cannot be answered.
    """
    if name == "manifest":
        return manifest(sources)
    source = _source(sources, params.get("source", "0"))
    rest = {key: value for key, value in params.items() if key not in ("source", "other")}
    if name in PAIRS:
        asked = params.get("other", "")
        other = source.before() if asked == "before" else _source(sources, asked)
        if other is None:
            raise SizeError(f"{source.title} is no run, so nothing is known of it before training.")
        return PAIRS[name](source, other, rest)
    if name not in ROUTES:
        raise SizeError(f"There is no data called {name!r}: there is {', '.join((*ROUTES, *PAIRS))}.")
    route = ROUTES[name]
    if route.needs not in page_facts(source)["has"]:
        raise SizeError(f"{source.title} has no {route.needs}, which {name} is made from.")
    return route.answer(source, rest)


def _source(sources: list[OpenedModel], number: str) -> OpenedModel:
    if not number.isdecimal() or int(number) >= len(sources):
        raise SizeError(f"There is no source {number!r}: there are {len(sources)}, counted from 0.")
    return sources[int(number)]


def manifest(sources: list[OpenedModel]) -> Answer:
    """What the page asks for first."""
    from embedlayer import __version__

    return {"version": __version__, "exported": False, "sources": [page_facts(source) for source in sources]}
