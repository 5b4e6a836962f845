/** Seeded random numbers: the same seed gives the same numbers in every browser. */

/** @import { Matrix } from "../types" */

/**
 * Return a generator of uniform numbers in [0, 1): mulberry32, 32 bits of state.
 * @param {number} seed
 * @returns {() => number}
 */
export function uniform(seed) {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/**
 * Return a generator of normal numbers with mean 0 and standard deviation 1 (Box-Muller).
 * @param {number} seed
 * @returns {() => number}
 */
export function normal(seed) {
  const next = uniform(seed);
  return () => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
}

/**
 * Return a matrix of normal numbers with mean 0.
 * @param {number} rows
 * @param {number} cols
 * @param {number} std standard deviation
 * @param {number} seed
 * @returns {Matrix}
 */
export function normalMatrix(rows, cols, std, seed) {
  const next = normal(seed);
  return { rows, cols, data: Float64Array.from({ length: rows * cols }, () => std * next()) };
}

/** Return a `normalMatrix` with two digits after the point. @param {Parameters<typeof normalMatrix>} options */
export function roundedMatrix(...options) {
  const { data, ...sizes } = normalMatrix(...options);
  return { ...sizes, data: data.map((value) => Math.round(100 * value) / 100) };
}

/** Return the numbers 0 .. count - 1 in random order (Fisher-Yates). @param {number} count @param {number} seed */
export function shuffled(count, seed) {
  const next = uniform(seed);
  const order = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(next() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
