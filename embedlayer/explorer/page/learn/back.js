/** Scene: a hidden state against all rows of the table: logits, softmax, loss. */

import { h, slider } from "../dom.js";
import { cosine, dot, indexOfLargest, norm, row } from "../math.js";
import { logitTable } from "../pipeline/logits.js";
import { percent } from "../pipeline/pictures.js";
import { softmax } from "../pipeline/probabilities.js";
import { tiles } from "../positions/scene.js";
import { changed, formatHash } from "../state.js";
import { DIM, smallTable } from "./onehot.js";
import { claimList, fixed } from "./parts.js";
import { WORDS } from "./words.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const TRUE_TOKEN = 5; // cat
const EXAMPLE = 4; // on: as h, its row does not win
const START = [1, -0.5, 0.5, 0];
const LARGEST = 4;

/** @type {Scene} */
export const scene = {
  id: "back",
  name: "Back to tokens",
  question: "How does a vector become a word again?",
  sentences: [
    "The last block and the final norm give a hidden state h, as wide as a row. The head multiplies h by every row of "
    + "W: ten dot products, the logits z.",
    "This head is tied: W is the table of scene “One-hot × W”, read in the other direction. Softmax makes the logits "
    + "probabilities p, and the loss is −ln p of the token that really follows, here “cat”.",
  ],
  task: "Change h until “cat” wins with more than half of the probability.",
  words: ["cross entropy"],
  draw,
};

/**
 * Return the logits of all tokens, `z = h · Wᵀ`, and their softmax.
 * @param {ArrayLike<number>} hidden
 * @param {Matrix} [table]
 */
export function read(hidden, table = smallTable()) {
  const logits = Float64Array.from({ length: table.rows }, (_, id) => dot(hidden, row(table, id)));
  return { logits, probabilities: softmax(logits, 1) };
}

/** @param {Stage} stage */
function draw(stage) {
  const table = smallTable();
  const hidden = stateOf(stage.text("h"));
  let chosen = Math.round(stage.number("row", TRUE_TOKEN, 0, WORDS.length - 1));
  const picture = logitTable({ names: WORDS, weights: table, digits: 2, choose: (id) => {
    chosen = id;
    update();
  } });
  const [numbers, link, claims] = [h("div"), h("a", { href: "" }), claimList(stage)];
  const update = () => {
    stage.set({ h: hidden.join() === START.join() ? null : hidden.join(), row: chosen === TRUE_TOKEN ? null : chosen });
    const { logits, probabilities } = read(hidden, table);
    picture.show({ hidden, logits, probabilities, temperature: 1, chosen });
    copy.textContent = `Set h to the row of “${WORDS[chosen]}”`;
    link.href = formatHash("learn", changed(stage.context.state.all(), { s: "onehot", "onehot.id": chosen }));
    link.textContent = `See W[${chosen}] at the input`;
    numbers.replaceChildren(numbersOf(hidden, probabilities[TRUE_TOKEN]));
    claims.show(claimsOf(hidden, table));
    stage.judge(...verdict(probabilities));
  };
  const sliders = hidden.map((value, d) => stateSlider(d, value, (number) => {
    hidden[d] = number;
    update();
  }));
  const copy = h("button", { type: "button", onClick: () => {
    row(table, chosen).forEach((value, d) => sliders[d].set(hidden[d] = value));
    update();
  } });
  update();
  return [h("div", { class: "learn-state" }, sliders),
    h("div", { class: "learn-controls" }, copy, h("span", { class: "learn-link" }, link)),
    numbers, stage.keep(picture), claims.element];
}

/**
 * Create the slider of a number of h.
 * @param {number} d
 * @param {number} value
 * @param {(value: number) => void} onInput
 */
function stateSlider(d, value, onInput) {
  const format = (/** @type {number} */ number) => fixed(number, 2);
  return slider({ label: `h[${d}]`, min: -LARGEST, max: LARGEST, step: 0.1, value, format, onInput });
}

/** @param {number[]} hidden @param {number} p probability of the true token */
function numbersOf(hidden, p) {
  return tiles([["p of “cat”", percent(p), "probability"], ["loss, −ln p", fixed(-Math.log(p), 3), "loss"],
    ["length of h", fixed(norm(hidden), 2), "length"]]);
}

/** Return the hidden state of a URL, or that of the start. @param {string} text */
function stateOf(text) {
  const numbers = text.split(",").map(Number.parseFloat);
  return numbers.length === DIM && numbers.every((value) => Math.abs(value) <= LARGEST) ? numbers : [...START];
}

/** @param {number[]} hidden @param {Matrix} table @returns {Claim[]} */
function claimsOf(hidden, table) {
  const { logits, probabilities } = read(hidden, table);
  const [best, near] = [indexOfLargest(logits),
    indexOfLargest(WORDS.map((_, id) => (id ? cosine(hidden, row(table, id)) : -1)))];
  const own = row(table, EXAMPLE);
  const ofOwn = read(own, table).logits;
  const winner = indexOfLargest(ofOwn);
  const longer = read(hidden.map((value) => 2 * value), table).probabilities;
  const size = table.rows * table.cols;
  return [
    ["The head finds the token whose row is most similar to h.", best === near ? null : false,
      `Here the largest cosine is that of “${WORDS[near]}”, the largest logit that of “${WORDS[best]}”. A longer row `
      + `gets larger logits: with h = W[${EXAMPLE}], the row of “${WORDS[EXAMPLE]}” itself, “${WORDS[winner]}” wins, `
      + `${fixed(ofOwn[winner], 2)} to ${fixed(ofOwn[EXAMPLE], 2)}, as its row has the length `
      + `${fixed(norm(row(table, winner)), 2)} against ${fixed(norm(own), 2)}.`],
    ["Weight tying halves the embedding parameter count.", true,
      `V × D = ${table.rows} × ${table.cols} = ${size} numbers at both ends. An untied head would have ${size} more.`],
    ["The length of h does not matter, only its direction.", norm(hidden) ? false : null,
      `With 2 · h each logit doubles. The winner stays “${WORDS[best]}”, with ${percent(longer[best])} instead of `
      + `${percent(probabilities[best])}. A final norm gives each h about the same length.`],
  ];
}

/** @param {Float64Array} probabilities @returns {[boolean, ...Child[]]} */
function verdict(probabilities) {
  const [best, p] = [indexOfLargest(probabilities), probabilities[TRUE_TOKEN]];
  const loss = fixed(-Math.log(p), 3);
  if (best !== TRUE_TOKEN) return [false, `“${WORDS[best]}” wins. “cat” has ${percent(p)}: the loss is ${loss}.`];
  if (p <= 0.5) {
    return [false, `“cat” wins, but with ${percent(p)} only: the loss is ${loss}. Make h longer, or turn it away from `
      + "the other rows."];
  }
  return [true, `“cat” has ${percent(p)}: the loss is ${loss}, below ln 2 = ${fixed(Math.LN2, 3)}.`];
}
