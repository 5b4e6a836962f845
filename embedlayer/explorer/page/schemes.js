/** Position schemes as the view Positions draws them: added vectors, rotations, or attention biases. */

import { add, alibiBias, alibiSlopes, dot, frequencies, rotate, row, sinusoid, unpackMatrix, waves } from "./math.js";

/** @import { DescribedScheme } from "./types" */

/**
 * @typedef {object} Scheme
 * @property {"input" | "rotation" | "bias" | "none"} point where it is applied: added to the input, rotating queries
 *   and keys, or as an attention bias
 * @property {string} name
 * @property {string} sentence what it does
 * @property {string} formula
 * @property {string} note
 * @property {number} columns number of dimensions, pairs or heads
 * @property {number | null} trained number of positions that it has rows for or was trained on
 * @property {number} last the last position; Infinity where there is no limit
 * @property {number} width of the vectors, or of a head; 0 for biases
 * @property {number} pairs number of waves
 * @property {(position: number) => Float64Array} vector of a position; for rotations its cosines and sines
 * @property {(pair: number) => number} wavelength positions for a full rotation; NaN if there is none
 * @property {(pair: number) => number[]} channels entries of `vector` that belong to a pair
 * @property {(channel: number) => string} part "sin", "cos", or another name of an entry of `vector`
 * @property {(vector: ArrayLike<number>, position: number) => Float64Array} apply the scheme to a token's vector
 * @property {(head: number, query: number, key: number) => number} bias
 * @property {(position: number) => number} queryFactor factor on a query, by its position
 * @property {number[] | null} slopes of ALiBi
 * @property {boolean} causal whether biases are for keys before the query only
 */

/** @type {Scheme} */
const NEUTRAL = {
  point: "none", name: "", sentence: "", formula: "", note: "", columns: 0, trained: null, last: Infinity, width: 0,
  pairs: 0, vector: () => new Float64Array(0), wavelength: () => NaN, channels: (pair) => [2 * pair, 2 * pair + 1],
  part: (channel) => `dimension ${channel}`, apply: (vector) => Float64Array.from(vector), bias: () => 0, slopes: null,
  causal: false, queryFactor: () => 1,
};

/** @type {Record<string, (described: DescribedScheme) => Scheme>} */
const KINDS = {
  sinusoidal: (described) => sinusoids(described.embed_dim, described.base, /** @type {any} */ (described)),
  learned,
  rotary: ownRotary,
  query_scaled: queryScaled,
  alibi: (described) => alibi(described.num_heads, described.slopes),
  relative,
};

/** Return a scheme that the server describes. @param {DescribedScheme} described @returns {Scheme} */
export function fromSource(described) {
  const none = { ...NEUTRAL, sentence: "This model has no position scheme." };
  const scheme = KINDS[described.kind]?.(described) ?? none;
  return { ...scheme, name: described.name, trained: described.trained_length };
}

/**
 * @param {number} dim
 * @param {number} base
 * @param {{layout?: string, endpoint?: boolean, offset?: number,
 *   padding_idx?: number | null, scale?: number}} [options]
 * @returns {Scheme}
 */
export function sinusoids(dim, base, options = {}) {
  const { layout = "interleaved", endpoint = false, offset = 0, padding_idx: padding = null, scale = 1 } = options;
  const waveOptions = { base, layout, endpoint };
  const list = waves(dim, waveOptions);
  const cosines = new Set(list.map((wave) => wave.cosine));
  /** @param {number} position */
  const vector = (position) => (position + offset === padding
    ? new Float64Array(dim)
    : sinusoid(position + offset, dim, waveOptions).map((value) => scale * value));
  return {
    ...NEUTRAL, point: "input", name: `Sinusoidal, D = ${dim}`, columns: dim, width: dim, pairs: list.length, vector,
    formula: "PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D))",
    sentence: "A fixed vector is added at each position: pairs of sine and cosine with wavelengths from short to long.",
    wavelength: (pair) => (2 * Math.PI) / list[pair].frequency,
    apply: (token, position) => add(token, vector(position)),
    channels: (pair) => [list[pair].sine, list[pair].cosine].filter((channel) => channel < dim),
    part: (channel) => (cosines.has(channel) ? "cos" : "sin"),
  };
}

/** @param {DescribedScheme} described @returns {Scheme} */
function learned(described) {
  const rows = unpackMatrix(described.rows);
  /** @param {number} position */
  const vector = (position) => (position < rows.rows
    ? Float64Array.from(row(rows, position))
    : new Float64Array(rows.cols).fill(NaN));
  return {
    ...NEUTRAL, point: "input", columns: rows.cols, width: rows.cols, pairs: Math.floor(rows.cols / 2), vector,
    last: rows.rows - 1,
    formula: "P[p], one learned row for each position",
    sentence: "A learned vector is added at each position. There is none after the last row.",
    apply: (token, position) => add(token, vector(position)),
  };
}

/**
 * @param {number} width
 * @param {number} base
 * @param {ArrayLike<number>} [list] radians per position of each pair
 * @param {{interleaved?: boolean, magnitude?: number, channels?: number[][]}} [options] as in `rotate`
 * @returns {Scheme}
 */
export function rotary(width, base, list = frequencies(width, base), options = {}) {
  return {
    ...NEUTRAL, point: "rotation", name: `Rotary, K = ${width}`, columns: list.length, width, pairs: list.length,
    formula: "θ = p · base^(-2i/K), (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ)",
    sentence: "Nothing is added to the input: pairs of channels of queries and keys are rotated by an angle that is "
      + "proportional to the position.",
    vector: (position) => Float64Array.from({ length: 2 * list.length }, (_, c) =>
      (c % 2 ? Math.sin : Math.cos)(position * list[c >> 1])),
    wavelength: (pair) => (2 * Math.PI) / Math.abs(list[pair]),
    apply: (token, position) => rotate(token, position, list, options),
    channels: (pair) => [2 * pair + 1, 2 * pair],
    part: (c) => (c % 2 ? "sin" : "cos"),
  };
}

/** @param {DescribedScheme} described @returns {Scheme} */
function ownRotary(described) {
  const scheme = rotary(described.head_dim, described.base, described.frequencies, /** @type {any} */ (described));
  const varies = described.varies ? "; shown with the frequencies of the trained length" : "";
  const note = described.scaling ? `${described.scaling}${varies}.` : "";
  return { ...scheme, note, queryFactor: queryFactor(described.query_scaling) };
}

/** @param {DescribedScheme} described @returns {Scheme} */
function queryScaled(described) {
  return {
    ...NEUTRAL, queryFactor: queryFactor(described.query_scaling),
    sentence: "Nothing is added and nothing is rotated: queries are multiplied by a factor of their position.",
  };
}

/**
 * Return the factor on a query by its position; NaN for a scaling that the page does not know.
 * @param {{kind: string, [field: string]: any} | null} scaling
 * @returns {(position: number) => number}
 */
function queryFactor(scaling) {
  if (!scaling) return () => 1;
  const { kind, scale, exponent, length, offset } = scaling;
  if (kind === "log_query_scaling") return (p) => 1 + scale * Math.log1p(Math.floor((p + offset) / length));
  if (kind === "power_query_scaling") return (p) => (1 + (p + offset) / length) ** exponent;
  return () => NaN;
}

/** @param {number} heads @param {number[]} [slopes] @returns {Scheme} */
export function alibi(heads, slopes = alibiSlopes(heads)) {
  return {
    ...NEUTRAL, point: "bias", name: `ALiBi, ${heads} heads`, columns: heads, slopes, causal: true,
    formula: "score(i, j) − slope[h] · |i − j|",
    sentence: "Nothing is added to vectors: each head subtracts its slope times the distance from the score of a query "
      + "and a key.",
    bias: (head, query, key) => alibiBias(slopes[head], query, key),
  };
}

/** @param {DescribedScheme} described @returns {Scheme} */
function relative(described) {
  const table = unpackMatrix(described.biases);
  const middle = (table.cols - 1) / 2;
  /** @param {number} query @param {number} key */
  const column = (query, key) => middle + Math.max(-middle, Math.min(middle, key - query));
  return {
    ...NEUTRAL, point: "bias", columns: table.rows, causal: !described.bidirectional,
    formula: "score(i, j) + weight[bucket(j − i), h]",
    sentence: "A learned number for each head and bucket of distances is added to the score. Small distances have "
      + "buckets of their own, larger ones share them.",
    bias: (head, query, key) => table.data[head * table.cols + column(query, key)],
  };
}

/**
 * Return the score of a query and a key at their positions, before the softmax.
 * @param {Pick<Scheme, "point" | "apply"> & Partial<Scheme>} scheme
 * @param {ArrayLike<number>} query
 * @param {ArrayLike<number>} key
 * @param {number} queryPosition
 * @param {number} keyPosition
 * @param {number} [head]
 */
export function score(scheme, query, key, queryPosition, keyPosition, head = 0) {
  if (scheme.point === "bias") {
    return dot(query, key) / Math.sqrt(query.length) + (scheme.bias?.(head, queryPosition, keyPosition) ?? 0);
  }
  const factor = (scheme.queryFactor?.(queryPosition) ?? 1) / Math.sqrt(query.length);
  return dot(scheme.apply(query, queryPosition), scheme.apply(key, keyPosition)) * factor;
}
