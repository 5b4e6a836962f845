/** What the panels of the view Positions share: the state, sliders for two positions, and common pictures. */

import { HeatMap } from "../charts/heat.js";
import { h, select, slider } from "../dom.js";
import { fromRows } from "../math.js";

/** @import { CellTest, Changes, Child, Closable, Matrix, PositionsData } from "../types" */
/** @import { Scheme } from "../schemes.js" */

/**
 * A part of the state that has changed: two positions, the tokens or the head, or everything.
 * @typedef {"all" | "positions" | "tokens"} Change
 *
 * @typedef {object} Scene
 * @property {PositionsData} data
 * @property {Scheme} scheme
 * @property {number} length number of positions shown
 * @property {number} last the last position that can be chosen
 * @property {Matrix} vectors of the source's tokens, scale applied
 * @property {number} a the first chosen position
 * @property {number} b the second chosen position
 * @property {number} pair
 * @property {number} head
 * @property {number} token index of the chosen token, or of the query's token
 * @property {number} key index of the key's token
 * @property {boolean} lock whether both positions move together
 * @property {number[]} order of the tokens in the panel about attention
 * @property {(changes: Changes) => void} set change the URL
 * @property {(part: Closable) => HTMLElement} keep close the part with the view; returns its element
 * @property {(draw: (change: Change) => void) => void} onChange
 * @property {(change: Change) => void} refresh call the functions passed to `onChange`
 */

export const MOST_COMPARED = 256;

/** @param {string} title @param {Child} sentence @param {...Child} children */
export function panel(title, sentence, ...children) {
  return h("section", { class: "panel pos-panel" }, h("h2", null, title), h("p", { class: "note" }, sentence),
    ...children);
}

/**
 * Create tiles of a name, a value, and the name of the value in the attribute `data-value`.
 * @param {[string, string, string?][]} entries
 */
export function tiles(entries) {
  return h("dl", { class: "pos-tiles" }, entries.map(([name, value, id]) =>
    h("div", null, h("dt", null, name), h("dd", { "data-value": id ?? null }, value))));
}

/** Return one vector for each of `count` positions. @param {Scheme} scheme @param {number} count */
export function vectorsOf(scheme, count) {
  return fromRows(Array.from({ length: count }, (_, position) => scheme.vector(position)));
}

/** Whether the vectors of a scheme are sines and cosines. @param {Scheme} scheme */
export function isWave(scheme) {
  return scheme.point === "rotation" || Number.isFinite(scheme.wavelength(0));
}

/**
 * Return the test for cells of positions that the source was not trained on; null if there are none.
 * @param {Scene} scene
 * @param {number} count
 * @returns {CellTest | null}
 */
export function untrainedCells({ scheme: { trained } }, count) {
  return trained !== null && count > trained ? (r, c) => Math.max(r, c) >= trained : null;
}

/** Change one or both positions. @param {Scene} scene @param {number} a @param {number} b */
export function setPositions(scene, a, b) {
  scene.a = Math.min(a, scene.last);
  scene.b = Math.min(b, scene.last);
  scene.set({ a: scene.a || null, b: scene.b === 1 ? null : scene.b });
  scene.refresh("positions");
}

/**
 * Create sliders for two positions and the check box that moves them together.
 * @param {Scene} scene
 * @param {[string, string]} [names]
 */
export function positionSliders(scene, names = ["Position a", "Position b"]) {
  /** @param {number} by @param {number} other how far both can move is limited by the other position */
  const limited = (by, other) => Math.max(-other, Math.min(scene.last - other, by));
  const common = { min: 0, max: scene.last };
  const a = slider({
    ...common, label: names[0], value: scene.a,
    onInput: (value) => {
      const shift = limited(value - scene.a, scene.b);
      setPositions(scene, scene.lock ? scene.a + shift : value, scene.lock ? scene.b + shift : scene.b);
    },
  });
  const b = slider({
    ...common, label: names[1], value: scene.b,
    onInput: (value) => {
      const shift = limited(value - scene.b, scene.a);
      setPositions(scene, scene.lock ? scene.a + shift : scene.a, scene.lock ? scene.b + shift : value);
    },
  });
  scene.onChange(() => {
    a.set(scene.a);
    b.set(scene.b);
  });
  const lock = h("input", {
    type: "checkbox", checked: scene.lock,
    onChange: () => {
      scene.lock = lock.checked;
      scene.set({ lock: lock.checked ? "1" : null });
    },
  });
  return h("div", { class: "pos-sliders" }, a, b, h("label", { class: "check" }, lock, "move both together"));
}

/**
 * Create the choice of a token.
 * @param {Scene} scene
 * @param {string} label
 * @param {"token" | "key"} name
 */
export function tokenChoice(scene, label, name) {
  return select({
    label, value: String(scene[name]),
    options: scene.data.tokens.map((token, i) => [String(i), `${token.text}  (${token.id})`]),
    onChange: (value) => {
      scene[name] = Number(value);
      scene.set({ [name]: value });
      scene.refresh("tokens");
    },
  });
}

/** Choose a head. @param {Scene} scene @param {number} head */
export function chooseHead(scene, head) {
  scene.head = head;
  scene.set({ head: head || null });
  scene.refresh("tokens");
}

/**
 * Draw positions or distances as rows, and dimensions, pairs or heads as columns.
 * @param {Scene} scene
 * @param {string} title
 * @param {string} sentence
 * @param {Matrix} values
 * @param {{row: string, column: string, unit?: string, limit?: number, marks?: boolean,
 *   onPick: (row: number, column: number) => void}} options
 */
export function mapPanel(scene, title, sentence, values, { row, column, unit = "value", limit, marks = true, onPick }) {
  const { trained } = scene.scheme;
  const heat = new HeatMap({
    label: title, unit, axes: [column, row], cellHeight: Math.max(1, Math.min(18, Math.floor(320 / values.rows))),
    rowName: (r) => `${row} ${r}`, columnName: (c) => `${column} ${c}`, onPick,
  });
  const positions = () => (marks ? [{ row: scene.a }, { row: scene.b }] : []);
  const shade = trained !== null && values.rows > trained ? (/** @type {number} */ r) => r >= trained : null;
  heat.show(values, { limit, shade, marks: positions() });
  scene.onChange((change) => {
    if (change === "positions") heat.mark(positions());
  });
  return panel(title, sentence, scene.keep(heat));
}

/**
 * Draw a square heat map of two positions.
 * @param {Scene} scene
 * @param {{label: string, unit: string, axes: [string, string], names: [string, string]}} texts `names`: of a row and
 *   of a column, in front of the position
 * @param {() => [Matrix, {limit?: number, blank?: CellTest | null}]} compute
 * @param {Change[]} changes when the numbers are computed again
 */
export function squareMap(scene, { label, unit, axes, names }, compute, changes) {
  const heat = new HeatMap({
    label, unit, square: true, axes, rowName: (p) => `${names[0]} ${p}`, columnName: (p) => `${names[1]} ${p}`,
    onPick: (a, b) => setPositions(scene, a, b),
  });
  scene.onChange((change) => {
    const marks = [{ row: scene.a }, { column: scene.b }];
    if (!changes.includes(change)) return heat.mark(marks);
    const [matrix, options] = compute();
    return heat.show(matrix, { ...options, shade: untrainedCells(scene, matrix.rows), marks });
  });
  return h("div", { class: "pos-square" }, scene.keep(heat));
}

/**
 * Create heat strips of vectors with a name each.
 * @param {string} label
 * @param {(row: number) => string} rowName
 * @param {string} [column]
 * @param {number} [cellHeight]
 */
export function vectorStrips(label, rowName, column = "dimension", cellHeight = 26) {
  const axis = column === "channel" ? "channel of the head" : column;
  return new HeatMap({
    label, unit: "value", rowLabels: true, axes: [axis], cellHeight, rowName, columnName: (d) => `${column} ${d}`,
  });
}
