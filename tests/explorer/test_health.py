"""The view's numbers are those of the analysis."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from explorer_requests import numbers
from pages import until

from embedlayer import TokenEmbedding
from embedlayer.analysis import chance_geometry, principal_components, table_geometry, table_health
from embedlayer.opening import OpenedModel


def test_findings_are_the_analysis_own_with_the_texts_of_the_page(ask, of_run):
    before, loss = of_run.before().table, of_run.run.read_metrics()[-1]["validation_loss"]
    expected = table_health(of_run.table, of_run.tokenizer, before=before, counts=of_run.counts, validation_loss=loss)
    found = ask(of_run, "health")
    assert found["summary"] == expected.summary()
    assert found["verdicts"]["never_seen"]["rows"] == int((of_run.counts == 0).sum())
    assert found["verdicts"]["sentence"] == expected.verdicts.sentence()
    assert found["under_trained"]["rows"] == int(expected.verdicts.is_unlearned.sum())
    assert found["never_touched"]["rows"] == len(expected.never_touched)
    assert numbers(ask(of_run, "verdicts"), dtype=torch.uint8).equal(expected.verdicts.verdicts)
    noise = numbers(ask(of_run, "noise-shares")).numpy()
    assert np.array_equal(noise, expected.verdicts.random.noise_shares, equal_nan=True)
    assert found["nearest"]["cosines"] == pytest.approx(expected.nearest.cosines, abs=1e-6)
    for finding in found["under_trained"]["tokens"]:
        assert finding["text"] == of_run.token_texts[finding["id"]]
    shares, geometry = ask(of_run, "spectrum"), table_geometry(of_run.table)
    explained = principal_components(of_run.rows, 16).explained_variance_ratio.tolist()
    assert shares["explained"] == pytest.approx(explained, abs=1e-5)
    for name in ("effective_rank", "mean_cosine", "isotropy"):
        assert shares[name] == getattr(geometry, name)
    assert shares["chance"] == asdict(chance_geometry(geometry))


def test_rows_with_other_norms_are_listed_with_their_texts_and_the_card_names_them(ask) -> None:
    rows = torch.randn(300, 24)
    rows[40:50] *= 20
    opened = OpenedModel("planted", TokenEmbedding.from_pretrained(rows), tokens=[f"t{row}" for row in range(300)])
    found = ask(opened, "health")
    (group,) = found["norm_outliers"]
    assert (group["rows"], group["ids"]) == (10, list(range(40, 50)))
    assert found["texts"]["41"] == "t41"
    assert "10 rows are longer than all others by a gap" in found["summary"]
    facts = ask(opened, "card", id=41)
    assert facts["findings"] == ["not_learned", "norm"]
    fault, of_rows = facts["table_reasons"]  # random numbers
    assert fault.startswith("The rows look untrained")
    assert of_rows.startswith("10 rows are longer")
    assert ask(opened, "card", id=2)["findings"] == ["not_learned"]


def test_a_run_that_learned_little_is_called_sound_nowhere_on_its_page(ask, of_run, exported_run, open_page) -> None:
    assert ask(of_run, "health")["is_sound"] is False
    page = open_page(f"{exported_run}#health")
    verdict = page.locator("#view-health .verdict")
    assert verdict.text_content().startswith("Faulty. Barely trained: the run recorded a loss on held-out text of ")
    assert "sound" not in verdict.get_attribute("class")
    page.goto(f"{exported_run}#health?id=40&card=open")
    page.locator(".card-verdict p").nth(1).wait_for()
    card_text = page.locator("#card").inner_text()
    assert "The table. Barely trained: " in card_text
    assert "Sound" not in card_text


def table_of(words: OpenedModel, change: Callable[[torch.Tensor], Any]) -> OpenedModel:
    """Some words of MiniLM, with changed rows."""
    rows = words.table.rows(3000, 3400).detach().float().clone()
    change(rows)
    return OpenedModel("words", TokenEmbedding.from_pretrained(rows), tokens=words.token_texts[3000:3400])


STATES: dict[str, tuple[Callable[[torch.Tensor], Any], str, str | None]] = {
    "undecided": (lambda rows: None, "Table not decided", None),
    "one dimension": (lambda rows: rows[:, 17].mul_(100), "Table not sound", "Largest dimension"),
    "constant": (lambda rows: rows[:, :10].fill_(0.1), "Table not sound", "Constant columns"),
    "broken row": (lambda rows: rows[5].fill_(torch.nan), "Table not sound", None),
}


@pytest.fixture(scope="module")
def tables(word_table) -> list[OpenedModel]:
    return [table_of(word_table, change) for change, _, _ in STATES.values()]


@pytest.fixture(scope="module")
def url(serve, of_run, tables) -> str:
    """The page of a run, of a table with norms beyond a scale, of one with rows of other norms, and of `tables`."""
    beyond, others = torch.rand(300, 24) + 0.5, torch.randn(300, 24)
    beyond[7] *= 1000
    beyond[8:10] = torch.nan
    others[40:50] *= 20
    planted = [OpenedModel("planted", TokenEmbedding.from_pretrained(rows)) for rows in (beyond, others)]
    return serve(of_run, *planted, *tables)


def test_the_tile_of_a_fault_is_marked_and_no_card_says_sound_of_a_row_in_such_a_table(
    ask, open_page, url, tables
) -> None:
    reports = [ask(table, "health") for table in tables]
    assert len({report["summary"] for report in reports}) == len(STATES)
    page = open_page(f"{url}#training", again=True)
    for number, (report, (_, summary, tile)) in enumerate(zip(reports, STATES.values(), strict=True), start=3):
        has_card = number < 5  # of a table that is not decided, and not sound
        page.goto(f"{url}#health?source={number}{'&id=300' if has_card else ''}")
        until(
            page,
            f"document.querySelector('#view-health .verdict')?.textContent.trim() === {json.dumps(report['summary'])}",
        )
        check_tiles(page, report, tile)
        check_pictures(page, report)
        if has_card:
            check_card(page, report, summary)


def check_pictures(page: Any, report: dict[str, Any]) -> None:
    """A picture is marked as a fault if one of its measures is."""
    pictures = page.locator(".picture")
    titles = ["Rows not learned Map", "Shared direction", "Norms", "Near duplicates"]
    assert pictures.locator("h2").all_text_contents() == titles
    shared = {"offset_share", "component_share", "dimension_share"} & {*report["at_fault"]}
    at_fault = ["rows" in report["at_fault"], bool(shared), bool(report["norm_outliers"]), False]
    found = [pictures.nth(place).get_attribute("class").split()[-1] == "is-fault" for place in range(4)]
    assert found == at_fault
    limits = [report["limits"][name] for name in ("offset", "variance", "variance")]
    bars = pictures.nth(1).locator("i")
    drawn = [float(bars.nth(place).evaluate("bar => bar.style.getPropertyValue('--limit')")) for place in range(3)]
    assert drawn == limits


def check_tiles(page: Any, report: dict[str, Any], tile: str | None) -> None:
    page.locator(".figures > summary").click()
    verdict = page.locator("#view-health .verdict")
    assert verdict.get_attribute("class").split() == ["verdict", report["state"]]
    assert page.locator(".tiles .is-fault dt").all_inner_texts() == ([tile] if tile else [])
    values = dict(
        zip(page.locator(".tiles dt").all_inner_texts(), page.locator(".tiles dd").all_inner_texts(), strict=True)
    )
    shared = report["shared"]
    assert values["Constant columns"].startswith(f"{len(shared['constant'])}\n")
    shown = float(values["Largest dimension"].split("\N{NO-BREAK SPACE}")[0])
    assert shown == pytest.approx(100 * shared["dimension_share"], rel=0.06)
    assert f"dimension {shared['dimension']}, of the variance" in values["Largest dimension"]
    counts = [int(values[name].split("\n")[0]) for name in ("Learned", "Not learned", "Never seen")]
    assert counts == [report["verdicts"][name]["rows"] for name in ("learned", "not_learned", "never_seen")]


def check_card(page: Any, report: dict[str, Any], summary: str) -> None:
    page.locator(".card-summary").get_by_text(summary).wait_for()
    page.locator(".card-toggle").click()
    page.locator(".card-verdict.card-faults p").nth(1).wait_for()
    card_text = page.locator("#card").inner_text()
    assert "No fault of this row." in card_text
    assert f"The table. {report['summary'].removeprefix('Faulty. ').split('. ')[0]}" in card_text
    assert "Sound" not in card_text


def test_tokens_that_never_occur_and_the_loss_of_a_run_have_tiles(ask, open_page, url, of_run) -> None:
    report = ask(of_run, "health")
    page = open_page(f"{url}#health", again=True)
    page.locator(".figures > summary").click()
    tiles = page.locator(".tiles > div")
    never = tiles.filter(has_text="Never seen").inner_text()
    assert never.split("\n")[1] == str(int((of_run.counts == 0).sum())) == str(report["absent"]["rows"])
    loss = tiles.filter(has_text="nats per token")
    assert f"{report['loss']['validation_loss']:.2f}" in loss.inner_text()
    assert "is-fault" in loss.get_attribute("class")  # a run of a few steps


def test_a_norm_apart_from_the_others_is_counted_and_rows_without_a_value_are_listed(open_page, url) -> None:
    page = open_page(f"{url}#health?source=1", again=True)
    assert "1 row with a norm apart from all others" in page.locator(".picture.is-fault").last.inner_text()
    assert "Rows with NaN or infinity: 2" in page.locator(".others").inner_text()


def test_the_page_lists_rows_with_other_norms_and_a_table_without_tokens_has_no_kinds(open_page, url) -> None:
    page = open_page(f"{url}#health?source=2&id=41&card=open", again=True)
    assert "Rows with norms of" in page.locator(".others h3").inner_text()
    assert page.locator(".others [data-token]").count() == 10
    verdict = page.locator(".card-verdict")
    verdict.locator("p").nth(1).wait_for()
    assert "Norm beyond a gap." in verdict.inner_text()
    assert "The table. The rows look untrained" in verdict.inner_text()
    page.goto(f"{url}#map?source=2&id=41")
    facts = page.locator(".map-card .facts")
    facts.wait_for()
    assert facts.locator("dt").all_inner_texts() == ["ID", "Norm"]
    legend = page.locator(".map-legend")
    legend.get_by_text(re.compile("norm of the row|#")).first.wait_for()  # before the clusters are there, and then
    assert not {"word", "part", "number", "special"} & set(legend.inner_text().split())


def test_the_usual_norms_are_those_of_the_learned_rows(word_table, ask, serve, open_page) -> None:
    source = table_of(word_table, lambda rows: rows[7].zero_())
    verdicts = numbers(ask(source, "verdicts"), dtype=torch.uint8)
    page = open_page(serve(source) + "#health", again=True)
    said = page.get_by_text("No learned row is an outlier: norms of").inner_text()
    usual = source.rows[:].norm(dim=1)[(verdicts != 1) & (verdicts != 2)]
    assert said.endswith(f"norms of {usual[usual > 0].min():.2f} to {usual.max():.2f}")
