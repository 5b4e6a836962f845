"""From a hidden state back to tokens: the scene of the story and the step Next token, against torch."""

import itertools
import re

import numpy as np
import pytest
import torch
from explorer_requests import steps_of

from embedlayer import TokenEmbedding
from embedlayer.opening import OpenedModel


@pytest.fixture(scope="module")
def table(story):
    content = story("onehot.smallTable()")
    return torch.tensor(content["data"], dtype=torch.float64).view(content["rows"], content["cols"])


@pytest.fixture(scope="module")
def url(serve):
    return serve(OpenedModel("table", TokenEmbedding(20, 4), tokens=[f"word{row}" for row in range(20)]))


def test_logits_and_probabilities_are_those_of_a_tied_head(story, table):
    embedding = torch.nn.Embedding.from_pretrained(table)
    for hidden in ([1, -0.5, 0.5, 0], [0, 0, 0, 0], [4, -4, 4, -4], table[5].tolist()):
        found = story("back.read(hidden)", hidden=hidden)
        logits = torch.tensor(hidden, dtype=torch.float64) @ embedding.weight.T
        np.testing.assert_allclose(found["logits"], logits, atol=1e-12)
        np.testing.assert_allclose(found["probabilities"], logits.softmax(-1), atol=1e-12)
        assert story("m.indexOfLargest(numbers)", numbers=logits.tolist()) == int(logits.argmax())


def test_what_the_scene_says_about_rows_as_hidden_states_is_so(story, table):
    assert torch.equal(table, (100 * table).round() / 100), "all digits of W are shown"
    words = story("words.WORDS")
    on, cat = words.index("on"), words.index("cat")
    logits = table @ table.T
    assert words[int(logits[on].argmax())] == "<unk>", "the row of a token, as h, need not let it win"
    assert table[words.index("<unk>")].norm() > table[on].norm()
    assert int(logits[cat].argmax()) == cat
    assert logits[cat].softmax(-1)[cat] < 0.5, "the button alone does not do the task"


def test_a_small_probability_is_written_with_few_digits(in_page):
    probabilities = [0, 3e-27, 9.4e-7, 4e-6, 0.00042, 0.0234, 1]
    shown = in_page({"pictures": "pipeline/pictures.js"}, "numbers.map(pictures.percent)", numbers=probabilities)
    assert shown == ["0%", "3·10^−25%", "9·10^−5%", "0.0004%", "0.04%", "2.3%", "100.0%"]


# What is written out can be computed with a pocket calculator


def number(text):
    return float(text.strip("()%").replace("−", "-").replace("·10^", "e"))


def check_arithmetic(lines):
    """Compute both lines from the digits that they show: at most 2 in the last digit may differ."""
    product, probability = lines
    factors, z = product.split(" = ")[-2:]
    terms = [[number(factor) for factor in term.split(" · ")] for term in factors.split(" + ")]
    assert abs(sum(a * b for a, b in terms) - number(z)) < 2.01e-4
    check_probability(probability)


def check_probability(probability):
    """Compute the exponential and the quotient of a line from the digits that it shows."""
    exponent = re.search(r"exp\(([−\d.]+)(?: / ([\d.]+))?\)", probability)
    power = number(exponent[1]) / float(exponent[2] or 1)
    top, bottom = (number(part) for part in probability.split(" = ")[-2].split(" / "))
    last_digit = 10.0 ** (np.floor(np.log10(top)) - 3)
    assert abs(np.exp(power) - top) < 2.01 * last_digit
    shown = probability.split(" = ")[-1]
    unit = 10.0 ** -len(shown.strip("%").partition(".")[2])
    assert abs(100 * top / bottom - number(shown)) < 2.01 * unit


def lines_of(page):
    return page.locator(".logit-sum > span").all_inner_texts()


def test_every_number_of_the_scene_can_be_computed_from_those_that_are_shown(url, open_page, table):
    page = open_page(url + "#learn?s=back", again=True)
    for hidden, row in itertools.product(["1,-0.5,0.5,0", "0.61,0.35,-0.28,0.19", "4,-3.7,-4,2.2"], (0, 5, 7)):
        page.evaluate("hash => { location.hash = hash; }", f"#learn?s=back&back.h={hidden}&back.row={row}")
        page.locator(f'.learn-row[aria-pressed="true"] b:text-is("{row}")').wait_for()
        page.locator('[data-value="length"]').wait_for()
        check_arithmetic(lines_of(page))
        logits = table @ torch.tensor([float(value) for value in hidden.split(",")], dtype=torch.float64)
        shown = [number(text) for text in page.locator(".logit-z").all_inner_texts()]
        np.testing.assert_allclose(shown, logits, atol=5.01e-4)
        sums = page.locator(".logit-table tbody tr").last.locator("td").all_inner_texts()
        assert number(sums[2]) == pytest.approx(logits.exp().sum().item(), rel=1e-3)
        loss = -logits.log_softmax(-1)[5].item()
        assert number(page.locator('[data-value="loss"]').inner_text()) == pytest.approx(loss, abs=5.01e-4)
    page.locator('.learn-row:has(b:text-is("4"))').focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.title") == "Write out z of “on”", "the focus stays"
    page.get_by_role("button", name="Set h to the row of “on”").click()
    assert page.get_by_role("slider", name="h[0]").get_attribute("aria-valuetext") == "−0.27"
    page.get_by_role("region", name="Task").get_by_text("“<unk>” wins.").wait_for()
    page.get_by_role("link", name="See W[4] at the input").click()
    page.locator('[data-value="sum"]', has_text="= W[4]").wait_for()


def test_the_tiny_layer_shows_the_norm_and_every_product(tiny, tiny_choices, url, open_page):
    page = open_page(url + "#pipeline?layer=tiny&step=head&tied=0&position=rotary", again=True)
    page.locator(".logit-z").first.wait_for()
    values = steps_of(tiny("rotary", tied=False))["head"]["values"]
    x, h, z = (values[name][-1] for name in ("before_norm", "hidden", "logits"))
    cells = page.locator(".pipe-picture", has_text="The final norm").locator("td:not(:empty)")
    shown = [number(text) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(shown, [*x, *h], atol=5.01e-5)
    np.testing.assert_allclose([number(text) for text in page.locator(".logit-z").all_inner_texts()], z, atol=5.01e-4)
    root, first = page.locator(".pipe-picture", has_text="The final norm").locator(".pipe-fact").all_inner_texts()
    squares = [float(text) for text in re.findall(r"([\d.]+)²", root)]
    mean_square = sum(value**2 for value in squares) / 4 + float(re.search(r"\+ ([\d.]+)\) =", root)[1])
    assert mean_square**0.5 == pytest.approx(number(root.split(" = ")[1]), abs=1e-4)
    weight, x0, by, h0 = (number(text) for text in re.findall(r"−?\d\.\d{4}", first)[-4:])
    assert weight * x0 / by == pytest.approx(h0, abs=2e-4)
    for row, temperature in itertools.product((0, 6), ("1", "0.35", "2")):
        page.get_by_role("slider", name="Temperature").fill(temperature)
        page.locator(".logit-table .learn-row").nth(row).click()
        check_arithmetic(lines_of(page))
        logit = page.locator(".next-logits li", has_text=tiny_choices["words"][row]).locator(".pipe-logit").inner_text()
        assert number(logit) == pytest.approx(float(z[row]) / float(temperature), abs=5.01e-3)
        assert f"row={row}" in page.evaluate("location.href")
    page.get_by_role("slider", name="Temperature").fill("0")
    assert lines_of(page)[1] == "At temperature 0 the largest logit has p = 100%."
