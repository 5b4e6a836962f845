/** A spatial index over points: a grid, each cell with its points. */

/** @import { Point } from "../types" */

/**
 * @typedef {object} Grid
 * @property {Float32Array} xs
 * @property {Float32Array} ys
 * @property {number} left
 * @property {number} bottom
 * @property {number} cell width of a cell
 * @property {Uint32Array} starts place in `points` of each cell's first point
 * @property {Uint32Array} points
 */

const COLUMNS = 256;

/**
 * @param {Float32Array} xs
 * @param {Float32Array} ys
 * @param {Uint32Array | null} [order] of drawing: of points at one place, `nearest` returns the one drawn last
 * @returns {Grid}
 */
export function makeGrid(xs, ys, order = null) {
  const [left, right] = range(xs);
  const [bottom, top] = range(ys);
  const cell = Math.max(right - left, top - bottom, 1e-9) / (COLUMNS - 1);
  const starts = new Uint32Array(COLUMNS * COLUMNS + 1);
  /** @param {number} i */
  const cellOf = (i) => Math.floor((ys[i] - bottom) / cell) * COLUMNS + Math.floor((xs[i] - left) / cell);
  for (let i = 0; i < xs.length; i++) if (cellOf(i) >= 0) starts[cellOf(i) + 1]++;
  for (let i = 0; i < COLUMNS * COLUMNS; i++) starts[i + 1] += starts[i];
  const next = starts.slice();
  const points = new Uint32Array(starts[COLUMNS * COLUMNS]);
  for (let k = 0; k < xs.length; k++) {
    const i = order === null ? k : order[k];
    if (cellOf(i) >= 0) points[next[cellOf(i)]++] = i;
  }
  return { xs, ys, left, bottom, cell, starts, points };
}

/** Return the lowest and the highest number; NaN is ignored. @param {Float32Array} values @returns {Point} */
function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/**
 * Call `visit(i)` with each point of the cells that a rectangle touches.
 * @param {Grid} grid
 * @param {Point} low
 * @param {Point} high
 * @param {(i: number) => void} visit
 */
export function visitBox(grid, low, high, visit) {
  /** @param {number} value */
  const clamp = (value) => Math.min(Math.max(Math.floor(value), 0), COLUMNS - 1);
  const first = clamp((low[0] - grid.left) / grid.cell);
  const last = clamp((high[0] - grid.left) / grid.cell);
  const top = clamp((high[1] - grid.bottom) / grid.cell);
  for (let row = clamp((low[1] - grid.bottom) / grid.cell); row <= top; row++) {
    const to = grid.starts[row * COLUMNS + last + 1];
    for (let k = grid.starts[row * COLUMNS + first]; k < to; k++) visit(grid.points[k]);
  }
}

/**
 * Return the point nearest to a place, at most `radius` away; -1 if there is none.
 * @param {Grid} grid
 * @param {Point} place
 * @param {number} radius
 * @param {(i: number) => boolean} isCandidate
 */
export function nearest(grid, [x, y], radius, isCandidate) {
  let best = -1;
  let least = radius * radius;
  visitBox(grid, [x - radius, y - radius], [x + radius, y + radius], (i) => {
    const distance = (grid.xs[i] - x) ** 2 + (grid.ys[i] - y) ** 2;
    if (distance <= least && isCandidate(i)) {
      least = distance;
      best = i;
    }
  });
  return best;
}

/** Return the IDs of the points inside a closed line. @param {Grid} grid @param {Point[]} line */
export function inside(grid, line) {
  const xs = line.map(([x]) => x);
  const ys = line.map(([, y]) => y);
  /** @type {number[]} */
  const found = [];
  visitBox(grid, [Math.min(...xs), Math.min(...ys)], [Math.max(...xs), Math.max(...ys)], (i) => {
    if (isInside(line, grid.xs[i], grid.ys[i])) found.push(i);
  });
  return Int32Array.from(found).sort();
}

/** @param {Point[]} line @param {number} x @param {number} y */
function isInside(line, x, y) {
  let isOdd = false;
  for (let i = 0, j = line.length - 1; i < line.length; j = i++) {
    const [xi, yi] = line[i];
    const [xj, yj] = line[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) isOdd = !isOdd;
  }
  return isOdd;
}

const DIGITS = 4;
const LARGEST_LINE = 60; // points of a line in the URL

/** Write a line as text for the URL, with at most about 60 points. @param {Point[]} line */
export function lineToText(line) {
  const step = Math.max(1, Math.ceil(line.length / LARGEST_LINE));
  return line.filter((_, i) => i % step === 0).flat().map((value) => Number(value.toPrecision(DIGITS))).join(",");
}

/** Read a line that `lineToText` wrote; empty if the text is none. @param {string} text @returns {Point[]} */
export function lineFromText(text) {
  const values = text.split(",").map(Number);
  if (values.length % 2 || values.some((value) => !Number.isFinite(value))) return [];
  return Array.from({ length: values.length / 2 }, (_, i) => [values[2 * i], values[2 * i + 1]]);
}
