/** Charts on a canvas: curves over steps and histograms, with axes, grid, and the values under the pointer as text. */

import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";
import { logTicks, scale, straight, ticks, trace } from "./lines.js";
import { short } from "./numbers.js";

/** @import { Closable, Context2D, Point, Theme } from "../types" */
/** @import { Scale } from "./lines.js" */

/**
 * @typedef {object} Series
 * @property {ArrayLike<number>} xs of bars: left edges, one more than `ys`
 * @property {ArrayLike<number>} ys
 * @property {string} colour
 * @property {"line" | "bars" | "dots"} [kind]
 * @property {number} [width]
 *
 * @typedef {{at: number, text: string, colour: string, upright?: boolean}} Rule a dashed line across the chart
 *
 * @typedef {object} Chart
 * @property {Series[]} series
 * @property {string} xLabel
 * @property {string} yLabel
 * @property {boolean} [yLog]
 * @property {boolean} [zero] whether the vertical axis includes 0
 * @property {number} [yFloor] lower end of the vertical axis
 * @property {Rule[]} [rules]
 * @property {(index: number) => string} [read] text for point `index` of the first series
 *
 * @typedef {object} Frame the plotted rectangle
 * @property {Scale} x
 * @property {Scale} y
 * @property {number} left
 * @property {number} right
 * @property {number} top
 * @property {number} bottom
 * @property {Point} xRange
 * @property {Point} yRange
 */

/**
 * Create a chart that follows its size, the theme and the pointer.
 * @param {(colours: Theme) => Chart} describe called for each drawing
 * @param {{height?: number, label: string}} options
 * @returns {Closable & {redraw: () => void}}
 */
export function chart(describe, { height = 260, label }) {
  const canvas = h("canvas", { role: "img", "aria-label": label });
  const reading = h("p", { class: "note chart-reading", "aria-live": "off" }, "\u00a0");
  const element = h("div", { class: "chart" }, canvas, reading);
  let width = 0;
  /** @type {Point | null} */
  let pointer = null;
  const redraw = () => {
    if (width) reading.textContent = draw(canvas, describe(theme()), width, height, pointer) ?? "\u00a0";
  };
  /** @param {PointerEvent} event */
  const move = (event) => {
    const box = canvas.getBoundingClientRect();
    pointer = [event.clientX - box.left, event.clientY - box.top];
    redraw();
  };
  const stop = onResize(element, (wide) => {
    if (wide === width) return;
    width = wide;
    redraw();
  });
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerdown", move);
  canvas.addEventListener("pointerleave", () => {
    pointer = null;
    redraw();
  });
  document.addEventListener("themechange", redraw);
  const close = () => {
    stop();
    document.removeEventListener("themechange", redraw);
  };
  return { element, close, redraw };
}

/**
 * Draw a chart; return the text for the point nearest to the pointer.
 * @param {HTMLCanvasElement} canvas
 * @param {Chart} about
 * @param {number} width
 * @param {number} height
 * @param {Point | null} pointer
 */
function draw(canvas, about, width, height, pointer) {
  const context = fit(canvas, width, height);
  const colours = theme();
  const frame = frameOf(about, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  drawAxes(context, about, frame, width, height, colours);
  context.save();
  context.beginPath();
  context.rect(frame.left, 0, frame.right - frame.left + 4, frame.bottom + 1);
  context.clip();
  for (const series of about.series) drawSeries(context, series, frame);
  context.restore();
  (about.rules ?? []).forEach((rule, line) => drawRule(context, rule, frame, line));
  return read(context, about, pointer, frame, colours);
}

/** @param {Chart} about @param {number} width @param {number} height @returns {Frame} */
function frameOf(about, width, height) {
  const [left, right, top, bottom] = [52, width - 10, 26, height - 38];
  const isLog = about.yLog ?? false;
  const rules = (about.rules ?? []).filter((rule) => !rule.upright).map((rule) => rule.at);
  const xRange = extent(about.series.map((each) => each.xs), false);
  let [low, high] = extent([...about.series.map((each) => each.ys), rules], isLog);
  if (about.zero && !isLog) low = Math.min(0, low);
  if (about.yFloor) low = about.yFloor;
  if (!isLog) high += (high - low) * 0.04;
  const x = scale(xRange[0], xRange[1], left, right);
  return { x, y: scale(low, high, bottom, top, isLog), left, right, top, bottom, xRange, yRange: [low, high] };
}

/**
 * @param {Context2D} context
 * @param {Chart} about
 * @param {Frame} frame
 * @param {number} width
 * @param {number} height
 * @param {Theme} colours
 */
function drawAxes(context, about, frame, width, height, colours) {
  const { left, right, bottom, x, y, xRange, yRange } = frame;
  context.textAlign = "right";
  for (const value of about.yLog ? logTicks(...yRange) : ticks(...yRange, height / 55)) {
    line(context, left, y(value), right, y(value), colours.line);
    context.fillStyle = colours.muted;
    context.fillText(short(value), left - 7, y(value));
  }
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  for (const value of ticks(...xRange, width / 80)) context.fillText(short(value), x(value), bottom + 13);
  context.textAlign = "right";
  context.fillText(about.xLabel, right, height - 8);
  context.textAlign = "left";
  context.fillText(about.yLabel, 4, 8);
}

/** @param {Context2D} context @param {Series} series @param {Frame} frame */
function drawSeries(context, { xs, ys, colour, kind, width }, { x, y, bottom }) {
  if (kind !== "bars") return trace(context, (i) => x(xs[i]), y, ys, { colour, width, dots: kind === "dots" });
  context.fillStyle = colour;
  for (let i = 0; i < ys.length; i++) {
    if (!(ys[i] > 0)) continue;
    const [from, to] = [x(xs[i]), x(xs[i + 1])];
    context.fillRect(from, y(ys[i]), Math.max(1, to - from - (to - from > 4 ? 1 : 0)), bottom - y(ys[i]));
  }
}

/** @param {Context2D} context @param {Rule} rule @param {Frame} frame @param {number} place among the rules */
function drawRule(context, { at, text, colour, upright }, { x, y, left, right, top, bottom }, place) {
  context.fillStyle = colour;
  if (upright) {
    const isRight = x(at) > (left + right) / 2;
    line(context, x(at), top, x(at), bottom, colour, [5, 4]);
    context.textAlign = isRight ? "right" : "left";
    context.strokeStyle = theme().paper;
    context.lineWidth = 4;
    context.strokeText(text, x(at) + (isRight ? -5 : 5), top + 6 + 15 * place);
    context.fillText(text, x(at) + (isRight ? -5 : 5), top + 6 + 15 * place);
  } else {
    line(context, left, y(at), right, y(at), colour, [5, 4]);
    context.textAlign = "right";
    context.fillText(text, right, y(at) + (y(at) < top + 20 ? 10 : -9));
  }
}

/**
 * Mark the point nearest to the pointer and return its text.
 * @param {Context2D} context
 * @param {Chart} about
 * @param {Point | null} pointer
 * @param {Frame} frame
 * @param {Theme} colours
 */
function read(context, about, pointer, { x, y, left, right, top, bottom }, colours) {
  const first = about.series[0];
  if (!pointer || pointer[0] < left - 8 || pointer[0] > right + 8 || !about.read || !first.ys.length) return null;
  const isBars = first.kind === "bars";
  /** @param {number} i */
  const middle = (i) => (isBars ? (x(first.xs[i]) + x(first.xs[i + 1])) / 2 : x(first.xs[i]));
  let index = 0;
  for (let i = 1; i < first.ys.length; i++) {
    if (Math.abs(middle(i) - pointer[0]) < Math.abs(middle(index) - pointer[0])) index = i;
  }
  line(context, middle(index), top, middle(index), bottom, colours.muted);
  context.fillStyle = first.colour;
  if (!isBars && Number.isFinite(first.ys[index])) {
    context.beginPath();
    context.arc(middle(index), y(first.ys[index]), 4, 0, 7);
    context.fill();
  }
  return about.read(index);
}

/**
 * Draw a straight line on whole pixels.
 * @param {Context2D} context
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 * @param {string} colour
 * @param {number[]} [dash]
 */
function line(context, x0, y0, x1, y1, colour, dash) {
  /** @param {number} value */
  const crisp = (value) => Math.round(value) + 0.5;
  straight(context, crisp(x0), crisp(y0), crisp(x1), crisp(y1), colour, dash);
}

/** @param {ArrayLike<number>[]} lists @param {boolean} isLog @returns {Point} */
function extent(lists, isLog) {
  let [low, high] = [Infinity, -Infinity];
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
 * Count values between evenly spaced edges.
 * @param {ArrayLike<number>} values
 * @param {number} low
 * @param {number} high
 * @param {number} bins
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

/** Create the legend of a chart. @param {{name: string, colour: string}[]} series */
export function chartLegend(series) {
  return h("p", { class: "chart-key" }, series.map(({ name, colour }) => {
    const swatch = h("i");
    swatch.style.borderColor = colour;
    return h("span", null, swatch, name);
  }));
}
