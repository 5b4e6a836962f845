/** Panels for schemes that are attention biases. */

import { Curves } from "../charts/curves.js";
import { COUNT, shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { matrix } from "../math.js";
import { MOST_COMPARED, chooseHead, mapPanel, panel, positionSliders, squareMap, tiles } from "./scene.js";

/** @import { Scheme } from "../schemes.js" */
/** @import { Scene } from "./scene.js" */

/** @param {Scene} scene */
export function biasPanels(scene) {
  const { scheme, length } = scene;
  const biases = matrix(length, scheme.columns, (distance, head) => scheme.bias(head, distance, 0));
  const sentence = "One row for each distance from the query back to the key, one column for each head: what is added "
    + "to the score.";
  const map = mapPanel(scene, "All distances", sentence, biases, {
    row: "distance", column: "head", unit: "added to the score", marks: false,
    onPick: (_, head) => chooseHead(scene, head),
  });
  return [map, twoPositions(scene), biasMatrix(scene), headCurves(scene)];
}

/** Draw the bias of each head for two positions. @param {Scene} scene */
function twoPositions(scene) {
  const { scheme } = scene;
  const numbers = h("div");
  const list = h("ol", { class: "pos-bars" });
  scene.onChange(() => {
    const values = Array.from({ length: scheme.columns }, (_, head) => scheme.bias(head, scene.a, scene.b));
    const most = Math.max(...values.map(Math.abs), 1e-12);
    numbers.replaceChildren(tiles([
      ["distance |a − b|", String(Math.abs(scene.a - scene.b))],
      [`bias of head ${scene.head}`, shown(values[scene.head]), "bias"],
      ["factor on the attention weight before normalisation", `× ${shown(Math.exp(values[scene.head]))}`],
    ]));
    list.replaceChildren(...values.map((value, head) => headBar(scene, head, value, Math.abs(value) / most)));
  });
  return panel("Two positions",
    "What each head adds to the score of a query at a and a key at b. Move both together: the bias stays the same.",
    positionSliders(scene, ["Query at a", "Key at b"]), numbers, list);
}

/** @param {Scene} scene @param {number} head @param {number} value @param {number} share of the longest bar */
function headBar(scene, head, value, share) {
  const bar = h("i");
  bar.style.width = `${100 * share}%`;
  if (value > 0) bar.className = "pos-up";
  const properties = {
    type: "button", "aria-pressed": String(head === scene.head), onClick: () => chooseHead(scene, head),
  };
  return h("li", null, h("button", properties, h("span", null, `head ${head}`),
    h("span", { class: "pipe-bar" }, bar), h("span", { class: "pipe-value" }, shown(value))));
}

/** Draw the bias of each head over the distance. @param {Scene} scene */
function headCurves(scene) {
  const { scheme, length } = scene;
  const chart = new Curves({ label: "Bias over the distance", axes: ["distance", "added to the score"] });
  scene.onChange((change) => {
    if (change === "positions") return;
    const series = Array.from({ length: scheme.columns }, (_, head) => ({
      name: `head ${head}`, colour: head % 8, thin: head !== scene.head,
      values: Array.from({ length }, (_each, distance) => scheme.bias(head, distance, 0)),
    }));
    series.sort((one, two) => Number(two.thin) - Number(one.thin));
    chart.show(series, { shadeFrom: scheme.trained ?? Infinity });
  });
  const sentence = "One curve for each head over the distance back to the key; the chosen head is drawn thick. Heads "
    + "with steep curves attend to near keys, heads with flat curves to far keys too.";
  return panel("Curves", sentence, scene.keep(chart), h("p", { class: "note" }, slopesText(scheme)));
}

/** @param {Scheme} scheme */
function slopesText({ slopes }) {
  if (!slopes) return "";
  const list = slopes.slice(0, 8).map((slope) => String(Number(slope.toPrecision(3)))).join(", ");
  return `Slopes: ${list}${slopes.length > 8 ? ", …" : "."}`;
}

/** Draw the bias of one head for all queries and keys. @param {Scene} scene */
function biasMatrix(scene) {
  const { scheme } = scene;
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const title = h("p", { class: "pipe-fact" });
  const map = squareMap(scene, {
    label: "Bias of one head", unit: "added to the score", axes: ["key", "query"], names: ["query at", "key at"],
  }, () => {
    title.textContent = `Head ${scene.head}`;
    return [matrix(count, count, (q, k) => scheme.bias(scene.head, q, k)),
      { blank: scheme.causal ? (q, k) => k > q : null }];
  }, ["all", "tokens"]);
  const causal = scheme.causal ? "; keys after the query are grey, since no query attends to them" : "";
  const sentence = `What one head adds to the scores of the first ${COUNT.format(count)} positions${causal}. Biases `
    + "depend on distances, not on positions: no position has a vector here.";
  return panel("All pairs of positions", sentence, title, map);
}
