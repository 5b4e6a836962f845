/** What an exported page computes for itself from the vectors in it. */

/** The answer to a request that is not baked, or undefined if it cannot be computed. */
export function compute(name, params, load) {
  return undefined;
}
