/** The inset for rows that never learned: a caption, their points, and a link to the view Health. */

import { fit, h } from "../dom.js";
import { theme } from "../theme.js";
import { spread } from "./viewport.js";

const [WIDTH, HEIGHT] = [92, 46]; // pixels

export class FoldedRows {
  /**
   * @param {Uint8Array} isFolded 1 for each row that never learned
   * @param {Float32Array} xs coordinates along the first component
   * @param {Float32Array} ys and along the second
   */
  constructor(isFolded, xs, ys) {
    this.isFolded = isFolded;
    this.count = isFolded.reduce((sum, each) => sum + each, 0);
    this.xs = xs.filter((_, id) => isFolded[id] === 1);
    this.ys = ys.filter((_, id) => isFolded[id] === 1);
    this.canvas = h("canvas", { "aria-hidden": "true" });
    const rows = this.count === 1 ? "1 row" : `${this.count.toLocaleString("en")} rows`;
    this.element = h("a", {
      class: "map-folded", href: "#health", hidden: !this.count,
      title: "Rows that no training text has moved. They are not on this map; the view Health lists them.",
    }, this.canvas, h("span", null, `${rows} never learned →`));
  }

  /** Show the inset or hide it. @param {boolean} isShown */
  show(isShown) {
    this.element.hidden = !isShown || !this.count;
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
