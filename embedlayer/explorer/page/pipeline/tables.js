/** The tables of the machine: a part of W around a row, the products of a one-hot vector and W, and the positions. */

import { COUNT, limitOf, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { row, unpackMatrix } from "../math.js";
import { factsOf, stepOf } from "./facts.js";
import { VectorPicture } from "./vector.js";

/** @import { Child, Matrix, Pipeline, PipelineStep, StepOf } from "../types" */

const POSITIONS_SHOWN = 7;
const LISTED = 3;

/**
 * One table of the machine.
 * @typedef {object} MachineTable
 * @property {HTMLElement} element
 * @property {VectorPicture[]} vectors
 * @property {VectorPicture | null} chosen the row that moves into the chain
 */

/**
 * Draw W around the row of a token, with the entries of its one-hot vector.
 * @param {Pipeline} pipeline
 * @param {number} token
 * @returns {MachineTable}
 */
export function tableOfRows(pipeline, token) {
  const { part, first, names, whole } = partOf(pipeline, token);
  const { id } = pipeline.tokens[token];
  const limit = limitOf(part);
  const dims = pipeline.embed_dim;
  const vectors = names.map((_, r) => new VectorPicture(row(part, r), { limit, dims }));
  const lines = names.map((name, r) => {
    const isChosen = first + r === id;
    return h("div", { class: isChosen ? "mach-row mach-chosen" : "mach-row" },
      h("b", { class: "mach-e" }, isChosen ? "1" : "0"), h("span", { class: "mach-id" }, String(first + r)),
      h("span", { class: "mach-name", title: name, "data-token": String(first + r) }, name), vectors[r].element);
  });
  const size = COUNT.format(pipeline.vocab_size);
  const wide = Math.ceil(dims / part.cols);
  const shares = `Each column shows the number of largest absolute value of ${wide} dimensions.`;
  const heads = h("div", { class: "mach-row mach-heads" }, h("b", { class: "mach-e", title: "one-hot vector" }, "e"),
    h("span", { class: "mach-id" }, "ID"), h("span", { class: "mach-name" }, "token"),
    wide > 1 ? h("span", { title: shares }, `row of W, largest of ${wide}`) : h("span", null, "row of W"));
  const last = first + names.length < pipeline.vocab_size;
  const element = machineTable("mach-w", ["W, the table ", h("small", null, `${size} × ${COUNT.format(dims)}`)],
    heads,
    whole ? null : more(first > 0, `${COUNT.format(first)} rows above`), lines,
    whole ? null : more(last, `${COUNT.format(pipeline.vocab_size - first - names.length)} rows below`));
  return { element, vectors, chosen: vectors[id - first] };
}

/** @param {boolean} is @param {string} text */
function more(is, text) {
  return h("p", { class: "mach-more" }, is ? `⋮ ${text}` : "");
}

/**
 * Draw the products of a token's one-hot vector and all rows of a small table, and their sum.
 * @param {Pipeline} pipeline
 * @param {number} token
 * @returns {MachineTable | null} null for a table that is too large
 */
export function tableOfProducts(pipeline, token) {
  const { part, first, names, whole } = partOf(pipeline, token);
  if (!whole) return null;
  const { id } = pipeline.tokens[token];
  const limit = limitOf(part);
  const options = { limit, dims: pipeline.embed_dim, plainZeros: true };
  const products = names.map((_, r) =>
    new VectorPicture(row(part, r).map((number) => Number(first + r === id) * number || 0), options));
  const sum = new VectorPicture(row(part, id - first), { ...options, plainZeros: false });
  const lines = products.map((product, r) => h("div", { class: first + r === id ? "mach-row mach-chosen" : "mach-row" },
    h("span", { class: "mach-times" }, `${first + r === id ? 1 : 0} ·`), product.element));
  const element = machineTable("mach-products", ["e · W ", h("small", null, "all products")],
    h("div", { class: "mach-row mach-heads" }, h("span", { class: "mach-times" }, "e"), h("span", null, "e[i] · W[i]")),
    lines, h("div", { class: "mach-row mach-total" }, h("span", { class: "mach-times" }, "sum"), sum.element));
  return { element, vectors: [...products, sum], chosen: sum };
}

/**
 * Draw the vectors of the positions around a token, or say where the model puts positions.
 * @param {Pipeline} pipeline
 * @param {number} token
 * @param {number} space of the dimensions of positions
 * @param {(step: string) => void} goTo
 * @returns {MachineTable}
 */
export function tableOfPositions(pipeline, token, space, goTo) {
  const step = stepOf(pipeline, "position");
  if (!step || step.idle) {
    const target = pipeline.steps.find(({ name }) => name === "rotation" || name === "bias");
    const link = target && h("button", { type: "button", class: "link", onClick: () => goTo(target.name) },
      `Go to the step ${target.title}`);
    const element = machineTable("mach-p mach-none", ["Positions"], h("p", null, step?.sentence ?? ""),
      target ? inAttention(target, token) : null, link ?? null);
    return { element, vectors: [], chosen: null };
  }
  const places = unpackMatrix(step.values.positions);
  const wide = Math.min(POSITIONS_SHOWN, places.rows);
  const first = Math.max(0, Math.min(token - (POSITIONS_SHOWN >> 1), places.rows - wide));
  const limit = limitOf(places);
  const vectors = Array.from({ length: wide }, (_, i) => new VectorPicture(row(places, first + i), { limit, space }));
  const lines = vectors.map((vector, i) =>
    h("div", { class: first + i === token ? "mach-row mach-chosen" : "mach-row" },
      h("span", { class: "mach-id" }, String(first + i)), vector.element));
  const element = machineTable("mach-p", ["P, the positions ", h("small", null, schemeName(step))],
    h("div", { class: "mach-row mach-heads" }, h("span", { class: "mach-id" }, "t"), h("span", null, "p[t]")),
    more(first > 0, ""), lines, more(first + wide < places.rows, ""));
  return { element, vectors, chosen: vectors[token - first] };
}

/**
 * List what a scheme does inside attention at a position: angles of the first pairs, or biases of the first heads.
 * @param {PipelineStep} step
 * @param {number} token
 */
function inAttention({ name, values }, token) {
  if (name === "rotation") {
    const angles = row(unpackMatrix(values.angles), token).slice(0, LISTED);
    return listed(`At position ${token}, modulo 2π:`,
      Array.from(angles, (angle, pair) => `pair ${pair} rotates by ${shown(angle)} rad`));
  }
  if (token === 0) return null;
  const heads = Array.from({ length: Math.min(LISTED, values.bias.shape[0]) }, (_, head) => head);
  return listed("To the score of the token before:", heads.map((head) =>
    `head ${head} adds ${shown(row(unpackMatrix(values.bias, head), token)[token - 1])}`));
}

/** @param {string} title @param {string[]} lines */
function listed(title, lines) {
  return h("div", null, title, h("ul", null, lines.map((line) => h("li", null, line))));
}

/** Return the name of a position scheme for readers. @param {PipelineStep} step */
function schemeName(step) {
  const { scheme } = factsOf(step, "position");
  if (scheme === "LearnedPositionalEmbedding") return "learned";
  return scheme === "SinusoidalPositionalEmbedding" ? "sinusoidal" : String(scheme);
}

/** @param {string} name @param {Child[]} title @param {...Child} children */
function machineTable(name, title, ...children) {
  return h("section", { class: `mach-table ${name}` }, h("h3", null, title), children);
}

/**
 * Return the part of the table around the row of a token.
 * @param {Pipeline} pipeline
 * @param {number} token
 * @returns {{part: Matrix, first: number, names: string[], whole: boolean}}
 */
function partOf(pipeline, token) {
  const step = /** @type {StepOf<"look_up">} */ (stepOf(pipeline, "look_up"));
  const index = step.facts.part_of[token];
  const { first, names } = step.facts.parts[index];
  return { part: unpackMatrix(step.values.near, index), first, names, whole: step.facts.whole };
}
