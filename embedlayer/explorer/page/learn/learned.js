/** Scene: learned beside sinusoidal position vectors. */

import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { cosine, fromRows, sinusoid } from "../math.js";
import { startRow } from "./inputs.js";
import { claimList, fixed, positionsLink } from "./parts.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [DIM, ROWS, MOST] = [32, 50, 80];
const NO_ROW = new Float64Array(DIM).fill(NaN);

/** @type {Scene} */
export const scene = {
  id: "learned",
  name: "Learned or sinusoidal",
  question: "How do learned and sinusoidal positions differ?",
  sentences: [
    `A learned scheme is a second table: ${ROWS} rows of ${DIM} numbers, random at the start (here as nn.Embedding `
    + "draws them, standard deviation 1) and then trained.",
    "A sinusoidal scheme is a formula without parameters. Make the text longer, and see which scheme has a vector for "
    + "each position.",
  ],
  words: ["RoPE", "ALiBi"],
  task: "Set the longest text for which the learned table has a row for each token.",
  draw,
};

/** @param {Stage} stage */
function draw(stage) {
  let length = Math.round(stage.number("length", 20, 1, MOST));
  const [left, right] = ["learned", "sinusoidal"].map((name) => new HeatMap({
    label: `${name} vectors`, unit: "value", axes: ["dimension", "position"], cellHeight: 2,
    rowName: (p) => `position ${p}`, columnName: (d) => `dimension ${d}`,
  }));
  const fact = h("p", { class: "pipe-fact", "data-value": "length" });
  const claims = claimList(stage);
  claims.show(claimsOf());
  const update = () => {
    stage.set({ length: length === 20 ? null : length });
    const shade = (/** @type {number} */ r) => r < length && r >= ROWS;
    left.show(rowsOf(length, (p) => (p < ROWS ? startRow("position", p, DIM, 1) : NO_ROW)), { limit: 2.5, shade });
    right.show(rowsOf(length, (p) => sinusoid(p, DIM)), { limit: 1 });
    const missing = Math.max(0, length - ROWS);
    fact.textContent = missing
      ? `${missing === 1 ? `Position ${ROWS} has` : `Positions ${ROWS} to ${length - 1} have`} no learned row: PyTorch `
        + "raises an IndexError."
      : `A text of ${length} tokens: positions 0 to ${length - 1} have a vector in both schemes.`;
    const some = missing === 1 ? "1 position has" : `${missing} positions have`;
    stage.judge(length === ROWS, length === ROWS
      ? `${ROWS} tokens are positions 0 to ${ROWS - 1}. The token after them has no row.`
      : missing ? `${some} no learned row.` : "A longer text is possible.");
  };
  const size = slider({
    label: "Length of the text, tokens", min: 1, max: MOST, value: length,
    onInput: (value) => {
      length = value;
      update();
    },
  });
  update();
  return [
    h("div", { class: "learn-two" }, size, fact), h("div", { class: "learn-pair learn-close" },
      h("div", null, h("h3", null, `Learned, before training: ${(ROWS * DIM).toLocaleString("en")} parameters`),
        stage.keep(left)),
      h("div", null, h("h3", null, "Sinusoidal: 0 parameters"), stage.keep(right))), claims.element,
    positionsLink(stage, DIM),
  ];
}

/**
 * Return the vectors of the positions of a text, and missing ones after it.
 * @param {number} length
 * @param {(p: number) => ArrayLike<number>} vector
 */
function rowsOf(length, vector) {
  return fromRows(Array.from({ length: MOST }, (_, p) => (p < length ? vector(p) : NO_ROW)));
}

/** @returns {Claim[]} */
function claimsOf() {
  const learned = cosine(startRow("position", 0, DIM), startRow("position", 1, DIM));
  const fixedOnes = cosine(sinusoid(0, DIM), sinusoid(1, DIM));
  return [
    ["Learned embeddings start random; sinusoidal ones encode relative positions.", true,
      `Cosine of positions 0 and 1: ${fixed(learned)} learned, ${fixed(fixedOnes)} sinusoidal. Training must find the `
      + "order of the learned rows by itself."],
    ["Learned embeddings cannot generalize beyond max_seq_len.", true,
      `The table has ${ROWS} rows, for positions 0 to ${ROWS - 1}. Position ${ROWS} has none: an IndexError.`],
    ["Sinusoidal embeddings can theoretically extrapolate.", null, "There is a vector for every position. But the loss "
      + "of a small decoder trained on 64 tokens was 3.633 there and 4.668 at 128 tokens."],
    ["RoPE and ALiBi extrapolate better.", null, "In the same experiment, from 64 to 512 tokens, the loss with rotary "
      + "positions went from 3.465 to 4.174, with ALiBi from 3.454 to 3.493."],
    ["Learned ones are often slightly better in practice.", null,
      "In that short training they were not: 3.752 learned, 3.633 sinusoidal, both at 64 tokens."],
  ];
}
