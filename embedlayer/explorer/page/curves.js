/** Curves over positions or distances on Canvas2D, with their numbers under the pointer or the arrow keys. */

import { fit, h, onResize } from "./dom.js";
import { palette, shown } from "./heat.js";
import { scale, straight, ticks, trace } from "./lines.js";

/** @typedef {{name: string, colour: number, values: ArrayLike<number>, thin?: boolean, dots?: boolean}} Series `colour`: of the theme's eight, from 0 */

/**
 * @param {{label: string, axes: [string, string], height?: number, xName?: (index: number) => string, legend?: boolean,
 *   onPick?: (index: number) => void}} options
 */
export function curves({ label, axes, height = 190, xName = (index) => `${axes[0]} ${index}`, legend = true, onPick }) {
  const canvas = h("canvas", { tabIndex: 0, role: "img", class: "curves-canvas" });
  const names = h("div", { class: "curves-legend" });
  const readout = h("output", { class: "heat-readout", "aria-live": "polite" });
  const box = h("div", { class: "heat-canvas-box" }, canvas);
  const element = h("figure", { class: "heat curves" },
    h("div", { class: "heat-axis" }, h("span", null, axes[1]), legend ? names : null), box, h("figcaption", { class: "heat-foot" }, readout));
  const view = { series: [], marks: [], start: 0, shadeFrom: Infinity, low: -1, high: 1, width: 0, cursor: null };
  const margin = { left: 46, right: 10, top: 8, bottom: 22 };

  const length = () => Math.max(1, ...view.series.map((each) => each.values.length));
  const across = (index) => scale(0, length() - 1, margin.left, view.width - margin.right)(index);
  const up = (value) => scale(view.low, view.high, height - margin.bottom, margin.top)(value);
  const upright = (context, index, colour, dash) => straight(context, across(index), margin.top, across(index), height - margin.bottom, colour, dash);

  const draw = () => {
    if (view.width < 60 || !view.series.length) return;
    const colours = palette();
    const context = fit(canvas, view.width, height);
    context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(view.low, view.high, 5)) {
      straight(context, margin.left, up(value), view.width - margin.right, up(value), value === 0 ? colours.muted : colours.line);
      context.fillStyle = colours.muted;
      context.fillText(String(value).replace("-", "−"), margin.left - 6, up(value));
    }
    context.textBaseline = "top";
    const last = length() - 1;
    for (const index of ticks(view.start, view.start + last, Math.max(2, Math.floor(view.width / 110))).map((place) => place - view.start)) {
      if (!Number.isInteger(index)) continue;
      context.textAlign = index === last ? "right" : index ? "center" : "left";
      context.fillText(String(index + view.start).replace("-", "−"), across(index), height - margin.bottom + 6);
    }
    context.textAlign = "right";
    if (view.shadeFrom <= last) shade(context, across(Math.max(0, view.shadeFrom)), colours);
    for (const { at, colour, text, side } of view.marks) {
      if (at < 0 || at > last) continue;
      upright(context, at, colour === undefined ? colours.ink : colours.series[colour], [4, 3]);
      context.fillStyle = colours.ink;
      const isLeft = side ? side === "left" : at > last / 2;
      context.textAlign = isLeft ? "right" : "left";
      context.fillText(text, across(at) + (isLeft ? -4 : 4), margin.top);
    }
    for (const each of view.series) {
      context.globalAlpha = each.thin ? 0.45 : 1;
      trace(context, across, up, each.values, { colour: colours.series[each.colour % 8], width: each.thin ? 1 : 2, dots: each.dots });
      context.globalAlpha = 1;
    }
    if (view.cursor !== null) upright(context, view.cursor, colours.ink);
  };

  const shade = (context, from, colours) => {
    const [right, bottom] = [view.width - margin.right, height - margin.bottom];
    context.save();
    context.beginPath();
    context.rect(from, margin.top, right - from, bottom - margin.top);
    context.clip();
    context.strokeStyle = colours.muted;
    context.globalAlpha = 0.5;
    context.beginPath();
    for (let x = from - bottom; x < right; x += 7) {
      context.moveTo(x, bottom);
      context.lineTo(x + bottom, 0);
    }
    context.stroke();
    context.restore();
  };

  const say = () => {
    if (view.cursor === null) return readout.replaceChildren(h("span", { class: "heat-hint" }, "point, or use the arrow keys"));
    const present = view.series.filter((each) => !each.thin && Number.isFinite(each.values[view.cursor]));
    const said = (present.length ? present : view.series).slice(0, 4).map((each) => `${each.name} ${shown(each.values[view.cursor] ?? Number.NaN)}`);
    readout.replaceChildren(h("span", null, xName(view.cursor + view.start)), ` · ${said.join(" · ")}`);
  };
  const point = (index) => {
    view.cursor = index;
    say();
    draw();
  };
  const indexAt = (event) => {
    const { left } = canvas.getBoundingClientRect();
    const share = (event.clientX - left - margin.left) / (view.width - margin.left - margin.right);
    return Math.min(length() - 1, Math.max(0, Math.round(share * (length() - 1))));
  };
  canvas.addEventListener("pointermove", (event) => point(indexAt(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("click", (event) => onPick?.(indexAt(event) + view.start));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    point(Math.min(length() - 1, Math.max(0, (view.cursor ?? -by) + by * (event.shiftKey ? 10 : 1))));
    event.preventDefault();
    event.stopPropagation();
  });
  const stop = onResize(box, (width) => {
    view.width = width;
    draw();
  });
  document.addEventListener("themechange", show);

  function show() {
    const { series } = palette();
    names.replaceChildren(...view.series.filter((each) => !each.thin).slice(0, 8).map((each) => {
      const swatch = h("i");
      swatch.style.background = series[each.colour % 8];
      return h("span", null, swatch, each.name);
    }));
    draw();
    say();
  }

  return {
    element,
    canvas,
    /** @param {Series[]} series @param {{start?: number, shadeFrom?: number, marks?: {at: number, text: string, colour?: number, side?: "left" | "right"}[], range?: [number, number]}} [more] */
    show(series, { start = 0, shadeFrom = Infinity, marks = [], range } = {}) {
      const values = series.flatMap((each) => Array.from(each.values).filter(Number.isFinite));
      const [low, high] = range ?? [Math.min(0, ...values), Math.max(0, ...values)];
      const room = range ? 0 : 0.05 * (high - low || 1);
      Object.assign(view, { series, start, shadeFrom, marks, low: low - (low < 0 ? room : 0), high: high + (high > 0 ? room : 0), cursor: null });
      canvas.setAttribute("aria-label", `${label}. Arrow keys read the numbers.`);
      show();
    },
    close() {
      stop();
      document.removeEventListener("themechange", show);
    },
  };
}
