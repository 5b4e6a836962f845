/** The part of the map that is on the screen, and how it moves. */

/** @import { Point, Viewport } from "../types" */

const FENCE = 10; // interquartile ranges outside the quartiles from which on a value is an outlier
const LEAST_SPREAD = 1e-3; // least interquartile range as a share of the larger quartile
const MOST_OUTLIERS = 0.05; // if a larger share is outside, none is an outlier

/**
 * Return the viewport that contains all but the `spare` outermost share of the points.
 * @param {Float32Array} xs
 * @param {Float32Array} ys
 * @param {number} width
 * @param {number} height
 * @param {number} [spare]
 * @returns {Viewport}
 */
export function fitViewport(xs, ys, width, height, spare = 0.004) {
  const [left, right] = spread(xs, spare);
  const [bottom, top] = spread(ys, spare);
  const zoom = Math.min(width / Math.max(right - left, 1e-9), height / Math.max(top - bottom, 1e-9)) * 0.86;
  return { x: (left + right) / 2, y: (bottom + top) / 2, zoom };
}

/**
 * Return the lowest and the highest value without the outermost share on each side, and without outliers; NaN and
 * infinity are ignored.
 * @param {Float32Array} values
 * @param {number} spare
 * @returns {Point}
 */
export function spread(values, spare) {
  const step = Math.max(1, Math.floor(values.length / 20000)); // a sample is enough for a picture
  const sample = [];
  for (let i = 0; i < values.length; i += step) if (Number.isFinite(values[i])) sample.push(values[i]);
  sample.sort((a, b) => a - b);
  if (!sample.length) return [0, 1];
  const cut = Math.floor(sample.length * spare);
  const [first, last] = withoutOutliers(sample);
  return [sample[Math.max(cut, first)], sample[Math.min(sample.length - 1 - cut, last)]];
}

/**
 * Return the indices of the lowest and the highest value without outliers, as `usual_range` of the plots does.
 * @param {number[]} ordered
 * @returns {Point}
 */
function withoutOutliers(ordered) {
  const most = ordered.length - 1;
  const [low, high] = [ordered[Math.floor(most / 4)], ordered[Math.ceil((3 * most) / 4)]];
  const reach = FENCE * Math.max(high - low, LEAST_SPREAD * Math.max(Math.abs(low), Math.abs(high)));
  const first = ordered.findIndex((value) => value >= low - reach);
  const above = ordered.findIndex((value) => value > high + reach);
  const last = above < 0 ? most : above - 1;
  return low === high || first + most - last > Math.max(1, MOST_OUTLIERS * ordered.length) ? [0, most] : [first, last];
}

/**
 * Return the number of points that have a place outside of the picture.
 * @param {Float32Array} xs
 * @param {Float32Array} ys
 * @param {Viewport} viewport
 * @param {number} width
 * @param {number} height
 */
export function countOutside(xs, ys, { x, y, zoom }, width, height) {
  const [right, top] = [width / 2 / zoom, height / 2 / zoom];
  let count = 0;
  for (let i = 0; i < xs.length; i++) if (Math.abs(xs[i] - x) > right || Math.abs(ys[i] - y) > top) count++;
  return count;
}

/**
 * Zoom by `factor` around a place on the screen.
 * @param {Viewport} viewport
 * @param {number} factor
 * @param {number} px
 * @param {number} py
 * @param {number} width
 * @param {number} height
 * @param {Point} limits of the zoom
 * @returns {Viewport}
 */
export function zoomAt(viewport, factor, px, py, width, height, limits) {
  const zoom = Math.min(Math.max(viewport.zoom * factor, limits[0]), limits[1]);
  const [x, y] = toData(viewport, px, py, width, height);
  return { x: x - (px - width / 2) / zoom, y: y + (py - height / 2) / zoom, zoom };
}

/**
 * Move by pixels.
 * @param {Viewport} viewport
 * @param {number} dx
 * @param {number} dy
 * @returns {Viewport}
 */
export function pan(viewport, dx, dy) {
  return { ...viewport, x: viewport.x - dx / viewport.zoom, y: viewport.y + dy / viewport.zoom };
}

/**
 * Convert pixels to data units.
 * @param {Viewport} viewport
 * @param {number} px
 * @param {number} py
 * @param {number} width
 * @param {number} height
 * @returns {Point}
 */
export function toData(viewport, px, py, width, height) {
  return [viewport.x + (px - width / 2) / viewport.zoom, viewport.y - (py - height / 2) / viewport.zoom];
}

/**
 * Convert data units to pixels.
 * @param {Viewport} viewport
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @returns {Point}
 */
export function toScreen(viewport, x, y, width, height) {
  return [width / 2 + (x - viewport.x) * viewport.zoom, height / 2 - (y - viewport.y) * viewport.zoom];
}
