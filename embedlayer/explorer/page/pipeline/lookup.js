/** The steps One-hot and Rows. */

import { COUNT } from "../charts/numbers.js";
import { h, scroller } from "../dom.js";
import { numberTable } from "../learn/parts.js";
import { matrix } from "../math.js";
import { stepOf } from "./facts.js";
import { occurrences } from "./occurrences.js";
import { picture, strips, valueOf } from "./pictures.js";

/** @import { Scene } from "./pictures.js" */

/** Draw each token as a vector of V entries with a single 1. @param {Scene} scene */
export function drawOneHot(scene) {
  const { pipeline, step, showTiny } = scene;
  const rows = stepOf(pipeline, "look_up");
  if (step.name === "one_hot" && rows?.facts.whole) return [wholeMatrix(scene, rows.facts.parts[0].names)];
  const last = pipeline.vocab_size - 1;
  const link = showTiny && h("p", { class: "note" },
    `A product with all ${COUNT.format(pipeline.vocab_size)} rows is too large to read. `,
    h("button", { type: "button", class: "link", onClick: showTiny }, "See all 40 products in the tiny layer"), ".");
  return [picture("All tokens",
    h("ol", { class: "pipe-onehots", "aria-label": "One-hot vectors" },
      pipeline.tokens.map((_, t) => oneHot(scene, t))),
    h("div", { class: "pipe-scale", "aria-hidden": "true" },
      h("span", null, "entry 0"), h("span", null, `entry ${COUNT.format(last)}`))), link];
}

/** @param {Scene} scene @param {number} t */
function oneHot({ pipeline, token, choose }, t) {
  const { id, text } = pipeline.tokens[t];
  const share = id / Math.max(1, pipeline.vocab_size - 1);
  const mark = h("i");
  const number = h("small", null, `1 at ${COUNT.format(id)}`);
  mark.style.left = `${100 * share}%`;
  if (share > 0.5) number.style.right = `calc(${100 * (1 - share)}% + 8px)`;
  else number.style.left = `calc(${100 * share}% + 8px)`;
  return h("li", null,
    h("button", { type: "button", "aria-pressed": String(t === token), onClick: () => choose(t) },
      h("span", { class: "pipe-name", "data-token": String(id) }, text),
      h("span", { class: "pipe-onehot" }, mark, number)));
}

/** Draw the one-hot vectors of all tokens with every 0 and 1. @param {Scene} scene @param {string[]} names */
function wholeMatrix(scene, names) {
  const { tokens } = scene.pipeline;
  const table = numberTable({
    caption: "E: a row for each token of the text, a column for each row of W",
    rowNames: tokens.map((token, t) => h("button", {
      type: "button", class: "link", "data-token": String(token.id), onClick: () => scene.choose(t),
    }, token.text)),
    columnNames: names.map((name, id) => `${id} ${name}`), digits: 0, limit: 1.5,
  });
  const ones = matrix(tokens.length, names.length, (t, id) => Number(tokens[t].id === id));
  table.show(ones, { mark: (t) => t === scene.token, plainZeros: true });
  return picture("All tokens", scroller("One-hot vectors", "scroll", scene.keep(table)));
}

/** Draw the row of each token. @param {Scene} scene */
export function drawLookUp(scene) {
  const rows = valueOf(scene, "rows");
  const [places, width] = [rows.rows, rows.cols].map((count) => COUNT.format(count));
  const note = `(T, D) = (${places}, ${width}); a batch of this text has the shape (1, ${places}, ${width}).`;
  return [strips(scene, "Rows of the table", rows, { title: "All tokens: E · W, the rows", note }),
    occurrences(scene, rows, "rows")];
}
