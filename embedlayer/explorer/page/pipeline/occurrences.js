/** All occurrences of one token in the text, side by side. */

import { HeatMap } from "../charts/heat.js";
import { limitOf, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { fromRows, row, similarities } from "../math.js";
import { cellColours } from "../colour.js";
import { theme } from "../theme.js";
import { nameOf, picture } from "./pictures.js";

/** @import { Matrix } from "../types" */
/** @import { Scene } from "./pictures.js" */

const MOST = 12;

/**
 * Compare the vectors of a token at all its positions: a strip for each, and the cosines of all pairs.
 * @param {Scene} scene
 * @param {Matrix} vectors one for each position of the text
 * @param {string} what name of the vectors
 * @returns {HTMLElement | null} null for a token that occurs once
 */
export function occurrences(scene, vectors, what) {
  const { tokens } = scene.pipeline;
  const places = [...tokens.keys()].filter((t) => tokens[t].id === tokens[scene.token].id).slice(0, MOST);
  if (places.length < 2) return null;
  const rows = fromRows(places.map((t) => row(vectors, t)));
  const heat = new HeatMap({
    label: `${what} of ${nameOf(scene)}`, unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 22,
    rowName: (i) => `position ${places[i]}`, columnName: (d) => `dimension ${d}`,
    onPick: (i) => scene.choose(places[i]),
  });
  heat.show(rows, { limit: limitOf(rows), marks: [{ row: places.indexOf(scene.token) }] });
  const title = `${nameOf(scene)} occurs ${places.length} times: its ${what}`;
  return picture(title, h("div", { class: "pipe-occurrences" }, scene.keep(heat), cosines(places, similarities(rows))));
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
  return h("div", { class: "scroll" }, h("table", { class: "learn-grid pipe-cosines" },
    h("caption", null, "cosine of each pair"), h("thead", null, head), h("tbody", null, body)));
}
