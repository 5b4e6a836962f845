/** Scene: attention scores without positions are permuted with the tokens. */

import { h, scroller } from "../dom.js";
import { add, dot, fromRows, largestDifference, matrix, permuted, row, sinusoid } from "../math.js";
import { smallTable } from "./onehot.js";
import { check, claimList, fixed, numberTable } from "./parts.js";
import { WORDS } from "./words.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const DIM = 8;
const IDS = [1, 5, 7]; // the cat sat
const ORDERS = ["0.1.2", "2.0.1", "1.0.2", "0.2.1", "1.2.0", "2.1.0"];
const SAME = 1e-9;

/** @type {Scene} */
export const scene = {
  id: "order",
  name: "Why positions",
  question: "Can attention tell “the cat sat” from “sat the cat”?",
  sentences: [
    "Attention compares all pairs of tokens: score = x[i] · x[j]. If x is only the token's row of the table, then "
    + "another order moves the same nine scores to other places.",
    "Nothing in a score says who came first. Adding a vector for each position changes that.",
  ],
  task: "Reorder the words, and switch on positions so that the nine scores are no longer the same nine.",
  draw,
};

/**
 * Return the vectors x of the three tokens in an order: rows of a table (10, 8), plus sinusoids. All have two digits
 * after the point, so the scores are those of the digits that are shown.
 * @param {number[]} order
 * @param {boolean} hasPositions
 */
export function vectors(order, hasPositions) {
  const table = smallTable(DIM);
  return fromRows(order.map((token, place) => {
    const vector = row(table, IDS[token]);
    return hasPositions ? add(vector, sinusoid(place, DIM).map((value) => Math.round(100 * value) / 100)) : vector;
  }));
}

/** Return the scores x · xᵀ of vectors. @param {Matrix} x */
export function scores(x) {
  return matrix(x.rows, x.rows, (i, j) => dot(row(x, i), row(x, j)));
}

/** @param {Stage} stage */
function draw(stage) {
  const saved = stage.text("order", ORDERS[0]);
  let order = (ORDERS.includes(saved) ? saved : ORDERS[0]).split(".").map(Number);
  let hasPositions = stage.text("positions") === "1";
  const boxes = [h("div"), h("div")];
  const fact = h("p", { class: "pipe-fact", "data-value": "difference" });
  const claims = claimList(stage);
  const buttons = ORDERS.map((text) => h("button", { type: "button", onClick: () => {
    order = text.split(".").map(Number);
    update();
  } }, sentenceOf(text.split(".").map(Number))));
  /** @type {{close: () => void}[]} */
  let shown = [];
  stage.onClose(() => shown.forEach((each) => each.close()));
  const update = () => {
    stage.set({ order: order.join(".") === ORDERS[0] ? null : order.join("."), positions: hasPositions ? "1" : null });
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(ORDERS[i] === order.join("."))));
    const [straight, other] = [[0, 1, 2], order].map((each) => vectors(each, hasPositions));
    shown.forEach((each) => each.close());
    shown = [...picturesOf(boxes[0], [0, 1, 2], straight), ...picturesOf(boxes[1], order, other)];
    const difference = largestDifference(scores(other), permuted(scores(straight), order));
    fact.textContent = `Put back into the first order, the largest difference of a score is ${fixed(difference)}.`;
    claims.show(claimsOf(order, hasPositions, difference));
    stage.judge(...verdict(order, hasPositions, difference));
  };
  const positions = check("add positions", hasPositions, (checked) => {
    hasPositions = checked;
    update();
  });
  update();
  return [
    h("div", { class: "learn-orders", role: "group", "aria-label": "Order of the words" }, buttons), positions,
    h("div", { class: "learn-pair learn-close learn-low" }, boxes), fact, claims.element,
  ];
}

/** @param {number[]} order */
function isStraight(order) {
  return order.every((token, place) => token === place);
}

/** @param {number[]} order */
function sentenceOf(order) {
  return order.map((token) => WORDS[IDS[token]]).join(" ");
}

/**
 * Draw the vectors, and below them their scores.
 * @param {HTMLElement} box
 * @param {number[]} order
 * @param {Matrix} x
 */
function picturesOf(box, order, x) {
  const names = order.map((token) => WORDS[IDS[token]]);
  const caption = `x (3, ${DIM}) of [${order.map((token) => IDS[token]).join(", ")}]`;
  const inputs = numberTable({ caption, rowNames: names, limit: 2 });
  const table = numberTable({ caption: "scores x[i] · x[j]", rowNames: names, columnNames: names, limit: 10 });
  inputs.show(x);
  table.show(scores(x));
  box.replaceChildren(scroller("Vectors", "scroll", inputs.element), table.element);
  return [inputs, table];
}

/**
 * @param {number[]} order
 * @param {boolean} hasPositions
 * @param {number} difference
 * @returns {Claim[]}
 */
function claimsOf(order, hasPositions, difference) {
  const isOpen = hasPositions && isStraight(order);
  const differ = `With positions the scores differ by up to ${fixed(difference, 2)}`;
  return [
    ["Attention is permutation-invariant.", isOpen ? null : false, isOpen ? "Both sides have the same order here."
      : hasPositions ? `${differ} when they are put back into the first order: it is not even equivariant.`
        : "It is equivariant: the scores change places with the tokens. Only their mean or sum is invariant."],
    ["The model cannot distinguish “the cat sat” from “sat the cat”.", isOpen ? null : !hasPositions,
      isOpen ? "Both sides have the same order here. With positions, another order gives other scores."
        : !hasPositions ? "Without positions and without a mask the scores are the same. A decoder's causal mask alone "
          + "already breaks this: the first token sees only itself."
          : `${differ}.`],
    ["Attention (without positional embeddings) is permutation-equivariant.", hasPositions ? null : true,
      hasPositions ? "Positions are added here: switch them off."
        : `Put back into the first order, the scores differ by ${fixed(difference)}.`],
  ];
}

/**
 * @param {number[]} order
 * @param {boolean} hasPositions
 * @param {number} difference
 * @returns {[boolean, ...Child[]]}
 */
function verdict(order, hasPositions, difference) {
  if (isStraight(order)) return [false, "Both sides have the same order. Choose another one."];
  if (difference < SAME) {
    const hint = hasPositions ? "" : " Now add positions.";
    return [false, `The nine scores are the same, at other places.${hint}`];
  }
  return [true, `The scores differ by up to ${fixed(difference, 2)}: now the order matters.`];
}
