/** The step Block: the vectors inside of the first block, its attention weights, and the matrices of a small one. */

import { HeatMap } from "../charts/heat.js";
import { COUNT, limitOf, shown } from "../charts/numbers.js";
import { h, scroller } from "../dom.js";
import { fixed, numberTable } from "../learn/parts.js";
import { fromRows, rootMeanSquare, row, unpackMatrix } from "../math.js";
import { factsOf } from "./facts.js";
import { bar, fact, headChoice, heightFor, nameOf, picture, valueOf } from "./pictures.js";
import { VectorPicture } from "./vector.js";

/** @import { BlockVector, Child } from "../types" */
/** @import { Scene } from "./pictures.js" */
/** @typedef {import("../math.js").Vector} Vector */

/** The vectors between the blocks and inside of one: the residual stream. */
const STREAM = ["input", "attention_sum", "mlp_sum", "stream"];
/** What each RMSNorm is computed from. @type {Record<string, string>} */
const NORMALISED = { attention_norm: "input", mlp_norm: "attention_sum" };
/** What the rows of each matrix are multiplied by. @type {Record<string, string>} */
const MATRICES = {
  query: "q = n · W_queryᵀ", key: "k = n · W_keyᵀ", value: "v = n · W_valueᵀ", out: "a = concat(p · v) · W_outᵀ",
  gate: "g = n′ · W_gateᵀ", up: "u = n′ · W_upᵀ", down: "m = s · W_downᵀ",
};

/** Draw the first block. @param {Scene} scene */
export function drawBlock(scene) {
  return [lines(scene), attention(scene), laterBlocks(scene), matrices(scene)];
}

/** Draw the vectors of the chosen token from the input of the block to its output. @param {Scene} scene */
function lines(scene) {
  const { vectors, units_a_column: units } = factsOf(scene.step, "block");
  const limit = limitOf(fromRows(["input", "attention_norm", "mlp_norm", "mlp_sum"].map((name) =>
    row(valueOf(scene, name), scene.token))));
  const lengths = row(valueOf(scene, "lengths"), scene.token);
  const head = h("li", { class: "block-line block-names" }, h("span"), h("span"),
    h("span", null, "numbers"), h("span", null, "length"), h("span", null, "size"));
  return picture(`${nameOf(scene)} at position ${scene.token}, from the input of the block to its output`,
    h("ol", { class: "block-lines" }, head, vectors.map((vector, i) => line(scene, vector, lengths[i], limit))),
    h("p", { class: "note" }, scene.step.values.gate_matrix
      ? "Numbers are rounded to four digits after the point: from the digits shown, you get the next line to about "
        + "0.001. Matrices are below."
      : "Equal colours mean equal numbers in all lines.",
    units > 1 ? ` Of each ${COUNT.format(units)} units of SwiGLU the one with the largest product is drawn.` : ""));
}

/** @param {Scene} scene @param {BlockVector} vector @param {number} length @param {number} limit */
function line(scene, { name, symbol, formula, size }, length, limit) {
  const numbers = row(valueOf(scene, name), scene.token);
  const source = NORMALISED[name];
  const root = source ? rootMeanSquare(row(valueOf(scene, source), scene.token), factsOf(scene.step, "block").eps) : 0;
  return h("li", { class: `block-line${STREAM.includes(name) ? " block-stream" : ""}`, "data-vector": name },
    h("b", null, symbol),
    h("span", { class: "block-formula" }, formula, root ? h("small", null, `the root is ${shown(root)}`) : null),
    scene.keep(new VectorPicture(numbers, { limit, isExact: true })),
    h("span", { class: "block-number" }, shown(length)), h("span", { class: "block-number" }, COUNT.format(size)));
}

/** Draw what the chosen token reads from the tokens, in one head. @param {Scene} scene */
function attention(scene) {
  const { heads } = factsOf(scene.step, "block");
  const shownHeads = scene.step.values.weights.shape[0];
  const head = Math.min(scene.head, shownHeads - 1);
  const weights = valueOf(scene, "weights", head);
  const { tokens } = scene.pipeline;
  const heat = new HeatMap({
    label: "Attention weights", unit: "weight", rowLabels: true, axes: ["key", "query"], isSequential: true,
    cellHeight: heightFor(tokens.length), rowName: (t) => tokens[t].text,
    columnName: (t) => `key ${tokens[t].text} at position ${t}`, onPick: (t) => scene.choose(t),
  });
  heat.show(weights, { limit: 1, marks: [{ row: scene.token }], blank: (i, j) => j > i });
  return h("div", { class: "grid-2" },
    picture(`What ${nameOf(scene)} reads: scores, attention weights p, values v`,
      heads > 1 ? headChoice(scene, "Head of the first block", "head", shownHeads, head) : null,
      weightedValues(scene, head, row(weights, scene.token)),
      h("p", { class: "note" }, "p is the softmax of the scores: e^score, divided by the sum over the tokens up to "
        + "this one. The sum of p · v is what this head reads.")),
    picture("Weights of all tokens in this head", scene.keep(heat)));
}

/** @param {Scene} scene @param {number} head @param {Vector} weights of the chosen query */
function weightedValues(scene, head, weights) {
  const scores = row(valueOf(scene, "scores", head), scene.token);
  const values = valueOf(scene, "values", head);
  const sum = row(valueOf(scene, "heads", head), scene.token);
  const limit = limitOf(values);
  /** @param {Child} name @param {string} score @param {Child} share @param {string} weight @param {Vector} numbers */
  const item = (name, score, share, weight, numbers) => h("li", { class: "block-value" }, name,
    h("span", { class: "block-number block-score" }, score), share,
    h("span", { class: "block-number block-weight" }, weight),
    scene.keep(new VectorPicture(numbers, { limit, isExact: true })));
  const total = Array.from(weights).reduce((all, weight) => all + weight, 0);
  const rows = scene.pipeline.tokens.slice(0, scene.token + 1).map((token, t) => item(
    h("button", { type: "button", class: "link pipe-row", onClick: () => scene.choose(t) }, token.text),
    fixed(scores[t]), bar(weights[t]), fixed(weights[t]), row(values, t)));
  return h("ol", { class: "block-values", "data-head": head }, rows,
    item(h("b", null, "Σ p · v"), "", h("span"), fixed(total), sum));
}

/** Say how long the vector is after each block. @param {Scene} scene */
function laterBlocks(scene) {
  const lengths = [...row(valueOf(scene, "state_lengths"), scene.token)];
  const { blocks } = factsOf(scene.step, "block");
  const others = blocks === 2 ? "Block 2 does the same with weights of its own"
    : `Blocks 2 to ${blocks} do the same with weights of their own`;
  const title = blocks === 1 ? "This model has one block" : others;
  return picture(title, fact(`Length of the vector of ${nameOf(scene)}: `),
    h("ol", { class: "block-lengths" }, lengths.map((length, i) =>
      h("li", null, h("small", null, i ? `after block ${i}` : "input"), h("b", null, shown(length))))));
}

/** Draw the matrices of a block that has few numbers. @param {Scene} scene */
function matrices(scene) {
  if (!scene.step.values.gate_matrix) return null;
  const width = valueOf(scene, "values").cols;
  const tables = Object.entries(MATRICES).map(([name, formula]) => {
    const matrix = unpackMatrix(scene.step.values[`${name}_matrix`]);
    const table = numberTable({
      caption: `W_${name}: ${formula}`, limit: limitOf(matrix),
      rowNames: Array.from({ length: matrix.rows }, (_, r) => String(r)),
    });
    table.show(matrix);
    return scene.keep(table);
  });
  return h("details", { class: "block-matrices" }, h("summary", null, "The matrices of this block"),
    h("p", { class: "note" }, "A row gives one number: the dot product of the row and the vector. The first "
      + `${width} rows of W_query, W_key and W_value are those of head 0. The weights w of both RMSNorms are 1.`),
    scroller("Matrices", "scroll block-tables", tables));
}
