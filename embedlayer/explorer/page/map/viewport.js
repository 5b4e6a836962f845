/** The part of the map that is on the screen, and how it moves. */

/** @import { Point, Viewport } from "../types" */

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
 * Return the lowest and the highest value without the outermost share on each side; NaN and infinity are ignored.
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
  return [sample[cut], sample[sample.length - 1 - cut]];
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
