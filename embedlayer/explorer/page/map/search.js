/** Finding tokens by text, regular expression, ID or bytes; sums of tokens as text. */

/** @import { TokenSum } from "../types" */

/**
 * @typedef {{kind: "text", text: string} | {kind: "regex", regex: RegExp} | {kind: "id", first: number, last: number}
 *   | {kind: "bytes", bytes: number[]} | {kind: "error", message: string} | {kind: "none"}} Query
 * @typedef {{sign: 1 | -1, text: string}} Term
 */

/**
 * Parse what was typed: `dog`, ` dog` (with its space, also `·`), `/^d.g$/`, `#17`, `#17-40`, `0xE2 96`.
 * @param {string} typed
 * @returns {Query}
 */
export function parseQuery(typed) {
  if (!typed.trim() && !/[· ]/.test(typed)) return { kind: "none" };
  const regex = typed.match(/^\/(.*)\/([imsu]*)$/s);
  if (regex) return parseRegex(regex[1], regex[2]);
  const id = typed.match(/^\s*#(\d+)(?:\s*-\s*(\d+))?\s*$/);
  if (id) return { kind: "id", first: Number(id[1]), last: Number(id[2] ?? id[1]) };
  const bytes = typed.match(/^\s*(?:0x|\\x)([0-9a-f\s\\x]+)$/i);
  if (bytes) return parseBytes(bytes[1].replace(/0x|\\x|\s/gi, ""));
  return { kind: "text", text: typed.replaceAll("·", " ") };
}

/** @param {string} pattern @param {string} flags @returns {Query} */
function parseRegex(pattern, flags) {
  try {
    return { kind: "regex", regex: new RegExp(pattern, flags.includes("u") ? flags : `${flags}u`) };
  } catch (error) {
    return { kind: "error", message: /** @type {Error} */ (error).message };
  }
}

/** @param {string} digits @returns {Query} */
function parseBytes(digits) {
  if (digits.length % 2) return { kind: "error", message: "Bytes are pairs of digits: 0xE2 96." };
  return { kind: "bytes", bytes: (digits.match(/../g) ?? []).map((pair) => Number.parseInt(pair, 16)) };
}

/**
 * Return the IDs of the tokens that match, best first: for a text equal texts, then texts equal except for case and
 * leading space, then those that begin with it, then those that contain it.
 * @param {Query} query
 * @param {string[]} texts
 * @param {string[]} lower the texts in lower case
 * @returns {Int32Array}
 */
export function search(query, texts, lower) {
  if (query.kind === "text") return byText(query.text, texts, lower);
  if (query.kind === "regex") return byRegex(query.regex, texts);
  if (query.kind === "bytes") return byBytes(query.bytes, bytesOfAll(texts));
  if (query.kind !== "id") return new Int32Array();
  const first = Math.min(query.first, texts.length);
  const last = Math.min(query.last, texts.length - 1);
  return Int32Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
}

/** @param {string} text @param {string[]} texts @param {string[]} lower */
function byText(text, texts, lower) {
  const wanted = text.toLowerCase();
  const bare = wanted.trim();
  /** @type {number[][]} */
  const ranks = [[], [], [], []];
  for (let i = 0; i < lower.length; i++) {
    const place = lower[i].indexOf(wanted);
    if (place < 0) continue;
    if (texts[i] === text) ranks[0].push(i);
    else if (lower[i].length <= bare.length + 1 && lower[i].trim() === bare) ranks[1].push(i);
    else ranks[place <= 1 ? 2 : 3].push(i);
  }
  return Int32Array.from(ranks.flat());
}

/** @param {RegExp} regex @param {string[]} texts */
function byRegex(regex, texts) {
  const found = [];
  for (let i = 0; i < texts.length; i++) if (texts[i] !== "" && regex.test(texts[i])) found.push(i);
  return Int32Array.from(found);
}

const encoder = new TextEncoder();

/** Return a token's bytes; `<0xE2>` in its text is a byte that is no whole character. @param {string} text */
export function bytesOf(text) {
  if (!text.includes("<0x")) return [...encoder.encode(text)];
  return text.split(/(<0x[0-9A-F]{2}>)/).flatMap((part) =>
    (/^<0x[0-9A-F]{2}>$/.test(part) ? [Number.parseInt(part.slice(3, 5), 16)] : [...encoder.encode(part)]));
}

/** @typedef {{all: Uint8Array, starts: Uint32Array}} TokenBytes bytes of all tokens, and where each token begins */

/** @type {WeakMap<string[], TokenBytes>} */
const tokenBytes = new WeakMap();

/** Return the bytes of all tokens, computed once for a list. @param {string[]} texts */
export function bytesOfAll(texts) {
  const found = tokenBytes.get(texts) ?? encodeAll(texts);
  tokenBytes.set(texts, found);
  return found;
}

/** @param {string[]} texts @returns {TokenBytes} */
function encodeAll(texts) {
  const starts = new Uint32Array(texts.length + 1);
  let all = new Uint8Array(16 * texts.length + 1024);
  texts.forEach((text, id) => {
    if (all.length < starts[id] + 3 * text.length) {
      const larger = new Uint8Array(2 * all.length + 3 * text.length);
      larger.set(all);
      all = larger;
    }
    if (text.includes("<0x")) {
      const bytes = bytesOf(text);
      all.set(bytes, starts[id]);
      starts[id + 1] = starts[id] + bytes.length;
    } else starts[id + 1] = starts[id] + encoder.encodeInto(text, all.subarray(starts[id])).written;
  });
  return { all, starts };
}

/** @param {number[]} wanted @param {TokenBytes} tokens */
function byBytes(wanted, { all, starts }) {
  const found = [];
  for (let id = 0; id + 1 < starts.length; id++) {
    const last = starts[id + 1] - wanted.length;
    for (let at = starts[id]; at <= last; at++) {
      let k = 0;
      while (k < wanted.length && all[at + k] === wanted[k]) k++;
      if (k === wanted.length) {
        found.push(id);
        break;
      }
    }
  }
  return Int32Array.from(found);
}

/**
 * Return the tokens that a typed text can mean, best first: the text itself, with a leading space, in lower case, with
 * a capital; or `#17`. `·` is a space. Of a text that begins with a space, all tokens with a space come first.
 * @param {string} typed
 * @param {Map<string, number>} ids by text
 * @returns {number[]} IDs without repetition
 */
export function variants(typed, ids) {
  const id = typed.match(/^\s*#(\d+)$/);
  if (id) return [Number(id[1])];
  const text = typed.replaceAll("·", " ");
  const bare = text.trim();
  const lower = bare.toLowerCase();
  const capital = bare.slice(0, 1).toUpperCase() + bare.slice(1);
  const spaced = [bare, lower, capital].map((form) => ` ${form}`);
  const forms = text.startsWith(" ") ? [text, ...spaced, bare, lower, capital]
    : [text, spaced[0], bare, lower, spaced[1], capital, spaced[2]];
  return [...new Set(forms.flatMap((form) => ids.get(form) ?? []))];
}

/**
 * Format a sum as text that parses to the same IDs, `a − b + c`: a token whose text would mean another one is `#17`.
 * @param {TokenSum} sum
 * @param {(id: number) => string} nameOf with invisible characters shown
 * @param {Map<string, number>} ids by text
 * @returns {string}
 */
export function expressionOf({ plus, minus }, nameOf, ids) {
  /** @param {number} id */
  const written = (id) => {
    const name = nameOf(id);
    const terms = [...parseExpression(name), ...parseExpression(`x + ${name}`).slice(1)];
    const isSafe = terms.length === 2 && terms.every((term) => term.text === name && term.sign === 1);
    return isSafe && variants(name, ids)[0] === id ? name : `#${id}`;
  };
  const [first, ...others] = plus.map((id) => `+ ${written(id)}`);
  const terms = [...(first ? [first] : []), ...minus.map((id) => `− ${written(id)}`), ...others];
  return terms.join(" ").replace(/^\+ /, "");
}

/** @type {WeakMap<string[], Map<string, number>>} */
const idsByTexts = new WeakMap();

/** Return the first ID of each text, computed once for a list. @param {string[]} texts */
export function idsByText(texts) {
  const found = idsByTexts.get(texts)
    ?? new Map(texts.map((text, id) => /** @type {const} */ ([text, id])).reverse());
  idsByTexts.set(texts, found);
  return found;
}

/**
 * Parse `king - man + woman` as terms; `−` and `–` are minus too. A term keeps the spaces that it begins with, beyond
 * the one after its sign.
 * @param {string} typed
 * @returns {Term[]}
 */
export function parseExpression(typed) {
  const isSigned = /^\s*[-−–]\s/.test(typed);
  const signed = isSigned ? ` ${typed.trimStart()}` : ` + ${typed.replace(/^\s*[+]\s?(?=.)/, "")}`;
  const parts = signed.split(/\s([+\-−–])\s/).slice(1);
  /** @type {Term[]} */
  const terms = [];
  for (let i = 0; i + 1 < parts.length; i += 2) {
    const text = parts[i + 1].trimEnd();
    if (text) terms.push({ sign: parts[i] === "+" ? 1 : -1, text });
  }
  return terms;
}
