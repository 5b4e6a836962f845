/** Curves over positions or distances on Canvas2D, and the numbers under the pointer or the arrow keys as text. */

import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";
import { diagonals, scale, straight, ticks, trace } from "./lines.js";
import { shown } from "./numbers.js";

/** @import { Context2D, Point, Theme } from "../types" */

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {number} colour number of a colour of the theme, from 0
 * @property {ArrayLike<number>} values
 * @property {boolean} [thin]
 * @property {boolean} [dots]
 *
 * @typedef {{at: number, text: string, colour?: number, side?: "left" | "right"}} CurveMark
 *
 * @typedef {object} CurveOptions
 * @property {string} label
 * @property {Point | string[]} axes names of the horizontal and of the vertical axis
 * @property {number} [height]
 * @property {(index: number) => string} [xName]
 * @property {boolean} [legend]
 * @property {(index: number) => void} [onPick]
 */

const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };

/** Curves with axes, marks and a cursor. */
export class Curves {
  /** @type {Series[]} */ #series = [];
  /** @type {CurveMark[]} */ #marks = [];
  /** @type {number | null} */ #cursor = null;
  #start = 0;
  #shadeFrom = Infinity;
  #low = -1;
  #high = 1;
  #width = 0;

  /** @param {CurveOptions} options */
  constructor(options) {
    const { axes, legend = true, height = 190 } = options;
    this.options = options;
    this.height = height;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: "curves-canvas" });
    this.names = h("div", { class: "curves-legend" });
    this.readout = h("output", { class: "heat-readout", "aria-live": "polite" });
    const box = h("div", { class: "heat-canvas-box" }, this.canvas);
    this.element = h("figure", { class: "heat curves" },
      h("div", { class: "heat-axis" }, h("span", null, axes[1]), legend ? this.names : null), box,
      h("figcaption", { class: "heat-foot" }, this.readout));
    this.#listen();
    this.stopResize = onResize(box, (width) => {
      this.#width = width;
      this.#draw();
    });
    document.addEventListener("themechange", this.#refresh);
  }

  /**
   * Show curves.
   * @param {Series[]} series
   * @param {{start?: number, shadeFrom?: number, marks?: CurveMark[], range?: Point}} [more] `start`: number of the
   *   first value; `shadeFrom`: index from which on the picture is hatched; `range`: ends of the vertical axis
   */
  show(series, { start = 0, shadeFrom = Infinity, marks = [], range } = {}) {
    const values = series.flatMap((each) => Array.from(each.values).filter(Number.isFinite));
    const [low, high] = range ?? [Math.min(0, ...values), Math.max(0, ...values)];
    const margin = range ? 0 : 0.05 * (high - low || 1);
    this.#series = series;
    this.#marks = marks;
    this.#start = start;
    this.#shadeFrom = shadeFrom;
    this.#low = low - (low < 0 ? margin : 0);
    this.#high = high + (high > 0 ? margin : 0);
    this.#cursor = null;
    this.canvas.setAttribute("aria-label", `${this.options.label}. Arrow keys read the numbers.`);
    this.#refresh();
  }

  close() {
    this.stopResize();
    document.removeEventListener("themechange", this.#refresh);
  }

  #refresh = () => {
    const colours = theme().series;
    this.names.replaceChildren(...this.#series.filter((each) => !each.thin).slice(0, 8).map((each) => {
      const swatch = h("i");
      swatch.style.background = colours[each.colour % 8];
      return h("span", null, swatch, each.name);
    }));
    this.#draw();
    this.#read();
  };

  #last() {
    return Math.max(1, ...this.#series.map((each) => each.values.length)) - 1;
  }

  #x = (/** @type {number} */ index) => scale(0, this.#last(), MARGIN.left, this.#width - MARGIN.right)(index);
  #y = (/** @type {number} */ value) => scale(this.#low, this.#high, this.height - MARGIN.bottom, MARGIN.top)(value);

  #draw() {
    if (this.#width < 60 || !this.#series.length) return;
    const colours = theme();
    const context = fit(this.canvas, this.#width, this.height);
    context.font = `11px ${getComputedStyle(this.canvas).fontFamily}`;
    this.#drawVerticalAxis(context, colours);
    this.#drawHorizontalAxis(context);
    if (this.#shadeFrom <= this.#last()) this.#shade(context, this.#x(Math.max(0, this.#shadeFrom)), colours);
    for (const mark of this.#marks) this.#drawMark(context, mark, colours);
    for (const { thin, dots, colour, values } of this.#series) {
      context.globalAlpha = thin ? 0.45 : 1;
      trace(context, this.#x, this.#y, values, { colour: colours.series[colour % 8], width: thin ? 1 : 2, dots });
      context.globalAlpha = 1;
    }
    if (this.#cursor !== null) this.#upright(context, this.#cursor, colours.ink);
  }

  /** @param {Context2D} context @param {Theme} colours */
  #drawVerticalAxis(context, colours) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(this.#low, this.#high, 5)) {
      const [y, colour] = [this.#y(value), value === 0 ? colours.muted : colours.line];
      straight(context, MARGIN.left, y, this.#width - MARGIN.right, y, colour);
      context.fillStyle = colours.muted;
      context.fillText(String(value).replace("-", "−"), MARGIN.left - 6, y);
    }
  }

  /** @param {Context2D} context */
  #drawHorizontalAxis(context) {
    const last = this.#last();
    context.textBaseline = "top";
    for (const number of ticks(this.#start, this.#start + last, Math.max(2, Math.floor(this.#width / 110)))) {
      const index = number - this.#start;
      if (!Number.isInteger(index)) continue;
      context.textAlign = index === last ? "right" : index ? "center" : "left";
      context.fillText(String(number).replace("-", "−"), this.#x(index), this.height - MARGIN.bottom + 6);
    }
  }

  /** @param {Context2D} context @param {CurveMark} mark @param {Theme} colours */
  #drawMark(context, { at, colour, text, side }, colours) {
    if (at < 0 || at > this.#last()) return;
    this.#upright(context, at, colour === undefined ? colours.ink : colours.series[colour], [4, 3]);
    const isLeft = side ? side === "left" : at > this.#last() / 2;
    context.fillStyle = colours.ink;
    context.textAlign = isLeft ? "right" : "left";
    context.fillText(text, this.#x(at) + (isLeft ? -4 : 4), MARGIN.top);
  }

  /** @param {Context2D} context @param {number} index @param {string} colour @param {number[]} [dash] */
  #upright(context, index, colour, dash) {
    straight(context, this.#x(index), MARGIN.top, this.#x(index), this.height - MARGIN.bottom, colour, dash);
  }

  /** @param {Context2D} context @param {number} from @param {Theme} colours */
  #shade(context, from, colours) {
    const [right, bottom] = [this.#width - MARGIN.right, this.height - MARGIN.bottom];
    context.save();
    context.beginPath();
    context.rect(from, MARGIN.top, right - from, bottom - MARGIN.top);
    context.clip();
    context.globalAlpha = 0.5;
    diagonals(context, from, right, bottom, colours.muted);
    context.restore();
  }

  /** Write the numbers at the cursor. */
  #read() {
    const cursor = this.#cursor;
    if (cursor === null) {
      const hint = h("span", { class: "heat-hint" }, "use the pointer or the arrow keys");
      return this.readout.replaceChildren(hint);
    }
    const { axes, xName = (index) => `${axes[0]} ${index}` } = this.options;
    const strong = this.#series.filter((each) => !each.thin && Number.isFinite(each.values[cursor]));
    const values = (strong.length ? strong : this.#series).slice(0, 4).map((each) =>
      `${each.name} ${shown(each.values[cursor] ?? Number.NaN)}`);
    return this.readout.replaceChildren(h("span", null, xName(cursor + this.#start)), ` · ${values.join(" · ")}`);
  }

  /** @param {number | null} index */
  #point(index) {
    this.#cursor = index;
    this.#read();
    this.#draw();
  }

  /** @param {MouseEvent} event */
  #indexAt(event) {
    const { left } = this.canvas.getBoundingClientRect();
    const share = (event.clientX - left - MARGIN.left) / (this.#width - MARGIN.left - MARGIN.right);
    return Math.min(this.#last(), Math.max(0, Math.round(share * this.#last())));
  }

  #listen() {
    const { canvas } = this;
    /** @param {PointerEvent} event */
    const follow = (event) => this.#point(this.#indexAt(event));
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && this.#point(null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("click", (event) => this.options.onPick?.(this.#indexAt(event) + this.#start));
    canvas.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowLeft" ? -1 : event.key === "ArrowRight" ? 1 : 0;
      if (!by) return;
      const next = (this.#cursor ?? -by) + by * (event.shiftKey ? 10 : 1);
      this.#point(Math.min(this.#last(), Math.max(0, next)));
      event.preventDefault();
      event.stopPropagation();
    });
  }
}
