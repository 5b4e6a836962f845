/** Finding tokens by text, regular expression, ID or bytes. */

/**
 * @typedef {{kind: "text", text: string} | {kind: "regex", regex: RegExp} | {kind: "id", first: number, last: number}
 *   | {kind: "bytes", bytes: number[]} | {kind: "error", message: string} | {kind: "none"}} Query
 */

/**
 * What a person typed: `dog`, ` dog` (with its space, `·` will do), `/^d.g$/`, `#17`, `#17-40`, `0xE2 96`.
 * @param {string} typed
 * @returns {Query}
 */
export function parseQuery(typed) {
  if (!typed.trim() && !/[· ]/.test(typed)) return { kind: "none" };
  const regex = typed.match(/^\/(.*)\/([imsu]*)$/s);
  if (regex) {
    try {
      return { kind: "regex", regex: new RegExp(regex[1], regex[2].includes("u") ? regex[2] : `${regex[2]}u`) };
    } catch (error) {
      return { kind: "error", message: error.message };
    }
  }
  const id = typed.match(/^\s*#(\d+)(?:\s*-\s*(\d+))?\s*$/);
  if (id) return { kind: "id", first: Number(id[1]), last: Number(id[2] ?? id[1]) };
  const bytes = typed.match(/^\s*(?:0x|\\x)([0-9a-f\s\\x]+)$/i);
  if (bytes) {
    const digits = bytes[1].replace(/0x|\\x|\s/gi, "");
    if (digits.length % 2 === 0) return { kind: "bytes", bytes: digits.match(/../g).map((pair) => Number.parseInt(pair, 16)) };
    return { kind: "error", message: "Bytes are pairs of digits: 0xE2 96." };
  }
  return { kind: "text", text: typed.replaceAll("·", " ") };
}

/**
 * IDs of the tokens that fit, best first: for a text the same text, then the same but for case and the space in front,
 * then those that begin with it, then those that contain it.
 * @param {Query} query @param {string[]} texts @param {string[]} lower the same in lower case
 * @returns {Int32Array}
 */
export function search(query, texts, lower) {
  switch (query.kind) {
    case "text": return byText(query.text, texts, lower);
    case "regex": return where(texts, (text) => text !== "" && query.regex.test(text));
    case "id": {
      const first = Math.min(query.first, texts.length);
      const last = Math.min(query.last, texts.length - 1);
      return Int32Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
    }
    case "bytes": return byBytes(query.bytes, bytesOfAll(texts));
    default: return new Int32Array();
  }
}

function byText(text, texts, lower) {
  const wanted = text.toLowerCase();
  const bare = wanted.trim();
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

function where(texts, fits) {
  const found = [];
  for (let i = 0; i < texts.length; i++) if (fits(texts[i])) found.push(i);
  return Int32Array.from(found);
}

const encoder = new TextEncoder();

/** A token's bytes; `<0xE2>` in its text is the byte that belongs to no whole character. @param {string} text */
export function bytesOf(text) {
  if (!text.includes("<0x")) return [...encoder.encode(text)];
  return text.split(/(<0x[0-9A-F]{2}>)/).flatMap((part) =>
    /^<0x[0-9A-F]{2}>$/.test(part) ? [Number.parseInt(part.slice(3, 5), 16)] : [...encoder.encode(part)]);
}

const flat = new WeakMap();

/** The bytes of all tokens, one after the other, and where each begins; made once for a list. @param {string[]} texts */
export function bytesOfAll(texts) {
  if (!flat.has(texts)) {
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
    flat.set(texts, { all, starts });
  }
  return flat.get(texts);
}

function byBytes(wanted, { all, starts }) {
  const found = [];
  for (let id = 0; id + 1 < starts.length; id++) {
    const last = starts[id + 1] - wanted.length;
    for (let at = starts[id]; at <= last; at++) {
      let k = 0;
      while (k < wanted.length && all[at + k] === wanted[k]) k++;
      if (k === wanted.length) { found.push(id); break; }
    }
  }
  return Int32Array.from(found);
}

/**
 * The tokens that a typed text can mean, best first: the text as typed, with a space in front, in lower case, with a
 * capital; or `#17`. `·` is a space.
 * @param {string} typed @param {Map<string, number>} ids by text
 * @returns {number[]} IDs, each once
 */
export function variants(typed, ids) {
  const id = typed.match(/^#(\d+)$/);
  if (id) return [Number(id[1])];
  const text = typed.replaceAll("·", " ");
  const bare = text.trim();
  const written = [text, ` ${bare}`, bare, bare.toLowerCase(), ` ${bare.toLowerCase()}`, bare[0]?.toUpperCase() + bare.slice(1), ` ${bare[0]?.toUpperCase()}${bare.slice(1)}`];
  return [...new Set(written.filter((variant) => ids.has(variant)).map((variant) => ids.get(variant)))];
}

/**
 * The sum as text that, typed again, means the same IDs: a token whose text would mean another one is `#17`.
 * @param {number[]} plus @param {number[]} minus @param {(id: number) => string} nameOf with unseen characters shown
 * @param {Map<string, number>} ids by text
 * @returns {string}
 */
export function expressionOf(plus, minus, nameOf, ids) {
  const written = (id) => {
    const name = nameOf(id);
    const terms = [...parseExpression(name), ...parseExpression(`x + ${name}`).slice(1)];
    const isSafe = terms.length === 2 && terms.every((term) => term.text === name && term.sign === 1);
    return isSafe && variants(name, ids)[0] === id ? name : `#${id}`;
  };
  return [...plus.map((id) => `+ ${written(id)}`), ...minus.map((id) => `− ${written(id)}`)].join(" ").replace(/^\+ /, "");
}

/**
 * `king - man + woman` as terms; `−` and `–` are minus too.
 * @param {string} typed
 * @returns {{sign: 1 | -1, text: string}[]}
 */
export function parseExpression(typed) {
  const parts = ` + ${typed.trim().replace(/^[+]\s*/, "")}`.split(/\s([+\-−–])\s+/).slice(1);
  const terms = [];
  for (let i = 0; i + 1 < parts.length; i += 2) {
    const text = parts[i + 1].trim();
    if (text) terms.push({ sign: parts[i] === "+" ? 1 : -1, text });
  }
  return terms;
}
