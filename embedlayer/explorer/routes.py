"""Which data the page can ask for, and what of it a file for sending away holds.

The page asks `GET /data/NAME?params`; an exported page finds the same answers baked in.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from embedlayer.errors import SizeError
from embedlayer.explorer import pipeline, positions, tokens, training
from embedlayer.explorer.source import Source

Params = Mapping[str, str]
Answer = Any
"""Bytes, or what JSON can hold."""


def once_without_params(source: Source) -> Iterable[Params]:
    """Baked as one answer."""
    return ({},)


def nothing(source: Source) -> Iterable[Params]:
    """Not baked."""
    return ()


@dataclass(frozen=True)
class Route:
    """One kind of data.

    Attributes:
        answer: The data, for a source and what the page asked with. What cannot be answered is an `EmbedLayerError`.
        baked: With which params an exported page holds the answer.
        needs: What a source must have (`Source.manifest()["has"]`), or there is no answer.
    """

    answer: Callable[[Source, Params], Answer]
    baked: Callable[[Source], Iterable[Params]] = once_without_params
    needs: str = "vectors"


ROUTES: dict[str, Route] = {
    "tokens": Route(tokens.texts),
    "axes": Route(tokens.axes),
    "coordinates": Route(tokens.coordinates, tokens.baked_coordinates),
    "norms": Route(tokens.norms),
    "frequencies": Route(tokens.frequencies, needs="frequency"),
    "neighbors": Route(tokens.neighbors, nothing),
    "along": Route(tokens.along, nothing),
    "vectors": Route(tokens.vectors, tokens.baked_vectors),
    "nearest": Route(tokens.nearest, tokens.baked_nearest),
    "pipeline": Route(pipeline.answer, pipeline.baked, needs="tokenizer"),
    "positions": Route(positions.answer),
    "metrics": Route(training.metrics, needs="metrics"),
}
"""Every kind of data, by the name the page asks for."""


def answer(sources: list[Source], name: str, params: Params) -> Answer:
    """The data that `/data/NAME?params` stands for; `source` among the params is the number of a source.

    Raises:
        EmbedLayerError: There is no such data, or the params cannot be answered.
    """
    if name == "manifest":
        return manifest(sources)
    if name not in ROUTES:
        raise SizeError(f"There is no data called {name!r}: there is {', '.join(ROUTES)}.")
    number = params.get("source", "0")
    if not number.isdecimal() or int(number) >= len(sources):
        raise SizeError(f"There is no source {number!r}: there are {len(sources)}, counted from 0.")
    source, route = sources[int(number)], ROUTES[name]
    if route.needs not in source.manifest()["has"]:
        raise SizeError(f"{source.title} has no {route.needs}, which {name} is made from.")
    return route.answer(source, {key: value for key, value in params.items() if key != "source"})


def manifest(sources: list[Source]) -> Answer:
    """What the page asks for first."""
    from embedlayer import __version__

    return {"version": __version__, "exported": False, "sources": [source.manifest() for source in sources]}
