/** The step Gradient: which rows of the table get a gradient from this text. */

import { HeatMap } from "../charts/heat.js";
import { COUNT, largestOf, limitOf, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { numberTable } from "../learn/parts.js";
import { fromRows, matrix } from "../math.js";
import { factsOf, stepOf } from "./facts.js";
import { ROUNDED } from "./logits.js";
import { bar, chip, nameOf, picture, valueOf } from "./pictures.js";

/** @import { Matrix, Pipeline, RowGradient } from "../types" */
/** @import { Scene } from "./pictures.js" */

/** Draw the gradient of all rows, by its two ways, and of the rows of this text. @param {Scene} scene */
export function drawGradient(scene) {
  return [scene.step.values.rows_gradient ? wholeGradient(scene) : allRows(scene), rowsOfText(scene)];
}

/**
 * Draw the gradient of every number of a small table: through the look-up, through the head, and together.
 * @param {Scene} scene
 */
function wholeGradient(scene) {
  const { pipeline, step } = scene;
  const { tied } = factsOf(step, "gradient");
  const [rows, head] = ["rows_gradient", "head_gradient"].map((name) => valueOf(scene, name));
  const both = matrix(rows.rows, rows.cols, (r, c) => rows.data[r * rows.cols + c] + head.data[r * rows.cols + c]);
  const limit = Math.max(largestOf(rows), largestOf(head));
  const names = stepOf(pipeline, "look_up")?.facts.parts[0].names ?? [];
  const used = new Set(pipeline.tokens.slice(0, -1).map((token) => token.id));
  const columnNames = Array.from({ length: rows.cols }, (_, c) => String(c));
  /** @param {string} caption @param {Matrix} numbers @param {(row: number) => boolean} mark */
  const table = (caption, numbers, mark) => {
    const grid = numberTable({ caption, rowNames: names, columnNames, digits: 3, limit });
    grid.show(numbers, { plainZeros: true, mark });
    return scene.keep(grid);
  };
  /** @param {string} text */
  const sign = (text) => h("span", { class: "learn-sign" }, text);
  const lookUp = table(tied ? "through the look-up" : "W: through the look-up", rows, (r) => used.has(r));
  const whole = h("div", { class: "learn-equation pipe-gradients" }, lookUp, tied
    ? [sign("+"), table("through the head", head, () => false), sign("="), table("gradient of W", both, () => false)]
    : table("rows of the head: through the scores", head, () => false));
  return picture("The gradient of every number", h("p", { class: "note" }, reasonOf(scene)), whole,
    h("p", { class: "note" }, ROUNDED));
}

/** Say which rows get a gradient, and why. @param {Scene} scene */
function reasonOf({ step }) {
  const { tied, used, touched_by_look_up: rows, touched_by_head: head } = factsOf(step, "gradient");
  const lookUp = `Through the look-up, ${COUNT.format(rows)} of the ${COUNT.format(used)} looked-up rows get a `
    + "gradient, and no other row (the last token predicts nothing). ";
  return lookUp + (tied
    ? `Through the head, ${COUNT.format(head)} rows do: each row's score is in the softmax, so the loss pushes it. `
      + "Tied means one table, so both parts are added."
    : `The head has rows of its own: ${COUNT.format(head)} of them get a gradient, and nothing of it reaches W.`);
}

/** @param {Scene} scene */
function allRows(scene) {
  const { pipeline, step, token } = scene;
  const { rows_a_bin: wide, tied } = factsOf(step, "gradient");
  const [lookUp, head, both] = ["through_rows", "through_head", "norms"].map((name) => valueOf(scene, name));
  const marks = [{ column: Math.floor(pipeline.tokens[token].id / wide) }];
  /** @param {[string, Matrix][]} rows @param {import("../types").HeatMark[]} frames */
  const heat = (rows, frames) => {
    const numbers = fromRows(rows.map(([, values]) => values.data));
    const map = new HeatMap({
      label: "Gradient of the rows", unit: "gradient norm", isSequential: true, cellHeight: 30, rowLabels: true,
      axes: ["row of the table"], rowName: (r) => rows[r][0], columnName: (bin) => binName(pipeline, bin, wide),
    });
    map.show(numbers, {
      limit: limitOf(numbers), blank: (r, bin) => numbers.data[r * numbers.cols + bin] === 0, marks: frames,
    });
    return scene.keep(map);
  };
  const note = h("p", { class: "note" }, `${reasonOf(scene)} The frame marks ${nameOf(scene)}; rows in grey get none.`);
  const title = `All ${COUNT.format(pipeline.vocab_size)} rows of the table`;
  if (tied) return picture(title, note, heat([["look-up", lookUp], ["head", head], ["together", both]], marks));
  return h("div", null, picture(title, note, heat([["look-up", lookUp]], marks)),
    picture("The rows of the untied head", heat([["head", head]], [])));
}

/** @param {Pipeline} pipeline @param {number} bin @param {number} wide */
function binName(pipeline, bin, wide) {
  if (wide === 1) return `row ${bin}`;
  const last = Math.min((bin + 1) * wide, pipeline.vocab_size) - 1;
  return `largest of rows ${COUNT.format(bin * wide)} to ${COUNT.format(last)}`;
}

/** @param {Scene} scene */
function rowsOfText(scene) {
  const { tied, rows } = factsOf(scene.step, "gradient");
  const most = Math.max(...rows.map((each) => each.norm ?? NaN), 1e-12);
  const head = h("tr", null, h("th", null, "token"), h("th", { class: "number" }, "count"),
    h("th", { class: "pipe-wide" }), h("th", { class: "number" }, "norm"),
    tied ? [h("th", { class: "number" }, "by look-up"), h("th", { class: "number" }, "by head")] : null);
  const table = h("table", { class: "pipe-rows" }, h("thead", null, head),
    h("tbody", null, rows.map((each) => rowOfText(scene, each, most))));
  const note = "The two parts are vectors that may differ in direction, so their norms do not add up to the norm of "
    + "their sum.";
  return picture("The rows of this text", h("div", { class: "scroll pipe-table-scroll" }, table),
    tied ? h("p", { class: "note" }, note) : null);
}

/** @param {Scene} scene @param {RowGradient} each @param {number} most the largest norm */
function rowOfText({ pipeline, step, token, choose }, each, most) {
  const at = pipeline.tokens.findIndex((other) => other.id === each.id);
  const button = chip(each, { onClick: () => choose(at), pressed: false, title: `ID ${each.id}` });
  const parts = factsOf(step, "gradient").tied ? [each.through_rows, each.through_head] : [];
  return h("tr", { "aria-current": each.id === pipeline.tokens[token].id ? "true" : null },
    h("td", null, button), h("td", { class: "number" }, COUNT.format(each.times)),
    h("td", { class: "pipe-wide" }, bar((each.norm ?? NaN) / most)),
    [each.norm, ...parts].map((norm) => h("td", { class: "number" }, shown(norm ?? NaN))));
}
