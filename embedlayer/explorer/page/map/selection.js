/** The tokens that the URL selects, and their cosine with all others. */

/** @import { TokenSum, ViewContext } from "../types" */

/**
 * Return the selected tokens.
 * @param {ViewContext["state"]} state
 * @param {number} size number of tokens
 * @returns {TokenSum}
 */
export function selectedTokens(state, size) {
  /** @param {string} key */
  const list = (key) => state.get(key, "").split(",").filter((id) => id !== "" && Number(id) < size).map(Number);
  return { plus: list("plus"), minus: list("minus") };
}

/** Return a selection as parameters of a request. @param {TokenSum} sum */
export function sumParams({ plus, minus }) {
  return { plus: plus.join(","), minus: minus.join(",") };
}

/** Return the IDs of all tokens of a selection. @param {TokenSum} sum */
export function idsOf({ plus, minus }) {
  return [...plus, ...minus];
}

/** Whether no token is selected. @param {TokenSum} sum */
export function isEmpty({ plus, minus }) {
  return !plus.length && !minus.length;
}
