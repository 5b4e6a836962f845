/** Scene: a one-hot vector times the table selects one row. */

import { h } from "../dom.js";
import { matrix } from "../math.js";
import { claimList, fixed, numberTable } from "./parts.js";
import { roundedMatrix } from "./random.js";
import { WORDS } from "./words.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */

export const DIM = 4;

/**
 * Return the table W of several scenes, 10 x D; row 0 is for padding.
 * @param {number} [dim]
 * @param {number} [seed]
 * @param {number} [std]
 */
export function smallTable(dim = DIM, seed = 9, std = 0.5) {
  const table = roundedMatrix(WORDS.length, dim, std, seed);
  table.data.fill(0, 0, dim);
  return table;
}

/** @type {Scene} */
export const scene = {
  id: "onehot",
  name: "One-hot × W",
  question: "What does “look up a row” multiply?",
  sentences: [
    "Write the ID as a one-hot vector e: ten numbers, a single 1 at the ID. Multiply each of them by its row of the "
    + "table W, and add up the ten rows.",
    "All 40 products are shown. Those of nine rows are 0, so the sum is the row itself.",
  ],
  task: "Choose the ID whose row has the largest number in column 0.",
  draw,
};

/** @param {Stage} stage */
function draw(stage) {
  const table = smallTable();
  let chosen = Math.round(stage.number("id", 3, 0, WORDS.length - 1));
  const buttons = WORDS.map((word, id) => h("button", {
    type: "button", class: "learn-row", title: word, onClick: () => choose(id),
  }, h("b", null, String(id)), h("span", null, word)));
  const { onehot, weights, products } = tablesOf(buttons);
  const fact = h("p", { class: "pipe-fact", "data-value": "sum" });
  const claims = claimList(stage);
  const update = () => {
    stage.set({ id: chosen === 3 ? null : chosen });
    buttons.forEach((button, id) => button.setAttribute("aria-pressed", String(id === chosen)));
    const mark = (/** @type {number} */ r) => r === chosen;
    onehot.show(matrix(WORDS.length, 1, (r) => Number(r === chosen)), { mark, plainZeros: true });
    weights.show(table, { mark });
    const all = withSum(table.data, chosen);
    products.show(all, { mark: (r) => mark(r) || r === WORDS.length, plainZeros: true });
    fact.textContent = `e · W = [${Array.from(all.data.slice(-DIM), (v) => fixed(v, 2)).join(", ")}] = W[${chosen}]`;
    claims.show([["Only one row of W participates.", true, `${zerosOf(all)} nn.Embedding copies row ${chosen} and `
      + "multiplies nothing; the result is equal."]]);
    stage.judge(...verdict(table, chosen));
  };
  /** @param {number} id */
  const choose = (id) => {
    chosen = id;
    update();
  };
  update();
  const equation = [onehot, weights, products].map((each) => stage.keep(each));
  return [
    h("div", { class: "learn-equation" }, equation[0], h("span", { class: "learn-sign" }, "×"), equation[1],
      h("span", { class: "learn-sign" }, "="), equation[2]), fact, claims.element];
}

/** Create the three tables: e, W and the products. @param {HTMLElement[]} buttons */
function tablesOf(buttons) {
  const rowNames = WORDS.map((_, id) => String(id));
  const common = { digits: 2, limit: 1.2 };
  return {
    onehot: numberTable({ caption: "ID, e", rowNames: buttons, columnNames: ["\u00a0"], digits: 0, limit: 1.5 }),
    weights: numberTable({ ...common, caption: "W", rowNames }),
    products: numberTable({ ...common, caption: "e[i] · W[i]", rowNames: [...rowNames, "sum"] }),
  };
}

/** Say how many of the products are 0. @param {Matrix} products with their sum as the last row */
function zerosOf({ data }) {
  const products = Array.from(data.slice(0, -DIM));
  const count = products.filter((product) => product === 0).length;
  return count < products.length ? `${count} of the ${products.length} products are 0.`
    : `All ${count} products are 0 here, since row 0, that of <pad>, is 0 itself.`;
}

/** @param {Matrix} table @param {number} chosen @returns {[boolean, ...Child[]]} */
function verdict({ data }, chosen) {
  const best = WORDS.reduce((most, _, id) => (data[id * DIM] > data[most * DIM] ? id : most), 0);
  return [chosen === best, chosen === best
    ? `Row ${best} (“${WORDS[best]}”) begins with ${fixed(data[best * DIM], 2)}, the largest of column 0.`
    : `Row ${chosen} begins with ${fixed(data[chosen * DIM], 2)}. Another row has a larger number there.`];
}

/**
 * Return the products e[i] · W[i] of all rows, and their sum in the last row.
 * @param {Float32Array | Float64Array} weights
 * @param {number} id
 */
function withSum(weights, id) {
  const rows = WORDS.length;
  return matrix(rows + 1, DIM, (r, c) => {
    if (r < rows) return Number(r === id) * weights[r * DIM + c];
    let sum = 0;
    for (let i = 0; i < rows; i++) sum += Number(i === id) * weights[i * DIM + c];
    return sum;
  });
}
