/** The step Head: the most likely next tokens. */

import { h } from "../dom.js";
import { bar, chip, nameOf, percent, picture } from "./pictures.js";

/** @import { LikelyToken } from "../types" */
/** @import { Scene } from "./pictures.js" */

const CONTEXT_TOKENS = 8;

/** Draw the next-token probabilities at the chosen token and at all positions. @param {Scene} scene */
export function drawHead(scene) {
  return [h("div", { class: "grid-2" }, nextTokens(scene), allPositions(scene))];
}

/** @param {Scene} scene */
function nextTokens(scene) {
  const { pipeline, step, token } = scene;
  /** @type {LikelyToken[]} */
  const topTokens = step.facts.top_tokens[token];
  const most = topTokens[0]?.chance ?? 1;
  const following = pipeline.tokens[token + 1];
  const list = topTokens.map((each) => h("li", { class: following?.id === each.id ? "pipe-right" : null },
    chip(each), bar((each.chance ?? 0) / most), h("span", { class: "pipe-value" }, percent(each.chance))));
  const tokens = pipeline.tokens.slice(Math.max(0, token + 1 - CONTEXT_TOKENS), token + 1);
  const note = following
    ? `The text continues with ${nameOf(scene, token + 1)}, which has probability ${percent(step.facts.next[token])}.`
    : "This is the last token of the text.";
  return picture("Most likely next tokens",
    h("p", { class: "pipe-sofar" }, token >= CONTEXT_TOKENS ? "… " : "", tokens.map((each) => chip(each)), " → ?"),
    h("ol", { class: "pipe-guesses" }, list), h("p", { class: "note" }, note));
}

/** @param {Scene} scene */
function allPositions(scene) {
  const { pipeline, step, token } = scene;
  const { top_tokens: topTokens, next } = step.facts;
  const rows = pipeline.tokens.map((each, t) => {
    const following = pipeline.tokens[t + 1];
    const choose = { type: "button", class: "link pipe-row", onClick: () => scene.choose(t) };
    return h("tr", { "aria-current": t === token ? "true" : null },
      h("td", null, h("button", choose, each.text)),
      h("td", null, chip(topTokens[t][0]), ` ${percent(topTokens[t][0].chance)}`),
      h("td", null, following ? [chip(following), ` ${percent(next[t])}`] : "—"));
  });
  const head = h("tr", null, ["after", "most likely", "next in the text"].map((text) => h("th", null, text)));
  return picture("At every position", h("div", { class: "scroll pipe-table-scroll" },
    h("table", null, h("thead", null, head), h("tbody", null, rows))));
}
