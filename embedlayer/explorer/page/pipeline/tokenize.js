/** The step Tokenize: how the tokenizer splits the text, and the same text under other tokenizers. */

import { h } from "../dom.js";
import { fourTokenizers, sideBySide, tokenizations } from "./side_by_side.js";
import { chosenAt, tokenPlayer } from "./token_player.js";

/** @import { Pipeline, Tokenization } from "../types" */
/** @import { Scene } from "./pictures.js" */
/** @import { Chosen } from "./token_player.js" */

/** @type {WeakMap<Pipeline, {list: Tokenization[], chosen: Chosen}>} what was loaded, and where the reader is */
const known = new WeakMap();

/** Draw the way from the text to the tokens. @param {Scene} scene */
export function drawTokenize(scene) {
  const box = h("div", { class: "tok-page" });
  const loaded = known.get(scene.pipeline);
  if (loaded) fill(scene, box, loaded);
  else load(scene, box);
  return [box];
}

/** @param {Scene} scene @param {HTMLElement} box */
async function load(scene, box) {
  let closed = false;
  scene.keep({ element: box, close: () => { closed = true; } });
  box.append(h("p", { class: "note" }, "Loading …"));
  try {
    const { context, showTiny, pipeline } = scene;
    const requests = fourTokenizers(showTiny ? {} : { layer: "tiny" }, context);
    const list = await tokenizations(context.data.load, pipeline.text, requests);
    const loaded = { list, chosen: chosenAt(scene.token) };
    known.set(scene.pipeline, loaded);
    if (!closed) fill(scene, box, loaded);
  } catch (error) {
    if (!closed) box.replaceChildren(h("p", null, /** @type {Error} */ (error).message));
  }
}

/** @param {Scene} scene @param {HTMLElement} box @param {{list: Tokenization[], chosen: Chosen}} loaded */
function fill({ keep, token, choose, pipeline }, box, { list, chosen }) {
  if (chosen.token !== token) [chosen.token, chosen.piece] = [token, null];
  const parts = [tokenPlayer(list[0], pipeline.text, chosen, { onToken: (next) => {
    chosen.token = next; // its pre-token stays chosen
    choose(next);
  } }), sideBySide(list, pipeline.text)];
  box.replaceChildren(...parts.map(keep));
}
