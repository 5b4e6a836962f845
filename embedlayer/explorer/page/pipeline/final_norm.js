/** The final norm of a decoder, and the head of a small one: from the output x of the last block to the logits. */

import { scroller } from "../dom.js";
import { fixed } from "../learn/parts.js";
import { fromRows, rootMeanSquare, row } from "../math.js";
import { factsOf, stepOf } from "./facts.js";
import { logitTable } from "./logits.js";
import { fact, nameOf, picture, valueOf, vectors } from "./pictures.js";
import { MOST_CELLS } from "./vector.js";

/** @import { Scene } from "./pictures.js" */

/** Draw the norm of the last token: x, h, and the number that x is divided by. @param {Scene} scene */
export function drawNorm(scene) {
  const last = scene.pipeline.tokens.length - 1;
  const [x, hidden] = ["before_norm", "hidden"].map((name) => row(valueOf(scene, name), last));
  const [weight] = valueOf(scene, "norm_weight").data;
  const eps = factsOf(scene.step, "head").norm_eps ?? 0;
  const root = rootMeanSquare(x, eps);
  const squares = x.length > MOST_CELLS ? "mean(x²)"
    : `(${Array.from(x, (value) => `${fixed(Math.abs(value))}²`).join(" + ")}) / ${x.length}`;
  return picture(`The final norm at the last token, ${nameOf(scene, last)}: from x to h`,
    vectors(scene, fromRows([x, hidden]), { names: ["x", "h"] }, { label: "x and h", cellHeight: 28 }),
    fact(`√(${squares} + ${eps}) = ${fixed(root)}`),
    fact(`h[0] = w[0] · x[0] / ${fixed(root)} = ${fixed(weight)} · ${fixed(x[0])} / ${fixed(root)} `
      + `= ${fixed(hidden[0])}`));
}

/**
 * Create the table of a small head, for the last token of the text; null for a head that is too large to read.
 * @param {Scene} scene
 * @returns {{element: HTMLElement, show: (probabilities: Float64Array, temperature: number) => void} | null}
 */
export function smallHead(scene) {
  if (!scene.step.values.head_rows) return null;
  const weights = valueOf(scene, "head_rows");
  if (weights.cols > MOST_CELLS) return null;
  const names = stepOf(scene.pipeline, "look_up")?.facts.parts[0].names ?? [];
  const hidden = row(valueOf(scene, "hidden"), scene.pipeline.tokens.length - 1);
  const logits = valueOf(scene, "logits").data;
  const { candidates = [], tied } = factsOf(scene.step, "head");
  const rowOfUrl = Number.parseInt(scene.state.get("row", ""), 10);
  /** @type {import("./logits.js").HeadReading} */
  let reading = {
    hidden, logits, probabilities: new Float64Array(logits.length), temperature: 1,
    chosen: rowOfUrl >= 0 && rowOfUrl < names.length ? rowOfUrl : candidates[0].id,
  };
  const table = logitTable({
    names, weights, digits: 4,
    choose: (chosen) => {
      reading = { ...reading, chosen };
      scene.state.set({ row: chosen });
      table.show(reading);
    },
  });
  const title = `From h to logits and probabilities: ${tied ? "W is the input table" : "W are the head's own rows"}`;
  return {
    element: picture(title, scroller("Logits", "scroll", scene.keep(table))),
    show: (probabilities, temperature) => {
      reading = { ...reading, probabilities, temperature };
      table.show(reading);
    },
  };
}
