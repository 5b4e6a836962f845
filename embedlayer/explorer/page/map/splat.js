/** Points drawn into pixels without a GPU: each point is a small stamp, blended into the buffer of an ImageData. */

/** @import { Rgb, Viewport } from "../types" */
/** @typedef {{size: number, alpha: Uint8Array}} Stamp coverage of a point's pixels, 0 to 255 */
/** @typedef {{pixels: Uint32Array, width: number, height: number}} Picture */
/**
 * @typedef {object} Points
 * @property {Float32Array} xs in data units
 * @property {Float32Array} ys
 * @property {Uint8Array | null} only 1 for each point to draw; null draws all
 * @property {Uint32Array | null} order of drawing, see `drawingOrder`; null for that of the points
 */

const MANY = 20000; // points from which on blocks of them are shuffled: drawing takes less than half the time then
const BLOCK = 16; // points whose coordinates are in one line of the processor's cache
const CELL = 4; // pixels a side of a cell in which density is counted

/**
 * Return a disc with a soft edge, or a square of one or two pixels for a small radius.
 * @param {number} radius in pixels
 * @param {number} opacity 0 to 1
 * @returns {Stamp}
 */
export function disc(radius, opacity) {
  if (radius < 1.25) {
    const size = radius < 0.75 ? 1 : 2;
    return { size, alpha: new Uint8Array(size * size).fill(Math.round(255 * opacity)) };
  }
  const size = 2 * Math.ceil(radius) + 1;
  const centre = (size - 1) / 2;
  const alpha = new Uint8Array(size * size);
  for (let i = 0; i < alpha.length; i++) {
    const distance = Math.hypot((i % size) - centre, Math.floor(i / size) - centre);
    alpha[i] = Math.round(255 * opacity * Math.min(1, Math.max(0, radius - distance + 0.5)));
  }
  return { size, alpha };
}

/**
 * Return the points in a random order, always the same one of as many points: late ones do not cover early ones. Of
 * many points, blocks are in random order.
 * @param {number} count
 */
export function drawingOrder(count) {
  const block = count > MANY ? BLOCK : 1;
  const blocks = Uint32Array.from({ length: Math.ceil(count / block) }, (_, i) => i);
  let seed = 1;
  for (let i = blocks.length - 1; i > 0; i--) {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0; // Numerical Recipes' generator: its high bits are random
    const other = Math.floor((seed / 2 ** 32) * (i + 1));
    [blocks[i], blocks[other]] = [blocks[other], blocks[i]];
  }
  const order = new Uint32Array(count);
  let place = 0;
  for (const first of blocks) {
    for (let i = first * block; i < Math.min(count, (first + 1) * block); i++) order[place++] = i;
  }
  return order;
}

/** Return a colour as a pixel of an ImageData seen as Uint32Array. @param {Rgb} rgb */
export function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * Blend points over a picture.
 * @param {Picture} picture
 * @param {Points} points
 * @param {Viewport} viewport with its zoom in pixels of the picture
 * @param {Uint32Array} colours a pixel for each point
 * @param {Stamp} stamp
 * @returns {number} how many points were inside the picture
 */
export function splat({ pixels, width, height }, { xs, ys, only, order }, viewport, colours, stamp) {
  const { size } = stamp;
  const half = (size - 1) / 2;
  const { zoom } = viewport;
  const left = width / 2 - viewport.x * zoom - half + 0.5;
  const top = height / 2 + viewport.y * zoom - half + 0.5;
  const [right, bottom, count] = [width - size + 1, height - size + 1, xs.length];
  let drawn = 0;
  for (let k = 0; k < count; k++) {
    const i = order === null ? k : order[k];
    const x = left + xs[i] * zoom;
    if (!(x >= 0 && x < right)) continue; // NaN too
    const y = top - ys[i] * zoom;
    if (!(y >= 0 && y < bottom) || (only !== null && only[i] === 0)) continue;
    drawn++;
    blendStamp(pixels, width, (y | 0) * width + (x | 0), colours[i], stamp);
  }
  return drawn;
}

/**
 * @param {Uint32Array} pixels
 * @param {number} width
 * @param {number} start index of the stamp's first pixel
 * @param {number} colour
 * @param {Stamp} stamp
 */
function blendStamp(pixels, width, start, colour, { size, alpha }) {
  const colourRB = colour & 0xff00ff;
  const colourG = colour & 0x00ff00;
  for (let row = 0, k = 0, at = start; row < size; row++, at += width) {
    for (let column = 0; column < size; column++, k++) {
      const a = alpha[k];
      if (a === 0) continue;
      const old = pixels[at + column];
      const oldRB = old & 0xff00ff;
      const oldG = old & 0x00ff00;
      const redBlue = (oldRB + (Math.imul(colourRB - oldRB, a) >> 8)) & 0xff00ff;
      const green = (oldG + (Math.imul(colourG - oldG, a) >> 8)) & 0x00ff00;
      pixels[at + column] = 0xff000000 | redBlue | green;
    }
  }
}

/**
 * Paint the density of points: the logarithm of a smoothed count, through a scale of 256 colours.
 * @param {Picture} picture
 * @param {Points} points
 * @param {Viewport} viewport with its zoom in pixels of the picture
 * @param {Uint32Array} scale 256 pixels, the first is the background
 */
export function density({ pixels, width, height }, points, viewport, scale) {
  const columns = Math.ceil(width / CELL);
  const rows = Math.ceil(height / CELL);
  const steps = densitySteps(points, viewport, width, height, columns, rows);
  for (let y = 0, at = 0; y < height; y++) {
    const fy = Math.min(Math.max((y + 0.5) / CELL - 0.5, 0), rows - 1.001);
    const y0 = Math.floor(fy);
    const ty = fy - y0;
    for (let x = 0; x < width; x++, at++) {
      const fx = Math.min(Math.max((x + 0.5) / CELL - 0.5, 0), columns - 1.001);
      const x0 = Math.floor(fx);
      const tx = fx - x0;
      const base = y0 * columns + x0;
      const upper = steps[base] + (steps[base + 1] - steps[base]) * tx;
      const lower = steps[base + columns] + (steps[base + columns + 1] - steps[base + columns]) * tx;
      pixels[at] = scale[(upper + (lower - upper) * ty) | 0];
    }
  }
}

/**
 * Return the step of the scale for each cell.
 * @param {Points} points
 * @param {Viewport} viewport
 * @param {number} width
 * @param {number} height
 * @param {number} columns
 * @param {number} rows
 */
function densitySteps({ xs, ys, only }, viewport, width, height, columns, rows) {
  let counts = new Float32Array(columns * rows);
  const zoom = viewport.zoom / CELL;
  const left = (width / 2 - viewport.x * viewport.zoom) / CELL;
  const top = (height / 2 + viewport.y * viewport.zoom) / CELL;
  for (let i = 0; i < xs.length; i++) {
    if (only !== null && only[i] === 0) continue;
    const x = Math.floor(left + xs[i] * zoom);
    const y = Math.floor(top - ys[i] * zoom);
    if (x >= 0 && y >= 0 && x < columns && y < rows) counts[y * columns + x]++;
  }
  for (let pass = 0; pass < 3; pass++) counts = smooth(counts, columns);
  let most = 0;
  for (const count of counts) if (count > most) most = count;
  const factor = most > 0 ? 255 / Math.log1p(12 * most) : 0;
  return counts.map((count) => Math.log1p(12 * count) * factor);
}

/** Average over three cells in each direction. @param {Float32Array} counts @param {number} columns */
function smooth(counts, columns) {
  const across = new Float32Array(counts.length);
  const result = new Float32Array(counts.length);
  for (let i = 1; i < counts.length - 1; i++) {
    across[i] = 0.25 * counts[i - 1] + 0.5 * counts[i] + 0.25 * counts[i + 1];
  }
  for (let i = columns; i < counts.length - columns; i++) {
    result[i] = 0.25 * across[i - columns] + 0.5 * across[i] + 0.25 * across[i + columns];
  }
  return result;
}
