"""The view's numbers are those of the analysis."""

import re
from dataclasses import asdict

import numpy as np
import pytest
import torch

from embedlayer.analysis import principal_components
from embedlayer.analysis.chance import chance_geometry
from embedlayer.analysis.geometry import table_geometry
from embedlayer.analysis.health import table_health as examine
from embedlayer.explorer import health
from embedlayer.explorer.export import write_page
from embedlayer.explorer.token_card import card
from embedlayer.sources import OpenedModel
from embedlayer.tables.dense import TokenEmbedding


def test_findings_are_the_analysis_own_with_the_texts_of_the_page(of_run):
    before, loss = of_run.before().table, of_run.run.read_metrics()[-1]["validation_loss"]
    expected = examine(of_run.table, of_run.tokenizer, before=before, counts=of_run.counts, validation_loss=loss)
    found = health.found(of_run, {})
    assert found["summary"] == expected.summary()
    assert found["under_trained"]["rows"] == int(expected.under_trained.flagged.sum())
    assert found["never_touched"]["rows"] == len(expected.never_touched)
    scores = np.frombuffer(health.scores(of_run, {}), np.float32)
    assert torch.equal(torch.from_numpy(scores.copy()), expected.under_trained.scores.float())
    for finding in found["under_trained"]["tokens"]:
        assert finding["text"] == of_run.token_texts[finding["id"]]


def test_rows_with_other_norms_are_listed_with_their_texts_and_the_card_names_them() -> None:
    rows = torch.randn(300, 24)
    rows[40:50] *= 20
    opened = OpenedModel("planted", TokenEmbedding.from_pretrained(rows), tokens=[f"t{row}" for row in range(300)])
    found = health.found(opened, {})
    (group,) = found["norm_outliers"]
    assert (group["rows"], group["ids"]) == (10, list(range(40, 50)))
    assert found["texts"]["41"] == "t41"
    assert "10 rows are longer than all others by a gap" in found["summary"]
    facts = card(opened, {"id": "41"})
    assert facts["findings"] == ["norm"]
    (fault,) = facts["table_faults"]  # random numbers
    assert fault.startswith("The rows look untrained")
    assert card(opened, {"id": "2"})["findings"] is None


def test_a_run_that_learned_little_is_called_sound_nowhere_on_its_page(of_run, browser, tmp_path) -> None:
    write_page(tmp_path / "report.html", [of_run])
    assert health.found(of_run, {})["is_sound"] is False
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{(tmp_path / 'report.html').as_uri()}#health")
        verdict = page.locator("p.verdict")
        assert verdict.inner_text().startswith("Barely trained: the loss on held-out text is ")
        assert "sound" not in verdict.get_attribute("class")
        page.goto(f"{(tmp_path / 'report.html').as_uri()}#health?id=40&card=open")
        page.locator(".card-verdict p").nth(1).wait_for()
        card_text = page.locator("#card").inner_text()
        assert "The table. Barely trained: " in card_text
        assert "Sound" not in card_text


def test_shares_of_the_variance_are_those_of_the_principal_components(of_run):
    found = health.shares(of_run, {})
    assert found["explained"] == pytest.approx(
        principal_components(of_run.rows, 16).explained_variance_ratio.tolist(), abs=1e-5
    )
    geometry = table_geometry(of_run.table)
    assert found["effective_rank"] == geometry.effective_rank
    assert found["mean_cosine"] == geometry.mean_cosine
    assert found["isotropy"] == geometry.isotropy
    assert found["chance"] == asdict(chance_geometry(geometry))


def test_the_page_lists_rows_with_other_norms_and_a_table_without_tokens_has_no_kinds(browser, serving) -> None:
    rows = torch.randn(300, 24)
    rows[40:50] *= 20
    opened = OpenedModel("planted", TokenEmbedding.from_pretrained(rows))
    with serving(opened) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{url}#health?id=41&card=open")
        assert "Rows with norms of" in page.locator(".others h3").inner_text()
        assert page.locator(".others [data-token]").count() == 10
        verdict = page.locator(".card-verdict")
        verdict.locator("p").nth(1).wait_for()
        assert "Norm beyond a gap." in verdict.inner_text()
        assert "The table. The rows look untrained" in verdict.inner_text()
        page.goto(f"{url}#map?id=41")
        facts = page.locator(".map-card .facts")
        facts.wait_for()
        assert facts.locator("dt").all_inner_texts() == ["ID", "Norm"]
        legend = page.locator(".map-legend")
        legend.get_by_text(re.compile("norm of the row|#")).first.wait_for()  # before the clusters are there, and then
        assert not {"word", "part", "number", "special"} & set(legend.inner_text().split())
