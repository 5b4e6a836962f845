"""What the page must know about an opened model before it asks for data."""

from collections.abc import Sequence

from embedlayer.explorer.answers import SourceManifest
from embedlayer.io.files import JsonObject
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.positions.position import Position
from embedlayer.tokenization.ids import require_rows


def check_tokenizers(sources: Sequence[OpenedModel]) -> None:
    """Check that every tokenizer fits its table, so that the page can show a text for each token.

    Raises:
        TokenizerError: A tokenizer has IDs outside its table.
    """
    for opened in sources:
        if opened.text_tokenizer is not None:
            require_rows(opened.text_tokenizer, opened.table.vocab_size, opened.title)


def page_facts(opened: OpenedModel) -> SourceManifest:
    """Return the description of a source for the page: title, sizes and kind.

    Its key `"has"` lists the available data: some of `vectors`, `tokens`, `tokenizer`, `input` (scale and positions are
    known), `position`, `head`, `metrics`, `before` (the table before training) and `frequency`.
    """
    position, run = opened.position, opened.run
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
        "position": None if position is None else {"kind": type(position).__name__, **_plain(position.config)},
        "scale": None if opened.table.factor is None else float(opened.table.factor),
        "tied": bool(opened.head is not None and opened.head.tied),
        "kind": type(opened.table).__name__,
    }


def _plain(config: JsonObject) -> JsonObject:
    """Return those entries of a configuration whose values are numbers, strings, bools, lists or `None`."""
    return {key: value for key, value in config.items() if isinstance(value, str | int | float | bool | None | list)}
