/** The step Head: the next token of a decoder, or the scores of an input vector where there are no blocks. */

import { h } from "../dom.js";
import { fixed } from "../learn/parts.js";
import { factsOf } from "./facts.js";
import { drawNext } from "./next.js";
import { bar, chip, nameOf, percent, picture } from "./pictures.js";

/** @import { Scene } from "./pictures.js" */

/** Draw the next token, or without blocks what the head reads from the input vectors. @param {Scene} scene */
export function drawHead(scene) {
  if (scene.step.values.logits) return drawNext(scene);
  return [h("div", { class: "grid-2" }, largestScores(scene), allPositions(scene))];
}

/** @param {Scene} scene */
function largestScores(scene) {
  const { step, token } = scene;
  const topTokens = factsOf(step, "head").top_tokens[token];
  const most = topTokens[0]?.chance ?? 1;
  const list = topTokens.map((each) => h("li", null,
    chip(each), bar((each.chance ?? 0) / most),
    h("span", { class: "pipe-logit" }, each.logit === null ? "" : `z ${fixed(each.logit, 2)}`),
    h("span", { class: "pipe-value" }, percent(each.chance))));
  return picture(`Largest scores z for the input vector of ${nameOf(scene)}, and their softmax`,
    h("ol", { class: "next-list next-logits" }, list));
}

/** @param {Scene} scene */
function allPositions(scene) {
  const { pipeline, step, token } = scene;
  const rows = pipeline.tokens.map((each, t) => {
    const choose = { type: "button", class: "link pipe-row", onClick: () => scene.choose(t) };
    const [best] = factsOf(step, "head").top_tokens[t];
    return h("tr", { "aria-current": t === token ? "true" : null },
      h("td", null, h("button", choose, each.text)), h("td", null, chip(best), ` ${percent(best.chance)}`));
  });
  const head = h("tr", null, ["input vector of", "largest score"].map((text) => h("th", null, text)));
  return picture("At every position", h("div", { class: "scroll pipe-table-scroll" },
    h("table", null, h("thead", null, head), h("tbody", null, rows))));
}
