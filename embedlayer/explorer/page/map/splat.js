/** Drawing points into pixels, without a GPU: each point is a small stamp, blended into the buffer of an ImageData. */

/** @typedef {{size: number, alpha: Uint8Array}} Stamp coverage of a point's pixels, 0 to 255 */

/** A disc with a soft edge; a square of one or two pixels where it is that small. @param {number} radius in pixels @param {number} opacity 0 to 1 @returns {Stamp} */
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

/** Red, green, blue as a pixel of an ImageData seen as Uint32Array. */
export function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/**
 * Blend points over what is there.
 * @param {Uint32Array} pixels @param {number} width @param {number} height
 * @param {Float32Array} xs @param {Float32Array} ys in data units
 * @param {import("./view.js").View} view with its zoom in these pixels
 * @param {Uint32Array} colours a pixel per point
 * @param {Stamp} stamp
 * @param {Uint8Array | null} only 1 for points to draw; all if null
 * @returns {number} how many points were in the picture
 */
export function splat(pixels, width, height, xs, ys, view, colours, stamp, only) {
  const { size, alpha } = stamp;
  const half = (size - 1) / 2;
  const zoom = view.zoom;
  const left = width / 2 - view.x * zoom - half + 0.5;
  const top = height / 2 + view.y * zoom - half + 0.5;
  const right = width - size + 1;
  const bottom = height - size + 1;
  const count = xs.length;
  let drawn = 0;
  for (let i = 0; i < count; i++) {
    const x = left + xs[i] * zoom;
    if (!(x >= 0 && x < right)) continue; // also what is not a number
    const y = top - ys[i] * zoom;
    if (!(y >= 0 && y < bottom) || (only !== null && only[i] === 0)) continue;
    drawn++;
    const colour = colours[i];
    const colourRB = colour & 0xff00ff;
    const colourG = colour & 0x00ff00;
    let at = (y | 0) * width + (x | 0);
    let k = 0;
    for (let row = 0; row < size; row++) {
      for (let column = 0; column < size; column++, k++) {
        const a = alpha[k];
        if (a === 0) continue;
        const old = pixels[at + column];
        const oldRB = old & 0xff00ff;
        const oldG = old & 0x00ff00;
        const red = (oldRB + (Math.imul(colourRB - oldRB, a) >> 8)) & 0xff00ff;
        const green = (oldG + (Math.imul(colourG - oldG, a) >> 8)) & 0x00ff00;
        pixels[at + column] = 0xff000000 | red | green;
      }
      at += width;
    }
  }
  return drawn;
}

/**
 * How many points lie around each pixel, as colours: the logarithm of a smoothed count, through 256 steps of a scale.
 * @param {Uint32Array} pixels @param {number} width @param {number} height @param {Float32Array} xs @param {Float32Array} ys
 * @param {import("./view.js").View} view @param {Uint32Array} scale 256 pixels, first is the background
 * @param {Uint8Array | null} only
 */
export function density(pixels, width, height, xs, ys, view, scale, only) {
  const cell = 4; // pixels a side
  const columns = Math.ceil(width / cell);
  const rows = Math.ceil(height / cell);
  let counts = new Float32Array(columns * rows);
  const zoom = view.zoom / cell;
  const left = (width / 2 - view.x * view.zoom) / cell;
  const top = (height / 2 + view.y * view.zoom) / cell;
  for (let i = 0; i < xs.length; i++) {
    if (only !== null && only[i] === 0) continue;
    const x = Math.floor(left + xs[i] * zoom);
    const y = Math.floor(top - ys[i] * zoom);
    if (x >= 0 && y >= 0 && x < columns && y < rows) counts[y * columns + x]++;
  }
  for (let pass = 0; pass < 3; pass++) counts = smooth(counts, columns, rows);
  let most = 0;
  for (const count of counts) if (count > most) most = count;
  const factor = most > 0 ? 255 / Math.log1p(12 * most) : 0;
  for (let i = 0; i < counts.length; i++) counts[i] = Math.log1p(12 * counts[i]) * factor;
  for (let y = 0, at = 0; y < height; y++) {
    const fy = Math.min(Math.max((y + 0.5) / cell - 0.5, 0), rows - 1.001);
    const y0 = Math.floor(fy);
    const ty = fy - y0;
    for (let x = 0; x < width; x++, at++) {
      const fx = Math.min(Math.max((x + 0.5) / cell - 0.5, 0), columns - 1.001);
      const x0 = Math.floor(fx);
      const tx = fx - x0;
      const base = y0 * columns + x0;
      const upper = counts[base] + (counts[base + 1] - counts[base]) * tx;
      const lower = counts[base + columns] + (counts[base + columns + 1] - counts[base + columns]) * tx;
      pixels[at] = scale[(upper + (lower - upper) * ty) | 0];
    }
  }
}

/** A mean over three cells each way. */
function smooth(counts, columns, rows) {
  const across = new Float32Array(counts.length);
  const result = new Float32Array(counts.length);
  for (let i = 1; i < counts.length - 1; i++) across[i] = 0.25 * counts[i - 1] + 0.5 * counts[i] + 0.25 * counts[i + 1];
  for (let i = columns; i < counts.length - columns; i++) {
    result[i] = 0.25 * across[i - columns] + 0.5 * across[i] + 0.25 * across[i + columns];
  }
  return result;
}
