/** The step Logit lens: the hidden state after every block, read by the model's own norm and head. */

import { h, scroller } from "../dom.js";
import { unpackMatrix } from "../math.js";
import { stepOf } from "./facts.js";
import { cellGrid } from "./lens_grid.js";
import { fillLoaded } from "./loaded.js";
import { bar, chip, fact, nameOf, percent, picture } from "./pictures.js";

/** @import { Child, LogitLens, Matrix, Pipeline, ShownToken } from "../types" */
/** @import { Scene } from "./pictures.js" */

/**
 * The lens of a text, unpacked.
 * @typedef {object} Lens
 * @property {number} layers
 * @property {number[][][]} ids the most likely tokens of each layer and position
 * @property {(layer: number, t: number, k: number) => number} probability
 * @property {Matrix} entropy in nats
 * @property {Matrix} next probability of the following token
 * @property {number[][]} ranks rank of the following token
 * @property {Map<number, ShownToken>} names
 * @property {{left: number}} scroll where the reader left the grid
 */

/** @type {WeakMap<Pipeline, Lens>} what was loaded, so that another choice is drawn at once */
const known = new WeakMap();

/** Draw the grid of layers and positions, and the chosen cell. @param {Scene} scene */
export function drawLens(scene) {
  const box = h("div", { class: "lens" });
  const ids = scene.pipeline.tokens.map((token) => token.id).join(",");
  fillLoaded(scene, box, {
    known, waiting: "Reading every layer …", load: async () => unpacked(await scene.load("logit-lens", { ids })),
    contents: (lens) => contents(scene, lens),
  });
  return [box];
}

/** @param {LogitLens} answer @returns {Lens} */
function unpacked(answer) {
  const probabilities = unpackMatrix(answer.top_probs);
  const [layers, positions] = [answer.top_ids.length, answer.top_ids[0].length];
  return {
    layers,
    ids: answer.top_ids,
    probability: (layer, t, k) => probabilities.data[(layer * positions + t) * probabilities.cols + k],
    entropy: unpackMatrix(answer.entropy),
    next: unpackMatrix(answer.next_probs),
    ranks: answer.next_ranks,
    names: new Map(answer.tokens.map((token) => [token.id, token])),
    scroll: { left: 0 },
  };
}

/** @param {Scene} scene @param {Lens} lens @returns {HTMLElement[]} */
function contents(scene, lens) {
  const stated = Number.parseInt(scene.state.get("layer", ""), 10);
  const layer = Number.isNaN(stated) ? lens.layers - 1 : Math.min(Math.max(stated, 0), lens.layers - 1);
  const grid = cellGrid(scene, lens, layer, (chosen, t) => {
    scene.state.set({ layer: chosen === lens.layers - 1 ? null : chosen });
    scene.choose(t);
  });
  return [grid, h("div", { class: "grid-2" }, cell(scene, lens, layer), following(scene, lens, layer)),
    summary(scene, lens)];
}

/** Return the name of a layer. @param {number} layer */
function afterBlocks(layer) {
  return `after ${layer} ${layer === 1 ? "block" : "blocks"}`;
}

/** Draw the most likely tokens of the chosen cell. @param {Scene} scene @param {Lens} lens @param {number} layer */
function cell(scene, lens, layer) {
  const { tokens } = scene.pipeline;
  const { token: t } = scene;
  const next = tokens[t + 1]?.id;
  const most = lens.probability(layer, t, 0) || 1;
  const list = lens.ids[layer][t].map((id, k) => h("li", { class: id === next ? "pipe-right" : null },
    chip(/** @type {ShownToken} */ (lens.names.get(id))), bar(lens.probability(layer, t, k) / most),
    h("span", { class: "pipe-value" }, percent(lens.probability(layer, t, k)))));
  const bits = lens.entropy.data[layer * tokens.length + t] / Math.LN2;
  return picture(`Most likely next tokens ${afterBlocks(layer)}, at ${nameOf(scene)}`,
    h("ol", { class: "next-list" }, list),
    fact("Entropy ", h("b", null, `${bits.toFixed(2)} bits`), "."));
}

/**
 * Draw how the following token rises from block to block.
 * @param {Scene} scene
 * @param {Lens} lens
 * @param {number} layer the chosen layer
 */
function following(scene, lens, layer) {
  const { token: t, pipeline } = scene;
  const next = pipeline.tokens[t + 1];
  if (!next) {
    const note = "No token follows the last one in this text. Choose another column to see how the following token "
      + "rises from block to block.";
    return picture("The token that follows", h("p", { class: "note" }, note));
  }
  const probabilities = lens.ranks.map((_, l) => lens.next.data[l * lens.next.cols + t]);
  const most = Math.max(...probabilities) || 1;
  const rows = probabilities.map((p, l) => h("tr", { "aria-current": l === layer ? "true" : null },
    h("th", { scope: "row" }, String(l)), h("td", { class: "pipe-wide" }, bar(p / most)),
    h("td", { class: "number" }, percent(p)), h("td", { class: "number" }, lens.ranks[l][t].toLocaleString("en"))));
  const head = h("tr", null, h("th", null, "blocks"), h("th", { class: "pipe-wide" }),
    h("th", { class: "number" }, "probability"), h("th", { class: "number" }, "rank"));
  return picture(`The token that follows, ${nameOf(scene, t + 1)}, after each block`,
    scroller("The token that follows, after each block", "scroll",
      h("table", null, h("thead", null, head), h("tbody", null, rows))));
}

/** Count over all positions what each layer reads. @param {Scene} scene @param {Lens} lens */
function summary(scene, lens) {
  const ids = scene.pipeline.tokens.map((token) => token.id);
  const rows = lens.ids.map((layer, l) => {
    const itself = layer.filter((best, t) => best[0] === ids[t]).length;
    const right = layer.filter((best, t) => t + 1 < ids.length && best[0] === ids[t + 1]).length;
    const bits = ids.reduce((sum, _, t) => sum + lens.entropy.data[l * ids.length + t], 0) / ids.length / Math.LN2;
    return h("tr", null, h("th", { scope: "row" }, String(l)),
      [`${itself} of ${ids.length}`, `${right} of ${ids.length - 1}`, bits.toFixed(2)].map((text) =>
        h("td", { class: "number" }, text)));
  });
  const titles = ["the token itself", "the token that follows", "mean entropy, bits"];
  const head = h("tr", null, h("th", null, "blocks"), titles.map((text) => h("th", { class: "number" }, text)));
  const note = stepOf(scene.pipeline, "head")?.facts.tied
    ? "The head is tied: after 0 blocks it compares each row of the table with all rows, so the most likely token is "
      + "often the token itself."
    : "";
  return picture("Positions where the most likely token is …",
    scroller("Positions by block", "scroll",
      h("table", { class: "lens-summary" }, h("thead", null, head), h("tbody", null, rows))),
    note ? h("p", { class: "note" }, note) : null);
}
