/** Scene: what the width D does to the variance and the length of input vectors. */

import { h, scroller } from "../dom.js";
import { norm } from "../math.js";
import { bar } from "../pipeline/pictures.js";
import { startRow } from "./inputs.js";
import { check, choice, claimList, fixed } from "./parts.js";
import { uniform } from "./random.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const DIMS = [8, 32, 128, 512];
const next = uniform(4);
const IDS = Array.from({ length: 32 }, () => Math.floor(1000 * next()));

/** @type {Scene} */
export const scene = {
  id: "width",
  name: "The width D",
  question: "Does the factor √D keep the variance stable?",
  sentences: [
    "Four layers of width D = 8, 32, 128 and 512, each with a random table of 1,000 rows. Each gets one text of 32 "
    + "random IDs; the bars show the measured variance of the output.",
    "The formula is beside it: variance = s² · std² for the row plus std² for the learned position, with s = √D or 1.",
  ],
  task: "Find the switches with which the variance at D = 512 is about that at D = 8.",
  draw,
};

/**
 * Measure the output x = s · W[id] + P[t] of a layer at its start.
 * @param {number} dim
 * @param {number} std
 * @param {boolean} scaled
 * @returns {{variance: number, length: number}}
 */
export function measured(dim, std, scaled) {
  const factor = scaled ? Math.sqrt(dim) : 1;
  let [sum, squares, length] = [0, 0, 0];
  IDS.forEach((id, t) => {
    const place = startRow("position", t, dim, std);
    const x = startRow("token", id, dim, std).map((value, d) => factor * value + place[d]);
    length += norm(x) / IDS.length;
    for (const value of x) {
      sum += value;
      squares += value * value;
    }
  });
  const count = IDS.length * dim;
  return { variance: (squares - (sum * sum) / count) / (count - 1), length };
}

/** Return the expected variance. @param {number} dim @param {number} std @param {boolean} scaled */
export function expected(dim, std, scaled) {
  return std * std * ((scaled ? dim : 1) + 1);
}

/** @param {Stage} stage */
function draw(stage) {
  let std = stage.text("std", "0.02") === "1" ? 1 : 0.02;
  let scaled = stage.text("scale", "1") === "1";
  const body = h("tbody");
  const table = h("table", { class: "learn-table" }, h("thead", null, h("tr", null,
    h("th", null, `(1, ${IDS.length}) →`),
    h("th", { class: "number" }, "variance"), h("th", { class: "learn-bars" }),
    h("th", { class: "number" }, "formula"), h("th", { class: "number" }, "length"))), body);
  const claims = claimList(stage);
  const update = () => {
    stage.set({ std: std === 1 ? "1" : null, scale: scaled ? null : "0" });
    const found = DIMS.map((dim) => ({ dim, ...measured(dim, std, scaled) }));
    const most = Math.max(...found.map((each) => each.variance));
    body.replaceChildren(...found.map(({ dim, variance, length }) => h("tr", null, 
      h("th", null, `(1, ${IDS.length}, ${dim})`),
      h("td", { class: "number", "data-value": `variance-${dim}` }, shortNumber(variance)),
      h("td", { class: "learn-bars" }, bar(variance / most)),
      h("td", { class: "number" }, shortNumber(expected(dim, std, scaled))),
      h("td", { class: "number" }, shortNumber(length)))));
    const [first, last] = [found[0], found[3]];
    const ratio = last.variance / first.variance;
    claims.show(claimsOf(std, scaled, ratio, last.length / first.length));
    const isStable = ratio > 0.8 && ratio < 1.25;
    stage.judge(isStable, `From D = 8 to D = 512 the variance becomes ${ratio.toPrecision(2)} times as large.`
      + (isStable ? " The factor √D was what made it grow." : ""));
  };
  const starts = choice("Standard deviation of the start", [["0.02", "0.02"], ["1", "1 (nn.Embedding)"]],
    String(std), (value) => {
      std = Number(value);
      update();
    });
  const scale = check("multiply the row by √D", scaled, (value) => {
    scaled = value;
    update();
  });
  update();
  return [h("div", { class: "learn-controls" }, starts, scale), scroller("Variances", "scroll", table), claims.element];
}

/** Format a number with three significant digits. @param {number} value */
function shortNumber(value) {
  return value.toPrecision(3);
}

/**
 * @param {number} std
 * @param {boolean} scaled
 * @param {number} variances
 * @param {number} lengths
 * @returns {Claim[]}
 */
function claimsOf(std, scaled, variances, lengths) {
  return [
    ["The scale factor √D helps keep the variance stable.", false, scaled
      ? `With it the variance is std² · (D + 1): ${shortNumber(std * std * 9)} at D = 8, `
        + `${shortNumber(std * std * 513)} at D = 512.`
      : `Without it the variance is 2 · std² at every D: ${variances.toPrecision(2)} times from D = 8 to 512.`],
    ["Without the factor the magnitude would vary significantly with D.", null,
      `The length grows as √D without the factor, 8 times from D = 8 to 512, but as D with it. Here: `
      + `${fixed(lengths, 1)} times. A start with std 1/√D and the factor keeps the variance.`],
    ["Scaling by √D helps maintain stable gradients.", false, scaled
      ? "A looked-up row gets √D times the gradient of the input: 2.8 times at D = 8, 22.6 times at D = 512. AdamW "
        + "divides by the size of a gradient: its steps do not change."
      : "Without the factor a looked-up row gets the gradient of the input itself, at every D."],
    ["A larger dimension gives the model more capacity, and costs more.", true, "The same decoder after 300 steps, "
      + "with D = 16, 64 and 192: 6.22, 5.55 and 4.66 nats on held-out text. Table and blocks grow with D. "
      + "(examples/width_and_tying.py)"],
    ["Large initial values cause instability, use a small std (0.01 to 0.02).", null,
      "Where a normalisation follows, the length of the input does not matter. A tied output head multiplies it by the "
      + `table again: its scores have a std of about std · √D = ${fixed(std * Math.sqrt(512), 2)} at D = 512. From `
      + "about 1 on, the first predictions are far from even."],
  ];
}
