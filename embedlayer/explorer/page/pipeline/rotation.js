/** The step Rotation: pairs of a query as vectors in the plane, before and after. */

import { shown } from "../charts/numbers.js";
import { fit, h } from "../dom.js";
import { norm, row } from "../math.js";
import { theme } from "../theme.js";
import { factsOf } from "./facts.js";
import { occurrences } from "./occurrences.js";
import { fact, headChoice, heightFor, nameOf, picture, positionMap, valueOf, vectorStrips } from "./pictures.js";

/** @import { Context2D, Matrix, Point } from "../types" */
/** @import { Scene } from "./pictures.js" */
/** @typedef {import("../math.js").Vector} Vector */

const DIALS = 8;
const SIZE = 76;

/**
 * Draw the rotation of the chosen token's query, or of a unit vector where no queries are known.
 * @param {Scene} scene
 */
export function drawRotation(scene) {
  const { step, token } = scene;
  const angles = valueOf(scene, "angles");
  if (!step.values.queries) {
    const title = `Pairs of a vector at position ${token}: before (grey) and after (blue)`;
    return [dials(scene, title, angles, null, null), angleMap(scene, angles)];
  }
  const heads = step.values.queries.shape[0];
  /** @type {Scene} */
  const own = { ...scene, light: () => {}, onLight: () => {} }; // a query's dimensions are not those of the rows
  const head = Math.min(scene.head, heads - 1);
  const rotated = valueOf(scene, "queries_turned", head);
  const [before, after] = [row(valueOf(scene, "queries", head), token), row(rotated, token)];
  const title = `The query of ${nameOf(scene)} at position ${token}: pairs before (grey) and after (blue)`;
  return [
    heads > 1 ? headChoice(scene, "Head of the first block", "query head", heads, head) : null,
    dials(scene, title, angles, before, after),
    vectorStrips(own, "The whole query", ["query", "rotated"], [before, after]),
    normFact(norm(before), norm(after)),
    occurrences(own, rotated, "rotated queries"),
    angleMap(scene, angles),
  ];
}

/**
 * Compare the norms of a query before and after; they differ where the scheme has an attention scaling.
 * @param {number} before
 * @param {number} after
 */
function normFact(before, after) {
  const factor = before ? after / before : 1;
  const isSame = Math.abs(factor - 1) < 1e-4;
  const sentence = isSame ? "A rotation keeps the norm: "
    : `A rotation keeps the norm; the attention scaling of this scheme multiplies it by ${shown(factor)}: `;
  return fact(sentence, h("b", null, shown(before)), " before, ", h("b", null, shown(after)), " after.");
}

/**
 * Draw some of the pairs.
 * @param {Scene} scene
 * @param {string} title
 * @param {Matrix} angles
 * @param {Vector | null} before the query; null draws a unit vector
 * @param {Vector | null} after
 */
function dials({ step, token }, title, angles, before, after) {
  const pairs = angles.cols;
  const count = Math.min(DIALS, pairs);
  const chosen = new Set(Array.from({ length: count }, (_, i) =>
    Math.round((i * (pairs - 1)) / Math.max(1, count - 1))));
  const figures = [...chosen].map((i) => {
    const [a, b] = factsOf(step, "rotation").channels[i];
    const angle = row(angles, token)[i];
    return dial(`pair ${i}`, angle, before ? [before[a], before[b]] : [1, 0],
      after ? [after[a], after[b]] : [Math.cos(angle), Math.sin(angle)]);
  });
  const note = token === 0 ? h("p", { class: "note" }, "At position 0 all angles are 0: choose another token.") : null;
  return picture(title, note, h("div", { class: "pipe-dials" }, figures));
}

/** @param {string} name @param {number} angle @param {Point} before @param {Point} after */
function dial(name, angle, before, after) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const colours = theme();
  const context = fit(canvas, SIZE, SIZE);
  const reach = SIZE / 2 - 4;
  const longest = Math.max(Math.hypot(...before), Math.hypot(...after)) || 1;
  const start = -Math.atan2(before[1], before[0]);
  context.translate(SIZE / 2, SIZE / 2);
  context.strokeStyle = colours.line;
  context.beginPath();
  context.arc(0, 0, reach, 0, 2 * Math.PI);
  context.stroke();
  context.fillStyle = colours["accent-soft"];
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, reach * 0.55, start, start - angle, angle > 0);
  context.fill();
  drawVector(context, before, reach / longest, colours.muted, 2);
  drawVector(context, after, reach / longest, colours.accent, 2.5);
  return h("figure", { class: "pipe-dial" }, canvas, h("figcaption", null, h("b", null, name), ` ${shown(angle)} rad`));
}

/**
 * Draw a vector from the centre of a canvas.
 * @param {Context2D} context
 * @param {Point} vector
 * @param {number} zoom
 * @param {string} colour
 * @param {number} width
 */
export function drawVector(context, [x, y], zoom, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineCap = "round";
  context.beginPath();
  context.moveTo(0, 0);
  context.lineTo(x * zoom, -y * zoom);
  context.stroke();
}

/** @param {Scene} scene @param {Matrix} angles */
function angleMap(scene, angles) {
  const cellHeight = Math.min(20, heightFor(angles.rows));
  const heat = positionMap(scene, "Angles", { unit: "radians", column: "pair", cellHeight });
  heat.show(angles, { limit: Math.PI, marks: [{ row: scene.token }] });
  return picture("Angle of each pair at each position, modulo 2π", scene.keep(heat));
}
