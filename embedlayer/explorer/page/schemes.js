/** Position schemes as the room Positions draws them: each speaks by vectors, by turning, or by a bias. */

import { add, alibiBias, alibiSlopes, dot, frequencies, rotate, sinusoid, unpackMatrix, waveOf } from "./math.js";

/**
 * @typedef {object} Scheme
 * @property {"added" | "rotary" | "bias" | "none"} speaks how
 * @property {string} name
 * @property {string} sentence what it does
 * @property {string} formula
 * @property {number} columns dimensions, pairs or heads
 * @property {number | null} trained positions that it covers or was trained on
 * @property {number} last the last position there is; Infinity for no end
 * @property {number} width of the vectors, or of a head; 0 for biases
 * @property {number} pairs of waves
 * @property {(position: number) => Float64Array} vector what stands for a position; for rotary the sines and cosines
 * @property {(pair: number) => number} wavelength positions to a turn; NaN if there is none
 * @property {(vector: ArrayLike<number>, position: number) => Float64Array} apply the vector of a token at a position
 * @property {(head: number, query: number, key: number) => number} bias
 */

const NEUTRAL = {
  columns: 0, trained: null, last: Infinity, width: 0, pairs: 0, formula: "", sentence: "",
  vector: () => new Float64Array(0), wavelength: () => NaN, apply: (vector) => Float64Array.from(vector), bias: () => 0,
};

/** A scheme as the server describes it. @returns {Scheme} */
export function fromSource(described) {
  const scheme = {
    sinusoidal: ownSinusoids, learned, rotary: ownRotary, alibi: ownAlibi, relative,
  }[described.kind]?.(described) ?? { ...NEUTRAL, speaks: "none", sentence: "This model has no positions of its own." };
  return { ...scheme, name: described.name, trained: described.trained_length };
}

/** @returns {Scheme} */
export function sinusoids(dim, base, { layout = "interleaved", endpoint = false, offset = 0, padding_idx: padding = null, scale = 1 } = {}) {
  const options = { base, layout, endpoint };
  const pairs = endpoint ? Math.floor(dim / 2) : Math.floor((dim + 1) / 2);
  const vector = (position) => (position + offset === padding ? new Float64Array(dim) : sinusoid(position + offset, dim, options).map((value) => scale * value));
  return {
    ...NEUTRAL, speaks: "added", name: `Sinusoids, D = ${dim}`, columns: dim, width: dim, pairs, vector,
    formula: "PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(p / base^(2i/D))",
    sentence: "A fixed vector is added for each position: pairs of sine and cosine, from fast waves to slow ones.",
    wavelength: (pair) => 2 * Math.PI * base ** (pair / (endpoint ? pairs - 1 : dim / 2)),
    apply: (token, position) => add(token, vector(position)),
    channels: (pair) => Array.from({ length: dim }, (_, d) => d).filter((d) => waveOf(d, dim, options).pair === pair),
    part: (d) => waveOf(d, dim, options).part,
  };
}

function ownSinusoids(described) {
  return sinusoids(described.embed_dim, described.base, described);
}

function learned(described) {
  const rows = unpackMatrix(described.rows);
  const vector = (position) => (position < rows.rows ? Float64Array.from(rows.data.subarray(position * rows.cols, (position + 1) * rows.cols)) : new Float64Array(rows.cols).fill(NaN));
  return {
    ...NEUTRAL, speaks: "added", columns: rows.cols, width: rows.cols, pairs: Math.floor(rows.cols / 2), vector, last: rows.rows - 1,
    formula: "P[p], one learned row for each position",
    sentence: "A learned vector is added for each position. Past the last row there is none.",
    apply: (token, position) => add(token, vector(position)),
    channels: (pair) => [2 * pair, 2 * pair + 1],
    part: (d) => `dimension ${d}`,
  };
}

/** @returns {Scheme} */
export function rotary(width, base, turning = frequencies(width, base), { interleaved = false, magnitude = 1 } = {}) {
  return {
    ...NEUTRAL, speaks: "rotary", name: `Rotary, K = ${width}`, columns: turning.length, width, pairs: turning.length,
    formula: "θ = p · base^(-2i/K), (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ)",
    sentence: "Nothing is added: pairs of numbers of queries and keys are turned by an angle that grows with the position.",
    vector: (position) => Float64Array.from({ length: 2 * turning.length }, (_, c) => (c % 2 ? Math.sin : Math.cos)(position * turning[c >> 1])),
    wavelength: (pair) => (2 * Math.PI) / turning[pair],
    apply: (token, position) => rotate(token, position, turning, { interleaved, magnitude }),
    channels: (pair) => [2 * pair + 1, 2 * pair],
    part: (c) => (c % 2 ? "sin" : "cos"),
  };
}

function ownRotary(described) {
  const scheme = rotary(described.head_dim, described.base, described.frequencies, described);
  return { ...scheme, note: described.scaling ? `${described.scaling}${described.varies ? "; shown with the frequencies of the trained length" : ""}` : "" };
}

/** @returns {Scheme} */
export function alibi(heads, slopes = alibiSlopes(heads)) {
  return {
    ...NEUTRAL, speaks: "bias", name: `ALiBi, ${heads} heads`, columns: heads,
    formula: "score(i, j) − slope[h] · |i − j|",
    sentence: "Nothing is added to vectors: the further back a key stands, the more is taken from its score, in each head at its own rate.",
    bias: (head, query, key) => alibiBias(slopes[head], query, key), slopes, causal: true,
  };
}

function ownAlibi(described) {
  return alibi(described.num_heads, described.slopes);
}

function relative(described) {
  const table = unpackMatrix(described.biases);
  const middle = (table.cols - 1) / 2;
  const place = (query, key) => middle + Math.max(-middle, Math.min(middle, key - query));
  return {
    ...NEUTRAL, speaks: "bias", columns: table.rows,
    formula: "score(i, j) + weight[bucket(j − i), h]",
    sentence: "A learned number for each head is added to the score: one for each small distance, one for each wider range of larger ones.",
    bias: (head, query, key) => table.data[head * table.cols + place(query, key)], causal: !described.bidirectional,
  };
}

/** The score of a query and a key at their places, before the softmax. */
export function score(scheme, query, key, queryPlace, keyPlace, head = 0) {
  const [q, k] = scheme.speaks === "bias" ? [query, key] : [scheme.apply(query, queryPlace), scheme.apply(key, keyPlace)];
  return dot(q, k) / Math.sqrt(query.length) + (scheme.speaks === "bias" ? scheme.bias(head, queryPlace, keyPlace) : 0);
}
