/** The step Tokenize: how the tokenizer splits the text, and the same text under other tokenizers. */

import { h } from "../dom.js";
import { fillLoaded } from "./loaded.js";
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
  fillLoaded(scene, box, {
    known, waiting: "Loading …", load: () => load(scene), contents: (loaded) => contents(scene, loaded),
  });
  return [box];
}

/** @param {Scene} scene */
async function load({ context, showTiny, pipeline, token }) {
  const requests = fourTokenizers(showTiny ? {} : { layer: "tiny" }, context);
  return { list: await tokenizations(context.data.load, pipeline.text, requests), chosen: chosenAt(token) };
}

/** @param {Scene} scene @param {{list: Tokenization[], chosen: Chosen}} loaded */
function contents({ keep, token, choose, pipeline }, { list, chosen }) {
  if (chosen.token !== token) [chosen.token, chosen.piece] = [token, null];
  const parts = [tokenPlayer(list[0], pipeline.text, chosen, { onToken: (next) => {
    chosen.token = next; // its pre-token stays chosen
    choose(next);
  } }), sideBySide(list, pipeline.text)];
  return parts.map(keep);
}
