/** Scene: sinusoidal position vectors. */

import { Curves } from "../charts/curves.js";
import { HeatMap } from "../charts/heat.js";
import { h, slider } from "../dom.js";
import { closest, cosine, fromRows, similarities, sinusoid } from "../math.js";
import { dimensionSeries } from "../positions/input.js";
import { sinusoids } from "../schemes.js";
import { claimList, fixed, positionsLink } from "./parts.js";

/** @import { Child, Matrix } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [DIM, LENGTH, BASE, GAP] = [64, 64, 10000, 32];
const SCHEME = sinusoids(DIM, BASE);

/** @type {Scene} */
export const scene = {
  id: "waves",
  name: "Sines and cosines",
  question: "How do sines and cosines number the positions?",
  sentences: [
    "Each row of the picture is the vector of one position: 32 pairs of a sine and a cosine. Those on the left have "
    + "short waves, those on the right long ones.",
    "Slide through the positions: each has its own pattern. The dots are the vector at a: sines in blue, cosines in "
    + "orange.",
  ],
  task: "Positions 0 and 32 have a certain cosine. Find two other positions with exactly the same cosine.",
  draw,
};

/** @param {Stage} stage */
function draw(stage) {
  const at = { a: Math.round(stage.number("a", 0, 0, LENGTH - 1)), b: Math.round(stage.number("b", 1, 0, LENGTH - 1)) };
  const rows = fromRows(Array.from({ length: LENGTH }, (_, p) => sinusoid(p, DIM)));
  const heat = new HeatMap({
    label: "Sinusoidal vectors", unit: "value", axes: ["dimension", "position"], cellHeight: 2.5,
    rowName: (p) => `position ${p}`, columnName: (d) => `dimension ${d}`,
  });
  heat.show(rows, { limit: 1 });
  const line = new Curves({
    label: "Vector at position a", axes: ["dimension", "value at a"], height: 110, xName: (d) => `dimension ${d}`,
  });
  const number = h("output", { class: "learn-number", "data-value": "cosine" });
  const claims = claimList(stage);
  claims.show(claimsOf(rows));
  const update = () => {
    stage.set({ a: at.a || null, b: at.b === 1 ? null : at.b });
    const similarity = cosine(sinusoid(at.a, DIM), sinusoid(at.b, DIM));
    heat.mark([{ row: at.a }, { row: at.b }]);
    line.show(dimensionSeries(SCHEME, SCHEME.vector(at.a)), { range: [-1.1, 1.1] });
    number.textContent = fixed(similarity);
    stage.judge(...verdict(at.a, at.b, similarity));
  };
  const [a, b] = /** @type {("a" | "b")[]} */ (["a", "b"]).map((key) => slider({
    label: `Position ${key}`, min: 0, max: LENGTH - 1, value: at[key],
    onInput: (value) => {
      at[key] = value;
      update();
    },
  }));
  update();
  return [
    h("div", { class: "learn-two" }, a, b),
    h("div", { class: "learn-pair" }, h("div", null, stage.keep(heat)),
      h("div", null, h("p", { class: "learn-reading" }, "cosine of a and b ", number), stage.keep(line))),
    claims.element, positionsLink(stage, DIM),
  ];
}

/** @param {number} a @param {number} b @param {number} similarity @returns {[boolean, ...Child[]]} */
function verdict(a, b, similarity) {
  const wanted = cosine(sinusoid(0, DIM), sinusoid(GAP, DIM));
  const text = `Positions ${a} and ${b}: ${fixed(similarity)}. Wanted: ${fixed(wanted)}.`;
  const isFirst = Math.min(a, b) === 0;
  if (Math.abs(a - b) !== GAP) return [false, text];
  if (isFirst) return [false, `${text} This is the pair itself. Now move both.`];
  return [true, `${text} The cosine depends on the distance b − a only: here 32 again.`];
}

/** @param {Matrix} rows @returns {Claim[]} */
function claimsOf(rows) {
  const { data } = similarities(rows);
  const found = closest(rows);
  const [first, last] = [SCHEME.wavelength(0), SCHEME.wavelength(SCHEME.pairs - 1)];
  const of = (/** @type {number} */ a, /** @type {number} */ b) => data[a * LENGTH + b];
  /** @param {number} dim */
  const next = (dim) => cosine(sinusoid(0, dim), sinusoid(1, dim)).toFixed(3);
  return [
    ["Low dimensions oscillate rapidly, high dimensions change slowly.", true,
      `The first pair repeats after ${fixed(first, 2)} positions, the last one after `
      + `${Math.round(last).toLocaleString("en")}.`],
    ["PE(pos+k) is a linear function of PE(pos).", true, "Pair i of PE(pos), rotated by k · 10000^(−2i/D), is pair i "
      + `of PE(pos+k). For k = ${GAP} and all rows shown, the largest difference is ${fixed(shiftError(rows))}.`],
    ["Nearby positions are more similar, and the similarity is symmetric.", null,
      `5 and 6: ${fixed(of(5, 6))}, 5 and 15: ${fixed(of(5, 15))}. But 0 and 5 have ${fixed(of(0, 5))}, 0 and 6 `
      + `${fixed(of(0, 6))}: farther and more similar. Symmetric: yes, 15 and 5 have ${fixed(of(15, 5))}.`],
    ["Positions 0 and 1: about 0.99 or more, almost identical.", data[1] >= 0.985,
      `The cosine is ${fixed(data[1])}. It is ${next(8)} at D = 8 and ${next(512)} at D = 512, and with base 10,000 it `
      + "never reaches 0.98."],
    ["Positions 0 and 32: the similarity drops significantly.", data[GAP] < 0.8,
      `${fixed(data[GAP])}. It does not fall evenly: 0 and 16 have ${fixed(data[16])}.`],
    ["Each position has a unique fingerprint.", (found?.distance ?? 0) > 0,
      `No two of these ${LENGTH} vectors are equal; the closest are at distance ${fixed(found?.distance ?? 0)}.`],
    ["Sine and cosine are 90° out of phase.", true,
      `cos(x) = sin(x + 90°), so sin² + cos² = 1 in each pair: every vector has length √32 = ${fixed(Math.sqrt(32))}.`],
  ];
}

/**
 * Return the largest difference between PE(p + GAP) and PE(p) with each pair (sin, cos) rotated by GAP · θ, over all p.
 * @param {Matrix} rows
 */
export function shiftError({ data, cols }) {
  let largest = 0;
  for (let at = 0; at < (LENGTH - GAP) * cols; at += 2) {
    const angle = (2 * Math.PI * GAP) / SCHEME.wavelength((at % cols) / 2);
    const [sin, cos] = [data[at], data[at + 1]];
    const [s, c] = [Math.sin(angle), Math.cos(angle)];
    const to = at + GAP * cols;
    const errors = [sin * c + cos * s - data[to], cos * c - sin * s - data[to + 1]].map(Math.abs);
    largest = Math.max(largest, ...errors);
  }
  return largest;
}
