"""A text in a model, step by step: requests of the page and of `embedlayer embed`, and their answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import cast, get_args

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.explorer import text_answers
from embedlayer.explorer.example_tokens import example_texts
from embedlayer.explorer.pipeline_steps import (
    MOST_TOKENS,
    Model,
    PipelineStep,
    longest,
    parts_of,
    pipeline_steps,
    trace_text,
)
from embedlayer.explorer.text_ids import Vocabulary, longer_text, shown_tokens, text_ids, vocabulary_of
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tiny_layer import WORDS as TINY_WORDS
from embedlayer.explorer.tiny_layer import TinyPosition, tiny_layer
from embedlayer.explorer.tokenization import TEXTS as PIECES
from embedlayer.explorer.tokens import Params, token_ids
from embedlayer.io.json_fields import finite_json
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import TABLE_ONLY, OpenedModel


@dataclass(frozen=True)
class Pipeline:
    """A text and all steps from its tokens to the gradient of its loss."""

    text: str
    how: str
    tokens: tuple[text_answers.ShownToken, ...]
    left_out: int
    vocab_size: int
    embed_dim: int
    steps: tuple[PipelineStep, ...]
    vectors: Float[Tensor, "T D"]
    appended: tuple[int, ...] = ()

    def to_json(self) -> text_answers.Pipeline:
        """Return the pipeline as a JSON object of its attributes, with packed tensors; see `packed`."""
        content = {**vars(self), "tokens": list(self.tokens), "steps": [step.to_json() for step in self.steps]}
        del content["vectors"]
        return cast(text_answers.Pipeline, finite_json(content))


def answer(source: OpenedModel, params: Params) -> text_answers.Pipeline:
    """Answer a request of the page: the pipeline of the parameter `text`."""
    model, vocabulary = requested_model(source, params)
    table, special = parts_of(model)[0], source.adds_special_tokens
    text, appended = params.get("text", ""), token_ids(params, "appended", table.vocab_size)
    text, rest = longer_text(vocabulary, text, appended, table.vocab_size, add_special_tokens=special)
    result = pipeline(model, vocabulary, text, appended=rest, add_special_tokens=special, no_decoder=source.no_decoder)
    if isinstance(model, DecoderLM):
        last = len(model.blocks)
        note = f"row 0 is the input of the first block, row {last} the output of the last (nostalgebraist, 2020)"
        result = replace(result, steps=(*result.steps, PipelineStep("lens", note)))
    return result.to_json()


def requested_model(source: OpenedModel, params: Mapping[str, str]) -> tuple[Model, Vocabulary]:
    """Return the model that a request asks for, and what converts texts to its IDs."""
    if params.get("layer") == "tiny":
        return tiny_layer(params.get("position", "learned"), tied=params.get("tied", "1") == "1"), TINY_WORDS
    return source.require_input(), vocabulary_of(source)


def choices(source: OpenedModel, params: Params) -> text_answers.PipelineChoices:
    """Return the example texts, and the texts, words and position schemes of the tiny layer, that the page offers."""
    vocabulary = vocabulary_of(source)
    refused = TABLE_ONLY.format("this source", source.table_only) if source.table_only else ""
    tiny: text_answers.TinyChoices = {
        "texts": list(TINY_TEXTS),
        "words": list(TINY_WORDS.names),
        "positions": list(get_args(TinyPosition)),
        "embed_dim": tiny_layer("learned", tied=True).table.embed_dim,
    }
    return {
        "texts": example_texts(source),
        "reads": "tokenizer" if isinstance(vocabulary, Tokenizer) else "ids" if vocabulary is None else "names",
        "refused": refused,
        "tiny": tiny,
        "pieces": list(PIECES),
    }


def exported_requests(source: OpenedModel) -> list[dict[str, str]]:
    """Return the parameters of the requests whose answers an exported page stores."""
    shapes = product(TINY_TEXTS, get_args(TinyPosition), "10")
    tiny = [{"layer": "tiny", "text": text, "position": name, "tied": tied} for text, name, tied in shapes]
    texts = [] if source.table_only else example_texts(source)
    return [*({"text": text} for text in texts), *tiny]


def pipeline(
    model: Model,
    vocabulary: Vocabulary,
    text: str,
    *,
    appended: Sequence[int] = (),
    add_special_tokens: bool = False,
    most_tokens: int = MOST_TOKENS,
    no_decoder: str = "",
) -> Pipeline:
    """Compute every step from `text` to the gradient of its loss."""
    table, position = parts_of(model)
    read = text_ids(vocabulary, text, table.vocab_size, add_special_tokens=add_special_tokens)
    ids = [*read.ids, *appended][: longest(position, most_tokens)]
    tokens = shown_tokens(vocabulary, ids)
    with torch.enable_grad():
        traced = trace_text(model, torch.tensor(ids, device=table.device))
        steps = tuple(pipeline_steps(traced, tokens, vocabulary, no_decoder))
    left_out = len(read.ids) + len(appended) - len(ids)
    sizes = (table.vocab_size, table.embed_dim)
    return Pipeline(text, read.how, tokens, left_out, *sizes, steps, traced.vectors.detach(), tuple(appended))
