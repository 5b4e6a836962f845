/** Panels for schemes that have a vector for each position: curves, and whether all vectors differ. */

import { Curves } from "../charts/curves.js";
import { COUNT, shown } from "../charts/numbers.js";
import { h, slider } from "../dom.js";
import { closest } from "../math.js";
import { isWave, panel, setPositions } from "./scene.js";

/** @import { Matrix } from "../types" */
/** @import { Scheme } from "../schemes.js" */
/** @import { Scene } from "./scene.js" */

/** Draw one pair of dimensions over the positions. @param {Scene} scene @param {Matrix} rows */
export function curvesPanel(scene, rows) {
  const wave = isWave(scene.scheme);
  const chart = new Curves({
    label: "Curves over the positions", axes: ["position", "value"],
    onPick: (p) => setPositions(scene, p, scene.b),
  });
  const wavelength = h("p", { class: "pipe-fact" });
  const draw = () => {
    const isFirst = scene.a <= scene.b;
    chart.show(pairSeries(scene, rows), {
      range: wave ? [-1, 1] : undefined, shadeFrom: scene.scheme.trained ?? Infinity,
      marks: [
        { at: scene.a, text: "a", side: isFirst ? "left" : "right" },
        { at: scene.b, text: "b", side: isFirst ? "right" : "left" },
      ],
    });
    wavelength.replaceChildren(...pairFact(scene.scheme, scene.pair));
  };
  scene.onChange(draw);
  const sentence = wave
    ? "Each pair of dimensions has one frequency: sine in blue, cosine in orange. Low pairs have short wavelengths, "
      + "high pairs long ones."
    : "Learned positions follow no formula: training determines each value.";
  return panel("Curves", sentence, pairSlider(scene, draw), scene.keep(chart), wavelength);
}

/** @param {Scene} scene @param {Matrix} rows */
function pairSeries({ scheme, pair }, rows) {
  const wave = isWave(scheme);
  return scheme.channels(pair).map((d) => {
    const where = scheme.point === "rotation" ? `pair ${pair}` : `dimension ${d}`;
    return {
      name: wave ? `${scheme.part(d)} (${where})` : where,
      colour: wave ? Number(scheme.part(d) === "cos") : d % 2,
      values: Array.from({ length: rows.rows }, (_, p) => rows.data[p * rows.cols + d]),
    };
  });
}

/** @param {Scheme} scheme @param {number} pair @returns {(string | Node)[]} */
function pairFact(scheme, pair) {
  const length = scheme.wavelength(pair);
  if (Number.isNaN(length) && isWave(scheme)) return [`Pair ${pair} does not rotate evenly.`];
  if (length === Infinity) return [`Pair ${pair} does not rotate.`];
  if (Number.isNaN(length)) return [`Dimensions ${scheme.channels(pair).join(" and ")} of the learned vectors.`];
  const text = length < 1e4 ? length.toFixed(length < 100 ? 2 : 0) : COUNT.format(Math.round(length));
  return [`The wavelength of pair ${pair} is `, h("b", null, text), " positions."];
}

/** @param {Scene} scene @param {() => void} draw */
function pairSlider(scene, draw) {
  const { scheme } = scene;
  if (scheme.pairs < 2) return null;
  const wave = isWave(scheme);
  return slider({
    label: wave ? "Pair" : "Dimensions", min: 0, max: scheme.pairs - 1, value: scene.pair,
    format: (i) => (wave ? String(i) : `${2 * i}, ${2 * i + 1}`),
    onInput: (value) => {
      scene.pair = value;
      scene.set({ pair: value === 2 ? null : value });
      draw();
    },
  });
}

/** @param {number} count other pairs at the same distance */
function others(count) {
  return count ? ` (and ${COUNT.format(count)} other ${count === 1 ? "pair" : "pairs"})` : "";
}

/**
 * Say whether any two positions have the same vector, and what was compared.
 * @param {Scene} scene
 * @param {Matrix} rows
 */
export function distinctFact(scene, rows) {
  const found = closest(rows);
  const described = scene.data.schemes.find((each) => each.name === scene.scheme.name);
  const isEqual = found && found.distance === 0;
  const first = isEqual ? `Positions ${found.a} and ${found.b} are identical. ` : "No two positions are identical. ";
  /** @type {(string | Node)[]} */
  const sentences = [h("b", null, first)];
  if (found) {
    sentences.push(`Compared: all ${COUNT.format(found.pairs)} pairs of the first ${COUNT.format(rows.rows)} `
      + `positions. The closest are ${found.a} and ${found.b}${others(found.alike - 1)}, at distance `,
    h("b", null, shown(found.distance)), ".");
  }
  if (described && "checked" in described) {
    sentences.push(` In the source, ${COUNT.format(described.distinct)} of ${COUNT.format(described.checked)} `
      + "vectors are different, compared number by number.");
  }
  return h("p", { class: "pipe-fact", "data-value": "distinct" }, sentences);
}
