/** Where the views show the chosen token: the card's links, and the text with which the view Pipeline opens. */

import { h } from "../dom.js";

/** @import { Changes, Data, Pipeline, TokenPlaces, ViewContext } from "../types" */
/** @import { About } from "./card.js" */

/**
 * Return the links to the views that show a token.
 * @param {number} id
 * @param {About} about
 */
export async function seeIt(id, { data, manifest, isComparable, hash, go }) {
  const { has } = manifest;
  const [places, isProbe] = await Promise.all([
    placesOf(data, id), has.includes("metrics") ? isProbed(data, id) : false,
  ]);
  const { text, at, position } = places ?? { text: null, at: null, position: null };
  const hasPipeline = has.includes("input");
  /** @type {[title: string, view: string, changes: Changes | undefined, fits: boolean][]} */
  const links = [
    ["Map", "map", undefined, true],
    ["Pipeline", "pipeline", { text, token: at }, hasPipeline && text !== null],
    ["Positions", "positions", { token: position }, position !== null],
    ["Compare", "compare", undefined, isComparable],
    ["Health", "health", undefined, true],
    ["Training", "training", undefined, isProbe],
    ["Learn", "learn", { s: "real", "real.id": id, "real.table": null }, true],
  ];
  const found = data.exported ? "No text of this file contains this token"
    : "No text was found that is split into this token";
  const note = places?.text === null && hasPipeline ? `${found}, so the Pipeline cannot show it.` : "";
  return [
    h("h3", null, "See it in"),
    h("nav", { class: "card-links", "aria-label": "See the token in" }, links.filter(([, , , fits]) => fits).map(
      ([title, view, changes]) => h("a", {
        href: hash(view, changes), onClick: (/** @type {MouseEvent} */ event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault(); // the state of the view may have changed since
          go(view, changes);
        },
      }, title))),
    ...(note ? [h("p", { class: "note" }, note)] : []),
  ];
}

/**
 * Return what other views need to show a token; null if that is not known.
 * @param {Data} data
 * @param {number} id
 * @returns {Promise<TokenPlaces | null>}
 */
function placesOf(data, id) {
  return data.load("card-places", { id }).catch(() => null);
}

/** Whether the view Training lists the neighbours of a token. @param {Data} data @param {number} id */
async function isProbed(data, id) {
  try {
    const { neighbors_before: probes } = await data.load("metrics");
    return probes.some((/** @type {{id: number}} */ probe) => probe.id === id);
  } catch {
    return false;
  }
}

/**
 * Let the view Pipeline open with the chosen token: at its position in the text, or in a text that contains it if the
 * URL has no text.
 * @param {ViewContext} context
 */
export async function openWithToken({ data, state, token }) {
  const id = token.get();
  if (id === null) return;
  const typed = state.get("text");
  if (typed === undefined) {
    const places = await placesOf(data, id);
    return places?.text ? state.set({ text: places.text, token: places.at }) : undefined;
  }
  /** @type {Pipeline | null} */
  const pipeline = await data.load("pipeline", { text: typed }).catch(() => null); // the view says why
  const at = pipeline?.tokens.findIndex((each) => each.id === id) ?? -1;
  if (pipeline && at >= 0 && pipeline.tokens[Number(state.get("token", "1"))]?.id !== id) state.set({ token: at });
  return undefined;
}

/**
 * Return the ID of the same token in another table: the same text, or else the text that differs by a leading space
 * alone; null if there is none.
 * @param {string[]} here texts of the table that has the token
 * @param {string[]} there texts of the other table
 * @param {number} id
 */
export function sameToken(here, there, id) {
  const text = here[id];
  if (!text) return null;
  if (there[id] === text) return id;
  const spaced = text.startsWith(" ") ? text.slice(1) : ` ${text}`;
  const found = there.indexOf(text);
  const other = found < 0 ? there.indexOf(spaced) : found;
  return other < 0 ? null : other;
}
