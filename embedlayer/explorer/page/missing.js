/** What a view shows where the source lacks what it needs: why, what it would show, and where to go on. */

import { empty, h } from "./dom.js";
import { changed, formatHash } from "./state.js";

/** @import { Child, Manifest } from "./types" */

/**
 * Create the message of a view whose source lacks something.
 * @param {string} lack a name in `has`
 * @param {Manifest} manifest
 * @param {number} source
 * @param {string} view
 */
export function missing(lack, { sources, command }, source, view) {
  const others = sources.flatMap(({ has, title: name }, i) => (has.includes(lack)
    ? [h("a", { href: formatHash(view, { source: String(i) }) }, `Show the ${view} of ${name}`)] : []));
  if (lack === "metrics") return notRun(command, source, others);
  if (lack === "input") return onlyTable(source, others);
  return empty("Nothing to show", `This source has no ${lack}.`, next(others));
}

/** @param {string} view @param {number} source @param {Record<string, string>} [state] */
function hashOf(view, source, state = {}) {
  return formatHash(view, changed(state, { source: source || null }));
}

/** @param {...Child} ways to go on */
export function next(...ways) {
  return h("span", { class: "next" }, ways);
}

/** @param {string} command @param {number} source @param {Child[]} others */
function notRun(command, source, others) {
  return empty("This source is not a training run",
    "Of a run, this view shows the loss beside ln V, the loss of a uniform prediction; the rows of the table that each "
    + "step looked up; the learning rate; and nearest tokens before and after training.",
    next(others,
      h("a", { href: hashOf("learn", source, { s: "training" }) }, "Train a table of twelve words in Learn"),
      h("span", null, "Or train a table on text files of your own, and open it:"),
      h("code", null, `${command} train FILE... -o DIR`), h("code", null, `${command} explore DIR`)));
}

/** @param {number} source @param {Child[]} others */
function onlyTable(source, others) {
  return empty("Only the table was read",
    "The model family of this checkpoint is not known, or a part of its embedding layer cannot be read, so its "
    + "positions are not known. The message of the command says which part.",
    next(others, h("a", { href: hashOf("map", source) }, "See the table in Map"),
      h("a", { href: hashOf("learn", source, { s: "waves" }) }, "See position vectors in Learn")));
}
