/** Where the page's numbers come from: the server, or an exported file. */

/** @import { Answers, Data, Load, Params } from "./types" */
/** @typedef {Answers[keyof Answers]} Answer data of some name */

/** An exported file lacks what was requested. */
export class NotExported extends Error {
  name = "NotExported";
}

/** Return the key under which an answer is stored. @param {string} name @param {Params} params */
export function keyOf(name, params) {
  const pairs = Object.keys(params).sort().map((key) =>
    `${encodeURIComponent(key)}=${encodeURIComponent(params[key])}`);
  return pairs.length ? `${name}?${pairs.join("&")}` : name;
}

/** Read from the server. @returns {Data} */
export function fromServer() {
  return {
    load: cached((key) => request(key)),
    ask: ofName((key) => request(key)),
    act: ofName((key) => request(key, "POST")),
    exported: false,
  };
}

/**
 * Return a function whose answers have the type of the requested name: the only place where it is taken as given.
 * @param {(key: string, name: string, params: Params) => Promise<Answer>} ask
 */
function ofName(ask) {
  return /** @type {Load} */ ((name, params = {}) => ask(keyOf(name, params), name, params));
}

/** @param {string} key @param {string} method @returns {Promise<Answer>} */
async function request(key, method = "GET") {
  let response;
  try {
    response = await fetch(`data/${key}`, { method });
  } catch {
    throw new Error("The server does not answer. Run embedlayer explore again and reload this page.");
  }
  const isJson = response.headers.get("Content-Type") === "application/json";
  if (!response.ok) throw new Error(isJson ? (await response.json()).error : `The server answered ${response.status}.`);
  return isJson ? response.json() : response.arrayBuffer();
}

/**
 * Read from an exported file, or compute from what the file holds.
 * @param {Record<string, {json?: Answer, base64?: string}>} content
 * @param {(name: string, params: Params, load: Load) => Promise<Answer> | undefined} compute
 * @returns {Data}
 */
export function fromFile(content, compute) {
  const load = cached(async (key, name, params) => {
    const found = content[key];
    if (found) return found.json ?? unpacked(found.base64 ?? "");
    const computed = compute(name, params, load);
    if (computed !== undefined) return computed;
    throw new NotExported("This file does not contain these numbers. Open the table itself: embedlayer explore DIR.");
  });
  return { load, ask: load, act: load, exported: true };
}

/** Decompress base64 of gzip. @param {string} base64 @returns {Promise<ArrayBuffer>} */
async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const CACHED_ANSWERS = 64;

/**
 * Remember the last answers; identical requests at the same time are sent once.
 * @param {(key: string, name: string, params: Params) => Promise<Answer>} ask
 * @returns {Load}
 */
function cached(ask) {
  /** @type {Map<string, Promise<Answer>>} */
  const answers = new Map();
  return ofName((key, name, params) => {
    const known = answers.get(key);
    if (known) return known;
    const answer = ask(key, name, params);
    answer.catch(() => answers.delete(key));
    answers.set(key, answer);
    if (answers.size > CACHED_ANSWERS) answers.delete(answers.keys().next().value ?? "");
    return answer;
  });
}
