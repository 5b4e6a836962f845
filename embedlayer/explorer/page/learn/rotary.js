/** Scene: rotary positions, as three pairs of a query and a key that rotate with their positions. */

import { Curves } from "../charts/curves.js";
import { h, fit, scroller, slider } from "../dom.js";
import { dot, frequencies, norm } from "../math.js";
import { drawVector } from "../pipeline/rotation.js";
import { rotary } from "../schemes.js";
import { theme } from "../theme.js";
import { claimList, fixed } from "./parts.js";
import { withTerms } from "./terms.js";

/** @import { Child, Point } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */

const [WIDTH, BASE, LAST, MOVE, SIZE] = [64, 10000, 60, 20, 168];
const START = { q: 5, k: 4 };
/** Pairs of the head that have numbers here: their query and key, of length 1. */
const PAIRS = [
  { pair: 0, q: [0.8, 0.6], k: [0.6, 0.8] },
  { pair: 8, q: [-0.6, 0.8], k: [0, 1] },
  { pair: 16, q: [0.96, 0.28], k: [0.6, 0.8] },
];
const SAME = 1e-9;
const SCHEME = rotary(WIDTH, BASE);
const FREQUENCIES = frequencies(WIDTH, BASE);
const HALF = WIDTH / 2;

/** @type {Scene} */
export const scene = {
  id: "rotary",
  name: "Rotary positions",
  question: "How can a rotation tell how far apart two tokens are?",
  sentences: [
    "Rotary positions add nothing to the row. Inside attention, each pair of numbers of a query q and of a key k is "
    + "rotated by an angle proportional to its position.",
    "The score q · k depends on the angles between them. Three of the 32 pairs of a head are shown: they rotate by 1, "
    + "0.1 and 0.01 radians per position.",
  ],
  words: ["score"],
  task: `Move both tokens by ${MOVE}. Then move only the key, farther back, until the scores of pairs 0 and 8 are both `
    + "negative.",
  draw,
};

/** Return a query or key of the whole head: the numbers of the three pairs, and zeros. @param {"q" | "k"} part */
export function headVector(part) {
  const vector = new Float64Array(WIDTH);
  for (const each of PAIRS) [vector[each.pair], vector[each.pair + HALF]] = each[part];
  return vector;
}

/**
 * Return the three pairs of the query at position q and of the key at position k, with their dot products before and
 * after the rotation.
 * @param {{q: number, k: number}} at
 */
export function rotated(at) {
  const [query, key] = [SCHEME.apply(headVector("q"), at.q), SCHEME.apply(headVector("k"), at.k)];
  return PAIRS.map(({ pair, q, k }) => {
    /** @param {Float64Array} vector @returns {Point} */
    const pairOf = (vector) => [vector[pair], vector[pair + HALF]];
    const after = { q: pairOf(query), k: pairOf(key) };
    return { pair, before: { q, k }, after, unrotated: dot(q, k), score: dot(after.q, after.k) };
  });
}

/** Return the sum of the scores of the pairs. @param {{q: number, k: number}} at */
export function totalScore(at) {
  return rotated(at).reduce((sum, { score }) => sum + score, 0);
}

/** @param {Stage} stage */
function draw(stage) {
  const at = {
    q: Math.round(stage.number("q", START.q, 0, LAST)), k: Math.round(stage.number("k", START.k, 0, LAST)),
  };
  let wasMoved = stage.text("moved") === "1";
  const dials = h("div", { class: "rotary-dials" });
  const numbers = h("div");
  const curves = scoreCurves();
  const claims = claimList(stage);
  const update = () => {
    wasMoved ||= at.q === START.q + MOVE && at.k === START.k + MOVE;
    stage.set({ q: at.q === START.q ? null : at.q, k: at.k === START.k ? null : at.k, moved: wasMoved ? "1" : null });
    drawDials();
    numbers.replaceChildren(scoreTable(at));
    curves.mark(at.q - at.k);
    claims.show(claimsOf(at));
    stage.judge(...verdict(at, wasMoved));
  };
  const drawDials = () => dials.replaceChildren(...rotated(at).map((each) => dial(each, at)));
  document.addEventListener("themechange", drawDials);
  stage.onClose(() => document.removeEventListener("themechange", drawDials));
  const controls = positionControls(at, update);
  update();
  return [
    ...controls, dials, scroller("Scores", "scroll", numbers), stage.keep(curves.chart),
    h("p", { class: "note" }, withTerms("A model rotates the queries and keys of each head. Its attention weights, the "
      + "residual stream, RMSNorm and SwiGLU around them are in the Pipeline: steps Rotation and Block.", stage.seen)),
    claims.element,
  ];
}

/**
 * Create the sliders of both positions, and the buttons that move both.
 * @param {{q: number, k: number}} at
 * @param {() => void} update
 */
function positionControls(at, update) {
  /** @type {["q" | "k", string][]} */
  const names = [["q", "Position of the query"], ["k", "Position of the key"]];
  const sliders = names.map(([part, label]) => slider({
    label, min: 0, max: LAST, value: at[part],
    onInput: (value) => {
      at[part] = value;
      update();
    },
  }));
  /** @param {number} by */
  const moveBoth = (by) => {
    const step = Math.max(-Math.min(at.q, at.k), Math.min(by, LAST - Math.max(at.q, at.k)));
    names.forEach(([part], i) => sliders[i].set(at[part] += step));
    update();
  };
  const buttons = [-10, -1, 1, 10].map((by) => h("button", {
    type: "button", "aria-label": `Move both by ${by}`, onClick: () => moveBoth(by),
  }, `${by < 0 ? "−" : "+"}${Math.abs(by)}`));
  return [h("div", { class: "learn-two" }, sliders), h("div", { class: "rotary-moves", role: "group",
    "aria-label": "Move both tokens" }, h("span", { class: "note" }, "Move both:"), buttons)];
}

/**
 * Draw a pair of the query and of the key: thin before the rotation, thick after it.
 * @param {ReturnType<typeof rotated>[number]} pair
 * @param {{q: number, k: number}} at
 */
function dial({ pair, before, after, score }, at) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const colours = theme();
  const context = fit(canvas, SIZE, SIZE);
  const reach = SIZE / 2 - 6;
  context.translate(SIZE / 2, SIZE / 2);
  context.strokeStyle = colours.line;
  context.beginPath();
  context.arc(0, 0, reach, 0, 2 * Math.PI);
  context.stroke();
  const [query, key] = colours.series;
  for (const [part, colour] of /** @type {["q" | "k", string][]} */ ([["q", query], ["k", key]])) {
    drawVector(context, /** @type {Point} */ (before[part]), reach, colours.muted, 1);
    drawVector(context, after[part], reach, colour, 3.5);
    context.fillStyle = colour;
    context.font = "600 15px system-ui";
    context.fillText(part, after[part][0] * reach * 0.78 + 5, -after[part][1] * reach * 0.78 - 5);
  }
  const angle = FREQUENCIES[pair] * (at.q - at.k);
  return h("figure", { class: "rotary-dial", "data-pair": pair }, canvas, h("figcaption", null,
    h("b", null, `pair ${pair}`), ` rotations differ by ${fixed(angle, 2)} rad, score ${fixed(score)}`));
}

/** Create the table of all numbers. @param {{q: number, k: number}} at */
function scoreTable(at) {
  const pairs = rotated(at);
  const sum = (/** @type {(pair: (typeof pairs)[number]) => number} */ of) => pairs.reduce((all, p) => all + of(p), 0);
  const vector = (/** @type {number[]} */ numbers) => numbers.map((value) => fixed(value)).join(", ");
  const rows = pairs.map(({ pair, after, unrotated, score }) => h("tr", { "data-pair": pair },
    h("th", { scope: "row" }, `pair ${pair}`), h("td", null, fixed(FREQUENCIES[pair], 2)),
    h("td", null, vector(after.q)), h("td", null, vector(after.k)), h("td", null, fixed(unrotated)),
    h("td", null, fixed(score))));
  const names = ["", "rad per position", `q at ${at.q}`, `k at ${at.k}`, "q · k, not rotated", "score"];
  return h("table", { class: "learn-table rotary-table" },
    h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows, h("tr", { "data-pair": "sum" }, h("th", { scope: "row" }, "sum"), h("td"), h("td"), h("td"),
      h("td", null, fixed(sum((p) => p.unrotated))), h("td", null, fixed(sum((p) => p.score))))));
}

/** Create the curves of the scores over the distance. */
function scoreCurves() {
  const chart = new Curves({
    label: "Scores over the distance", axes: ["distance: query − key", "score"], height: 150,
    xName: (distance) => `distance ${distance}`,
  });
  const series = PAIRS.map(({ pair }, i) => ({
    name: `pair ${pair}`, colour: [2, 3, 5][i],
    values: Array.from({ length: LAST + 1 }, (_, distance) => rotated({ q: distance, k: 0 })[i].score),
  }));
  const mark = (/** @type {number} */ distance) => chart.show(series, {
    range: [-1.1, 1.1], marks: distance < 0 ? [] : [{ at: distance, text: `distance ${distance}` }],
  });
  return { chart, mark };
}

/** @param {{q: number, k: number}} at @param {boolean} wasMoved @returns {[boolean, ...Child[]]} */
function verdict(at, wasMoved) {
  const moved = START.q + MOVE;
  const [total, first] = [totalScore(at), totalScore(START)];
  const [fast, slow] = rotated(at).map(({ score }) => score);
  const text = `Pair 0 has ${fixed(fast)}, pair 8 ${fixed(slow)}.`;
  if (!wasMoved) {
    const isMoving = at.q !== START.q && Math.abs(total - first) < SAME;
    return [false, `The sum of the scores is ${fixed(total)}${isMoving ? ", as at the start. Move on." : "."}`];
  }
  if (at.q !== moved) return [false, `${text} Put the query back at ${moved}.`];
  if (at.k > at.q) return [false, `${text} A query does not read a key that comes after it.`];
  if (at.k === START.k + MOVE) return [false, `${text} No score changed. Now move only the key.`];
  if (fast >= 0 || slow >= 0) return [false, `${text} Find a distance at which both are negative.`];
  return [true, `${text} At distance ${at.q - at.k} the rotations of pair 0 differ by ${at.q - at.k} radians, those `
    + `of pair 8 by ${fixed(FREQUENCIES[8] * (at.q - at.k), 1)}.`];
}

/** @param {{q: number, k: number}} at @returns {Claim[]} */
function claimsOf(at) {
  const [q, k] = [headVector("q"), headVector("k")];
  const vectors = [q, SCHEME.apply(q, at.q), k, SCHEME.apply(k, at.k)];
  const lengths = vectors.map((vector) => fixed(norm(vector)));
  const list = Array.from({ length: LAST + 1 - Math.abs(at.q - at.k) }, (_, p) =>
    totalScore({ q: p + Math.max(0, at.q - at.k), k: p + Math.max(0, at.k - at.q) }));
  const spread = Math.max(...list) - Math.min(...list);
  const angles = PAIRS.map(({ pair }) => fixed(at.q * FREQUENCIES[pair], 2)).join(", ");
  const period = (2 * Math.PI) / frequencies(128, BASE)[63]; // of the last pair, in positions
  const [trained, longer] = [63, 511].map((position) => fixed(position * FREQUENCIES[16], 2));
  return [
    ["RoPE rotates the query and key vectors based on position.", true,
      `The query at ${at.q} is rotated, the key at ${at.k} too. A rotation keeps lengths: ${lengths[0]} and `
      + `${lengths[1]} for q, ${lengths[2]} and ${lengths[3]} for k. The row of the token is not changed.`],
    ["The rotation angle depends on both position and dimension.", true,
      `Pair i rotates by position · 10000^(−2i/64). At position ${at.q}, pairs 0, 8 and 16 rotate by ${angles} `
      + "radians."],
    ["RoPE encodes relative positions naturally in the attention computation.", true,
      `All ${list.length} pairs of positions with the distance ${at.q - at.k} have the score `
      + `${fixed(totalScore(at))}: the largest difference is ${fixed(spread)}.`],
    ["This approach extrapolates well to longer sequences than seen during training.", null,
      `There is an angle for every position. But pair 16 rotates by at most ${trained} radians on 64 tokens, and by `
      + `${longer} on 512: training on 64 never saw such scores. Measured losses are in the scene before.`],
    ["RoPE is used for positional encoding by default, following LLaMA.", true,
      `LLaMA's heads have 64 such pairs with base 10,000: the first rotates once in ${fixed(2 * Math.PI, 2)} `
      + `positions, the last in ${Math.round(period).toLocaleString("en")}. It has no position table, and the `
      + "embedding layer no positions."],
    ["Modern models use RoPE or ALiBi, but the lookup-table mechanism is the same.", false,
      `Nothing is looked up: the ${HALF} angles of a position are computed. 0 parameters.`],
  ];
}
