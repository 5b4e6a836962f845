/** Where the page's numbers come from: the server that it was opened from, or what is baked into the file. */

/** @typedef {Record<string, string | number>} Params */
/**
 * @typedef {object} Data
 * @property {(name: string, params?: Params) => Promise<any>} load
 * @property {boolean} exported
 * @property {(name: string) => Params[] | null} baked with which params the file holds answers; null if a server is asked
 */

/** The name under which an answer is kept. @param {string} name @param {Params} params */
export function keyOf(name, params) {
  const query = Object.keys(params).sort().map((key) => `${encodeURIComponent(key)}=${encodeURIComponent(params[key])}`).join("&");
  return query ? `${name}?${query}` : name;
}

/** Ask the server. @returns {Data} */
export function fromServer() {
  return kept(async (key) => {
    let response;
    try {
      response = await fetch(`data/${key}`);
    } catch {
      throw new Error("The server does not answer. Start embedlayer explore again and reload this page.");
    }
    const isJson = response.headers.get("Content-Type") === "application/json";
    if (!response.ok) throw new Error(isJson ? (await response.json()).error : `The server answered ${response.status}.`);
    return isJson ? response.json() : response.arrayBuffer();
  }, () => null);
}

/**
 * Find answers in the file, or compute them from what the file holds.
 * @param {Record<string, {json?: any, base64?: string}>} content
 * @param {(name: string, params: Params, load: (name: string, params?: Params) => Promise<any>) => Promise<any> | undefined} compute
 * @returns {Data}
 */
export function fromFile(content, compute) {
  /** @type {Data} */
  const data = kept(async (key, name, params) => {
    const found = content[key];
    if (found) return "json" in found ? found.json : unpacked(found.base64 ?? "");
    const computed = compute(name, params, data.load);
    if (computed !== undefined) return computed;
    throw Object.assign(new Error("This file does not hold these numbers. Open the table itself: embedlayer explore DIR."), { name: "NotBaked" });
  }, (name) => Object.keys(content).filter((key) => key.split("?")[0] === name).map((key) => Object.fromEntries(new URLSearchParams(key.split("?")[1] ?? ""))));
  return data;
}

/** base64 of gzip to bytes. @param {string} base64 @returns {Promise<ArrayBuffer>} */
async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const KEPT = 64;

/** Remember the last answers, and ask once for what is asked twice at the same time. */
function kept(ask, baked) {
  /** @type {Map<string, Promise<any>>} */
  const answers = new Map();
  const load = (name, params = {}) => {
    const key = keyOf(name, params);
    const known = answers.get(key);
    if (known) return known;
    const answer = ask(key, name, params);
    answer.catch(() => answers.delete(key));
    answers.set(key, answer);
    if (answers.size > KEPT) answers.delete(answers.keys().next().value);
    return answer;
  };
  return { load, baked, exported: baked("") !== null };
}
