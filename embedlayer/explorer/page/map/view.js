/**
 * Where points stand on the screen: `screen = centre of the canvas + zoom * (point - view's centre)`, y upwards.
 * @typedef {{x: number, y: number, zoom: number}} View centre in data units, pixels per unit
 */

/**
 * A view in which all but the `spare` outermost share of points lie.
 * @param {Float32Array} xs @param {Float32Array} ys @param {number} width @param {number} height @param {number} [spare]
 * @returns {View}
 */
export function fitView(xs, ys, width, height, spare = 0.004) {
  const [left, right] = spread(xs, spare);
  const [bottom, top] = spread(ys, spare);
  const zoom = Math.min(width / Math.max(right - left, 1e-9), height / Math.max(top - bottom, 1e-9)) * 0.86;
  return { x: (left + right) / 2, y: (bottom + top) / 2, zoom };
}

/** Lowest and highest value, without the outermost share on each side; values that are not numbers do not count. */
export function spread(values, spare) {
  const step = Math.max(1, Math.floor(values.length / 20000)); // a sample is enough to look at
  const sample = [];
  for (let i = 0; i < values.length; i += step) if (Number.isFinite(values[i])) sample.push(values[i]);
  sample.sort((a, b) => a - b);
  if (!sample.length) return [0, 1];
  const cut = Math.floor(sample.length * spare);
  return [sample[cut], sample[sample.length - 1 - cut]];
}

/** The view after zooming by `factor` at a place on the screen, which stays where it is. */
export function zoomAt(view, factor, px, py, width, height, limits) {
  const zoom = Math.min(Math.max(view.zoom * factor, limits[0]), limits[1]);
  const [x, y] = toData(view, px, py, width, height);
  return { x: x - (px - width / 2) / zoom, y: y + (py - height / 2) / zoom, zoom };
}

/** The view after moving the picture by pixels. */
export function pan(view, dx, dy) {
  return { ...view, x: view.x - dx / view.zoom, y: view.y + dy / view.zoom };
}

/** From the screen to data. @returns {[number, number]} */
export function toData(view, px, py, width, height) {
  return [view.x + (px - width / 2) / view.zoom, view.y - (py - height / 2) / view.zoom];
}

/** From data to the screen. @returns {[number, number]} */
export function toScreen(view, x, y, width, height) {
  return [width / 2 + (x - view.x) * view.zoom, height / 2 - (y - view.y) * view.zoom];
}
