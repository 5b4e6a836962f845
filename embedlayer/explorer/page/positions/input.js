/** Panels for schemes that add a vector to the input. */

import { Curves } from "../charts/curves.js";
import { COUNT, limitOf, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { cosine, distance, dot, fromRows, norm, row, similarities } from "../math.js";
import { sinusoids } from "../schemes.js";
import { curvesPanel, distinctFact } from "./panels.js";
import {
  MOST_COMPARED, isWave, mapPanel, panel, positionSliders, setPositions, squareMap, tiles, tokenChoice, vectorStrips,
  vectorsOf,
} from "./scene.js";

/** @import { Matrix } from "../types" */
/** @import { Scheme } from "../schemes.js" */
/** @import { Scene } from "./scene.js" */

/** @param {Scene} scene */
export function inputPanels(scene) {
  const rows = vectorsOf(scene.scheme, scene.length);
  const wave = isWave(scene.scheme);
  const sentence = wave
    ? "One row for each position, one column for each dimension. Wavelengths grow from left to right; each row is "
      + "different."
    : "One row for each position, one column for each dimension, as learned.";
  const map = mapPanel(scene, "All positions", sentence, rows, {
    row: "position", column: "dimension", limit: wave ? 1 : limitOf(rows),
    onPick: (p) => setPositions(scene, p, scene.b),
  });
  return [map, twoPositions(scene), similarityPanel(scene, rows), sameToken(scene), curvesPanel(scene, rows)];
}

/** Draw the vectors of two positions and their similarity. @param {Scene} scene */
function twoPositions(scene) {
  const { scheme } = scene;
  const wave = isWave(scheme);
  const strips = vectorStrips("Two positions", (r) => `${"ab"[r]}: ${[scene.a, scene.b][r]}`);
  const chart = new Curves({
    label: "Vector of position a", axes: ["dimension", "value at position a"], height: 150,
    xName: (d) => `dimension ${d}`,
  });
  const numbers = h("div");
  scene.onChange(() => {
    const [a, b] = [scheme.vector(scene.a), scheme.vector(scene.b)];
    strips.show(fromRows([a, b]), { limit: wave ? 1 : undefined });
    chart.show(dimensionSeries(scheme, a), { range: wave ? [-1.1, 1.1] : undefined });
    numbers.replaceChildren(tiles([
      ["cosine", shown(cosine(a, b)), "cosine"], ["dot product", shown(dot(a, b)), "dot"],
      ["distance", shown(distance(a, b)), "distance"],
    ]));
  });
  const sentence = "The similarity of the vectors of two positions."
    + (wave ? " Move both together: it depends on their distance only." : "");
  return panel("Two positions", sentence, positionSliders(scene), numbers, scene.keep(strips), scene.keep(chart),
    h("p", { class: "pipe-fact" }, wave ? neighbourFact(scheme) : null));
}

/** Return the dimensions of a vector as series of dots. @param {Scheme} scheme @param {Float64Array} vector */
export function dimensionSeries(scheme, vector) {
  if (!isWave(scheme)) return [{ name: "value", colour: 0, values: vector, dots: true }];
  return [["sine", "sin"], ["cosine", "cos"]].map(([name, part], colour) => ({
    name, colour, values: vector.map((value, d) => (scheme.part(d) === part ? value : NaN)), dots: true,
  }));
}

/** Compute the cosine of neighbouring positions for some widths. @param {Scheme} scheme */
function neighbourFact(scheme) {
  /** @param {Scheme} each */
  const neighbours = (each) => cosine(each.vector(0), each.vector(1)).toFixed(3);
  return [
    "The cosine of neighbouring positions is often said to be about 0.99. Computed for sinusoids of base 10,000: ",
    ...[8, 64, 512].flatMap((dim, i) =>
      [i ? ", " : "", h("b", null, neighbours(sinusoids(dim, 10000))), ` at D = ${dim}`]),
    `; here ${neighbours(scheme)} at D = ${scheme.width}.`,
  ];
}

/** Draw the cosine of all pairs of positions. @param {Scene} scene @param {Matrix} rows */
function similarityPanel(scene, rows) {
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const first = { rows: count, cols: rows.cols, data: rows.data.subarray(0, count * rows.cols) };
  const cosines = similarities(first);
  const map = squareMap(scene, {
    label: "Similarity of positions", unit: "cosine", axes: ["position b", "position a"], names: ["a", "b"],
  }, () => [cosines, { limit: 1 }], ["all"]);
  const sentence = `Cosine similarity of the first ${COUNT.format(count)} positions: orange is similar. Stripes along `
    + "the diagonal mean that the similarity depends on the distance.";
  return panel("All pairs of positions", sentence, map, distinctFact(scene, first));
}

/** Draw one token of the source at two positions. @param {Scene} scene */
function sameToken(scene) {
  const { vectors } = scene;
  const isOwnWidth = scene.scheme.width === vectors.cols;
  const scheme = isOwnWidth ? scene.scheme : sinusoids(vectors.cols, 10000);
  const names = () => ["token", `at ${scene.a}`, `at ${scene.b}`, "difference"];
  const strips = vectorStrips("One token at two positions", (r) => names()[r]);
  const numbers = h("div");
  scene.onChange(() => {
    const token = row(vectors, scene.token);
    const [a, b] = [scheme.apply(token, scene.a), scheme.apply(token, scene.b)];
    strips.show(fromRows([token, a, b, b.map((value, d) => value - a[d])]));
    numbers.replaceChildren(tiles([
      ["cosine of the token at a and at b", shown(cosine(a, b)), "token-cosine"],
      ["cosine of the two positions alone", shown(cosine(scheme.vector(scene.a), scheme.vector(scene.b))),
        "position-cosine"],
      ["norm of the token's vector", shown(norm(token))],
    ]));
  });
  const note = isOwnWidth ? "" : ` The table has ${COUNT.format(vectors.cols)} dimensions, so these are sinusoids of `
    + "that width.";
  return panel("The same token at two positions",
    `A token's vector of this source, with its scale applied, plus the vectors of positions a and b.${note}`,
    h("div", { class: "toolbar" }, tokenChoice(scene, "Token", "token")), numbers, scene.keep(strips));
}
