/** Parts that the steps of the view Pipeline share. */

import { HeatMap } from "../charts/heat.js";
import { limitOf } from "../charts/numbers.js";
import { h, select, visibleRuns } from "../dom.js";
import { fromRows, unpackMatrix } from "../math.js";

/** @import { CellTest, Child, Closable, Matrix, Pipeline, PipelineStep, ShownToken } from "../types" */

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
 * @property {(part: Closable) => HTMLElement} keep close the part with the picture; returns its element
 */

const PERCENT = new Intl.NumberFormat("en", {
  style: "percent", maximumFractionDigits: 1, minimumFractionDigits: 1,
});
const SMALL_PERCENT = new Intl.NumberFormat("en", { style: "percent", maximumSignificantDigits: 1 });

/** Format a probability. @param {number | null | undefined} probability */
export function percent(probability) {
  if (probability === null || probability === undefined) return "none";
  return (probability >= 0.001 ? PERCENT : SMALL_PERCENT).format(probability);
}

/**
 * Create a chip for a token, with its ID below it if one is passed; a button if `onClick` is passed.
 * @param {ShownToken} token
 * @param {{id?: number, title?: string, pressed?: boolean, onClick?: () => void}} [options]
 */
export function chip(token, { id, title, pressed, onClick } = {}) {
  const text = token.decoded ? visibleRuns(token.decoded) : [h("i", null, token.text)];
  const content = [h("span", null, text), id === undefined ? null : h("small", null, String(id))];
  const properties = { class: `pipe-chip pipe-${token.kind}`, title, "data-token": String(token.id) };
  if (!onClick) return h("span", properties, content);
  return h("button", { ...properties, type: "button", "aria-pressed": String(pressed), onClick }, content);
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
  const heat = new HeatMap({
    label: title ?? name, unit: "value", rowLabels: true, axes: ["dimension"],
    cellHeight: height ?? heightFor(tokens.length), rowName: (t) => tokens[t].text,
    columnName: (d) => `dimension ${d}`, onPick: (t) => scene.choose(t),
  });
  heat.show(matrix, { limit, blank, marks: [{ row: scene.token }] });
  return picture(title ?? null, note ? h("p", { class: "note" }, note) : null, scene.keep(heat));
}

/**
 * Draw a few vectors of the chosen token below each other.
 * @param {Scene} scene
 * @param {string} title
 * @param {string[]} names
 * @param {ArrayLike<number>[]} rows
 */
export function vectorStrips(scene, title, names, rows) {
  const heat = new HeatMap({
    label: title, unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 28, rowName: (r) => names[r],
    columnName: (d) => `dimension ${d}`,
  });
  const matrix = fromRows(rows);
  heat.show(matrix, { limit: limitOf(matrix) });
  return picture(title, scene.keep(heat));
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
