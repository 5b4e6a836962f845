/** The probabilities of the next token from its logits, and samples from them. Plain loops, for a slider over all V. */

import { uniform } from "../learn/random.js";

/** @import { Matrix } from "../types" */

/**
 * Return `softmax(logits / temperature)`; at temperature 0, probability 1 for the first of the largest logits.
 * @param {Matrix["data"]} logits final logits, after the soft cap
 * @param {number} temperature
 * @returns {Float64Array}
 */
export function softmax(logits, temperature) {
  const found = new Float64Array(logits.length);
  let largest = -Infinity;
  for (let id = 0; id < logits.length; id++) if (logits[id] > largest) largest = logits[id];
  if (temperature === 0) {
    found[logits.indexOf(largest)] = 1;
    return found;
  }
  let sum = 0;
  for (let id = 0; id < logits.length; id++) sum += found[id] = Math.exp((logits[id] - largest) / temperature);
  for (let id = 0; id < logits.length; id++) found[id] /= sum;
  return found;
}

/** Return the entropy in bits. @param {Float64Array} probabilities */
export function entropyOf(probabilities) {
  let bits = 0;
  for (let id = 0; id < probabilities.length; id++) {
    if (probabilities[id] > 0) bits -= probabilities[id] * Math.log2(probabilities[id]);
  }
  return bits;
}

/**
 * Draw a token; the same seed draws the same token.
 * @param {Float64Array} probabilities
 * @param {number} seed
 */
export function drawn(probabilities, seed) {
  let rest = uniform(seed)();
  let last = 0;
  for (let id = 0; id < probabilities.length; id++) {
    if (probabilities[id] <= 0) continue;
    last = id;
    rest -= probabilities[id];
    if (rest < 0) break;
  }
  return last;
}
