/** One text under several tokenizers, aligned by its bytes: tokens, bytes per token, and the size of the table. */

import { COUNT } from "../charts/numbers.js";
import { h } from "../dom.js";
import { byteStrips, textOfBytes } from "./byte_strips.js";
import { picture } from "./pictures.js";
import { tokenBoxes } from "./token_player.js";

/** @import { Closable, Load, Params, Tokenization, ViewContext } from "../types" */
/** @import { ByteRow } from "./byte_strips.js" */

const MOST = 4;

/**
 * Return the parameters of the requests of a text's tokens under up to four tokenizers: the first one, that of the
 * source, those of other sources, the page's small one, and bytes.
 * @param {Params} first
 * @param {ViewContext} context
 * @returns {Params[]}
 */
export function fourTokenizers(first, { sources, source }) {
  /** @type {Params} */
  const layer = first.layer ? { layer: first.layer } : {};
  const own = ["small", "bytes"].filter((name) => name !== first.tokenizer)
    .map((tokenizer) => ({ ...layer, tokenizer }));
  const isOfSource = !first.layer && !first.tokenizer;
  const numbers = [source, ...sources.keys()].filter((number, i) => sources[number].has.includes("tokenizer")
    && (i ? number !== source : !isOfSource));
  const others = numbers.slice(0, MOST - 1 - own.length).map((number) =>
    /** @type {Params} */ (number === source ? {} : { source: number }));
  return [first, ...others, ...own];
}

/**
 * Ask for a text's tokens under several tokenizers. The first must have an answer; of the others those are left out
 * that have none: an exported page holds a few answers only.
 * @param {Load} load
 * @param {string} text
 * @param {Params[]} requests
 * @returns {Promise<Tokenization[]>}
 */
export async function tokenizations(load, text, requests) {
  const [first, ...rest] = requests.map((params) => load("tokenization", { text, ...params }));
  const others = await Promise.allSettled(rest);
  return [await first, ...others.flatMap((answer) => (answer.status === "fulfilled" ? [answer.value] : []))];
}

/** Create the strips and the table. @param {Tokenization[]} list @param {string} text @returns {Closable} */
export function sideBySide(list, text) {
  const bytes = new TextEncoder().encode(text);
  const strips = byteStrips();
  strips.show(list.map((each) => rowOf(each, bytes.length)), bytes);
  const head = ["", "tokens of the text", "bytes per token", "numbers of the table, V × D"].map((name, i) =>
    h("th", { class: i ? "number" : null, scope: "col" }, name));
  return {
    close: strips.close,
    element: picture("The same text under other tokenizers", h("p", { class: "note" }, "Aligned by bytes: the same "
      + "byte is at the same place in each strip. As a rule, fewer tokens need a larger table."), strips.element,
    h("table", { class: "tok-table" }, h("thead", null, h("tr", null, head)),
      h("tbody", null, list.map((each) => lineOf(each, bytes))))),
  };
}

/** @param {Tokenization} tokenization @param {number} size bytes of the text @returns {ByteRow} */
function rowOf({ title, tokens, left_out: leftOut }, size) {
  const boxes = tokenBoxes(tokens);
  const end = boxes.at(-1)?.stop ?? 0;
  const rest = `${COUNT.format(leftOut)} more`;
  return { name: title, boxes: leftOut && end < size
    ? [...boxes, { start: end, stop: size, title: rest, kind: "tok-more", label: () => rest }] : boxes };
}

/**
 * Count the special tokens that stand for other text than their name.
 * @param {Tokenization} tokenization
 * @param {Uint8Array} bytes of the text
 */
function unknownOf({ tokens }, bytes) {
  return tokens.filter(({ kind, start, stop, text }) =>
    kind === "special" && stop > start && textOfBytes(bytes.subarray(start, stop)) !== text).length;
}

/** @param {Tokenization} tokenization @param {Uint8Array} bytes of the text */
function lineOf(tokenization, bytes) {
  const { title, vocab_size: vocab, embed_dim: dim, text_tokens: count } = tokenization;
  const unknown = unknownOf(tokenization, bytes);
  return h("tr", null, h("th", { scope: "row" }, title, unknown ? h("small", null, ` ${COUNT.format(unknown)} unknown: `
      + "that text is lost") : null),
    h("td", { class: "number" }, COUNT.format(count)),
    h("td", { class: "number" }, count ? (bytes.length / count).toFixed(3) : "–"),
    h("td", { class: "number" }, h("small", null, `${COUNT.format(vocab)} × ${COUNT.format(dim)} = `),
      COUNT.format(vocab * dim)));
}
