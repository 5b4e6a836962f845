/** Scene: only looked-up rows get a gradient. */

import { h, select } from "../dom.js";
import { fromRows, matrix, row } from "../math.js";
import { bar } from "../pipeline/pictures.js";
import { DIM, smallTable } from "./onehot.js";
import { claimList, fixed, numberTable } from "./parts.js";
import { PADDING, WORDS } from "./words.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const START = [3, 7, 1];

/** @type {Scene} */
export const scene = {
  id: "gradient",
  name: "Gradients of rows",
  question: "Which rows of the table learn from a sentence?",
  sentences: [
    "Three tokens, three looked-up rows. Let the loss be the sum of all their numbers: then each looked-up vector gets "
    + "the gradient 1, 1, 1, 1.",
    "The table gets dL/dW = one_hotᵀ · dL/doutput: each row gets the sum of the gradients of its tokens. A row that "
    + "was not looked up gets none.",
  ],
  words: ["padding"],
  task: "Choose the three tokens so that one row gets a gradient of total size 12.",
  draw,
};

/**
 * Return dL/dW = one_hotᵀ · G, (V, D), for a gradient of ones; the padding row gets none.
 * @param {number[]} ids
 */
export function rowGradients(ids) {
  return matrix(WORDS.length, DIM, (r) => (r === PADDING ? 0 : ids.filter((id) => id === r).length));
}

/** @param {Stage} stage */
function draw(stage) {
  const table = smallTable();
  const ids = idsOf(stage.text("ids"));
  const choices = ids.map((id, slot) => select({
    label: `Token ${slot + 1}`, value: String(id),
    options: WORDS.map((word, i) => /** @type {[string, string]} */ ([String(i), `${i} ${word}`])),
    onChange: (value) => {
      ids[slot] = Number(value);
      stage.set({ ids: ids.join(".") === START.join(".") ? null : ids.join(".") });
      update();
    },
  }));
  const places = ids.map(() => h("span"));
  const output = numberTable({ caption: "output = W[ids]", rowNames: places, limit: 1.2 });
  const gradient = numberTable({
    caption: "dL/dW, a row for each ID", rowNames: WORDS.map((word, id) => `${id} ${word}`), digits: 0, limit: 4,
  });
  const sizes = h("ol", { class: "learn-sizes", "aria-label": "Sum of the sizes of each row's gradient" });
  const claims = claimList(stage);
  const update = () => {
    const found = rowGradients(ids);
    places.forEach((place, slot) => (place.textContent = `token ${slot + 1} = row ${ids[slot]}`));
    output.show(fromRows(ids.map((id) => row(table, id))));
    gradient.show(found, { mark: (r) => ids.includes(r), plainZeros: true });
    const totals = WORDS.map((_, r) => [...row(found, r)].reduce((sum, value) => sum + Math.abs(value), 0));
    sizes.replaceChildren(...totals.map((total) => h("li", null, bar(total / 12), h("span", null, fixed(total)))));
    claims.show(claimsOf(ids));
    stage.judge(...verdict(ids, totals));
  };
  update();
  return [
    h("div", { class: "learn-slots" }, choices),
    h("div", { class: "learn-beside" }, stage.keep(output), stage.keep(gradient),
      h("div", null, h("p", { class: "learn-caption" }, "sum of |dL/dW|"), sizes)), claims.element,
  ];
}

/** @param {string} text @returns {number[]} */
function idsOf(text) {
  const ids = text.split(".").map(Number);
  const isGood = text !== "" && ids.length === 3 && ids.every((id) => Number.isInteger(id) && WORDS[id] !== undefined);
  return isGood ? ids : [...START];
}

/** @param {number[]} ids @returns {Claim[]} */
function claimsOf(ids) {
  const used = [...new Set(ids)].filter((id) => id !== PADDING).sort((a, b) => a - b);
  return [
    ["Only the selected rows receive gradients.", true, `Rows with a gradient: ${used.join(", ") || "none"}`
      + `${ids.includes(PADDING) ? "; the padding row, ID 0, is left out on purpose" : ""}. This is the input table; a `
      + "tied output head adds a gradient to every row (the scene “A table learns” shows it)."],
    ["The padding row is zero and gets no gradient.", true, "ID 0 is declared as padding here (padding_idx of "
      + "nn.Embedding), so its row stays zero. Without that declaration it is trained like any other row."],
    ["Each batch only updates a small subset of rows.", null,
      "It is so for plain SGD. AdamW also moves rows without a gradient, by momentum and weight decay. RowAdamW of "
      + "this library has the same result, and writes such a row only when it is read; SparseAdam leaves it out."],
  ];
}

/** @param {number[]} ids @param {number[]} totals @returns {[boolean, ...Child[]]} */
function verdict(ids, totals) {
  const at = totals.indexOf(12);
  if (at >= 0) return [true, `Row ${at} is looked up three times, so it gets 1 + 1 + 1 in each of its 4 numbers: 12.`];
  const most = Math.max(...totals);
  const pads = ids.filter((id) => id === PADDING).length;
  return [false, `The largest is ${fixed(most, 0)}.`
    + (pads > 1 ? " Padding gets no gradient, however often it occurs." : "")];
}
