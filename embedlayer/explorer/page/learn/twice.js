/** Scene: the same word at two positions. */

import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { cosine, fromRows } from "../math.js";
import { inputVector } from "./inputs.js";
import { claimList, fixed, listSlider, schemeSwitches } from "./parts.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [TOKEN, LAST] = [1, 63]; // “the”
const DIMS = [8, 16, 64, 512];

/** @type {Scene} */
export const scene = {
  id: "twice",
  name: "The same word twice",
  question: "Is a word the same vector at two places?",
  sentences: [
    "One word is at position a and at position b. Its row is the same; the vector of the position is not.",
    "The cosine is the similarity of the two sums: 1 is the same direction, 0 is a right angle. Try the same position "
    + "twice, neighbours, and distant positions.",
  ],
  task: "Make the cosine of the two vectors fall below 0.65.",
  draw,
};

/**
 * Return the cosine of a token, by default “the”, at two positions.
 * @param {{a: number, b: number, dim: number, scheme: string, scaled: boolean, token?: number}} options
 */
export function sameWord({ a, b, token = TOKEN, ...options }) {
  const [first, second] = [a, b].map((position) => inputVector({ token, position, ...options }));
  return { first, second, cosine: cosine(first.sum, second.sum) };
}

/** @param {Stage} stage */
function draw(stage) {
  const at = { a: Math.round(stage.number("a", 0, 0, LAST)), b: Math.round(stage.number("b", 1, 0, LAST)) };
  let dim = DIMS.find((each) => each === stage.number("dim", 64, 8, 512)) ?? 64;
  const token = Math.round(stage.number("id", TOKEN, 0, 999)); // a link can name another one, and more positions
  const more = stage.text("more").split(".").map(Number).filter((p) => p > 0 && p <= LAST);
  const fact = h("p", { class: "pipe-fact", "data-value": "token" });
  const heat = heatOf(() =>
    ["the row", `at a = ${at.a}`, ...more.map((p) => `at ${p}`), `at b = ${at.b}`, "b − a"]);
  const positions = () => [at.a, ...more, at.b];
  const number = h("output", { class: "learn-number", "data-value": "cosine" });
  const claims = claimList(stage);
  const update = () => {
    const options = { dim, token, ...switches.chosen };
    fact.textContent = factOf(token, positions());
    stage.set({ a: at.a || null, b: at.b === 1 ? null : at.b, dim: dim === 64 ? null : dim,
      id: token === TOKEN ? null : token });
    const { first, second, cosine: similarity } = sameWord({ ...at, ...options });
    const sums = positions().map((position) => inputVector({ position, ...options }).sum);
    heat.show(fromRows([first.scaledRow, ...sums, second.sum.map((value, d) => value - first.sum[d])]));
    number.textContent = fixed(similarity);
    claims.show(claimsOf(options, [...new Set(positions())]));
    stage.judge(...verdict(similarity));
  };
  const switches = schemeSwitches(stage, () => update());
  const [a, b] = /** @type {("a" | "b")[]} */ (["a", "b"]).map((key) => slider({
    label: `Position ${key}`, min: 0, max: LAST, value: at[key], onInput: (value) => {
      at[key] = value;
      update();
    } }));
  const width = listSlider("Width D", DIMS, dim, (value) => {
    dim = value;
    update();
  });
  update();
  return [
    h("div", { class: "learn-two" }, a, b), fact, h("p", { class: "learn-reading" }, "cosine ", number),
    stage.keep(heat),
    h("div", { class: "learn-controls" }, switches.elements, width), claims.element,
  ];
}

/** @param {() => string[]} names of the rows */
function heatOf(names) {
  return new HeatMap({
    label: "The word at its positions", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 28,
    rowName: (r) => names()[r], columnName: (d) => `dimension ${d}`,
  });
}

/** @param {number} similarity @returns {[boolean, string]} */
function verdict(similarity) {
  const text = `The cosine is ${fixed(similarity)}`;
  return similarity < 0.65 ? [true, `${text}: the same word, two clearly different vectors.`] : [false, `${text}.`];
}

/** @param {number} token @param {number[]} positions */
function factOf(token, positions) {
  const places = `${positions.slice(0, -1).join(", ")} and ${positions.at(-1)}`;
  return `${token === TOKEN ? "“the”, t" : "T"}oken ID ${token}, at positions ${places}.`;
}

/**
 * @param {{dim: number, scheme: string, scaled: boolean, token: number}} options
 * @param {number[]} positions all different
 * @returns {Claim[]}
 */
function claimsOf(options, positions) {
  /** @param {number} a @param {number} b @param {number} [dim] */
  const between = (a, b, dim = options.dim) => sameWord({ ...options, a, b, dim }).cosine;
  const [same, next, far, farther] = [between(0, 0), between(0, 1), between(0, 5), between(0, 50)];
  const isLearned = options.scheme === "learned";
  const count = new Set(positions.map((position) => inputVector({ position, ...options }).sum.join())).size;
  return [
    ["Same position: the similarity is 1.0.", same > 1 - 1e-9, `Positions 0 and 0: ${fixed(same)}.`],
    ["Positions 0 and 1 are very similar (> 0.95), because position embeddings change gradually.",
      isLearned && next > 0.95 ? null : next > 0.95, `Positions 0 and 1: ${fixed(next)}. `
      + (isLearned ? `${next > 0.95 ? "The reason is another one: l" : "L"}earned rows start at random, and 0 and 50 `
        + `have ${fixed(farther)}.`
        : `It depends on D: ${fixed(between(0, 1, 8))} at D = 8, ${fixed(between(0, 1, 512))} at D = 512.`)],
    ["Positions 0 and 5: the similarity drops.", far < next - 0.05 && (isLearned ? null : true),
      `${fixed(next)} for 0 and 1, ${fixed(far)} for 0 and 5. `
      + (isLearned ? "Before training, the similarity of learned rows does not depend on the distance."
        : "It does not fall evenly with the distance.")],
    ["The same token at different positions has different embeddings.", count > 1 ? count === positions.length : null,
      count > 1 ? `Token ID ${options.token} at positions ${positions.join(", ")}: ${count} different vectors of `
        + `${options.dim} numbers.` : `Both are position ${positions[0]} here, and the same vector.`],
  ];
}
