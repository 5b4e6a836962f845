"""Every canvas chart against its own axes and legend."""

import re
from typing import Any

import numpy as np
import pytest

DRAWN = """(async () => {
    const place = document.body.appendChild(document.createElement("div"));
    place.style.cssText = "position: fixed; inset: 0 auto auto 0; width: 420px; z-index: 9";
    const [calls, { prototype }] = [[], CanvasRenderingContext2D];
    for (const name of ["fillText", "arc", "moveTo", "lineTo", "fillRect", "strokeRect"]) {
        const draw = prototype[name];
        prototype[name] = function (...values) {
            calls.push([name, values, /Text|Rect|arc/.test(name) ? this.fillStyle : this.strokeStyle, this.textAlign]);
            draw.apply(this, values);
        };
    }
    const part = PART;
    place.append(part.element);
    await new Promise((resolve) => setTimeout(resolve, 60));
    const canvas = place.querySelector("canvas");
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const drawn = [...new Map(calls.splice(0).map((call) => [JSON.stringify(call), call])).values()];
    const at = points.length ? points.map(([x, y]) => [x * width, y * height])
        : drawn.filter(([name]) => name === "arc").map(([, [x, y]]) => [x, y]);
    const said = () => place.querySelector("output, .chart-reading").textContent;
    const send = (name, [x, y]) => canvas.dispatchEvent(
        new PointerEvent(name, { clientX: left + x, clientY: top + y, bubbles: true }));
    const read = at.map((point, i) => (send(i % 2 ? "pointermove" : "pointerdown", point), said()));
    send("pointerleave", [0, 0]);
    const typed = keys.map((key) => {
        const [shiftKey, name] = [key.startsWith("Shift"), key.replace("Shift", "")];
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, shiftKey }));
        return said();
    });
    canvas.dispatchEvent(new Event("blur"));
    const pixel = (target, x, y) => [...target.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3)];
    const bar = place.querySelector(".heat-bar");
    const swatches = [...place.querySelectorAll(".curves-legend i")].map((each) => each.style.background);
    const found = {
        drawn, read, typed, swatches, cells: at.map(([x, y]) => pixel(canvas, x, y)), last: said(),
        ramp: bar ? Array.from({ length: bar.width }, (_, x) => pixel(bar, x, 4)) : [],
        ends: [...place.querySelectorAll(".heat-legend span")].map((each) => each.textContent),
    };
    part.close();
    place.remove();
    return found;
})()"""

VALUES = [0.5, -1.25, None, 2.0, 0.25, -0.75]
OTHERS = [1.0, 1.5, -0.5, 0.0, None, -2.0]


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def drawn(in_page: Any, part: str, *, points: Any = (), keys: Any = (), **values: Any) -> dict[str, Any]:
    modules = {"heat": "charts/heat.js", "curves": "charts/curves.js", "chart": "charts/chart.js"}
    return in_page(modules, DRAWN.replace("PART", part), points=list(points), keys=list(keys), **values)


def from_axes(calls: list[Any]) -> Any:
    """Return the function from pixels to numbers that the labels of the two axes say; they must be evenly spaced."""
    labels = [each[1] + [each[3]] for each in calls if each[0] == "fillText" and re.fullmatch(r"[−\d.,]+", each[1][0])]
    bottom = max(label[2] for label in labels)
    lines = []
    for place, some in ((1, [label for label in labels if label[2] == bottom]),
                        (2, [label for label in labels if label[2] != bottom])):  # fmt: skip
        pixels, numbers = np.array([[label[place], number(label[0])] for label in some]).T
        lines.append(np.polyfit(pixels, numbers, 1))
        np.testing.assert_allclose(np.polyval(lines[-1], pixels), numbers, atol=0.02 * np.ptp(numbers))
    return lambda x, y: [float(np.polyval(line, at)) for line, at in zip(lines, (x, y), strict=True)]


def finite(values: list[float | None], first: int = 0) -> list[list[float]]:
    return [[first + i, value] for i, value in enumerate(values) if value is not None]


def test_curves_have_their_values_at_their_axes_under_the_pointer_and_under_the_keys(in_page):
    code = """(() => {
        const made = new curves.Curves({ label: "values", axes: ["place", "value"], onPick: () => {} });
        const list = (values) => Float64Array.from(values, (value) => value ?? NaN);
        made.show([{ name: "a", colour: 1, values: list(first), dots: true },
            { name: "b", colour: 2, values: list(second) }], { start: 4, marks: [{ at: 1, text: "mark" }] });
        return made;
    })()"""
    keys = ["ArrowRight", "ArrowRight", "ShiftArrowRight", "ArrowLeft", "ShiftArrowLeft"]
    found = drawn(in_page, code, keys=keys, first=VALUES, second=OTHERS)
    to_data = from_axes(found["drawn"])
    dots = [to_data(*call[1][:2]) for call in found["drawn"] if call[0] == "arc"]
    np.testing.assert_allclose(dots, finite(VALUES, 4), atol=0.03)
    colours = [call[2] for call in found["drawn"] if call[0] == "arc"]
    line = [call for call in found["drawn"] if call[0].endswith("To") and call[2] != colours[0]]
    ends = [to_data(*call[1]) for call in line]
    for point in finite(OTHERS, 4):
        assert np.abs(np.array(ends) - point).sum(1).min() < 0.05
    (mark,) = [call[1] for call in found["drawn"] if call[0] == "fillText" and call[1][0] == "mark"]
    assert to_data(*mark[1:])[0] == pytest.approx(5, abs=0.2)

    def said(place: int) -> str:
        names = [(name, values[place]) for name, values in (("a", VALUES), ("b", OTHERS)) if values[place] is not None]
        return f"place {4 + place} · " + " · ".join(f"{name} {value:.4f}" for name, value in names).replace("-", "−")

    assert found["read"] == [said(int(x) - 4) for x, _ in finite(VALUES, 4)]
    assert found["typed"] == [said(place) for place in (0, 1, 5, 4, 0)]
    assert found["last"] == "use the pointer or the arrow keys"
    rgb = re.findall(r"\d+", found["swatches"][0])
    assert "#" + "".join(f"{int(part):02x}" for part in rgb) == colours[0]


@pytest.mark.parametrize("is_log", [False, True])
def test_a_chart_has_its_values_at_its_axes_and_under_the_pointer(in_page, is_log):
    code = """chart.chart(() => ({
        series: [{ xs, ys, colour: "rgb(1, 2, 3)", kind: "dots" },
            { xs, ys: ys.map((y) => y * 2), colour: "rgb(4, 5, 6)" },
            { xs: [...xs, 12], ys, colour: "rgb(7, 8, 9)", kind: "bars" }],
        xLabel: "step", yLabel: "value", yLog: isLog, zero: true, read: (i) => `point ${i}`,
        rules: [{ at: 3, text: "limit", colour: "rgb(9, 9, 9)" },
            { at: 5, text: "here", colour: "rgb(8, 8, 8)", upright: true }],
    }), { label: "values" })"""
    xs, ys = [0, 1, 3, 7, 11], [1.5, 12.0, 4.0, 30.0, 120.0 if is_log else 2.0]
    found = drawn(in_page, code, xs=xs, ys=ys, isLog=is_log)
    calls = found["drawn"]
    for call in calls:
        if is_log and call[0] == "fillText" and re.fullmatch(r"[\d.,]+", call[1][0]) and call[3] == "right":
            call[1][0] = str(np.log10(number(call[1][0])))
    to_data = from_axes(calls)
    expected = np.log10(ys) if is_log else np.array(ys)
    tolerance = 0.02 * np.ptp(expected)
    dots = [to_data(*call[1][:2]) for call in calls if call[0] == "arc"]
    np.testing.assert_allclose(dots, np.transpose([xs, expected]), atol=tolerance + 0.1)
    line = np.array([to_data(*call[1]) for call in calls if call[0].endswith("To") and call[2] == "#040506"])
    np.testing.assert_allclose(line[:, 1], expected + np.log10(2) if is_log else 2 * expected, atol=tolerance)
    bars = [call[1] for call in calls if call[0] == "fillRect" and call[2] == "#070809"]
    tops = np.array([to_data(x, y) for x, y, _, _ in bars])
    np.testing.assert_allclose(tops, np.transpose([xs, expected]), atol=tolerance + 0.1)
    ends = [to_data(x + width, y + height) for x, y, width, height in bars]
    assert [round(x) for x, _ in ends] == [*xs[1:], 12]
    assert np.ptp([y for _, y in ends]) < tolerance
    texts = {call[1][0]: call[1][1:] for call in calls if call[0] == "fillText"}
    assert to_data(*texts["here"])[0] == pytest.approx(5, abs=0.3)
    assert to_data(*texts["limit"])[1] == pytest.approx(np.log10(3) if is_log else 3, abs=10 * tolerance)
    assert found["read"] == [f"point {i}" for i in range(5)]
    assert found["last"].strip() == ""


@pytest.mark.parametrize("is_square", [False, True])
def test_a_heat_map_has_the_colours_of_its_legend_and_says_the_number_of_each_cell(in_page, is_square):
    values = np.round(np.random.default_rng(0).uniform(-2, 2, (4, 12)), 2)
    code = """(() => {
        const made = new heat.HeatMap({ label: "values", unit: "unit", square: isSquare, axes: ["column", "row"],
            rowName: (r) => `row ${r}`, columnName: (c) => `column ${c}`, cellHeight: 20 });
        const data = Float64Array.from(values.flat());
        data[5] = NaN;
        made.show({ rows: 4, cols: 12, data }, { limit: 2 });
        return made;
    })()"""
    points = [((c + 0.5) / 12, (r + 0.5) / 4) for r in range(4) for c in range(12)]
    keys = ["ArrowDown", "ArrowRight", "ShiftArrowRight", "End", "ArrowUp", "Home", "ShiftArrowRight", "ArrowLeft"]
    found = drawn(in_page, code, points=points, keys=keys, values=values.tolist(), isSquare=is_square)

    def said(r: int, c: int) -> str:
        shown = "none" if (r, c) == (0, 5) else f"{values[r, c]:.4f}".replace("-", "−")
        return f"{shown} row {r} · column {c}"

    assert found["read"] == [said(r, c) for r in range(4) for c in range(12)]
    walk = [(1, 0), (1, 1), (1, 11), (1, 11), (0, 11), (0, 0), (0, 10), (0, 9)]
    assert found["typed"] == [said(*cell) for cell in walk]
    assert found["ends"] == ["unit", "−2", "+2"]
    ramp, cells = np.array(found["ramp"], float), np.array(found["cells"], float)
    steps = (values.flatten() / 2 + 1) / 2 * (len(ramp) - 1)
    legend = np.stack([np.interp(steps, np.arange(len(ramp)), ramp[:, i]) for i in range(3)], 1)
    known = np.arange(48) != 5
    np.testing.assert_allclose(cells[known], legend[known], atol=6)
    assert np.abs(ramp - cells[5]).sum(1).min() > 10, "a missing number has a colour of its own"
