/** The page's state in the URL's hash: `#view?key=value`, so that a link restores what the page showed. */

/** @import { Changes } from "./types" */
/** @typedef {Record<string, string>} State */

/** Split a hash. @param {string} hash @returns {{view: string, state: State}} */
export function parseHash(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { view: decodeURIComponent(view), state: Object.fromEntries(new URLSearchParams(query)) };
}

/** Join a hash. @param {string} view @param {State} state */
export function formatHash(view, state) {
  const query = new URLSearchParams(Object.entries(state).sort(([a], [b]) => (a < b ? -1 : 1))).toString();
  return `#${encodeURIComponent(view)}${query ? `?${query}` : ""}`;
}

/**
 * Return `state` with `changes`; null, undefined and "" remove a key.
 * @param {State} state
 * @param {Changes} changes
 * @returns {State}
 */
export function changed(state, changes) {
  const next = { ...state };
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") delete next[key];
    else next[key] = String(value);
  }
  return next;
}
