// The mathematics of the sliders: pure functions, computed in float64, tested equal to the library.
// A matrix is {rows, cols, data}: its numbers row by row.

/** Radians per position of each pair of `dim` dimensions: base^(-2i / dim). */
export function frequencies(dim, base = 10000) {
  return Float64Array.from({ length: Math.floor(dim / 2) }, (_, i) => base ** -((2 * i) / dim));
}

/** PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D)); other layouts as in the library. */
export function sinusoid(position, dim, { base = 10000, layout = "interleaved", endpoint = false } = {}) {
  const pairs = endpoint ? Math.floor(dim / 2) : Math.floor((dim + 1) / 2);
  const divisor = endpoint ? pairs - 1 : dim / 2;
  const out = new Float64Array(dim);
  for (let i = 0; i < pairs; i++) {
    const angle = position * base ** -(i / divisor);
    const [sine, cosine] = layout === "interleaved" ? [2 * i, 2 * i + 1] : [i, pairs + i];
    out[sine] = Math.sin(angle);
    if (cosine < dim) out[cosine] = Math.cos(angle);
  }
  return out;
}

/** Which wave a dimension of a sinusoid belongs to: {pair, part: "sin" | "cos"}. */
export function waveOf(dimension, dim, { layout = "interleaved", endpoint = false } = {}) {
  const pairs = endpoint ? Math.floor(dim / 2) : Math.floor((dim + 1) / 2);
  if (layout === "interleaved") return { pair: dimension >> 1, part: dimension % 2 ? "cos" : "sin" };
  return dimension < pairs ? { pair: dimension, part: "sin" } : { pair: dimension - pairs, part: "cos" };
}

/** The two channels of pair i of a head: (2i, 2i + 1), or (i, i + half). */
function channelsOf(pair, pairs, interleaved) {
  return interleaved ? [2 * pair, 2 * pair + 1] : [pair, pair + pairs];
}

/** A query or key turned by its position: pair i by position * turning[i] radians, times the attention factor. */
export function rotate(vector, position, turning, { interleaved = false, magnitude = 1 } = {}) {
  const out = Float64Array.from(vector);
  for (let i = 0; i < turning.length; i++) {
    const [a, b] = channelsOf(i, turning.length, interleaved);
    const cos = Math.cos(position * turning[i]) * magnitude;
    const sin = Math.sin(position * turning[i]) * magnitude;
    out[a] = vector[a] * cos - vector[b] * sin;
    out[b] = vector[b] * cos + vector[a] * sin;
  }
  return out;
}

/** How fast each head forgets: 2^(-max_bias i / H); between powers of two the library's fill-up. */
export function alibiSlopes(heads, maxBias = 8) {
  let above = 1;
  while (above < heads) above *= 2;
  const slopes = Array.from({ length: above }, (_, i) => 2 ** ((-maxBias * (i + 1)) / above));
  if (above === heads) return slopes;
  const every = (start) => slopes.filter((_, i) => i % 2 === start);
  return [...every(1), ...every(0)].slice(0, heads);
}

/** What ALiBi adds to the score of a query and a key. */
export function alibiBias(slope, query, key) {
  return -slope * Math.abs(query - key);
}

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

export function cosine(a, b) {
  const size = Math.sqrt(dot(a, a) * dot(b, b));
  return size ? dot(a, b) / size : 0;
}

export function distance(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += (a[i] - b[i]) ** 2;
  return Math.sqrt(sum);
}

export function add(a, b) {
  return Float64Array.from(a, (number, i) => number + b[i]);
}

export function matrix(rows, cols, fill) {
  const data = new Float64Array(rows * cols);
  for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) data[r * cols + c] = fill(r, c);
  return { rows, cols, data };
}

export function fromRows(list) {
  const cols = list.length ? list[0].length : 0;
  const data = new Float64Array(list.length * cols);
  list.forEach((row, r) => data.set(row, r * cols));
  return { rows: list.length, cols, data };
}

export function row(m, r) {
  return m.data.subarray(r * m.cols, (r + 1) * m.cols);
}

/** Cosines of all pairs of rows. */
export function similarities(m) {
  const unit = fromRows(
    Array.from({ length: m.rows }, (_, r) => {
      const size = Math.sqrt(dot(row(m, r), row(m, r))) || 1;
      return row(m, r).map((number) => number / size);
    }),
  );
  const out = { rows: m.rows, cols: m.rows, data: new Float64Array(m.rows * m.rows) };
  for (let i = 0; i < m.rows; i++) {
    for (let j = i; j < m.rows; j++) {
      const alike = dot(row(unit, i), row(unit, j));
      out.data[i * m.rows + j] = alike;
      out.data[j * m.rows + i] = alike;
    }
  }
  return out;
}

/** The closest two rows, of equally close ones the first: {a, b, distance, pairs} of all pairs; null for fewer than two. */
export function closest(m) {
  if (m.rows < 2) return null;
  const best = { a: 0, b: 1, distance: Infinity, pairs: (m.rows * (m.rows - 1)) / 2 };
  for (let a = 0; a < m.rows; a++) {
    for (let b = a + 1; b < m.rows; b++) {
      const apart = distance(row(m, a), row(m, b));
      if (apart < best.distance - 1e-9) Object.assign(best, { a, b, distance: apart });
    }
  }
  return best;
}

/** The same matrix with rows and columns in another order: out[i][j] = m[order[i]][order[j]]. */
export function permuted(m, order) {
  return matrix(order.length, order.length, (i, j) => m.data[order[i] * m.cols + order[j]]);
}

export function largestDifference(a, b) {
  let largest = 0;
  for (let i = 0; i < a.data.length; i++) largest = Math.max(largest, Math.abs(a.data[i] - b.data[i]));
  return largest;
}

const unpacked = new WeakMap();

/** A tensor as the server packs it, {shape, float32}: {shape, data}. Unpacked once, so only to be read. */
function unpack(packed) {
  if (!unpacked.has(packed)) {
    const bytes = Uint8Array.from(atob(packed.float32), (letter) => letter.charCodeAt(0));
    unpacked.set(packed, { shape: packed.shape, data: new Float32Array(bytes.buffer) });
  }
  return unpacked.get(packed);
}

/** A packed (T, C) tensor, or entry `index` of a packed (H, T, C) one, as a matrix. */
export function unpackMatrix(packed, index = 0) {
  const { shape, data } = unpack(packed);
  const [rows, cols] = shape.slice(-2);
  return { rows, cols, data: data.subarray(index * rows * cols, (index + 1) * rows * cols) };
}
