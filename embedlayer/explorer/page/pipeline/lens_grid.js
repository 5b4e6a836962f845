/** The grid of the logit lens: a row for each number of blocks, a column for each position. */

import { h } from "../dom.js";
import { percent, picture } from "./pictures.js";

/** @import { ShownToken } from "../types" */
/** @import { Lens } from "./lens.js" */
/** @import { Scene } from "./pictures.js" */

/** @type {Record<string, [number, number]>} */
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/**
 * Draw the grid.
 * @param {Scene} scene
 * @param {Lens} lens
 * @param {number} layer the chosen layer
 * @param {(layer: number, t: number) => void} onChoose
 */
export function cellGrid(scene, lens, layer, onChoose) {
  const { tokens } = scene.pipeline;
  const cells = lens.ids.map((row, l) => row.map((_, t) => cellButton(scene, lens, l, t, l === layer, onChoose)));
  const table = h("table", { class: "lens-grid" },
    h("thead", null, h("tr", null, h("th", null, "blocks"), tokens.map((token) => tokenCell("th", token)))),
    h("tbody", null, cells.map((row, l) => h("tr", null, h("th", { scope: "row" }, rowName(l, lens.layers)),
      row.map((button) => h("td", null, button))))),
    h("tfoot", null, h("tr", null, h("th", { scope: "row" }, "follows"),
      tokens.map((_, t) => (tokens[t + 1] ? tokenCell("td", tokens[t + 1]) : h("td", null, "?"))))));
  table.addEventListener("keydown", (event) => moveFocus(event, cells));
  const box = h("div", { class: "scroll lens-scroll", onScroll: () => { lens.scroll.left = box.scrollLeft; } }, table);
  queueMicrotask(() => { // once it is in the page
    box.scrollLeft = lens.scroll.left;
    showColumn(box, cells[layer][scene.token]);
  });
  const legend = h("p", { class: "note lens-legend" }, "Each cell is the most likely next token.",
    h("span", null, "Its probability: 0 %", h("i", { class: "lens-scale" }), "100 %"),
    h("span", null, h("i", { class: "lens-right" }), "it is the token that follows"));
  return picture(null, box, legend);
}

/** Scroll sideways until a cell is seen beside the names of the rows. @param {HTMLElement} box @param {Element} cell */
function showColumn(box, cell) {
  const [frame, names] = [box, box.querySelector("th") ?? box].map((each) => each.getBoundingClientRect());
  const { left, right } = cell.getBoundingClientRect();
  if (right > frame.right) box.scrollLeft += right - frame.right;
  else if (left < names.right) box.scrollLeft -= names.right - left;
}

/** @param {number} layer @param {number} layers */
function rowName(layer, layers) {
  if (layer === 0) return ["0", h("small", null, " input")];
  return layer === layers - 1 ? [String(layer), h("small", null, " output")] : [String(layer)];
}

/** @param {"th" | "td"} tag @param {ShownToken} token */
function tokenCell(tag, token) {
  return h(tag, { "data-token": String(token.id), title: `${token.text}, ID ${token.id}` }, token.text);
}

/**
 * @param {Scene} scene
 * @param {Lens} lens
 * @param {number} l
 * @param {number} t
 * @param {boolean} isRow whether its row is the chosen one
 * @param {(layer: number, t: number) => void} onChoose
 */
function cellButton(scene, lens, l, t, isRow, onChoose) {
  const { tokens } = scene.pipeline;
  const token = /** @type {ShownToken} */ (lens.names.get(lens.ids[l][t][0]));
  const probability = lens.probability(l, t, 0);
  const chosen = isRow && t === scene.token;
  const name = `${token.text} ${percent(probability)}, row ${l}, at ${tokens[t].text}`;
  const button = h("button", {
    type: "button", class: tokens[t + 1]?.id === token.id ? "lens-right" : null, "data-token": String(token.id),
    "aria-pressed": String(chosen), "aria-label": name, title: name, tabIndex: chosen ? 0 : -1,
    onClick: () => onChoose(l, t),
  }, token.text);
  button.style.setProperty("--p", `${Math.round(100 * (probability || 0))}%`);
  return button;
}

/** Move the focus with the arrow keys. @param {KeyboardEvent} event @param {HTMLButtonElement[][]} cells */
function moveFocus(event, cells) {
  const step = STEPS[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
  const l = cells.findIndex((row) => row.includes(/** @type {HTMLButtonElement} */ (event.target)));
  if (l < 0) return;
  const t = cells[l].indexOf(/** @type {HTMLButtonElement} */ (event.target));
  cells[l + step[0]]?.[t + step[1]]?.focus();
  event.preventDefault();
  event.stopPropagation();
}
