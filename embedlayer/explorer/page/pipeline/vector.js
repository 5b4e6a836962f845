/** One vector of the machine: cells with numbers where there is room, else a strip of colours. */

import { binColumns, cellImage } from "../charts/heat_cells.js";
import { cellColours } from "../colour.js";
import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";

/** @typedef {import("../math.js").Vector} Numbers */

export const MOST_CELLS = 8;

/** A vector that can light one of its dimensions. */
export class VectorPicture {
  /** @type {Numbers} */ #numbers;
  #stop = () => {};

  /**
   * @param {Numbers} numbers
   * @param {{limit: number, dims?: number, space?: number, isExact?: boolean, plainZeros?: boolean}} options
   *   `limit`: absolute value at which colours end; `dims`: dimensions of the vector, of which a strip may show fewer;
   *   `space`: number of the space that the dimensions belong to; `isExact`: whether cells have four digits where two
   *   are not enough; `plainZeros`: whether 0 has no digits and no colour
   */
  constructor(numbers, { limit, dims = numbers.length, space = 0, isExact = false, plainZeros = false }) {
    this.#numbers = numbers;
    this.limit = limit || 1;
    this.plainZeros = plainZeros;
    this.digits = isExact ? digitsOf(numbers) : 2;
    this.dims = dims;
    this.space = space;
    this.mark = h("i", { class: "vec-mark", hidden: true });
    this.element = h("div", { class: "vec" }, this.mark);
    if (numbers.length <= MOST_CELLS) this.#makeCells();
    else this.#makeStrip();
  }

  close() {
    this.#stop();
  }

  /** Light a dimension, or none. @param {number | null} dimension */
  light(dimension) {
    this.mark.hidden = dimension === null;
    if (dimension === null) return;
    this.mark.style.left = `${(100 * dimension) / this.dims}%`;
    this.mark.style.width = `${100 / this.dims}%`;
  }

  /** Return the dimension at a place of the screen. @param {number} x in CSS pixels */
  dimensionAt(x) {
    const box = this.element.getBoundingClientRect();
    return Math.min(this.dims - 1, Math.max(0, Math.floor((this.dims * (x - box.left)) / box.width)));
  }

  #makeCells() {
    this.element.classList.add("vec-cells");
    this.element.append(...Array.from(this.#numbers, (number) => {
      const isPlain = this.plainZeros && number === 0;
      const cell = h("span", { class: isPlain ? "vec-zero" : null }, isPlain ? "0" : decimal(number, this.digits));
      if (!isPlain) Object.assign(cell.style, cellColours(number / this.limit, theme().dark));
      return cell;
    }));
  }

  #makeStrip() {
    const canvas = h("canvas");
    this.element.append(canvas);
    this.#stop = onResize(this.element, (width, height) => {
      if (width < 2 || height < 2) return;
      const matrix = { rows: 1, cols: this.#numbers.length, data: this.#numbers };
      const bins = binColumns(matrix, Math.floor(width * Math.min(globalThis.devicePixelRatio || 1, 2)));
      const image = cellImage(matrix, bins, { limit: this.limit, blank: null, isSequential: false }, theme());
      const context = fit(canvas, width, height);
      context.imageSmoothingEnabled = false;
      context.drawImage(image, 0, 0, width, height);
    });
  }
}

/** Return 2, or 4 where two digits after the point are not all digits of some numbers. @param {Numbers} numbers */
export function digitsOf(numbers) {
  return numbers.every((number) => Math.abs(100 * number - Math.round(100 * number)) < 1e-4) ? 2 : 4;
}

/** Format a number with − for minus. @param {number} number @param {number} digits */
function decimal(number, digits) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  return number.toFixed(digits).replace("-", "−");
}
