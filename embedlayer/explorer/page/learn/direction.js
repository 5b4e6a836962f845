/** Part of the scene about a trained table: a direction between groups of words, and words that did not make it. */

import { h, slider, token } from "../dom.js";
import { bar } from "../pipeline/pictures.js";
import { choice, claimList, fixed } from "./parts.js";

/** @import { Claim } from "./parts.js" */
/** @import { Stage } from "./stage.js" */
/** @typedef {[word: string, id: number]} Word */

/** @type {Record<string, {name: string, sides: [string, string], quote: string, words: [string, string]}>} */
export const DIRECTIONS = {
  gender: {
    name: "man − woman", sides: ["male", "female"],
    quote: "One combination of dimensions might capture gender-like differences (man vs. woman).",
    words: ["man boy king father son brother he husband uncle prince",
      "woman girl queen mother daughter sister she wife aunt princess"],
  },
  living: {
    name: "animate being − object", sides: ["animate being", "object"],
    quote: "Another might capture whether something is an animate being or an object.",
    words: ["man woman dog cat horse child king bird girl boy doctor teacher mother father soldier queen baby fish",
      "table car house book door stone chair knife paper ship box bottle computer road bridge machine window clock"],
  },
};
const [MOST, ENOUGH] = [8, 12]; // words a side that make a direction; words a side that a table must have

/**
 * Return the IDs of words that are tokens; where tokens at the start of a word begin with a space, with that space.
 * @param {string[]} texts
 * @param {string} words
 * @returns {Word[]}
 */
export function idsOf(texts, words) {
  const start = texts.some((text) => /^ \p{L}+$/u.test(text)) ? " " : "";
  return words.split(" ").map((word) => /** @type {Word} */ ([word, texts.indexOf(start + word)]))
    .filter(([, id]) => id >= 0);
}

/**
 * Create the part; return null for a table that lacks the words.
 * @param {Stage} stage
 * @param {number} source number of the table
 * @param {string[]} texts
 */
export async function directionPart(stage, source, texts) {
  const found = Object.entries(DIRECTIONS).map(([key, { words }]) =>
    /** @type {const} */ ([key, words.map((side) => idsOf(texts, side))]));
  if (found.some(([, sides]) => sides.some((side) => side.length < ENOUGH - 2))) return null;
  const groups = Object.fromEntries(found);
  let [key, count] = [stage.text("direction") in groups ? stage.text("direction") : "gender",
    Math.round(stage.number("count", 1, 1, MOST))];
  const [list, claims] = [h("div", { class: "learn-pair" }), claimList(stage)];
  const made = h("p", { class: "pipe-fact", "data-value": "made" });
  const show = async () => {
    stage.set({ direction: key === "gender" ? null : key, count: count === 1 ? null : count });
    const [plus, minus] = groups[key].map((side) => side.slice(0, count).map(([, id]) => id).join(","));
    const cosines = new Float32Array(await stage.context.data.load("along", { source, plus, minus }));
    if (stage.isClosed) return;
    const others = groups[key].map((side) => side.slice(count).map(([word, id]) =>
      ({ word, id, cosine: cosines[id] })).sort((a, b) => b.cosine - a.cosine));
    const { sides } = DIRECTIONS[key];
    made.textContent = `Unit rows: ${groups[key].map((side) => side.slice(0, count).map(([word]) =>
      `“${word}”`).join(" + ")).map((sum) => (count > 1 ? `(${sum})` : sum)).join(" − ")}`;
    list.replaceChildren(...others.map((words, side) => h("div", null, h("h3", null, sides[side]),
      h("ol", { class: "direction-words" }, words.map(({ word, id, cosine }) => h("li", null, token(word, { of: id }),
        bar(Math.min(1, 2 * Math.abs(cosine))),
        h("span", { class: "pipe-value" }, `${fixed(cosine, 2)}${isRight(cosine, side) ? "" : " ✗"}`)))))));
    claims.show(claimsOf(key, others));
  };
  const which = choice("Direction", Object.entries(DIRECTIONS).map(([id, { name }]) => [id, name]), key, (value) => {
    key = value;
    show();
  });
  const words = slider({ label: "Words a side that make it", min: 1, max: MOST, value: count, onInput: (value) => {
    count = value;
    show();
  } });
  await show();
  return h("section", { class: "learn-part", "data-value": "direction" }, h("h3", null, "A direction between words"),
    h("p", { class: "note" }, "The sum of some unit rows minus the sum of others is a direction. Below: its cosine "
      + "with words that it was not made of. ✗ is on the wrong side of 0."),
    h("div", { class: "learn-controls" }, which, words), made, list, claims.element);
}

/** @param {number} cosine @param {number} side 0: plus, 1: minus */
function isRight(cosine, side) {
  return side ? cosine < 0 : cosine > 0;
}

/** @param {string} key @param {{cosine: number}[][]} others of both sides @returns {Claim[]} */
function claimsOf(key, others) {
  const all = others.flatMap((words, side) => words.map(({ cosine }) => isRight(cosine, side)));
  const right = all.filter(Boolean).length;
  const { quote, name } = DIRECTIONS[key];
  return [[quote, right === all.length ? true : null, `${name}: ${right} of ${all.length} other words are on their `
    + `side (half of them would be by chance).${right < all.length ? " The direction has other features, too." : ""}`]];
}
