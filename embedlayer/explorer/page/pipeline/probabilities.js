/** The probabilities of the next token from its logits, and samples from them. */

import { uniform } from "../learn/random.js";

/** @import { Matrix } from "../types" */

/**
 * Return `softmax(logits / temperature)`; at temperature 0, probability 1 for the first of the largest logits.
 * @param {Matrix["data"]} logits final logits, after the soft cap
 * @param {number} temperature
 * @returns {Float64Array}
 */
export function softmax(logits, temperature) {
  let largest = -Infinity;
  for (const logit of logits) if (logit > largest) largest = logit;
  if (temperature === 0) {
    const found = new Float64Array(logits.length);
    found[logits.indexOf(largest)] = 1;
    return found;
  }
  const powers = Float64Array.from(logits, (logit) => Math.exp((logit - largest) / temperature));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

/** Return the entropy in bits. @param {Float64Array} probabilities */
export function entropyOf(probabilities) {
  return probabilities.reduce((sum, p) => (p > 0 ? sum - p * Math.log2(p) : sum), 0);
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
