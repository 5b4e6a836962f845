"""Routes of the explorer: which data the page can request, and which of it an exported page holds.

The page requests `GET /data/NAME?params`, or `POST` for what acts. An exported page holds the same answers in the file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

from embedlayer.core.errors import SizeError
from embedlayer.core.formatting import command_name
from embedlayer.explorer import (
    compare,
    example_tokens,
    health,
    logit_lens,
    model_tensors,
    pipeline,
    positions,
    table_map,
    token_card,
    tokenization,
    tokens,
    training,
    user_columns,
)
from embedlayer.explorer.answers import Manifest, SourceManifest
from embedlayer.explorer.text_ids import whole_number
from embedlayer.explorer.tiny_layer import tiny_layer
from embedlayer.explorer.tokens import Params
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.positions.position import Position
from embedlayer.tokenization.ids import require_rows

Answer = Any  # bytes, or a record of `explorer.answers` that JSON can represent


@dataclass(frozen=True)
class Route:
    """One kind of data that the page can request."""

    answer: Callable[[OpenedModel, Params], Answer]
    exported: Callable[[OpenedModel], Iterable[Params]] = lambda source: ({},)
    needs: tuple[str, ...] = ("vectors",)
    acts: bool = False  # starts or ends something, so it is a POST


ROUTES: dict[str, Route] = {
    "tokens": Route(tokens.texts),
    "axes": Route(tokens.axes),
    "coordinates": Route(tokens.coordinates, lambda source: ({"count": str(tokens.EXPORTED_COMPONENTS)},)),
    "layout-start": Route(table_map.start, lambda source: (), acts=True),
    "layout-cancel": Route(table_map.cancel, lambda source: (), acts=True),
    "layout-progress": Route(table_map.progress, table_map.exported_requests),
    "layout": Route(table_map.layout, table_map.exported_requests),
    "layout-recall": Route(table_map.layout_recall, table_map.exported_requests),
    "clusters": Route(table_map.clusters, table_map.exported_requests),
    "cluster-of": Route(table_map.cluster_of, table_map.exported_requests),
    "folded": Route(table_map.folded),
    "norms": Route(tokens.norms),
    "examples": Route(example_tokens.examples),
    "frequencies": Route(tokens.frequencies, needs=("frequency",)),
    "neighbors": Route(tokens.neighbors, lambda source: ()),
    "along": Route(tokens.along, lambda source: ()),
    "columns": Route(user_columns.columns),
    "column": Route(user_columns.column, user_columns.exported_columns),
    "encode": Route(tokens.encode, lambda source: (), needs=("tokenizer",)),
    "vectors": Route(tokens.vectors, tokens.exported_vectors),
    "nearest": Route(tokens.nearest, tokens.exported_nearest),
    "card": Route(token_card.card, lambda source: ()),
    "card-places": Route(token_card.places, lambda source: ()),
    "cards": Route(token_card.cards, token_card.exported_requests),
    "pipeline-choices": Route(pipeline.choices),
    "pipeline": Route(pipeline.answer, pipeline.exported_requests),
    "tokenization": Route(tokenization.answer, tokenization.exported_requests),
    "logit-lens": Route(logit_lens.answer, logit_lens.exported_requests),
    "positions": Route(positions.answer, needs=("input",)),
    "health": Route(health.report),
    "verdicts": Route(health.verdicts),
    "noise-shares": Route(health.noise_shares),
    "spectrum": Route(health.shares),
    "metrics": Route(training.metrics, needs=("metrics",)),
    "tensors": Route(model_tensors.answer, model_tensors.exported_requests),
}
"""Every kind of data, by the name that the page requests."""


PAIRS: dict[str, Callable[[OpenedModel, OpenedModel, Params], Answer]] = {
    "compare": compare.summary,
    "compare-places": compare.places,
    "compare-neighbors": compare.other_neighbors,
}
"""Data about two sources. The parameter `other` is the number of the second, or `before` for before training."""

EXPORTED_PAIRS = ("compare", "compare-places")


def check_tokenizers(sources: Sequence[OpenedModel]) -> None:
    """Check that every tokenizer fits its table, so that the page can show a text for each token."""
    for opened in sources:
        if opened.text_tokenizer is not None:
            require_rows(opened.text_tokenizer, opened.table.vocab_size, opened.title)


def page_facts(opened: OpenedModel) -> SourceManifest:
    """Return the description of a source for the page: title, sizes and kind."""
    position, run = opened.position, opened.run
    config = {} if position is None else position.config
    arguments = {name: x for name, x in config.items() if isinstance(x, str | int | float | bool | None | list)}
    there = {
        "vectors": True,
        "tokens": opened.tokens is not None or opened.text_tokenizer is not None,
        "tokenizer": opened.text_tokenizer is not None,
        "input": not opened.table_only,
        "position": position is not None and type(position) is not Position,
        "head": opened.head is not None,
        "metrics": run is not None and run.metrics.exists(),
        "before": run is not None and run.contains_run,
        "frequency": run is not None and run.corpus.exists(),
    }
    return {
        "title": opened.title,
        "path": "" if isinstance(opened.source, str) else str(opened.source),
        "vocab_size": opened.table.vocab_size,
        "embed_dim": opened.table.embed_dim,
        "has": [name for name, has in there.items() if has],
        "position": None if position is None else {"kind": type(position).__name__, **arguments},
        "scale": None if opened.table.factor is None else float(opened.table.factor),
        "tied": bool(opened.head is not None and opened.head.tied),
        "kind": type(opened.table).__name__,
    }


def method_of(name: str) -> str:
    """Return the HTTP method of a request for the data `name`: POST if the request starts or ends something."""
    return "POST" if name in ROUTES and ROUTES[name].acts else "GET"


def others(sources: list[OpenedModel], source: OpenedModel) -> list[str]:
    """Return the sources that a source can be compared with, as values of the request parameter `other`."""
    numbers = [str(number) for number, other in enumerate(sources) if other is not source]
    return ["before", *numbers] if "before" in page_facts(source)["has"] else numbers


def answer(sources: list[OpenedModel], name: str, params: Params) -> Answer:
    """Return the data of the request `/data/NAME?params`: bytes, or a value for JSON."""
    if name == "manifest":
        return manifest(sources)
    source = _source(sources, params.get("source", "0"))
    rest = {key: value for key, value in params.items() if key not in ("source", "other")}
    if name in PAIRS:
        number = params.get("other", "")
        other = source.before() if number == "before" else _source(sources, number)
        if other is None:
            raise SizeError(f"{source.title} is not a run, so its table before training is unknown.")
        return PAIRS[name](source, other, rest)
    if name not in ROUTES:
        raise SizeError(f"There is no data named {name!r}; the names are {', '.join((*ROUTES, *PAIRS))}.")
    route = ROUTES[name]
    missing = [need for need in route.needs if need not in page_facts(source)["has"]]
    if missing:
        raise SizeError(f"{source.title} has no {missing[0]}, which {name} needs.")
    if rest.get("layer") == "tiny":
        return _of_tiny_layer(route, tuple(sorted(rest.items())))
    return route.answer(source, rest)


@lru_cache(maxsize=256)
def _of_tiny_layer(route: Route, params: tuple[tuple[str, str], ...]) -> Answer:
    """Return an answer about the tiny layer, which is the same beside every source."""
    return route.answer(OpenedModel("tiny layer", tiny_layer("learned", tied=True).table), dict(params))


def _source(sources: list[OpenedModel], number: str) -> OpenedModel:
    """Return the source with the index `number`, a string from a request; raise a `SizeError` if there is none."""
    if not number.isdecimal() or whole_number(number) >= len(sources):
        raise SizeError(f"There is no source {number!r}; there are {len(sources)} sources, numbered from 0.")
    return sources[whole_number(number)]


def manifest(sources: list[OpenedModel]) -> Manifest:
    """Return what the page requests first."""
    from embedlayer import __version__

    facts = [page_facts(source) for source in sources]
    return {
        "version": __version__,
        "command": command_name(),
        "course": course_address(),
        "exported": False,
        "sources": facts,
    }


def course_address() -> str:
    """Return the address of the course beside that of the documentation in the package's metadata."""
    try:
        urls = metadata("embedlayer").get_all("Project-URL", [])
    except PackageNotFoundError:
        return ""
    address = dict(url.split(", ", 1) for url in urls).get("Documentation", "")
    return f"{address.removesuffix('index.md')}course/index.md" if address else ""
