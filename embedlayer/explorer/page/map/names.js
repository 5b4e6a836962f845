/** Which tokens are named at a zoom: in each cell of the map the first in a fixed order. */

import { toData } from "./viewport.js";

/** @import { Point, Viewport } from "../types" */

const CELL = 120; // pixels: on the screen a cell is between half of it and all of it
const FINEST = 24;
const STORED = 9; // levels up to this one are computed once for all points

/**
 * Chooses names. The map is divided into 2^level x 2^level cells; the level follows the zoom, so that a cell keeps
 * about its size on the screen. Cells do not move with the viewport, so names stay while the map is moved, and a token
 * that is named keeps its name while one zooms in.
 */
export class NameCells {
  /** @type {Map<number, Int32Array>} */ #levels = new Map();

  /**
   * @param {object} about
   * @param {Float32Array} about.xs
   * @param {Float32Array} about.ys
   * @param {Int32Array} about.order tokens, first to be named first
   * @param {Uint8Array | null} about.only 1 for each point that is shown; null if all are
   * @param {(low: Point, high: Point, visit: (id: number) => void) => void} about.visit calls `visit` with each point
   *   in a rectangle, and maybe with others
   */
  constructor({ xs, ys, order, only, visit }) {
    this.xs = xs;
    this.ys = ys;
    this.only = only;
    this.visit = visit;
    this.order = order.filter((id) => (!only || only[id] === 1) && Number.isFinite(xs[id]) && Number.isFinite(ys[id]));
    this.rank = new Int32Array(xs.length).fill(-1);
    this.order.forEach((id, rank) => {
      this.rank[id] = rank;
    });
    const [left, right] = extent(xs, this.order);
    const [bottom, top] = extent(ys, this.order);
    this.left = left;
    this.bottom = bottom;
    this.side = Math.max(right - left, top - bottom, 1e-9) * 1.0001;
  }

  /**
   * Return the tokens to name in a viewport, first in the order first.
   * @param {Viewport} viewport
   * @param {number} width
   * @param {number} height
   */
  at(viewport, width, height) {
    const level = Math.ceil(Math.log2((this.side * viewport.zoom) / CELL));
    const low = toData(viewport, 0, height, width, height);
    const high = toData(viewport, width, 0, width, height);
    const found = level > STORED ? this.#visible(Math.min(level, FINEST), low, high)
      : this.#stored(Math.max(level, 0), low, high);
    return found.sort((a, b) => this.rank[a] - this.rank[b]);
  }

  /** @param {number} value in cells @param {number} columns */
  #clamped(value, columns) {
    return Math.min(Math.max(Math.floor(value), 0), columns - 1);
  }

  /** @param {number} level @param {Point} low @param {Point} high */
  #stored(level, low, high) {
    const cells = this.#levels.get(level) ?? this.#fill(level);
    const columns = 2 ** level;
    const scale = columns / this.side;
    const first = this.#clamped((low[0] - this.left) * scale, columns);
    const last = this.#clamped((high[0] - this.left) * scale, columns);
    const top = this.#clamped((high[1] - this.bottom) * scale, columns);
    const found = [];
    for (let row = this.#clamped((low[1] - this.bottom) * scale, columns); row <= top; row++) {
      for (let column = first; column <= last; column++) {
        const id = cells[row * columns + column];
        if (id >= 0) found.push(id);
      }
    }
    return found;
  }

  /** Compute the first token of each cell of a level. @param {number} level */
  #fill(level) {
    const columns = 2 ** level;
    const scale = columns / this.side;
    const cells = new Int32Array(columns * columns).fill(-1);
    for (const id of this.order) {
      const column = Math.floor((this.xs[id] - this.left) * scale);
      const cell = Math.floor((this.ys[id] - this.bottom) * scale) * columns + column;
      if (cells[cell] < 0) cells[cell] = id;
    }
    this.#levels.set(level, cells);
    return cells;
  }

  /** @param {number} level @param {Point} low @param {Point} high */
  #visible(level, low, high) {
    const columns = 2 ** level;
    const scale = columns / this.side;
    /** @type {Map<number, number>} */
    const cells = new Map();
    this.visit(low, high, (id) => {
      if (this.rank[id] < 0) return;
      const column = Math.floor((this.xs[id] - this.left) * scale);
      const cell = Math.floor((this.ys[id] - this.bottom) * scale) * columns + column;
      const known = cells.get(cell);
      if (known === undefined || this.rank[id] < this.rank[known]) cells.set(cell, id);
    });
    return [...cells.values()];
  }
}

/** Return the lowest and the highest of some values. @param {Float32Array} values @param {Int32Array} ids */
function extent(values, ids) {
  let [low, high] = [Infinity, -Infinity];
  for (const id of ids) {
    if (values[id] < low) low = values[id];
    if (values[id] > high) high = values[id];
  }
  return low <= high ? [low, high] : [0, 1];
}
