/** The steps from the looked-up rows to the input of the first block. */

import { HeatMap } from "../charts/heat.js";
import { COUNT, limitOf, shown, trimmed } from "../charts/numbers.js";
import { h } from "../dom.js";
import { row, unpackMatrix } from "../math.js";
import { factsOf, stepOf } from "./facts.js";
import { occurrences } from "./occurrences.js";
import { fact, heightFor, nameOf, percent, picture, positionMap, strips, valueOf } from "./pictures.js";
import { MOST_CELLS } from "./vector.js";

/** @import { Matrix, PipelineStep } from "../types" */
/** @import { Scene } from "./pictures.js" */

const CLOSE_UP = 64;

/** Draw rows before and after the scale. @param {Scene} scene */
export function drawScale(scene) {
  const after = valueOf(scene, "scaled");
  const { factor, scaled } = factsOf(scene.step, "scale");
  if (!scaled) return [strips(scene, "Rows", after, { title: "All tokens: the rows, unchanged" })];
  const rows = /** @type {PipelineStep} */ (stepOf(scene.pipeline, "look_up")).values.rows;
  const options = { limit: limitOf(after), height: Math.min(20, heightFor(after.rows)) };
  const note = "The same pattern; equal colours mean equal numbers in both pictures.";
  return [
    strips(scene, "Before", unpackMatrix(rows), { ...options, title: "All tokens: before" }),
    strips(scene, "After", after, { ...options, title: `All tokens: times ${trimmed(factor)}`, note }),
  ];
}

/** Draw token-type vectors and their sums with the tokens. @param {Scene} scene */
export function drawTypes(scene) {
  const title = "Added vectors";
  return [
    strips(scene, title, valueOf(scene, "types"), { title }),
    strips(scene, "Sum", valueOf(scene, "result"), { title: "Sum" }),
  ];
}

/** Draw the position vectors, or the vectors where the scheme adds nothing to the input. @param {Scene} scene */
export function drawPositions(scene) {
  if (factsOf(scene.step, "position").kind !== "added") {
    return [strips(scene, "Vectors", valueOf(scene, "result"), { title: "All tokens: the vectors, unchanged" })];
  }
  const cellHeight = heightFor(scene.pipeline.tokens.length);
  const heat = positionMap(scene, "Position vectors", { unit: "value", column: "dimension", cellHeight });
  heat.show(valueOf(scene, "positions"), { marks: [{ row: scene.token }] });
  return [picture("All positions of this text", scene.keep(heat))];
}

/** Draw the sums of token and position, and compare those of one token. @param {Scene} scene */
export function drawSum(scene) {
  const result = valueOf(scene, "result");
  return [strips(scene, "Sums", result, { title: "All tokens: sums" }), occurrences(scene, result, "sums")];
}

/** Draw a step of which only the result is shown. @param {Scene} scene */
export function drawResult(scene) {
  const result = valueOf(scene, "result");
  return [
    strips(scene, scene.step.title, result, { title: "All tokens" }), occurrences(scene, result, "vectors"),
  ];
}

/** Draw one sample of dropout. @param {Scene} scene */
export function drawDropout(scene) {
  const [kept, dropped] = [valueOf(scene, "kept"), valueOf(scene, "dropped")];
  /** @param {number} i */
  const isDropped = (i) => dropped.data[i] === 0 && kept.data[i] !== 0;
  const count = Array.from(dropped.data.keys()).filter(isDropped).length;
  return [
    fact(`Of ${COUNT.format(dropped.data.length)} numbers, `, h("b", null, COUNT.format(count)),
      ` (${percent(count / dropped.data.length)}) are 0 in this sample; the others are multiplied by `
      + `${shown(1 / (1 - factsOf(scene.step, "dropout").shown_p))}.`),
    kept.cols > MOST_CELLS ? dropoutCloseUp(scene, kept, dropped) : null,
    strips(scene, "Dropped", dropped, {
      title: "All tokens in this sample, grey where a number was dropped",
      blank: (t, d) => isDropped(t * dropped.cols + d), limit: limitOf(dropped),
    }),
  ];
}

/**
 * Draw the first dimensions of the chosen token with and without dropout.
 * @param {Scene} scene
 * @param {Matrix} kept
 * @param {Matrix} dropped
 */
function dropoutCloseUp(scene, kept, dropped) {
  const cols = Math.min(CLOSE_UP, kept.cols);
  const [inference, training] = [kept, dropped].map((matrix) => row(matrix, scene.token).slice(0, cols));
  const heat = new HeatMap({
    label: "One token", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 28,
    rowName: (r) => ["eval", "train"][r], columnName: (d) => `dimension ${d}`,
  });
  /** @param {number} r @param {number} d */
  const isDropped = (r, d) => r === 1 && training[d] === 0 && inference[d] !== 0;
  const data = Float32Array.from([...inference, ...training]);
  heat.show({ rows: 2, cols, data }, { blank: isDropped, shade: isDropped });
  const title = `${nameOf(scene)}, the first ${cols} dimensions: hatched where a number was dropped`;
  return picture(title, scene.keep(heat));
}
