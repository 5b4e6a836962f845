/** Charts on a canvas: lines over steps, bars of a histogram; with axes, grid, and what stands under the pointer. */

import { fit, h, onResize } from "./dom.js";

/**
 * Round numbers that divide a range well.
 * @param {number} low @param {number} high @param {number} about how many
 * @returns {number[]}
 */
export function ticks(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

/** Powers of ten inside a range. */
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.floor(Math.log10(high) + 1e-9); power++) found.push(10 ** power);
  return found;
}

/** A number as short as it can be read. @param {number} value */
export function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}

/**
 * @typedef {{name: string, xs: ArrayLike<number>, ys: ArrayLike<number>, colour: string, kind?: "line" | "bars" | "dots", dash?: number[], width?: number}} Series
 *   bars: `xs` are left edges, one more than `ys`
 * @typedef {{series: Series[], xLabel: string, yLabel: string, xLog?: boolean, yLog?: boolean, zero?: boolean, yFloor?: number, rules?: {at: number, text: string, colour: string, upright?: boolean}[],
 *   read?: (index: number) => string, onPick?: (index: number) => void}} Chart
 */

/**
 * A chart that follows its size, the theme and the pointer.
 * @param {() => Chart} describe called for each drawing, so that colours follow the theme
 * @param {{height?: number, label: string, theme: () => any}} options
 * @returns {{element: HTMLElement, redraw: () => void, close: () => void}}
 */
export function chart(describe, { height = 260, label, theme }) {
  const canvas = h("canvas", { role: "img", "aria-label": label });
  const reading = h("p", { class: "note chart-reading", "aria-live": "off" }, "\u00a0");
  const element = h("div", { class: "chart" }, canvas, reading);
  let width = 0;
  let pointer = null;
  let layout = null;
  const redraw = () => { if (width) layout = draw(canvas, describe(), width, height, theme(), pointer, reading); };
  const stop = onResize(element, (wide) => { if (wide !== width) { width = wide; redraw(); } });
  const move = (event) => { const box = canvas.getBoundingClientRect(); pointer = [event.clientX - box.left, event.clientY - box.top]; redraw(); };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerdown", move);
  canvas.addEventListener("pointerleave", () => { pointer = null; redraw(); });
  canvas.addEventListener("click", () => { const about = describe(); if (about.onPick && layout?.index >= 0) about.onPick(layout.index); });
  document.addEventListener("themechange", redraw);
  return { element, redraw, close: () => { stop(); document.removeEventListener("themechange", redraw); } };
}

function draw(canvas, about, width, height, colours, pointer, reading) {
  const context = fit(canvas, width, height);
  const left = 52;
  const right = width - 10;
  const top = 26;
  const bottom = height - 38;
  const [xLow, xHigh] = extent(about.series.map((s) => s.xs), about.xLog);
  let [yLow, yHigh] = extent([...about.series.map((s) => s.ys), (about.rules ?? []).filter((r) => !r.upright).map((r) => r.at)], about.yLog);
  if (about.zero && !about.yLog) yLow = Math.min(0, yLow);
  if (about.yFloor) yLow = about.yFloor;
  if (!about.yLog) yHigh += (yHigh - yLow) * 0.04;
  const x = scale(xLow, xHigh, left, right, about.xLog);
  const y = scale(yLow, yHigh, bottom, top, about.yLog);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const value of about.yLog ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, height / 55)) {
    line(context, left, y(value), right, y(value), colours.line);
    context.fillStyle = colours.muted;
    context.fillText(short(value), left - 7, y(value));
  }
  context.textAlign = "center";
  for (const value of about.xLog ? logTicks(xLow, xHigh) : ticks(xLow, xHigh, width / 80)) {
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
    context.setLineDash([5, 4]);
    if (rule.upright) line(context, x(rule.at), top, x(rule.at), bottom, rule.colour);
    else line(context, left, y(rule.at), right, y(rule.at), rule.colour);
    context.setLineDash([]);
    context.fillStyle = rule.colour;
    context.textAlign = "right";
    if (rule.upright) { context.textAlign = x(rule.at) > (left + right) / 2 ? "right" : "left"; context.fillText(rule.text, x(rule.at) + (context.textAlign === "left" ? 5 : -5), top + 6); }
    else context.fillText(rule.text, right, y(rule.at) + (y(rule.at) < top + 20 ? 10 : -9));
  }
  return { index: read(context, about, pointer, { x, y, left, right, top, bottom }, colours, reading) };
}

function read(context, about, pointer, { x, y, left, right, top, bottom }, colours, reading) {
  const nothing = () => { reading.textContent = "\u00a0"; return -1; };
  if (!pointer || pointer[0] < left - 8 || pointer[0] > right + 8 || !about.read) return nothing();
  const first = about.series[0];
  const middle = (i) => (first.kind === "bars" ? (x(first.xs[i]) + x(first.xs[i + 1])) / 2 : x(first.xs[i]));
  let index = -1;
  for (let i = 0; i < first.ys.length; i++) if (index < 0 || Math.abs(middle(i) - pointer[0]) < Math.abs(middle(index) - pointer[0])) index = i;
  if (index < 0) return nothing();
  line(context, middle(index), top, middle(index), bottom, colours.muted);
  context.fillStyle = first.colour;
  if (first.kind !== "bars") { context.beginPath(); context.arc(middle(index), y(first.ys[index]), 4, 0, 7); context.fill(); }
  reading.textContent = about.read(index);
  return index;
}

function paint(context, { xs, ys, colour, kind = "line", dash = [], width = 2 }, x, y, bottom) {
  context.strokeStyle = colour;
  context.fillStyle = colour;
  if (kind === "bars") {
    for (let i = 0; i < ys.length; i++) {
      if (!(ys[i] > 0)) continue;
      const from = x(xs[i]);
      const to = x(xs[i + 1]);
      context.fillRect(from, y(ys[i]), Math.max(1, to - from - (to - from > 4 ? 1 : 0)), bottom - y(ys[i]));
    }
    return;
  }
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  for (let i = 0; i < ys.length; i++) {
    if (kind === "dots") { context.moveTo(x(xs[i]) + 2.5, y(ys[i])); context.arc(x(xs[i]), y(ys[i]), 2.5, 0, 7); }
    else if (i) context.lineTo(x(xs[i]), y(ys[i]));
    else context.moveTo(x(xs[i]), y(ys[i]));
  }
  if (kind === "dots") context.fill();
  else context.stroke();
  context.setLineDash([]);
}

function line(context, x0, y0, x1, y1, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  context.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  context.stroke();
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

function scale(low, high, from, to, isLog) {
  const at = isLog ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const [a, b] = [at(low), at(high)];
  return (value) => from + ((at(value) - a) / (b - a || 1)) * (to - from);
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

/** Names of lines with their colours. @param {{name: string, colour: string, dash?: number[]}[]} series */
export function key(series) {
  return h("p", { class: "chart-key" }, series.map(({ name, colour, dash }) => {
    const swatch = h("i", { class: dash ? "is-dashed" : null });
    swatch.style.borderColor = colour;
    return h("span", null, swatch, name);
  }));
}
