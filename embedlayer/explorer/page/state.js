/** The page's state in the URL's hash: `#room?key=value`, so that a link shows what one saw. */

/** @typedef {Record<string, string>} State */

/** @param {string} hash @returns {{room: string, state: State}} */
export function parseHash(hash) {
  const [room, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { room: decodeURIComponent(room), state: Object.fromEntries(new URLSearchParams(query)) };
}

/** @param {string} room @param {State} state */
export function formatHash(room, state) {
  const query = new URLSearchParams(Object.entries(state).sort(([a], [b]) => (a < b ? -1 : 1))).toString();
  return `#${encodeURIComponent(room)}${query ? `?${query}` : ""}`;
}

/**
 * `state` with `changes`; null and undefined remove.
 * @param {State} state @param {Record<string, any>} changes @returns {State}
 */
export function changed(state, changes) {
  const next = { ...state };
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") delete next[key];
    else next[key] = String(value);
  }
  return next;
}
