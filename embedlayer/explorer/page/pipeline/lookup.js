/** The steps One-hot and Rows. */

import { COUNT } from "../charts/numbers.js";
import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";
import { heightFor, nameOf, strips, valueOf } from "./pictures.js";

/** @import { Context2D } from "../types" */
/** @import { Scene } from "./pictures.js" */

/** Draw each token as a vector of V entries with a single 1. @param {Scene} scene */
export function drawOneHot({ pipeline, token, choose }) {
  const last = Math.max(1, pipeline.vocab_size - 1);
  const lines = pipeline.tokens.map((shownToken, t) => {
    const mark = h("i");
    const number = h("small", null, `1 at ${COUNT.format(shownToken.id)}`);
    const share = shownToken.id / last;
    mark.style.left = `${100 * share}%`;
    if (share > 0.5) number.style.right = `calc(${100 * (1 - share)}% + 8px)`;
    else number.style.left = `calc(${100 * share}% + 8px)`;
    return h("li", null,
      h("button", { type: "button", "aria-pressed": String(t === token), onClick: () => choose(t) },
        h("span", { class: "pipe-name" }, shownToken.text), h("span", { class: "pipe-onehot" }, mark, number)));
  });
  return [
    h("ol", { class: "pipe-onehots", "aria-label": "One-hot vectors" }, lines),
    h("div", { class: "pipe-scale", "aria-hidden": "true" },
      h("span", null, "entry 0"), h("span", null, `entry ${COUNT.format(last)}`)),
  ];
}

/** Draw the table as a column, and a line from each row that is read to its token. @param {Scene} scene */
export function drawLookUp(scene) {
  const { pipeline, token } = scene;
  const rows = valueOf(scene, "rows");
  const height = heightFor(rows.rows);
  const label = `The table, and the ${rows.rows} rows that are read from it`;
  const canvas = h("canvas", { class: "pipe-table", role: "img", "aria-label": label });
  const section = strips(scene, "Rows of the table", rows, { height });
  const box = h("div", { class: "pipe-table-box" }, canvas);
  section.querySelector(".heat-body")?.prepend(box);
  const close = onResize(box, () => {
    if (box.clientWidth >= 20) drawTable(canvas, scene, box.clientWidth, height);
  });
  scene.keep({ element: box, close });
  const note = `On the left is the table, row 0 at the top and row ${COUNT.format(pipeline.vocab_size - 1)} at the `
    + `bottom: ${nameOf(scene)} is row ${COUNT.format(pipeline.tokens[token].id)}.`;
  return [section, h("p", { class: "note" }, note)];
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Scene} scene
 * @param {number} width
 * @param {number} rowHeight
 */
function drawTable(canvas, { pipeline, token }, width, rowHeight) {
  const colours = theme();
  const tall = pipeline.tokens.length * rowHeight;
  const context = fit(canvas, width, tall);
  const barWidth = Math.min(34, width * 0.35);
  context.fillStyle = colours.raised;
  context.strokeStyle = colours.line;
  context.fillRect(1, 0, barWidth, tall);
  context.strokeRect(1.5, 0.5, barWidth - 1, tall - 1);
  const order = [...pipeline.tokens.keys()].sort((a, b) => Number(a === token) - Number(b === token));
  for (const t of order) {
    const from = 2 + (pipeline.tokens[t].id / Math.max(1, pipeline.vocab_size - 1)) * (tall - 4);
    context.strokeStyle = t === token ? colours.accent : colours.muted;
    context.globalAlpha = t === token ? 1 : 0.5;
    context.lineWidth = t === token ? 2 : 1;
    drawRead(context, from, (t + 0.5) * rowHeight, barWidth, width);
  }
  context.globalAlpha = 1;
}

/**
 * Draw the line from a row of the table to its token.
 * @param {Context2D} context
 * @param {number} from
 * @param {number} to
 * @param {number} barWidth
 * @param {number} width
 */
function drawRead(context, from, to, barWidth, width) {
  context.beginPath();
  context.moveTo(1, from);
  context.lineTo(1 + barWidth, from);
  context.bezierCurveTo(width * 0.7, from, width * 0.6, to, width, to);
  context.stroke();
}
