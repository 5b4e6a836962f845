"""The route `tokenization`: what the page draws of a text's tokens, for every kind of tokenizer, and its own ones."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from covering import some
from explorer_requests import ids_of, request, stored_answers
from tokenizer_kinds import BUILDERS, LANGUAGES, REAL, SOME_REAL, real_tokenizers, tokenizer_of
from tokenizers import Tokenizer, processors

from embedlayer import TokenEmbedding
from embedlayer.core import visible_text
from embedlayer.opening import OpenedModel
from embedlayer.tokenization import compare_tokenizers, table_size

OWN = ("small", "bytes")
EMOJI = "👩‍💻 🏳️‍🌈 e\u0301"
OF_TEXTS = ("I love dogs", *LANGUAGES, EMOJI, "a</s>b<|endoftext|> c", "  two\n\nlines\t", "dog " * 90)


def source_of(tokenizer: Tokenizer) -> OpenedModel:
    return OpenedModel("own", TokenEmbedding(table_size(tokenizer), 4), tokenizer=tokenizer)


@pytest.fixture
def answer(ask: Any) -> Any:
    """The answer about a text, which satisfies what every answer does."""

    def checked(source: OpenedModel, text: str, **params: str) -> Any:
        shown = ask(source, "tokenization", text=text, **params)
        check_answer(shown, text)
        return shown

    return checked


def check_answer(shown: Any, text: str) -> None:
    content = text.encode(errors="replace")
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


@pytest.mark.parametrize("kind", BUILDERS)
def test_the_tokens_are_those_of_the_pipeline_for_every_kind(ask, answer, kind) -> None:
    source = source_of(tokenizer_of(kind))
    for text in OF_TEXTS:
        shown, step = answer(source, text), ask(source, "pipeline", text=text)
        for name in ("id", "text"):
            assert [token[name] for token in shown["tokens"]] == [token[name] for token in step["tokens"]]
        assert all(shown[name] == step[name] for name in ("left_out", "vocab_size", "embed_dim"))
        with_special = ask(replace(source, table_only="It is not known."), "tokenization", text=text)
        of_text = compare_tokenizers(source.tokenizer, source.tokenizer, text).a.text_tokens
        assert shown["text_tokens"] == with_special["text_tokens"] == of_text
        assert shown["text"] == visible_text(text)
        assert shown["model"] == type(tokenizer_of(kind).model).__name__
        if source.tokenizer.normalizer is None:
            assert shown["normalized"] == visible_text(text)


CASES = product([*REAL, "minilm"], ["", *OWN])


@pytest.mark.parametrize(
    ("name", "own"), some({*((name, "") for name in SOME_REAL), *(("bert", own) for own in OWN)}, CASES)
)
def test_so_are_those_of_real_tokenizers_and_of_those_of_the_page_beside_them(answer, shared_data, name, own) -> None:
    if name not in real_tokenizers(shared_data):
        pytest.skip(f"the package with the tokenizer of {name} is not installed")
    source = source_of(real_tokenizers(shared_data)[name])
    for text in OF_TEXTS:
        answer(source, text, **({"tokenizer": own} if own else {}))


def test_names_and_typed_ids_are_looked_up_whole(answer) -> None:
    tiny = answer(source_of(tokenizer_of("bytes")), "I love zebras", layer="tiny")
    assert (tiny["title"], tiny["model"], tiny["vocab_size"], tiny["embed_dim"]) == ("Tiny layer", "names", 10, 4)
    pieces = [(piece["text"], piece["trace"]["id"]) for piece in tiny["pieces"]]
    assert pieces == [("I", 1), ("love", 2), ("zebras", None)]
    tokens = [(token["text"], token["start"], token["stop"]) for token in tiny["tokens"]]
    assert tokens == [("I", 0, 1), ("love", 2, 6), ("<unk>", 7, 13)]
    source = OpenedModel("vectors", TokenEmbedding(3, 2), tokens=["big dog", "é", ""])
    shown = answer(source, "É zebra, Big  dog")
    words = [(piece["text"], piece["first"], piece["behind"], piece["trace"]["id"]) for piece in shown["pieces"]]
    assert words == [("É", 0, 1, 1), ("zebra", 1, 1, None), (",", 1, 1, None), ("Big··dog", 1, 2, 0)]
    assert [(token["id"], token["start"], token["stop"]) for token in shown["tokens"]] == [(1, 0, 2), (0, 10, 18)]
    for rows in (source, OpenedModel("rows", TokenEmbedding(3, 2))):
        typed = answer(rows, " #2 #0")
        assert (typed["model"], ids_of(typed).tolist()) == ("ids", [2, 0])
        assert [piece["text"] for piece in typed["pieces"]] == ["#2", "#0"]


def test_a_text_that_is_not_traced_has_its_tokens_and_says_why(ask, answer) -> None:
    random = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    random.model.dropout = 0.5
    plain = source_of(tokenizer_of("byte-level BPE"))
    refused, long = (
        ask(source_of(random), "tokenization", text="small dogs"),
        ask(plain, "tokenization", text="é" * 1001),
    )
    assert refused["refused"].startswith("This tokenizer leaves out merges by chance (dropout 0.5)")
    assert long["refused"] == "This text has 1,001 characters: the steps of at most 1,000 are shown."
    assert refused["pieces"] == long["pieces"] == []
    assert refused["tokens"] == ask(plain, "tokenization", text="small dogs")["tokens"]
    assert [token["stop"] for token in long["tokens"]] == [*range(1, 65)]
    whole = answer(plain, "é" * 1000)
    assert (whole["refused"], whole["left_out"], len(whole["pieces"])) == ("", 2000 - 64, 1)
    twice = Tokenizer.from_str(tokenizer_of("byte-level BPE").to_str())
    twice.post_processor = processors.TemplateProcessing(single="$A $A")
    source = replace(source_of(twice), table_only="It is not known.")
    assert source.adds_special_tokens
    shown = ask(source, "tokenization", text="dog")
    assert "It cannot be traced." in shown["refused"]
    assert [token["text"] for token in shown["tokens"]] == ["do", "g"] * 2


ODD_TEXTS = (
    "x" * 10_000, "word " * 2000, "  ", " " * 3000, "\n", "👨‍👩‍👧‍👦" * 50, "\u0301" * 200, "\x00\x07", "</s>" * 100,
    "#99999999999999999999", "a\ud800b",
)  # fmt: skip


def test_any_text_has_an_answer_from_the_server(ask) -> None:
    source = source_of(tokenizer_of("SentencePiece BPE with byte fallback"))
    for text, name in product(ODD_TEXTS, ("", *OWN)):
        assert ask(source, "tokenization", text=text, tokenizer=name)["tokens"]


# The small tokenizer


def test_texts_of_the_small_tokenizer_show_words_that_are_one_token_after_a_space_and_several_without(ask) -> None:
    source = source_of(tokenizer_of("bytes"))

    def tokens_of(text: str) -> list[str]:
        shown = ask(source, "tokenization", text=text, tokenizer="small")
        assert shown["vocab_size"] == 1200
        return [token["text"] for token in shown["tokens"]]

    texts = ask(source, "pipeline-choices")["pieces"]
    alone = [text for text in texts if f" {text}" in texts and len(tokens_of(f" {text}")) == 1 < len(tokens_of(text))]
    assert {"love", "football", "played"} <= {*alone}
    assert tokens_of(" love") == ["·love"]
    assert tokens_of("love") == ["l", "o", "ve"]
    assert {len(tokens_of(text)) for text in texts if text.isalpha()} >= {2, 3, 4, 5}
    assert tokens_of("🙂") == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert len(tokens_of("👩‍💻")) == 11
    assert ask(source, "tokenization", text="a", tokenizer="bytes")["vocab_size"] == 256


def test_an_exported_page_holds_the_texts_under_all_three_tokenizers(ask, of_run, exported_run, tiny_choices) -> None:
    held = stored_answers(exported_run)
    choices = ask(of_run, "pipeline-choices")
    texts = [{"text": text} for text in choices["texts"]]
    texts += [{"text": text, "layer": "tiny"} for text in tiny_choices["texts"]]
    wanted = [text | own for text in texts for own in ({}, {"tokenizer": "small"}, {"tokenizer": "bytes"})]
    wanted += [{"text": text, "tokenizer": "small"} for text in choices["pieces"]]
    for params in wanted:
        assert ask.raw(of_run, "tokenization", **params) == held[request("tokenization", source="0", **params)]


def test_a_source_of_which_only_the_table_is_known_exports_no_texts_of_its_own(export) -> None:
    table = OpenedModel("table", TokenEmbedding.from_pretrained(torch.zeros(3, 2)), table_only="It is not known.")
    held = [request for request in stored_answers(export(table)) if request.startswith(("pipeline?", "tokenization?"))]
    assert held
    assert all("layer=tiny" in each or "tokenizer=small" in each for each in held)
