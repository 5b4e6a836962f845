"""The token card: its numbers beside plain PyTorch, and the card in a real browser, in every view."""

import json

import pytest
import torch
import torch.nn.functional as F

from embedlayer import TokenEmbedding
from embedlayer.data.tokenizer import load_tokenizer, token_text, train_tokenizer
from embedlayer.errors import SizeError, TokenIdError
from embedlayer.explorer.health import table_report
from embedlayer.explorer.pipeline import pipeline
from embedlayer.explorer.token_card import card, cards, places
from embedlayer.sources import OpenedModel


def test_numbers_are_those_of_plain_torch(run, of_run):
    rows, before = of_run.rows.double(), of_run.before().rows.double()
    norms = rows.norm(dim=1)
    text = (run.path / "text.txt").read_text()
    ids = torch.tensor(of_run.tokenizer.encode(text, add_special_tokens=False).ids)
    counts = ids.bincount(minlength=len(rows))
    scores = table_report(of_run).under_trained.scores
    for token in (1, 40, int(ids[3]), 280, len(rows) - 1):
        facts = card(of_run, {"id": str(token)})
        assert facts["id"] == token
        assert facts["norm"] == pytest.approx(float(norms[token]), rel=1e-5)
        assert facts["norm_share"] == pytest.approx(float((norms.float() < norms.float()[token]).double().mean()))
        assert facts["score"] == pytest.approx(float(scores[token]), abs=1e-5)
        assert facts["count"] == counts[token]
        assert facts["count_rank"] == 1 + int((counts > counts[token]).sum())
        assert facts["cosine_before"] == pytest.approx(float(F.cosine_similarity(rows[token], before[token], dim=0)))
        assert facts["norm_before"] == pytest.approx(float(before[token].norm()))
        assert ("never_looked_up" in (facts["findings"] or [])) == (counts[token] == 0)
        expected = {other for other in range(len(rows)) if is_variant(of_run, token, other)}
        assert {other for other, _ in facts["variants"] or []} == expected
        for other, cosine in facts["variants"] or []:
            assert cosine == pytest.approx(float(F.cosine_similarity(rows[token], rows[other], dim=0)), abs=1e-5)


def is_variant(source, token, other):
    one, two = (source.token_texts[each].removeprefix(" ").casefold() for each in (token, other))
    return token != other and one == two and bool(one.strip()) and not {token, other} & {*source.special_ids}


def test_findings_name_every_fault():
    rows = torch.randn(700, 32)
    rows[:200] = rows[0] + 0.05 * torch.randn(200, 32)
    rows[300] = 0.0
    rows[301, 4] = torch.nan
    rows[302:304] = rows[304]
    source = OpenedModel("faulty", TokenEmbedding.from_pretrained(rows))
    found = {token: card(source, {"id": str(token)}) for token in (7, 300, 301, 303, 500)}
    assert {token: facts["findings"] for token, facts in found.items()} == {
        7: ["under_trained"],
        300: ["zero"],
        301: ["broken"],
        303: ["duplicate"],
        500: None,
    }
    assert found[303]["equal_rows"] == {"rows": 2, "ids": [302, 304]}
    assert found[301]["norm"] is found[301]["norm_share"] is None
    assert "count" not in found[7]
    assert "cosine_before" not in found[7]


def test_an_exported_page_stores_the_same_facts_of_all_tokens(of_run):
    stored = json.loads(cards(of_run, {}))
    for token in range(0, of_run.table.vocab_size, 7):
        facts = {name: column[token] for name, column in stored["numbers"].items()}
        some = {name: column.get(str(token)) for name, column in stored["some"].items()}
        position, text, at = some.pop("position"), some.pop("text"), some.pop("at")
        assert {"id": token, **facts, **some} == card(of_run, {"id": str(token)})
        shown = places(of_run, {"id": str(token)})
        assert position == shown["position"]
        assert text is None or (text, at) == (shown["text"], shown["at"])


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_the_text_for_the_pipeline_contains_the_token(kind):
    tokenizer = train_tokenizer("the Class and the class of classes, love dogs; naïve 日本 " * 40, kind, vocab_size=330)
    size = max(tokenizer.get_vocab().values()) + 1
    source = OpenedModel("texts", TokenEmbedding(size, 4), tokenizer=tokenizer)
    found = {}
    for token in range(size):
        found[token], at, _ = places(source, {"id": str(token)}).values()
        if found[token] is not None:
            assert pipeline(source.table, tokenizer, found[token]).tokens[at].id == token
    missing = [token_text(tokenizer, token) for token, text in found.items() if text is None]
    assert len(missing) < size / 2 if kind == "bpe" else len(missing) < size / 10, missing


def test_a_token_of_a_sentencepiece_table_is_found_in_an_example(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "llama2-tokenizer.model")
    source = OpenedModel("llama", TokenEmbedding(32000, 2), tokenizer=tokenizer)
    dogs = tokenizer.token_to_id("▁dogs")
    assert places(source, {"id": str(dogs)}) == {
        "text": "I love dogs and dogs love me.",
        "at": 2,
        "position": None,
    }
    cat = tokenizer.token_to_id("▁cat")
    assert places(source, {"id": str(cat)})["position"] == tokenizer.encode(
        "The cat", add_special_tokens=False
    ).ids.index(cat)


def test_what_is_no_token_is_refused(of_run):
    for asked, error in (("9999", TokenIdError), ("x", SizeError), ("", SizeError), ("1,2", SizeError)):
        for answer in (card, places):
            with pytest.raises(error):
                answer(of_run, {"id": asked})
