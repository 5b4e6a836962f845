/** Charts on a canvas: lines over steps, bars of a histogram; with axes, grid, and what stands under the pointer. */

import { fit, h, onResize } from "./dom.js";
import { logTicks, scale, short, straight, ticks, trace } from "./lines.js";

/**
 * @typedef {{xs: ArrayLike<number>, ys: ArrayLike<number>, colour: string, kind?: "line" | "bars" | "dots", width?: number}} Series
 *   bars: `xs` are left edges, one more than `ys`
 * @typedef {{series: Series[], xLabel: string, yLabel: string, yLog?: boolean, zero?: boolean, yFloor?: number, rules?: {at: number, text: string, colour: string, upright?: boolean}[],
 *   read?: (index: number) => string}} Chart
 */

/**
 * A chart that follows its size, the theme and the pointer.
 * @param {() => Chart} describe called for each drawing, so that colours follow the theme
 * @param {{height?: number, label: string, theme: () => any}} options
 * @returns {{element: HTMLElement, close: () => void}}
 */
export function chart(describe, { height = 260, label, theme }) {
  const canvas = h("canvas", { role: "img", "aria-label": label });
  const reading = h("p", { class: "note chart-reading", "aria-live": "off" }, "\u00a0");
  const element = h("div", { class: "chart" }, canvas, reading);
  let width = 0;
  let pointer = null;
  const redraw = () => { if (width) draw(canvas, describe(), width, height, theme(), pointer, reading); };
  const stop = onResize(element, (wide) => { if (wide !== width) { width = wide; redraw(); } });
  const move = (event) => { const box = canvas.getBoundingClientRect(); pointer = [event.clientX - box.left, event.clientY - box.top]; redraw(); };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerdown", move);
  canvas.addEventListener("pointerleave", () => { pointer = null; redraw(); });
  document.addEventListener("themechange", redraw);
  return { element, close: () => { stop(); document.removeEventListener("themechange", redraw); } };
}

function draw(canvas, about, width, height, colours, pointer, reading) {
  const context = fit(canvas, width, height);
  const left = 52;
  const right = width - 10;
  const top = 26;
  const bottom = height - 38;
  const [xLow, xHigh] = extent(about.series.map((s) => s.xs), false);
  let [yLow, yHigh] = extent([...about.series.map((s) => s.ys), (about.rules ?? []).filter((r) => !r.upright).map((r) => r.at)], about.yLog);
  if (about.zero && !about.yLog) yLow = Math.min(0, yLow);
  if (about.yFloor) yLow = about.yFloor;
  if (!about.yLog) yHigh += (yHigh - yLow) * 0.04;
  const x = scale(xLow, xHigh, left, right);
  const y = scale(yLow, yHigh, bottom, top, about.yLog);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  context.textAlign = "right";
  for (const value of about.yLog ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, height / 55)) {
    line(context, left, y(value), right, y(value), colours.line);
    context.fillStyle = colours.muted;
    context.fillText(short(value), left - 7, y(value));
  }
  context.textAlign = "center";
  for (const value of ticks(xLow, xHigh, width / 80)) {
    context.fillStyle = colours.muted;
    context.fillText(short(value), x(value), bottom + 13);
  }
  context.textAlign = "right";
  context.fillText(about.xLabel, right, height - 8);
  context.textAlign = "left";
  context.fillText(about.yLabel, 4, 8);
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left + 4, bottom + 1);
  context.clip();
  for (const series of about.series) paint(context, series, x, y, bottom);
  context.restore();
  for (const rule of about.rules ?? []) {
    if (rule.upright) line(context, x(rule.at), top, x(rule.at), bottom, rule.colour, [5, 4]);
    else line(context, left, y(rule.at), right, y(rule.at), rule.colour, [5, 4]);
    context.fillStyle = rule.colour;
    context.textAlign = "right";
    if (rule.upright) { context.textAlign = x(rule.at) > (left + right) / 2 ? "right" : "left"; context.fillText(rule.text, x(rule.at) + (context.textAlign === "left" ? 5 : -5), top + 6); }
    else context.fillText(rule.text, right, y(rule.at) + (y(rule.at) < top + 20 ? 10 : -9));
  }
  reading.textContent = read(context, about, pointer, { x, y, left, right, top, bottom }, colours) ?? "\u00a0";
}

/** Mark what is nearest to the pointer; returns what there is to say of it. */
function read(context, about, pointer, { x, y, left, right, top, bottom }, colours) {
  const first = about.series[0];
  if (!pointer || pointer[0] < left - 8 || pointer[0] > right + 8 || !about.read || !first.ys.length) return null;
  const middle = (i) => (first.kind === "bars" ? (x(first.xs[i]) + x(first.xs[i + 1])) / 2 : x(first.xs[i]));
  let index = 0;
  for (let i = 1; i < first.ys.length; i++) if (Math.abs(middle(i) - pointer[0]) < Math.abs(middle(index) - pointer[0])) index = i;
  line(context, middle(index), top, middle(index), bottom, colours.muted);
  context.fillStyle = first.colour;
  if (first.kind !== "bars") { context.beginPath(); context.arc(middle(index), y(first.ys[index]), 4, 0, 7); context.fill(); }
  return about.read(index);
}

function paint(context, { xs, ys, colour, kind, width }, x, y, bottom) {
  if (kind !== "bars") return trace(context, (i) => x(xs[i]), y, ys, { colour, width, dots: kind === "dots" });
  context.fillStyle = colour;
  for (let i = 0; i < ys.length; i++) {
    if (!(ys[i] > 0)) continue;
    const from = x(xs[i]);
    const to = x(xs[i + 1]);
    context.fillRect(from, y(ys[i]), Math.max(1, to - from - (to - from > 4 ? 1 : 0)), bottom - y(ys[i]));
  }
}

/** A straight line that fills its pixels. */
function line(context, x0, y0, x1, y1, colour, dash) {
  const crisp = (value) => Math.round(value) + 0.5;
  straight(context, crisp(x0), crisp(y0), crisp(x1), crisp(y1), colour, dash);
}

function extent(lists, isLog) {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (let i = 0; i < list.length; i++) {
      const value = list[i];
      if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (!(high >= low)) return isLog ? [1, 10] : [0, 1];
  if (high === low) return isLog ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  return [low, high];
}

/**
 * A histogram: counts between evenly spaced edges.
 * @param {ArrayLike<number>} values @param {number} low @param {number} high @param {number} bins
 * @returns {{edges: Float64Array, counts: Float64Array}}
 */
export function histogram(values, low, high, bins) {
  const edges = Float64Array.from({ length: bins + 1 }, (_, i) => low + ((high - low) * i) / bins);
  const counts = new Float64Array(bins);
  const factor = bins / (high - low || 1);
  for (let i = 0; i < values.length; i++) {
    const place = Math.floor((values[i] - low) * factor);
    if (place >= 0 && place < bins) counts[place]++;
    else if (values[i] === high) counts[bins - 1]++;
  }
  return { edges, counts };
}

/** Names of lines with their colours. @param {{name: string, colour: string}[]} series */
export function key(series) {
  return h("p", { class: "chart-key" }, series.map(({ name, colour }) => {
    const swatch = h("i");
    swatch.style.borderColor = colour;
    return h("span", null, swatch, name);
  }));
}
