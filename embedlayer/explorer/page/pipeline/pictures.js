/** Parts that the steps of the view Pipeline share. */

import { HeatMap } from "../charts/heat.js";
import { limitOf } from "../charts/numbers.js";
import { OPENS_CARD, h, scroller, select, visibleRuns } from "../dom.js";
import { numberTable } from "../learn/parts.js";
import { fromRows, unpackMatrix } from "../math.js";
import { MOST_CELLS, digitsOf } from "./vector.js";

/** @import { CellTest, Changes, Child, Closable, Load, Matrix, Pipeline, PipelineStep } from "../types" */
/** @import { ShownToken, ViewContext, ViewState } from "../types" */

/**
 * What a step is drawn from.
 * @typedef {object} Scene
 * @property {Pipeline} pipeline
 * @property {PipelineStep} step
 * @property {number} token position of the chosen token
 * @property {number} head number of the chosen head
 * @property {(token: number) => void} choose
 * @property {(head: number) => void} chooseHead
 * @property {(() => void) | null} showTiny show the tiny layer; null where it is shown
 * @property {(dimension: number | null, dims: number) => void} light light a dimension of vectors of `dims` numbers
 * @property {(dims: number, show: (dimension: number | null) => void) => void} onLight call `show` with the dimension
 *   that is lit, of vectors of `dims` numbers
 * @property {(part: Closable) => HTMLElement} keep close the part with the picture; returns its element
 * @property {ViewState} state
 * @property {Load} load
 * @property {boolean} exported whether the page has no server
 * @property {(id: number, changes?: Changes) => void} append add a token to the text; and change the state
 * @property {() => void} removeAppended
 * @property {ViewContext} context
 */

const PERCENT = new Intl.NumberFormat("en", {
  style: "percent", maximumFractionDigits: 1, minimumFractionDigits: 1,
});
const SMALL_PERCENT = new Intl.NumberFormat("en", { style: "percent", maximumSignificantDigits: 1 });

const TINY = 1e-6; // below it, digits and a power of ten

/** Format a probability. @param {number | null | undefined} probability */
export function percent(probability) {
  if (probability === null || probability === undefined || Number.isNaN(probability)) return "none";
  if (probability && probability < TINY) {
    const [digit, power] = (100 * probability).toExponential(0).split("e-");
    return `${digit}·10^−${power}%`;
  }
  return (probability >= 0.001 ? PERCENT : SMALL_PERCENT).format(probability);
}

/**
 * Create a chip for a token, with its ID below it if one is passed. A click chooses the token, and opens the token card
 * unless `onClick` says what else it does.
 * @param {ShownToken} token
 * @param {{id?: number, title?: string, pressed?: boolean, onClick?: () => void}} [options]
 */
export function chip(token, { id, title, pressed, onClick } = {}) {
  const text = token.decoded ? visibleRuns(token.decoded) : [h("i", null, token.text)];
  const content = [h("span", null, text), id === undefined ? null : h("small", null, String(id))];
  const kind = `pipe-chip pipe-${token.kind}${onClick ? "" : ` ${OPENS_CARD}`}`;
  const state = onClick ? { "aria-pressed": String(pressed), onClick } : {};
  return h("button", { class: kind, title, type: "button", "data-token": token.id, ...state }, content);
}

/** Create a section of a step. @param {string | null} title @param {...Child} children */
export function picture(title, ...children) {
  return h("section", { class: "pipe-picture" }, title ? h("h3", null, title) : null, children);
}

/** Create a sentence with computed numbers. @param {...Child} children */
export function fact(...children) {
  return h("p", { class: "pipe-fact" }, children);
}

/** Create a bar whose length is a share of the longest. @param {number} share */
export function bar(share) {
  const inner = h("i");
  inner.style.width = `${100 * share}%`;
  return h("span", { class: "pipe-bar" }, inner);
}

/** @param {Scene} scene @param {string} name @param {number} [index] */
export function valueOf(scene, name, index = 0) {
  return unpackMatrix(scene.step.values[name], index);
}

/** Return the text of a token in quotation marks. @param {Scene} scene @param {number} [token] */
export function nameOf(scene, token = scene.token) {
  return `“${scene.pipeline.tokens[token].text}”`;
}

/** Return the height of a strip, so that all fit on a screen. @param {number} rows */
export function heightFor(rows) {
  return Math.round(Math.min(30, Math.max(14, 300 / rows)));
}

/**
 * Draw a heat strip for each token.
 * @param {Scene} scene
 * @param {string} name
 * @param {Matrix} matrix
 * @param {{title?: string, note?: string, limit?: number, blank?: CellTest, height?: number}} [options]
 */
export function strips(scene, name, matrix, { title, note, limit, blank, height } = {}) {
  const { tokens } = scene.pipeline;
  const rows = { names: tokens.map((token) => token.text), chosen: scene.token, pick: scene.choose };
  const options = { label: title ?? name, limit, blank, cellHeight: height ?? heightFor(tokens.length) };
  return picture(title ?? null, note ? h("p", { class: "note" }, note) : null, vectors(scene, matrix, rows, options));
}

/**
 * Draw vectors below each other: as numbers where they have few dimensions, else as strips. Their dimensions light
 * together with those of the machine.
 * @param {Scene} scene
 * @param {Matrix} matrix
 * @param {{names: string[], chosen?: number, pick?: (row: number) => void}} rows
 * @param {{label: string, limit?: number, blank?: CellTest, cellHeight?: number}} options
 */
export function vectors(scene, matrix, { names, chosen, pick }, { label, limit = limitOf(matrix), blank, cellHeight }) {
  if (matrix.cols <= MOST_CELLS) return numbers(scene, matrix, { names, chosen, pick }, { limit, plainZeros: !!blank });
  const heat = new HeatMap({
    label, unit: "value", rowLabels: true, axes: ["dimension"], cellHeight, rowName: (r) => names[r],
    columnName: (d) => `dimension ${d}`, onPick: pick,
    onPoint: (cell) => scene.light(cell ? cell.column : null, matrix.cols),
  });
  const marks = chosen === undefined ? [] : [{ row: chosen }];
  heat.show(matrix, { limit, blank, marks });
  scene.onLight(matrix.cols, (column) => heat.mark(column === null ? marks : [...marks, { column }]));
  return scene.keep(heat);
}

/**
 * Draw vectors of few dimensions as a table of numbers.
 * @param {Scene} scene
 * @param {Matrix} matrix
 * @param {{names: string[], chosen?: number, pick?: (row: number) => void}} rows
 * @param {{limit: number, plainZeros: boolean}} options
 */
function numbers(scene, matrix, { names, chosen, pick }, { limit, plainZeros }) {
  const table = numberTable({
    caption: "", limit, digits: digitsOf(matrix.data),
    columnNames: Array.from({ length: matrix.cols }, (_, d) => String(d)),
    rowNames: names.map((name, r) => (pick
      ? h("button", { type: "button", class: "link", onClick: () => pick(r) }, name) : name)),
  });
  table.show(matrix, { mark: (r) => r === chosen, plainZeros });
  table.element.addEventListener("pointermove", (event) => {
    const cell = /** @type {HTMLElement} */ (event.target).closest("td");
    const line = cell?.closest("tbody > tr");
    if (cell && line) scene.light([...line.children].indexOf(cell) - 1, matrix.cols);
  });
  table.element.addEventListener("pointerleave", () => scene.light(null, matrix.cols));
  scene.onLight(matrix.cols, (dimension) => {
    for (const line of table.element.querySelectorAll("tbody tr")) {
      [...line.children].forEach((cell, i) => cell.classList.toggle("pipe-lit", i - 1 === dimension));
    }
  });
  return scroller("Numbers", "scroll", scene.keep(table));
}

/**
 * Draw a few vectors of the chosen token below each other.
 * @param {Scene} scene
 * @param {string} title
 * @param {string[]} names
 * @param {ArrayLike<number>[]} rows
 */
export function vectorStrips(scene, title, names, rows) {
  return picture(title, vectors(scene, fromRows(rows), { names }, { label: title, cellHeight: 28 }));
}

/**
 * Draw a heat map of positions.
 * @param {Scene} scene
 * @param {string} label
 * @param {{unit: string, column: string, cellHeight: number}} options
 */
export function positionMap(scene, label, { unit, column, cellHeight }) {
  return new HeatMap({
    label, unit, rowLabels: true, axes: [column, "position"], cellHeight, rowName: (t) => `position ${t}`,
    rowLabel: String, columnName: (c) => `${column} ${c}`, onPick: (t) => scene.choose(t),
  });
}

/**
 * Create the choice of a head.
 * @param {Scene} scene
 * @param {string} label
 * @param {string} name
 * @param {number} heads
 * @param {number} head
 */
export function headChoice(scene, label, name, heads, head) {
  return h("div", { class: "toolbar" }, select({
    label, value: String(head), options: Array.from({ length: heads }, (_, i) => [String(i), `${name} ${i}`]),
    onChange: (value) => scene.chooseHead(Number(value)),
  }));
}
