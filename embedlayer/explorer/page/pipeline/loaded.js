/** A picture of a step whose numbers are an answer of their own, loaded when the step is first shown. */

import { h } from "../dom.js";

/** @import { Pipeline } from "../types" */
/** @import { Scene } from "./pictures.js" */

/**
 * Fill a box at once with what was loaded for this pipeline, else when it is loaded; the message of an error takes its
 * place.
 * @template Loaded
 * @param {Scene} scene
 * @param {HTMLElement} box
 * @param {object} options
 * @param {WeakMap<Pipeline, Loaded>} options.known what was loaded
 * @param {string} options.waiting sentence that is shown until then
 * @param {() => Promise<Loaded>} options.load
 * @param {(loaded: Loaded) => HTMLElement[]} options.contents
 */
export async function fillLoaded({ pipeline, keep }, box, { known, waiting, load, contents }) {
  const loaded = known.get(pipeline);
  if (loaded) return box.replaceChildren(...contents(loaded));
  let closed = false;
  keep({ element: box, close: () => { closed = true; } });
  box.append(h("p", { class: "note" }, waiting));
  try {
    const news = await load();
    known.set(pipeline, news);
    if (!closed) box.replaceChildren(...contents(news));
  } catch (error) {
    if (!closed) box.replaceChildren(h("p", null, /** @type {Error} */ (error).message));
  }
}
