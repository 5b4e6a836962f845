/** The step Gradient: which rows of the table get a gradient from this text. */

import { HeatMap } from "../charts/heat.js";
import { COUNT, limitOf, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { bar, chip, nameOf, picture, valueOf } from "./pictures.js";

/** @import { Pipeline, RowGradient } from "../types" */
/** @import { Scene } from "./pictures.js" */

/** Draw the gradient norms of all rows and of the rows of this text. @param {Scene} scene */
export function drawGradient(scene) {
  return [allRows(scene), rowsOfText(scene)];
}

/** @param {Scene} scene */
function allRows(scene) {
  const { pipeline, step, token } = scene;
  const { rows_a_bin: wide, tied } = step.facts;
  const norms = valueOf(scene, "norms");
  const heat = new HeatMap({
    label: "Gradient of the rows", unit: "gradient norm", isSequential: true, cellHeight: 36,
    axes: ["row of the table"], rowName: () => "", columnName: (bin) => binName(pipeline, bin, wide),
  });
  heat.show(norms, {
    limit: limitOf(norms), blank: (_, bin) => norms.data[bin] === 0,
    marks: [{ column: Math.floor(pipeline.tokens[token].id / wide) }],
  });
  const note = `The frame marks ${nameOf(scene)}. `
    + (tied ? "Every row gets a gradient." : "Rows in grey get no gradient.");
  return picture(`All ${COUNT.format(pipeline.vocab_size)} rows of the table`, h("p", { class: "note" }, note),
    scene.keep(heat));
}

/** @param {Pipeline} pipeline @param {number} bin @param {number} wide */
function binName(pipeline, bin, wide) {
  if (wide === 1) return `row ${bin}`;
  const last = Math.min((bin + 1) * wide, pipeline.vocab_size) - 1;
  return `largest of rows ${COUNT.format(bin * wide)} to ${COUNT.format(last)}`;
}

/** @param {Scene} scene */
function rowsOfText(scene) {
  const { tied } = scene.step.facts;
  /** @type {RowGradient[]} */
  const rows = scene.step.facts.rows;
  const most = Math.max(...rows.map((each) => each.norm), 1e-12);
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
  const parts = step.facts.tied ? [each.through_rows, each.through_head] : [];
  return h("tr", { "aria-current": each.id === pipeline.tokens[token].id ? "true" : null },
    h("td", null, button), h("td", { class: "number" }, COUNT.format(each.times)),
    h("td", { class: "pipe-wide" }, bar(each.norm / most)),
    [each.norm, ...parts].map((norm) => h("td", { class: "number" }, shown(norm))));
}
