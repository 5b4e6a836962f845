/** The subwords that a tokenizer splits a text into, where no single token is that text. */

import { token, visibleText, h } from "../dom.js";

/** @import { Data } from "../types" */

/** @typedef {{text: string, splits: number[][], problem: string}} Subwords */

/**
 * Split a text as it is, and after a space, as inside a sentence.
 * @param {Data} data
 * @param {string} text
 * @param {boolean} hasTokenizer
 * @returns {Promise<Subwords>}
 */
export async function subwordsOf(data, text, hasTokenizer) {
  const bare = text.trim();
  const problem = data.exported ? "This file has no tokenizer that could split it; embedlayer explore DIR has one."
    : hasTokenizer ? "" : "There is no tokenizer that could split it.";
  if (problem) return { text: bare, splits: [], problem };
  try {
    const splits = await Promise.all([bare, ` ${bare}`].map((each) => data.load("encode", { text: each })));
    const isSame = String(splits[0]) === String(splits[1]);
    return { text: bare, splits: (isSame ? splits.slice(1) : splits).filter((ids) => ids.length > 0), problem: "" };
  } catch (error) {
    return { text: bare, splits: [], problem: /** @type {Error} */ (error).message };
  }
}

/**
 * Create the buttons that select one subword, or the sum of all.
 * @param {Subwords} subwords
 * @param {string[]} texts
 * @param {(ids: number[]) => void} choose
 */
export function subwordButtons({ text, splits, problem }, texts, choose) {
  const head = h("p", { class: "note", role: "status" }, `No single token is “${visibleText(text)}”. `,
    problem || "The tokenizer splits it into:");
  return h("div", { class: "map-subwords" }, head, splits.map((ids) => h("div", { class: "chips" },
    ids.map((id) => token(texts[id], { id, title: "Select this token", onClick: () => choose([id]) })),
    ids.length > 1 ? sumButton(ids, choose) : null)));
}

/** @param {number[]} ids @param {(ids: number[]) => void} choose */
function sumButton(ids, choose) {
  return h("button", { type: "button", class: "link", onClick: () => choose([...new Set(ids)]) }, "their sum");
}
