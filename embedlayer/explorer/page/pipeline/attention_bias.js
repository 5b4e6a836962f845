/** The step Bias: what a position scheme adds to the attention scores. */

import { HeatMap } from "../charts/heat.js";
import { factsOf } from "./facts.js";
import { headChoice, heightFor, picture, valueOf } from "./pictures.js";

/** @import { Scene } from "./pictures.js" */

/** Draw the bias of one head. @param {Scene} scene */
export function drawBias(scene) {
  const { step, pipeline, token } = scene;
  const heads = step.values.bias.shape[0];
  const head = Math.min(scene.head, heads - 1);
  const bias = valueOf(scene, "bias", head);
  const heat = new HeatMap({
    label: "Bias", unit: "added to the score", rowLabels: true, axes: ["key", "query"],
    cellHeight: heightFor(bias.rows), rowName: (t) => pipeline.tokens[t].text,
    columnName: (t) => `key ${pipeline.tokens[t].text} at position ${t}`, onPick: (t) => scene.choose(t),
  });
  heat.show(bias, { marks: [{ row: token }], blank: factsOf(step, "bias").causal ? (i, j) => j > i : null });
  return [headChoice(scene, "Head", "head", heads, head), picture(null, scene.keep(heat))];
}
