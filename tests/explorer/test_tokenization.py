"""The route `tokenization`: what the page draws of a text's tokens, for every kind of tokenizer, and its own ones."""

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from answer_types import check
from covering import some
from tokenizer_kinds import BUILDERS, LANGUAGES, REAL, SOME_REAL, real_tokenizers, tokenizer_of
from tokenizers import Tokenizer, models, processors

from embedlayer import SizeError, TextError, TokenEmbedding, TokenIdError, TokenizerError
from embedlayer.core import visible_text
from embedlayer.explorer import pipeline, tokenization
from embedlayer.explorer.export import exported_answers
from embedlayer.explorer.routes import answer as route_answer
from embedlayer.explorer.text_ids import NamedRows
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tokenization import MOST_CHARS, TEXTS, TITLES, answer, exported_requests, own_tokenizer
from embedlayer.opening import OpenedModel
from embedlayer.tokenization.comparison import compare_tokenizers
from embedlayer.tokenization.ids import table_size

EMOJI = "👩‍💻 🏳️‍🌈 e\u0301"
OF_TEXTS = ("I love dogs", *LANGUAGES, EMOJI, "a</s>b<|endoftext|> c", "  two\n\nlines\t", "dog " * 90)


def source_of(tokenizer: Tokenizer) -> OpenedModel:
    return OpenedModel("own", TokenEmbedding(table_size(tokenizer), 4), tokenizer=tokenizer)


def check_answer(source: OpenedModel, text: str, **params: str) -> Any:
    """What every answer satisfies, beside the step of the Pipeline."""
    shown = answer(source, {"text": text, **params})
    check(shown, answer)
    content = text.encode()
    tokens, pieces = shown["tokens"], shown["pieces"]
    assert all(0 <= token["start"] <= token["stop"] <= len(content) for token in tokens)
    covered = [place for piece in pieces for place in range(piece["first"], piece["behind"])]
    assert covered == [*range(len(tokens))]
    for piece in pieces:
        own = tokens[piece["first"] : piece["behind"]]
        assert all(piece["start"] <= token["start"] <= token["stop"] <= piece["stop"] for token in own)
        trace = piece["trace"]
        assert (trace is None) == piece["added"]
        if trace is not None and trace["kind"] == "bpe":
            named = {*trace["symbols"], *(merge["result"] for merge in trace["merges"])}
            assert named == {*trace["shown"]}
            left = [*trace["symbols"]]
            for merge in trace["merges"]:
                left[merge["index"] : merge["index"] + 2] = [merge["result"]]
            assert [trace["shown"][symbol] for symbol in left][: len(own)] == [token["text"] for token in own]
    return shown


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_tokens_are_those_of_the_pipeline_for_every_kind(kind) -> None:
    source = source_of(tokenizer_of(kind))
    for text in OF_TEXTS:
        shown, step = check_answer(source, text), pipeline.answer(source, {"text": text})
        assert [token["id"] for token in shown["tokens"]] == [token["id"] for token in step["tokens"]]
        assert [token["text"] for token in shown["tokens"]] == [token["text"] for token in step["tokens"]]
        assert shown["left_out"] == step["left_out"]
        of_text = compare_tokenizers(source.tokenizer, own_tokenizer("bytes"), text).a.text_tokens
        with_special = answer(replace(source, table_only="It is not known."), {"text": text})
        assert shown["text_tokens"] == with_special["text_tokens"] == of_text
        assert shown["text"] == visible_text(text)
        assert (shown["vocab_size"], shown["embed_dim"]) == (step["vocab_size"], step["embed_dim"])
        assert shown["model"] == type(tokenizer_of(kind).model).__name__
        assert step["steps"][0]["name"] == "tokenize"
        if source.tokenizer.normalizer is None:
            assert shown["normalized"] == visible_text(text)


@pytest.mark.parametrize("name", some(SOME_REAL, [*REAL, "minilm"]))
def test_so_are_those_of_real_tokenizers(shared_data, name) -> None:
    if name not in real_tokenizers(shared_data):
        pytest.skip(f"the package with the tokenizer of {name} is not installed")
    source = source_of(real_tokenizers(shared_data)[name])
    for text in OF_TEXTS:
        check_answer(source, text)


@pytest.mark.parametrize(("name", "own"), some({("bert", own) for own in TITLES}, product([*REAL, "minilm"], TITLES)))
def test_so_are_those_of_the_tokenizers_of_the_page_beside_real_ones(shared_data, name, own) -> None:
    if name not in real_tokenizers(shared_data):
        pytest.skip(f"the package with the tokenizer of {name} is not installed")
    source = source_of(real_tokenizers(shared_data)[name])
    for text in OF_TEXTS:
        check_answer(source, text, tokenizer=own)


def test_names_and_typed_ids_are_looked_up_whole() -> None:
    tiny = check_answer(source_of(tokenizer_of("bytes")), "I love zebras", layer="tiny")
    assert (tiny["title"], tiny["model"], tiny["vocab_size"], tiny["embed_dim"]) == ("Tiny layer", "names", 10, 4)
    assert [(piece["text"], piece["trace"]["id"]) for piece in tiny["pieces"]] == [
        ("I", 1),
        ("love", 2),
        ("zebras", None),
    ]
    assert [(token["text"], token["start"], token["stop"]) for token in tiny["tokens"]] == [
        *(("I", 0, 1), ("love", 2, 6), ("<unk>", 7, 13)),
    ]
    names = ["big dog", "é", ""]
    source = OpenedModel("vectors", TokenEmbedding(3, 2), tokens=names)
    shown = check_answer(source, "É zebra, Big  dog")
    words = [(piece["text"], piece["first"], piece["behind"], piece["trace"]["id"]) for piece in shown["pieces"]]
    assert words == [("É", 0, 1, 1), ("zebra", 1, 1, None), (",", 1, 1, None), ("Big··dog", 1, 2, 0)]
    assert [(token["id"], token["start"], token["stop"]) for token in shown["tokens"]] == [(1, 0, 2), (0, 10, 18)]
    assert NamedRows(names).ids("É zebra, Big  dog") == ([1, 0], ["zebra", ","])
    for rows in (source, OpenedModel("rows", TokenEmbedding(3, 2))):
        typed = check_answer(rows, " #2 #0")
        assert (typed["model"], [token["id"] for token in typed["tokens"]]) == ("ids", [2, 0])
        assert [piece["text"] for piece in typed["pieces"]] == ["#2", "#0"]


def test_a_text_that_is_not_traced_has_its_tokens_and_says_why() -> None:
    random = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    random.model.dropout = 0.5
    plain = source_of(tokenizer_of("byte-level BPE"))
    refused = answer(source_of(random), {"text": "small dogs"})
    assert refused["refused"].startswith("This tokenizer leaves out merges by chance (dropout 0.5)")
    long = answer(plain, {"text": "é" * (MOST_CHARS + 1)})
    assert long["refused"] == "This text has 1,001 characters: the steps of at most 1,000 are shown."
    assert refused["pieces"] == long["pieces"] == []
    assert refused["tokens"] == answer(plain, {"text": "small dogs"})["tokens"]
    assert [token["stop"] for token in long["tokens"]] == [*range(1, 65)]
    whole = check_answer(plain, "é" * MOST_CHARS)
    assert (whole["refused"], whole["left_out"], len(whole["pieces"])) == ("", 2 * MOST_CHARS - 64, 1)


def test_a_template_that_repeats_the_text_is_not_traced() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A")
    source = replace(source_of(tokenizer), table_only="It is not known.")
    assert source.adds_special_tokens
    shown = answer(source, {"text": "dog"})
    assert "It cannot be traced." in shown["refused"]
    assert [token["text"] for token in shown["tokens"]] == ["do", "g"] * 2


def test_what_cannot_be_answered_is_refused() -> None:
    source = source_of(tokenizer_of("bytes"))
    with pytest.raises(SizeError, match="no tokenizer 'gpt2'; the page has small, bytes"):
        answer(source, {"text": "a", "tokenizer": "gpt2"})
    with pytest.raises(TextError, match="has no tokens"):
        answer(source, {})
    with pytest.raises(TokenIdError):
        answer(OpenedModel("rows", TokenEmbedding(3, 2)), {"text": "#3"})
    with pytest.raises(TokenizerError, match="no tokenizer and no names"):
        answer(OpenedModel("rows", TokenEmbedding(3, 2)), {"text": "dog"})
    with pytest.raises(TextError, match="cannot encode"):
        answer(source_of(Tokenizer(models.WordLevel({"a": 0}, "<unk>"))), {"text": "b"})


ODD_TEXTS = {
    "one word": "x" * 10_000,
    "words": "word " * 2000,
    "spaces": "  ",
    "many spaces": " " * 3000,
    "a line": "\n",
    "families": "👨‍👩‍👧‍👦" * 50,
    "marks": "\u0301" * 200,
    "controls": "\x00\x07",
    "special tokens": "</s>" * 100,
    "a number": "#99999999999999999999",
}


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_any_text_has_an_answer_from_the_server(serving, text) -> None:
    with serving(source_of(tokenizer_of("SentencePiece BPE with byte fallback"))) as address:
        for name in ("", *TITLES):
            query = urllib.parse.urlencode({"text": text, "tokenizer": name})
            with urllib.request.urlopen(f"{address}data/tokenization?{query}") as response:
                assert json.load(response)["tokens"]
        with urllib.request.urlopen(f"{address}data/tokenization?text=a%ED%A0%80b") as response:  # a lone surrogate
            assert json.load(response)["tokens"]
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(f"{address}data/tokenization?text=+&layer=tiny")
        assert json.load(refused.value)["error"]


def test_a_tokenizer_is_read_once(monkeypatch) -> None:
    source = source_of(tokenizer_of("Unigram"))
    answer(source, {"text": "a"})
    monkeypatch.setattr(tokenization, "TokenTracer", None)
    assert answer(source, {"text": "small dogs"})["pieces"]


# The small tokenizer


def tokens_of(text: str) -> list[str]:
    return [
        token["text"]
        for token in answer(source_of(tokenizer_of("bytes")), {"text": text, "tokenizer": "small"})["tokens"]
    ]


def test_the_small_tokenizer_is_the_same_each_time_it_is_trained() -> None:
    assert own_tokenizer.__wrapped__("small").to_str() == own_tokenizer("small").to_str()
    assert own_tokenizer("small").get_vocab_size() == 1200
    assert own_tokenizer("bytes").get_vocab_size() == 256


def test_its_texts_show_words_that_are_one_token_after_a_space_and_several_without() -> None:
    alone = [text for text in TEXTS if f" {text}" in TEXTS and len(tokens_of(f" {text}")) == 1 < len(tokens_of(text))]
    assert {"love", "football", "played"} <= {*alone}
    assert tokens_of(" love") == ["·love"]
    assert tokens_of("love") == ["l", "o", "ve"]
    assert {len(tokens_of(text)) for text in TEXTS if text.isalpha()} >= {2, 3, 4, 5}
    assert tokens_of("🙂") == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert len(tokens_of("👩‍💻")) == 11


def test_an_exported_page_holds_the_texts_under_all_three_tokenizers(of_run) -> None:
    requests = exported_requests(of_run)
    assert len({tuple(sorted(each.items())) for each in requests}) == len(requests)
    content = exported_answers([of_run])
    keys = [key for key in content if key.startswith("tokenization?")]
    assert len(keys) == len(requests)
    texts = [{"text": text} for text in pipeline.choices(of_run, {})["texts"]]
    texts += [{"text": text, "layer": "tiny"} for text in TINY_TEXTS]
    assert all(
        {**text, **own} in requests for text in texts for own in ({}, {"tokenizer": "small"}, {"tokenizer": "bytes"})
    )
    assert pipeline.choices(of_run, {})["pieces"] == [*TEXTS]
    assert all({"text": text, "tokenizer": "small"} in requests for text in TEXTS)
    for params in requests:
        assert answer(of_run, params) == route_answer([of_run], "tokenization", params)


def test_a_source_of_which_only_the_table_is_known_exports_no_texts_of_its_own() -> None:
    table = OpenedModel("table", TokenEmbedding.from_pretrained(torch.zeros(3, 2)), table_only="It is not known.")
    assert all("layer" in each or each.get("tokenizer") == "small" for each in exported_requests(table))
