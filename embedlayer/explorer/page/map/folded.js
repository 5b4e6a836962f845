/** The inset for rows that are not on the map: a caption that says why, their points, and a link to the view Health. */

import { fit, h } from "../dom.js";
import { theme } from "../theme.js";
import { spread } from "./viewport.js";

const [WIDTH, HEIGHT] = [92, 46]; // pixels

export class FoldedRows {
  /**
   * @param {Uint8Array} isFolded 1 for each row that is not learned, is zero, or holds NaN or infinity
   * @param {Float32Array} norms NaN for a row with NaN or infinity
   * @param {Float32Array} xs coordinates along the first component
   * @param {Float32Array} ys and along the second
   */
  constructor(isFolded, norms, xs, ys) {
    this.isFolded = isFolded;
    this.count = isFolded.reduce((sum, each) => sum + each, 0);
    const isDrawn = (/** @type {number} */ id) => isFolded[id] === 1 && Number.isFinite(xs[id]);
    this.xs = xs.filter((_, id) => isDrawn(id));
    this.ys = ys.filter((_, id) => isDrawn(id));
    this.canvas = h("canvas", { "aria-hidden": "true" });
    /** @param {(norm: number) => boolean} is */
    const count = (is) => norms.filter((norm, id) => isFolded[id] === 1 && is(norm)).length;
    this.broken = count(Number.isNaN);
    this.zero = count((norm) => norm === 0);
    this.caption = h("span");
    this.element = h("a", {
      class: "map-folded", href: "#health", hidden: !this.count,
      title: "These rows are not on this map; the view Health lists them.",
    }, this.canvas, this.caption);
  }

  /**
   * Show the inset, or hide it if no row is missing on the map.
   * @param {boolean} isLayout whether the map is the neighbour layout; along components only NaN has no place
   */
  show(isLayout) {
    const { count, broken, zero } = this;
    /** @type {[number, string][]} */
    const reasons = isLayout ? [[count - broken - zero, "not learned"], [zero, "all zero"], [broken, "with NaN"]]
      : [[broken, "with NaN, not on the map"]];
    const written = reasons.filter(([rows]) => rows).map(([rows, why], i) =>
      `${rows.toLocaleString("en")} ${i ? "" : rows === 1 ? "row " : "rows "}${why}`);
    this.element.hidden = !written.length;
    this.canvas.hidden = !isLayout;
    this.caption.textContent = `${written.join(", ")} →`;
  }

  /** Draw the points in the colours of the page. */
  draw() {
    const context = fit(this.canvas, WIDTH, HEIGHT);
    const [left, right] = spread(this.xs, 0.01);
    const [bottom, top] = spread(this.ys, 0.01);
    const zoom = 0.9 * Math.min(WIDTH / (right - left || 1), HEIGHT / (top - bottom || 1));
    context.fillStyle = theme().muted;
    context.globalAlpha = 0.5;
    for (let i = 0; i < this.xs.length; i++) {
      const x = WIDTH / 2 + (this.xs[i] - (left + right) / 2) * zoom;
      context.fillRect(x, HEIGHT / 2 - (this.ys[i] - (bottom + top) / 2) * zoom, 1.4, 1.4);
    }
  }
}
