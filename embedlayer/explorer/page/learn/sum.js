/** Scene: the pipeline from IDs to input vectors, step by step. */

import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { fromRows } from "../math.js";
import { tiles } from "../positions/scene.js";
import { vocabularyList } from "./ids.js";
import { STD, dropped, inputVector, meanNorm } from "./inputs.js";
import { claimList, fixed, listSlider, schemeSwitches } from "./parts.js";
import { WORDS } from "./words.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const IDS = [1, 5, 7, 4, 1, 6]; // the cat sat on the mat
const DIMS = [16, 64, 256, 1024, 2048, 4096];
const STEPS = ["1 token IDs", "2 one-hot", "3 rows W[id]", "4 × √D", "5 positions P[t]", "6 sum", "7 dropout"];
const DROPOUT = 0.1; // as GPT-2

/** @type {Scene} */
export const scene = {
  id: "sum",
  name: "Token + position",
  question: "How do a word and its place become one vector?",
  sentences: [
    "Move the slider: IDs, one-hot vectors, rows of the table, rows times √D, vectors of the positions, their sum, and "
    + "dropout, which sets a tenth of it to zero in training.",
    "The model gets only the sum. Which part is larger in it depends on the width D and on the scale. Rows start with "
    + "standard deviation 0.02.",
  ],
  task: "Go to step 6. With sinusoidal positions, make the token part longer than the position part.",
  draw,
};

/** @typedef {ReturnType<typeof inputVector>} Parts */

/** @param {Stage} stage */
function draw(stage) {
  let step = Math.round(stage.number("step", 1, 1, STEPS.length));
  let dim = DIMS.find((each) => each === stage.number("dim", 64, 16, 4096)) ?? 64;
  const heat = strip((c) => (step === 2 ? `ID ${c}` : `dimension ${c}`));
  const formula = h("p", { class: "pipe-fact", "data-value": "formula" });
  const vocabulary = vocabularyList();
  vocabulary.show(IDS);
  const [numbers, claims, strips] = [h("div"), claimList(stage), stage.keep(heat)];
  const update = () => {
    const { scheme, scaled } = switches.chosen;
    stage.set({ step: step === 1 ? null : step, dim: dim === 64 ? null : dim });
    const parts = IDS.map((token, position) => inputVector({ token, position, dim, scheme, scaled }));
    strips.hidden = step === 1;
    vocabulary.element.hidden = step > 1;
    if (step > 1) heat.show(matrixOf(step, parts), {});
    formula.textContent = formulaOf(step, parts[1], dim);
    const [tokens, places] = [meanNorm(parts.map((p) => p.scaledRow)), meanNorm(parts.map((p) => p.place))];
    numbers.replaceChildren(lengthsOf(tokens, places));
    claims.show([scaleClaim(switches.chosen, tokens / places), dropoutClaim(parts)]);
    stage.judge(...verdict(step, scheme, tokens / places));
  };
  const switches = schemeSwitches(stage, () => update());
  const steps = slider({
    label: "Step", min: 1, max: STEPS.length, value: step, format: (value) => STEPS[value - 1],
    onInput: (value) => {
      step = value;
      update();
    },
  });
  const width = listSlider("Width D", DIMS, dim, (value) => {
    dim = value;
    update();
  });
  update();
  return [
    steps, h("ol", { class: "pipe-chips learn-flow" }, chips()),
    h("div", { class: "learn-strips" }, vocabulary.element, strips, formula),
    h("div", { class: "learn-controls" }, switches.elements, width), numbers, claims.element,
  ];
}

/** @param {number} tokens mean length of the token parts @param {number} places mean length of the position parts */
function lengthsOf(tokens, places) {
  return tiles([
    ["length of the token part", fixed(tokens, 3), "token"],
    ["length of the position part", fixed(places, 3), "place"],
    ["token ÷ position", fixed(tokens / places, 3), "ratio"],
  ]);
}

/** Create the heat strips of the six tokens. @param {(column: number) => string} columnName */
function strip(columnName) {
  return new HeatMap({
    label: "The vectors of this step", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 20, columnName,
    rowName: (t) => `${t} ${WORDS[IDS[t]]}`,
  });
}

function chips() {
  return IDS.map((id, t) =>
    h("li", { class: "pipe-chip learn-big" }, h("span", null, WORDS[id]), h("small", null, `ID ${id} at ${t}`)));
}

/** @param {{scheme: string, scaled: boolean}} chosen @param {number} ratio token ÷ position @returns {Claim} */
function scaleClaim({ scheme, scaled }, ratio) {
  const isLearned = scheme === "learned";
  const places = isLearned ? `With learned positions, which start with std ${STD} like the rows`
    : "With sinusoidal positions, whose length is √(D/2)";
  const other = isLearned ? "Sinusoidal ones are longer than scaled rows below D = 1,250."
    : "With learned positions, which start like the rows, the scaled row is the longer part at every D.";
  return ["Scaling by √D prevents the positional signal from dominating.", scaled ? ratio > 1 : null,
    `${places}, ${scaled ? "" : "and without the scale, "}token ÷ position is ${fixed(ratio, 2)} here. ${other}`];
}

/** Return the sums after dropout. @param {Parts[]} parts */
function withDropout(parts) {
  return fromRows(parts.map(({ sum }, t) => dropped(sum, DROPOUT, t)));
}

/** @param {Parts[]} parts @returns {Claim} */
function dropoutClaim(parts) {
  const { data } = withDropout(parts);
  const zeros = data.filter((value) => value === 0).length;
  return ["Dropout is applied after the sum, for regularisation.", null, `p = ${DROPOUT}: `
    + `${zeros.toLocaleString("en")} of ${data.length.toLocaleString("en")} numbers are 0 in this training step, other `
    + `ones in the next; those that are kept are divided by ${1 - DROPOUT}. In evaluation, and with p = 0, nothing `
    + "changes."];
}

/** Return what a step shows, one row for each token. @param {number} step @param {Parts[]} parts @returns {Matrix} */
function matrixOf(step, parts) {
  if (step === 2) return fromRows(IDS.map((id) => WORDS.map((_, i) => Number(i === id))));
  if (step === 7) return withDropout(parts);
  const names = /** @type {const} */ (["row", "scaledRow", "place", "sum"]);
  return fromRows(parts.map((each) => each[names[step - 3]]));
}

/**
 * Return the numbers of dimension 0 of the second token: results with four digits, right from the six of what they are
 * computed from.
 * @param {number} step
 * @param {Parts} parts
 * @param {number} dim
 */
export function formulaOf(step, { row, factor, scaledRow, place, sum }, dim) {
  const [r, s, p] = [row, scaledRow, place].map((vector) => fixed(vector[0], 6));
  return [
    "Each word is looked up in the list of ten words; its ID is the number of its row.",
    "“cat” is ID 5: a 1 at entry 5, zeros at the nine others.",
    `“cat”, dimension 0: ${r}, read from row 5. Both “the” have the same row.`,
    `“cat”, dimension 0: ${factor === 1 ? "1" : `√${dim}`} · ${r} = ${fixed(scaledRow[0])}`,
    `Position 1, dimension 0: ${p}, the same for every word at position 1.`,
    `“cat” at position 1, dimension 0: ${s} + ${p} = ${fixed(sum[0])}`,
    `“cat” at position 1, dimension 0: ${fixed(dropped(sum, DROPOUT, 1)[0])}, which is `
    + `${dropped(sum, DROPOUT, 1)[0] ? `${fixed(sum[0], 6)} / ${1 - DROPOUT}` : "dropped"}.`,
  ][step - 1];
}

/** @param {number} step @param {string} scheme @param {number} ratio @returns {[boolean, ...Child[]]} */
function verdict(step, scheme, ratio) {
  const text = `token ÷ position is ${fixed(ratio, 3)}`;
  if (step < 6) return [false, `This is step ${step}.`];
  if (scheme !== "sinusoidal") return [false, `${text}, but with learned positions. Try sinusoidal ones.`];
  if (ratio <= 1) return [false, `${text}: the position is the larger part.`];
  return [true, `${text}. 0.02 · D is larger than √(D/2) only from D = 1,250 on.`];
}
