/** All occurrences of one token in the text, side by side. */

import { shown } from "../charts/numbers.js";
import { h, scroller } from "../dom.js";
import { fromRows, row, similarities } from "../math.js";
import { cellColours } from "../colour.js";
import { theme } from "../theme.js";
import { nameOf, picture, vectors } from "./pictures.js";

/** @import { Matrix } from "../types" */
/** @import { Scene } from "./pictures.js" */

const MOST = 12;

/**
 * Compare the vectors of a token at all its positions: a strip for each, and the cosines of all pairs.
 * @param {Scene} scene
 * @param {Matrix} all one for each position of the text
 * @param {string} what name of the vectors
 * @returns {HTMLElement | null} null for a token that occurs once
 */
export function occurrences(scene, all, what) {
  const { tokens } = scene.pipeline;
  const places = [...tokens.keys()].filter((t) => tokens[t].id === tokens[scene.token].id).slice(0, MOST);
  if (places.length < 2) return null;
  const rows = fromRows(places.map((t) => row(all, t)));
  const strips = vectors(scene, rows, {
    names: places.map((t) => `at ${t}`), chosen: places.indexOf(scene.token), pick: (i) => scene.choose(places[i]),
  }, { label: `${what} of ${nameOf(scene)}`, cellHeight: 22 });
  const title = `${nameOf(scene)} occurs ${places.length} times: its ${what}`;
  return picture(title, h("div", { class: "pipe-occurrences" }, strips, cosines(places, similarities(rows))));
}

/** @param {number[]} places @param {Matrix} matrix */
function cosines(places, matrix) {
  const head = h("tr", null, h("td"), places.map((t) => h("th", { scope: "col" }, `at ${t}`)));
  const body = places.map((t, i) => h("tr", null, h("th", { scope: "row" }, `at ${t}`), places.map((_, j) => {
    const cosine = matrix.data[i * places.length + j];
    const cell = h("td", null, shown(cosine));
    Object.assign(cell.style, cellColours(cosine, theme().dark));
    return cell;
  })));
  return scroller("Cosine of each pair", "scroll", h("table", { class: "learn-grid pipe-cosines" },
    h("caption", null, "cosine of each pair"), h("thead", null, head), h("tbody", null, body)));
}
