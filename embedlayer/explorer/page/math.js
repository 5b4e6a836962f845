// The mathematics behind the sliders: pure functions in float64, tested equal to the library.

/** @import { Matrix, PackedTensor } from "./types" */

/**
 * @typedef {Float64Array | Float32Array} Vector
 * @typedef {object} WaveOptions
 * @property {number} [base]
 * @property {string} [layout] "interleaved", "concatenated" or "cosines_first", as in the library
 * @property {boolean} [endpoint] as in the library
 *
 * @typedef {object} Wave a sine and a cosine of one frequency
 * @property {number} frequency radians per position
 * @property {number} sine dimension of the sine
 * @property {number} cosine dimension of the cosine, which an odd width may lack
 */

/**
 * Return the radians per position of each pair of `dim` dimensions: base^(-2i / dim).
 * @param {number} dim
 * @param {number} [base]
 */
export function frequencies(dim, base = 10000) {
  return Float64Array.from({ length: Math.floor(dim / 2) }, (_, i) => base ** -((2 * i) / dim));
}

/**
 * Return the waves of a sinusoidal embedding of `dim` dimensions.
 * @param {number} dim
 * @param {WaveOptions} [options]
 * @returns {Wave[]}
 */
export function waves(dim, { base = 10000, layout = "interleaved", endpoint = false } = {}) {
  const pairs = endpoint ? Math.floor(dim / 2) : Math.floor((dim + 1) / 2);
  const divisor = endpoint ? pairs - 1 : dim / 2;
  const half = Math.floor(dim / 2);
  const first = layout === "cosines_first";
  return Array.from({ length: pairs }, (_, i) => {
    const halves = first ? [half + i, i < half ? i : dim] : [i, pairs + i];
    const [sine, cosine] = layout === "interleaved" ? [2 * i, 2 * i + 1] : halves;
    return { frequency: base ** -(i / divisor), sine, cosine };
  });
}

/**
 * Return the vector of one position: PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)).
 * @param {number} position
 * @param {number} dim
 * @param {WaveOptions} [options]
 */
export function sinusoid(position, dim, options) {
  const out = new Float64Array(dim);
  for (const { frequency, sine, cosine } of waves(dim, options)) {
    out[sine] = Math.sin(position * frequency);
    if (cosine < dim) out[cosine] = Math.cos(position * frequency);
  }
  return out;
}

/**
 * Rotate pairs of channels of a query or key: (a, b) → (a cos − b sin, a sin + b cos).
 * @param {ArrayLike<number>} vector
 * @param {ArrayLike<number>} numbers cosine and sine of each pair, and the factor of all other channels
 * @param {[number, number][]} channels both channels of each pair
 */
export function rotatePairs(vector, numbers, channels) {
  const out = Float64Array.from(vector, (value) => numbers[2 * channels.length] * value);
  channels.forEach(([a, b], i) => {
    const [cos, sin] = [numbers[2 * i], numbers[2 * i + 1]];
    out[a] = vector[a] * cos - vector[b] * sin;
    out[b] = vector[b] * cos + vector[a] * sin;
  });
  return out;
}

/**
 * Return the slope of each head: 2^(-maxBias i / H); where H is no power of two, the library's interpolation.
 * @param {number} heads
 * @param {number} [maxBias]
 */
export function alibiSlopes(heads, maxBias = 8) {
  let above = 1;
  while (above < heads) above *= 2;
  const slopes = Array.from({ length: above }, (_, i) => 2 ** ((-maxBias * (i + 1)) / above));
  if (above === heads) return slopes;
  /** @param {number} start */
  const every = (start) => slopes.filter((_, i) => i % 2 === start);
  return [...every(1), ...every(0)].slice(0, heads);
}

/**
 * Return what ALiBi adds to the score of a query and a key.
 * @param {number} slope
 * @param {number} query
 * @param {number} key
 */
export function alibiBias(slope, query, key) {
  return -slope * Math.abs(query - key);
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** @param {ArrayLike<number>} vector */
export function norm(vector) {
  return Math.sqrt(dot(vector, vector));
}

/**
 * Return what RMSNorm divides by: √(mean(x²) + eps).
 * @param {ArrayLike<number>} vector
 * @param {number} eps
 */
export function rootMeanSquare(vector, eps) {
  return Math.sqrt(dot(vector, vector) / vector.length + eps);
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
export function cosine(a, b) {
  const size = Math.sqrt(dot(a, a) * dot(b, b));
  return size ? dot(a, b) / size : 0;
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
export function distance(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += (a[i] - b[i]) ** 2;
  return Math.sqrt(sum);
}

/** @param {ArrayLike<number>} a @param {ArrayLike<number>} b */
export function add(a, b) {
  return Float64Array.from(a, (number, i) => number + b[i]);
}

/**
 * Return a matrix of `fill(row, column)`.
 * @param {number} rows
 * @param {number} cols
 * @param {(row: number, column: number) => number} fill
 * @returns {Matrix}
 */
export function matrix(rows, cols, fill) {
  const data = new Float64Array(rows * cols);
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) data[r * cols + c] = fill(r, c);
  return { rows, cols, data };
}

/** Stack vectors. @param {ArrayLike<number>[]} list @returns {Matrix} */
export function fromRows(list) {
  const cols = list.length ? list[0].length : 0;
  const data = new Float64Array(list.length * cols);
  list.forEach((each, r) => data.set(each, r * cols));
  return { rows: list.length, cols, data };
}

/** Return a view of one row. @param {Matrix} m @param {number} r @returns {Vector} */
export function row(m, r) {
  return m.data.subarray(r * m.cols, (r + 1) * m.cols);
}

/** Return the cosines of all pairs of rows. @param {Matrix} m @returns {Matrix} */
export function similarities(m) {
  const unit = fromRows(Array.from({ length: m.rows }, (_, r) => {
    const size = norm(row(m, r)) || 1;
    return row(m, r).map((number) => number / size);
  }));
  const data = new Float64Array(m.rows * m.rows);
  for (let i = 0; i < m.rows; i++) {
    for (let j = i; j < m.rows; j++) {
      const similarity = dot(row(unit, i), row(unit, j));
      data[i * m.rows + j] = similarity;
      data[j * m.rows + i] = similarity;
    }
  }
  return { rows: m.rows, cols: m.rows, data };
}

const ROUNDING = 1e-4; // of a distance: an angle of 256 radians in float32 is off by up to 1.5e-5

/**
 * Return the two rows of smallest distance, the first of several equal pairs; null for fewer than two rows. `pairs` is
 * the number of pairs, and `alike` that of those with this distance, but for the rounding of float32.
 * @param {Matrix} m
 */
export function closest(m) {
  if (m.rows < 2) return null;
  /** @type {[a: number, b: number, distance: number][]} */
  const pairs = [];
  for (let a = 0; a < m.rows; a++) {
    for (let b = a + 1; b < m.rows; b++) pairs.push([a, b, distance(row(m, a), row(m, b))]);
  }
  const least = pairs.reduce((smallest, [, , apart]) => Math.min(smallest, apart), Infinity);
  const near = pairs.filter(([, , apart]) => apart <= least * (1 + ROUNDING));
  return { a: near[0][0], b: near[0][1], distance: least, alike: near.length, pairs: pairs.length };
}

/** Reorder rows and columns: out[i][j] = m[order[i]][order[j]]. @param {Matrix} m @param {number[]} order */
export function permuted(m, order) {
  return matrix(order.length, order.length, (i, j) => m.data[order[i] * m.cols + order[j]]);
}

/** @param {Matrix} a @param {Matrix} b */
export function largestDifference(a, b) {
  let largest = 0;
  for (let i = 0; i < a.data.length; i++) largest = Math.max(largest, Math.abs(a.data[i] - b.data[i]));
  return largest;
}

/** Return the index of the largest number, the first of equal ones. @param {ArrayLike<number>} numbers */
export function indexOfLargest(numbers) {
  return Array.from(numbers).reduce((best, value, i, all) => (value > all[best] ? i : best), 0);
}

/** @type {WeakMap<PackedTensor, Float32Array>} */
const unpacked = new WeakMap();

/** Decode a tensor of the server, once: the result must not be changed. @param {PackedTensor} packed */
function unpack(packed) {
  const found = unpacked.get(packed);
  if (found) return found;
  const bytes = Uint8Array.from(atob(packed.float32), (letter) => letter.charCodeAt(0));
  const data = new Float32Array(bytes.buffer);
  unpacked.set(packed, data);
  return data;
}

/**
 * Return a packed (T, C) tensor, or entry `index` of a packed (H, T, C) tensor, as a matrix.
 * @param {PackedTensor} packed
 * @param {number} [index]
 * @returns {Matrix}
 */
export function unpackMatrix(packed, index = 0) {
  const [rows, cols] = packed.shape.slice(-2);
  return { rows, cols, data: unpack(packed).subarray(index * rows * cols, (index + 1) * rows * cols) };
}
