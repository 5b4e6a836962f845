/** What an exported page computes itself from the vectors in it: neighbours and cosines. */

import { NotExported } from "./data.js";

/** @import { Answer } from "./data.js" */
/** @import { Load, Neighbor, Params, TokenFacts } from "./types" */
/** @typedef {{count: number, width: number, numbers: Int8Array, norms: Float32Array}} Rows */

/**
 * Compute the answer to a request that is not in the file; return undefined if it cannot be computed.
 * @param {string} name
 * @param {Params} params
 * @param {Load} load
 * @returns {Promise<Answer> | undefined}
 */
export function compute(name, params, load) {
  const source = { source: params.source ?? 0 };
  if (name === "coordinates" && Number(params.count) > 3) return load("coordinates", { ...source, count: 3 });
  if (name === "along") return along(params, load, source);
  if (name === "card" || name === "card-places") return factsOf(Number(params.id), load, source);
  return name === "neighbors" ? neighbors(params, load, source) : undefined;
}

/** @typedef {{numbers: Record<string, unknown[]>, some: Record<string, Record<number, unknown>>,
 *   all: Record<string, unknown>}} Cards facts of all tokens */

/** @type {Map<string | number, Promise<Cards>>} */
const cards = new Map();

/**
 * Return the facts about a token, and where other views show it.
 * @param {number} id
 * @param {Load} load
 * @param {Params} source
 * @returns {Promise<TokenFacts>}
 */
async function factsOf(id, load, source) {
  const reading = cards.get(source.source)
    ?? load("cards", source).then((buffer) => JSON.parse(new TextDecoder().decode(buffer)));
  cards.set(source.source, reading);
  const { numbers, some, all } = await reading;
  return /** @type {TokenFacts} */ (Object.fromEntries([["id", id], ...Object.entries(all),
    ...Object.entries(numbers).map(([name, column]) => [name, column[id]]),
    ...Object.entries(some).map(([name, column]) => [name, column[id] ?? null])]));
}

/** @param {Params} params @param {Load} load @param {Params} source */
async function along(params, load, source) {
  return cosines(await rowsOf(load, source), idList(params.plus), idList(params.minus)).buffer;
}

/**
 * @param {Params} params
 * @param {Load} load
 * @param {Params} source
 * @returns {Promise<Neighbor[]>}
 */
async function neighbors(params, load, source) {
  const [plus, minus] = [idList(params.plus), idList(params.minus)];
  const topn = Number(params.topn ?? 20);
  const [{ texts }, rows] = await Promise.all([load("tokens", source), rowsOf(load, source).catch(() => null)]);
  if (rows) {
    /** @param {number} id */
    const isCandidate = (id) => texts[id] !== "" && !plus.includes(id) && !minus.includes(id);
    return best(cosines(rows, plus, minus), topn, isCandidate);
  }
  if (plus.length === 1 && !minus.length) {
    return fromNearest(await load("nearest", source), plus[0], texts.length).slice(0, topn);
  }
  throw new NotExported("This file contains the neighbours of single tokens only. Sums of tokens need the table "
    + "itself: embedlayer explore DIR.");
}

/** @type {Map<string | number, Promise<Rows>>} */
const opened = new Map();

/**
 * Return the int8 rows of the file and their norms, in units of each row's own scale.
 * @param {Load} load
 * @param {Params} source
 * @returns {Promise<Rows>}
 */
function rowsOf(load, source) {
  const found = opened.get(source.source);
  if (found) return found;
  const opening = Promise.all([load("vectors", source), load("tokens", source)]).then(([buffer, { texts }]) => {
    const numbers = new Int8Array(buffer, 4 * texts.length);
    const width = numbers.length / texts.length;
    return { count: texts.length, width, numbers, norms: norms(numbers, texts.length, width) };
  });
  opened.set(source.source, opening);
  return opening;
}

/** @param {Int8Array} numbers @param {number} count @param {number} width */
function norms(numbers, count, width) {
  return Float32Array.from({ length: count }, (_, row) => {
    let sum = 0;
    for (let i = row * width; i < (row + 1) * width; i++) sum += numbers[i] * numbers[i];
    return Math.sqrt(sum);
  });
}

/**
 * Return the cosine of each row with the sum of the `plus` unit rows minus the `minus` unit rows.
 * @param {Rows} rows
 * @param {number[]} plus
 * @param {number[]} minus
 */
export function cosines({ count, width, numbers, norms: lengths }, plus, minus) {
  const query = new Float64Array(width);
  /** @param {number} id @param {number} sign */
  const addRow = (id, sign) => {
    for (let i = 0; i < width; i++) query[i] += (sign * numbers[id * width + i]) / (lengths[id] || 1);
  };
  for (const id of plus) addRow(id, 1);
  for (const id of minus) addRow(id, -1);
  const length = Math.hypot(...query) || 1;
  return Float32Array.from({ length: count }, (_, row) => {
    let sum = 0;
    for (let i = 0, at = row * width; i < width; i++, at++) sum += query[i] * numbers[at];
    return sum / length / (lengths[row] || 1);
  });
}

/**
 * Return the `topn` largest values with their IDs, largest first.
 * @param {Float32Array} values
 * @param {number} topn
 * @param {(id: number) => boolean} isCandidate
 */
export function best(values, topn, isCandidate) {
  /** @type {Neighbor[]} */
  const found = [];
  let least = -Infinity;
  for (let id = 0; id < values.length; id++) {
    if (!(values[id] > least) || !isCandidate(id)) continue;
    let place = found.length;
    while (place > 0 && found[place - 1][1] < values[id]) place--;
    found.splice(place, 0, [id, values[id]]);
    if (found.length > topn) found.pop();
    if (found.length === topn) least = found[topn - 1][1];
  }
  return found;
}

/**
 * Read the neighbours of one token from the precomputed lists of all tokens.
 * @param {ArrayBuffer} buffer
 * @param {number} id
 * @param {number} count
 * @returns {Neighbor[]}
 */
function fromNearest(buffer, id, count) {
  const each = buffer.byteLength / 8 / count;
  const ids = new Uint32Array(buffer, 0, count * each);
  const scores = new Float32Array(buffer, 4 * count * each);
  const found = Array.from({ length: each }, (_, k) =>
    /** @type {Neighbor} */ ([ids[id * each + k], scores[id * each + k]]));
  return found.filter(([, score]) => score >= -1);
}

/** @param {string | number | undefined} text */
function idList(text) {
  return String(text ?? "").split(",").filter(Boolean).map(Number);
}
