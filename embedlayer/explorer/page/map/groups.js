/** Kinds, scripts and lengths of tokens, to colour the map by. */

import { bytesOf } from "./search.js";

/** @import { Groups } from "../types" */

/** Names of `analysis/token_classes.py`, which also knows which tokens are spaces or unreachable. */
export const KINDS = ["word", "part", "number", "punctuation", "byte", "special", "no token"];
/** Numbers of `KINDS`. */
export const KIND = { start: 0, inside: 1, number: 2, punctuation: 3, byte: 4, special: 5, none: 6 };

/** Verdicts about a row, in the order of `VERDICTS` in `analysis/row_verdicts.py`. */
export const VERDICTS = ["learned", "not learned", "never seen", "cannot tell"];
/** Their colours, by number in the palette of the page. */
export const VERDICT_COLOURS = [0, 1, 3, 5];

/**
 * Classify tokens. Tokenizers mark either the start of a word (with a space) or the inside of a word (with `##`).
 * @param {string[]} texts
 * @param {number[]} special IDs of special tokens
 * @returns {Groups}
 */
export function kinds(texts, special) {
  const specials = new Set(special);
  const spaces = texts.filter((text) => text.length > 1 && text[0] === " ").length;
  const marksStart = spaces > Math.max(8, texts.length / 50);
  const marksInside = !marksStart && texts.some((text) => text.startsWith("##"));
  const of = Uint8Array.from(texts, (text, id) => {
    if (specials.has(id) || /^\[unused\d+\]$/.test(text)) return KIND.special;
    if (text === "") return KIND.none;
    if (/<0x[0-9A-F]{2}>|\ufffd/.test(text)) return KIND.byte;
    const bare = text.trim().replace(/^##(?=.)/, "");
    if (/^\p{N}+$/u.test(bare)) return KIND.number;
    if (!/[\p{L}\p{M}]/u.test(bare)) return KIND.punctuation;
    if (marksStart) return text[0] === " " ? KIND.start : KIND.inside;
    return marksInside && text.startsWith("##") ? KIND.inside : KIND.start;
  });
  return { names: KINDS, of };
}

/** Return one group of all rows of a table without tokens. @param {number} count @returns {Groups} */
export function rowsAlone(count) {
  return { names: ["row"], of: new Uint8Array(count) };
}

const SCRIPTS = [
  "Latin", "Cyrillic, Greek", "Han, Kana, Hangul", "Arabic, Hebrew", "other scripts", "digits", "symbols, spaces",
  "bytes, special, none",
];
/** @type {[RegExp, number][]} */
const TESTS = [
  [/\p{Script=Latin}/u, 0], [/[\p{Script=Cyrillic}\p{Script=Greek}]/u, 1],
  [/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u, 2],
  [/[\p{Script=Arabic}\p{Script=Hebrew}]/u, 3], [/[\p{L}\p{M}]/u, 4], [/\p{N}/u, 5],
];

/** Return the script of each token's letters. @param {string[]} texts @param {Groups} kind @returns {Groups} */
export function scripts(texts, kind) {
  const of = Uint8Array.from(texts, (text, id) => {
    if (kind.of[id] >= KIND.byte) return 7;
    if (/^[ a-zA-Z#]+$/.test(text) && /[a-zA-Z]/.test(text)) return 0; // the most frequent case first
    return TESTS.find(([test]) => test.test(text))?.[1] ?? 6;
  });
  return { names: SCRIPTS, of };
}

/** Return the number of characters of each token; a byte of a character counts as one. @param {string[]} texts */
export function lengths(texts) {
  return Float32Array.from(texts, (text) => [...text.replace(/<0x[0-9A-F]{2}>/g, "?")].length);
}

/** Return the bytes of a text in hexadecimal. @param {string} text */
export function hex(text) {
  return bytesOf(text).map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
}
