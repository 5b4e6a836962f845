/** Position schemes as the view Positions draws them: added vectors, rotations, or attention biases. */

import {
  add, alibiBias, alibiSlopes, dot, frequencies, rotatePairs, row, sinusoid, unpackMatrix, waves,
} from "./math.js";

/** @import { AdditiveScheme, BiasScheme, DescribedScheme, Matrix, RotationScheme } from "./types" */
/** @typedef {(position: number) => ArrayLike<number>} Rotations numbers of a position, as in `rotatePairs` */

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
 * @property {(vector: ArrayLike<number>, position: number) => Float64Array} apply the scheme to a token's vector, or
 *   to a key
 * @property {(vector: ArrayLike<number>, position: number) => Float64Array} [applyToQuery] where queries differ
 * @property {(head: number, query: number, key: number) => number} bias
 * @property {number[] | null} slopes of ALiBi
 * @property {boolean} causal whether biases are for keys before the query only
 */

/** @type {Scheme} */
const NEUTRAL = {
  point: "none", name: "", sentence: "", formula: "", note: "", columns: 0, trained: null, last: Infinity, width: 0,
  pairs: 0, vector: () => new Float64Array(0), wavelength: () => NaN, channels: (pair) => [2 * pair, 2 * pair + 1],
  part: (channel) => `dimension ${channel}`, apply: (vector) => Float64Array.from(vector), bias: () => 0, slopes: null,
  causal: false,
};

/** Return a scheme that the server describes. @param {DescribedScheme} described @returns {Scheme} */
export function fromSource(described) {
  return { ...kindOf(described), name: described.name, trained: described.trained_length };
}

/** @param {DescribedScheme} described @returns {Scheme} */
function kindOf(described) {
  switch (described.kind) {
    case "sinusoidal": return sinusoids(described.embed_dim, described.base, described);
    case "learned": return learned(described);
    case "rotation": return ownRotation(described);
    case "alibi": return alibi(described.num_heads, described.slopes);
    case "relative": return relative(described);
    case "undrawn": {
      const sentence = `${described.name} rotates queries and keys, but not in pairs of channels: it is not drawn.`;
      return { ...NEUTRAL, sentence };
    }
    default: return { ...NEUTRAL, sentence: "This source has no position scheme." };
  }
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

/** @param {AdditiveScheme} described @returns {Scheme} */
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

/** @param {number} width @param {number} base @returns {Scheme} */
export function rotary(width, base) {
  const list = frequencies(width, base);
  const channels = Array.from(list, (_, i) => /** @type {[number, number]} */ ([i, i + list.length]));
  return {
    ...rotation(width, channels, (position) =>
      [...Array.from(list).flatMap((each) => [Math.cos(position * each), Math.sin(position * each)]), 1]),
    name: `Rotary, K = ${width}`,
    formula: "θ = p · base^(-2i/K), (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ)",
  };
}

/**
 * Return the scheme that rotates pairs of channels.
 * @param {number} width
 * @param {[number, number][]} channels
 * @param {Rotations} keys
 * @param {Rotations} [queries]
 * @returns {Scheme}
 */
function rotation(width, channels, keys, queries = keys) {
  /** @param {number} position */
  const vector = (position) => {
    const numbers = queries(position);
    return Float64Array.from({ length: 2 * channels.length }, (_, c) =>
      numbers[c] / Math.hypot(numbers[c - (c % 2)], numbers[c - (c % 2) + 1]));
  };
  const turns = angleSteps(vector, channels.length);
  const isEven = turns.every((each) => !Number.isNaN(each));
  return {
    ...NEUTRAL, point: "rotation", columns: channels.length, width, pairs: channels.length, vector,
    formula: `${isEven ? "θ = p · frequency[i]" : "θ = angle[p, i]"}, (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ)`,
    sentence: "Nothing is added to the input: pairs of channels of queries and keys are rotated by an angle that "
      + `${isEven ? "is proportional to" : "depends on"} the position.`,
    wavelength: (pair) => (2 * Math.PI) / Math.abs(turns[pair]),
    apply: (token, position) => rotatePairs(token, keys(position), channels),
    applyToQuery: (token, position) => rotatePairs(token, queries(position), channels),
    channels: (pair) => [2 * pair + 1, 2 * pair],
    part: (c) => (c % 2 ? "sin" : "cos"),
  };
}

/**
 * Return by how many radians each pair rotates in one position; NaN where that is not the same at each position.
 * @param {(position: number) => Float64Array} vector cosine and sine of each pair
 * @param {number} pairs
 */
function angleSteps(vector, pairs) {
  const [first, second, third, fourth] = [0, 1, 2, 3].map(vector);
  return Array.from({ length: pairs }, (_, i) => {
    /** @param {Float64Array} from @param {Float64Array} to */
    const angle = (from, to) => {
      const [cos, sin, nextCos, nextSin] = [from[2 * i], from[2 * i + 1], to[2 * i], to[2 * i + 1]];
      return Math.atan2(cos * nextSin - sin * nextCos, cos * nextCos + sin * nextSin);
    };
    const [step, later, last] = [angle(first, second), angle(second, third), angle(third, fourth)];
    return Math.abs(step - later) > 1e-5 || Math.abs(later - last) > 1e-5 ? NaN : step;
  });
}

/** @param {RotationScheme} described @returns {Scheme} */
function ownRotation(described) {
  const keys = unpackMatrix(described.keys ?? described.queries);
  const queries = unpackMatrix(described.queries);
  const none = new Float64Array(queries.cols).fill(NaN);
  /** @param {Matrix} numbers @returns {Rotations} */
  const of = (numbers) => (position) => (position < numbers.rows ? row(numbers, position) : none);
  const scheme = {
    ...rotation(described.head_dim, described.channels, of(keys), of(queries)),
    note: described.note, last: queries.rows - 1,
  };
  return described.channels.length ? scheme : {
    ...scheme, point: "none",
    sentence: "Nothing is added and nothing is rotated: queries are multiplied by a factor of their position.",
  };
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

/** @param {BiasScheme} described @returns {Scheme} */
function relative(described) {
  const table = unpackMatrix(described.biases);
  const middle = (table.cols - 1) / 2;
  /** @param {number} query @param {number} key */
  const column = (query, key) => middle + Math.max(-middle, Math.min(middle, key - query));
  return {
    ...NEUTRAL, point: "bias", columns: table.rows, causal: described.causal,
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
  const applied = (scheme.applyToQuery ?? scheme.apply)(query, queryPosition);
  return dot(applied, scheme.apply(key, keyPosition)) / Math.sqrt(query.length);
}
