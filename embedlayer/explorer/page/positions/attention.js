/** The panel that compares attention scores with and without positions, for the same tokens in several orders. */

import { HeatMap } from "../charts/heat.js";
import { limitOf, shown } from "../charts/numbers.js";
import { OPENS_CARD, h, oneTabStop } from "../dom.js";
import { largestDifference, matrix, permuted } from "../math.js";
import { score, sinusoids } from "../schemes.js";
import { firstNumbers, hasOwnQueries, queryAndKey } from "./rotation.js";

/** @import { Matrix, PositionsData } from "../types" */
/** @import { Scheme } from "../schemes.js" */
/** @import { Scene } from "./scene.js" */
/** @typedef {Pick<Scheme, "point" | "apply"> & Partial<Scheme>} Scorer */

const MOST_TOKENS = 8;
const SAME = 1e-9;

/** @type {Scorer} */
const NO_POSITIONS = { point: "input", apply: (vector) => Float64Array.from(vector) };

/** Return the number of tokens that the panel compares. @param {PositionsData} data */
export function comparedTokens(data) {
  return Math.min(MOST_TOKENS, data.tokens.length);
}

/** @param {Scene} scene */
export function attentionPanel(scene) {
  const count = comparedTokens(scene.data);
  const straight = Array.from({ length: count }, (_, i) => i);
  const chips = oneTabStop(h("ol", { class: "pipe-chips" }));
  const scores = scoresOf(scene, count);
  const without = scorePicture(scene, "Without positions", "without");
  const withThem = scorePicture(scene, "With positions", "with");
  const draw = () => {
    chips.replaceChildren(...scene.order.map((t, place) => h("li", null, h("button", {
      type: "button", class: `pipe-chip ${OPENS_CARD}`, "data-token": scene.data.tokens[t].id,
    }, h("span", null, scene.data.tokens[t].text), h("small", null, `at ${place}`)))));
    const [plain, placed] = [scores(NO_POSITIONS, scene.order), scores(scorerOf(scene), scene.order)];
    const limit = limitOf(plain, placed);
    without.show(plain, permuted(scores(NO_POSITIONS, straight), scene.order), limit);
    withThem.show(placed, permuted(scores(scorerOf(scene), straight), scene.order), limit);
  };
  scene.onChange((change) => {
    if (change !== "positions") draw();
  });
  const sentence = `Scores q · k / √K of some tokens, with ${inputsText(scene)}. Without positions, another order of `
    + "the tokens permutes their scores: attention cannot distinguish one order from another.";
  return h("section", { class: "panel pos-panel pos-wide" }, h("h2", null, "Attention with and without positions"),
    h("p", { class: "note" }, sentence), orderButtons(scene, straight, draw), chips,
    h("div", { class: "grid-2" }, without.element, withThem.element));
}

/**
 * Return the scheme of which the panel draws the scores: one as wide as the vectors.
 * @param {Scene} scene
 * @returns {Scorer}
 */
function scorerOf({ scheme, vectors }) {
  return scheme.point === "input" && scheme.width !== vectors.cols ? sinusoids(vectors.cols, 10000) : scheme;
}

/** @param {Scene} scene */
function inputsText(scene) {
  const { scheme, vectors } = scene;
  if (scheme.point === "rotation" && hasOwnQueries(scene)) {
    return "queries and keys of the first head of the first block";
  }
  return scheme.point === "rotation" && scheme.width !== vectors.cols
    ? `the first ${scheme.width} numbers of the tokens' vectors as queries and keys`
    : "the tokens' vectors themselves as queries and keys";
}

/**
 * Return the function that computes the scores of the tokens `order[0], order[1], ...` at positions 0, 1, ...
 * @param {Scene} scene
 * @param {number} count
 */
function scoresOf(scene, count) {
  const { scheme, vectors } = scene;
  const inputs = Array.from({ length: count }, (_, t) => {
    if (scheme.point === "rotation") return queryAndKey(scene, t, t, 0);
    const vector = firstNumbers(scene, t, vectors.cols);
    return { query: vector, key: vector };
  });
  /** @param {Scorer} scorer @param {number[]} order */
  return (scorer, order) => matrix(count, count, (i, j) =>
    score(scorer, inputs[order[i]].query, inputs[order[j]].key, i, j, scene.head));
}

/** @param {Scene} scene @param {string} title @param {"with" | "without"} name */
function scorePicture(scene, title, name) {
  /** @param {number} place */
  const text = (place) => scene.data.tokens[scene.order[place]].text;
  const heat = new HeatMap({
    label: `Scores ${name} positions`, unit: "score", rowLabels: true, axes: ["key", "query"], cellHeight: 26,
    rowName: text, columnName: (place) => `key ${text(place)}`,
  });
  const sentence = h("p", { class: "pipe-fact", "data-value": name });
  const element = h("section", { class: "pipe-picture" }, h("h3", null, title), scene.keep(heat), sentence);
  /** @param {Matrix} scores @param {Matrix} expected permuted scores of the original order @param {number} limit */
  const show = (scores, expected, limit) => {
    heat.show(scores, { limit });
    sentence.replaceChildren(...comparison(scene, title, name === "with", largestDifference(scores, expected)));
  };
  return { element, show };
}

/** @param {Scene} scene @param {string} title @param {boolean} hasPositions @param {number} difference */
function comparison({ order }, title, hasPositions, difference) {
  if (order.every((t, i) => t === i)) return [`${title}. Permute the tokens to compare.`];
  const result = difference > SAME ? ". The order matters."
    : hasPositions ? ": this order keeps every distance, and this scheme depends on distances only."
      : ": the same scores in another order. The order of the tokens has no effect.";
  return [
    `${title}: scores of the permuted text and permuted scores of the text differ by at most `,
    h("b", null, shown(difference)), result,
  ];
}

/** @param {Scene} scene @param {number[]} straight @param {() => void} draw */
function orderButtons(scene, straight, draw) {
  /** @param {number[]} order */
  const permute = (order) => {
    scene.order = order;
    scene.set({ order: order.every((t, i) => t === i) ? null : order.join(".") });
    draw();
  };
  /** @param {string} text @param {() => number[]} order */
  const button = (text, order) => h("button", { type: "button", onClick: () => permute(order()) }, text);
  return h("div", { class: "toolbar" }, button("Shuffle", () => shuffled(scene.order)),
    button("Reverse", () => [...scene.order].reverse()),
    button("Swap the first two", () => [scene.order[1], scene.order[0], ...scene.order.slice(2)]),
    button("Original order", () => straight));
}

/** Return a random permutation (Fisher-Yates). @param {number[]} list */
function shuffled(list) {
  const order = [...list];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}
