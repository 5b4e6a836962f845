/** Token rows and position vectors of the scenes about positions, at their start: normal numbers with std 0.02. */

import { add, norm, sinusoid } from "../math.js";
import { normal, uniform } from "./random.js";

/** Standard deviation of token rows and learned positions at the start, as in GPT-2. */
export const STD = 0.02;

/**
 * Return the row of a token or of a learned position at the start of training.
 * @param {"token" | "position"} table
 * @param {number} index
 * @param {number} dim
 * @param {number} [std]
 */
export function startRow(table, index, dim, std = STD) {
  const next = normal((table === "token" ? 1 : 2) * 1e6 + 1000 * index + dim);
  return Float64Array.from({ length: dim }, () => std * next());
}

/** Return the vector of a position. @param {string} scheme @param {number} position @param {number} dim */
export function positionVector(scheme, position, dim) {
  return scheme === "learned" ? startRow("position", position, dim) : sinusoid(position, dim);
}

/**
 * Return the parts of an input vector: s · W[token] with s = √D or 1, P[position], and their sum.
 * @param {{token: number, position: number, dim: number, scheme: string, scaled: boolean}} options
 */
export function inputVector({ token, position, dim, scheme, scaled }) {
  const factor = scaled ? Math.sqrt(dim) : 1;
  const row = startRow("token", token, dim);
  const scaledRow = row.map((value) => factor * value);
  const place = positionVector(scheme, position, dim);
  return { row, factor, scaledRow, place, sum: add(scaledRow, place) };
}

/**
 * Return what dropout makes of a vector in training: zeros with probability p, and the others divided by 1 − p.
 * @param {Float64Array} vector
 * @param {number} p
 * @param {number} seed
 */
export function dropped(vector, p, seed) {
  const next = uniform(seed);
  return vector.map((value) => (next() < p ? 0 : value / (1 - p)));
}

/** Return the mean norm of some vectors. @param {ArrayLike<number>[]} vectors */
export function meanNorm(vectors) {
  return vectors.reduce((total, vector) => total + norm(vector), 0) / vectors.length;
}
