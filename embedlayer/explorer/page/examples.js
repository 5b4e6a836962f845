/** Examples of the table that is open; where its tokens are no everyday words, also those of another opened source. */

import { visibleText } from "./dom.js";
import { expressionOf, idsByText } from "./map/search.js";

/** @import { Examples, TokenSum, ViewContext } from "./types" */
/**
 * @typedef {Examples & {source: number, title: string, texts: string[]}} OtherExamples
 * @typedef {{own: Examples, other: OtherExamples | null}} FoundExamples
 */

/** @param {Pick<ViewContext, "data" | "sources" | "source">} context @returns {Promise<FoundExamples>} */
export async function examplesOf({ data, sources, source }) {
  /** @type {Examples} */
  const own = await data.load("examples");
  for (let i = 0; i < sources.length && !own.is_everyday; i++) {
    /** @type {Examples} */
    const examples = i === source ? own : await data.load("examples", { source: i });
    if (!examples.is_everyday) continue;
    /** @type {{texts: string[]}} */
    const { texts } = await data.load("tokens", { source: i });
    return { own, other: { ...examples, source: i, title: sources[i].title, texts } };
  }
  return { own, other: null };
}

/** Return a sum as it can be typed. @param {TokenSum} sum @param {string[]} texts */
export function sumText(sum, texts) {
  return expressionOf(sum, (id) => visibleText(texts[id]), idsByText(texts));
}
