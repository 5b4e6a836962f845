/** What tokens are: kinds, scripts and lengths, to colour the map by. */

import { bytesOf } from "./search.js";

/** @typedef {{names: string[], of: Uint8Array}} Groups the group of each token, by number */

export const KINDS = ["starts a word", "inside a word", "number", "punctuation", "piece of a character", "special", "no token"];

/**
 * What each token is in its text. Tokenizers mark either what starts a word (a space in front) or what does not (`##`).
 * @param {string[]} texts @param {number[]} special IDs of special tokens
 * @returns {Groups}
 */
export function kinds(texts, special) {
  const specials = new Set(special);
  let spaces = 0;
  let hashes = 0;
  for (const text of texts) {
    if (text.length > 1 && text[0] === " ") spaces++;
    else if (text.startsWith("##")) hashes++;
  }
  const marksStart = spaces > Math.max(8, texts.length / 50);
  const marksInside = !marksStart && hashes > 0;
  const of = Uint8Array.from(texts, (text, id) => {
    if (specials.has(id) || /^\[unused\d+\]$/.test(text)) return 5;
    if (text === "") return 6;
    if (/<0x[0-9A-F]{2}>|�/.test(text)) return 4;
    const bare = text.trim().replace(/^##(?=.)/, "");
    if (/^\p{N}+$/u.test(bare)) return 2;
    if (!/[\p{L}\p{M}]/u.test(bare)) return 3;
    if (marksStart) return text[0] === " " ? 0 : 1;
    return marksInside && text.startsWith("##") ? 1 : 0;
  });
  return { names: KINDS, of };
}

const SCRIPTS = ["Latin", "Cyrillic, Greek", "Han, Kana, Hangul", "Arabic, Hebrew", "other scripts", "digits", "symbols, spaces", "bytes, special, none"];
const TESTS = [
  [/\p{Script=Latin}/u, 0], [/[\p{Script=Cyrillic}\p{Script=Greek}]/u, 1],
  [/[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u, 2],
  [/[\p{Script=Arabic}\p{Script=Hebrew}]/u, 3], [/[\p{L}\p{M}]/u, 4], [/\p{N}/u, 5],
];

/** The script of each token's letters. @param {string[]} texts @param {Groups} kind @returns {Groups} */
export function scripts(texts, kind) {
  const of = Uint8Array.from(texts, (text, id) => {
    if (kind.of[id] >= 4) return 7;
    if (/^[ a-zA-Z#]+$/.test(text) && /[a-zA-Z]/.test(text)) return 0; // most tables are mostly this
    return TESTS.find(([test]) => test.test(text))?.[1] ?? 6;
  });
  return { names: SCRIPTS, of };
}

/** Characters of each token; a byte that is a piece of a character counts as one. */
export function lengths(texts) {
  return Float32Array.from(texts, (text) => [...text.replace(/<0x[0-9A-F]{2}>/g, "?")].length);
}

/** Bytes as people write them. @param {string} text */
export function hex(text) {
  return bytesOf(text).map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
}
