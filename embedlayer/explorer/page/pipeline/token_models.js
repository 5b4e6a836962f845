/** How a tokenizer's model splits one pre-token: merges of BPE, tries of WordPiece, paths of Unigram, a look-up. */

import { COUNT } from "../charts/numbers.js";
import { h, oneTabStop, scroller, token } from "../dom.js";
import { fixed } from "../learn/parts.js";

/** @import { BpeTrace, Child, TracedPiece, UnigramTrace, WholeTrace, WordPieceTrace } from "../types" */

/**
 * The steps of a model on one pre-token.
 * @typedef {object} ModelSteps
 * @property {string} name of the model
 * @property {string} unit what a step is
 * @property {number} count
 * @property {(done: number, goTo: (done: number) => void) => Child[]} draw the state after some steps
 */

const DIGITS = 3; // of a log-probability
const ADDED = "An added token is cut out of the text before all else. It is one token; the model does not split it.";
const MERGE_RULE = "Under two neighbours: the rank of their merge, its place in the tokenizer's list of merges. The "
  + "lowest rank is merged next.";
const ENDED = "Training added one merge at a time, that of the most frequent pair, and ended before ";
const BYTES = "A character without an entry is written as its bytes, which are never merged. ";
const BYTE = /^<0x[0-9A-F]{2}>$/; // entry for a byte

/** Return the steps of the model on a pre-token. @param {TracedPiece} piece @returns {ModelSteps} */
export function modelSteps({ trace, text }) {
  if (!trace) return single("added token", ADDED);
  if (trace.kind === "bpe") return mergeSteps(trace);
  if (trace.kind === "wordpiece") return trySteps(trace, text);
  if (trace.kind === "unigram") return { name: "Unigram", unit: "", count: 0, draw: () => drawPaths(trace) };
  return lookUp(trace, text);
}

/** @param {string} name @param {...Child} sentence @returns {ModelSteps} */
function single(name, ...sentence) {
  return { name, unit: "", count: 0, draw: () => [h("p", null, sentence)] };
}

/** @param {WholeTrace} trace @param {string} text */
function lookUp({ id }, text) {
  return single("look-up", token(text), id === null ? " is not in the vocabulary."
    : ` is looked up as a whole: its ID is ${COUNT.format(id)}.`);
}

// Byte-pair encoding

/** Return the symbols after some merges. @param {BpeTrace} trace @param {number} count */
export function symbolsAfter({ symbols, merges }, count) {
  const list = [...symbols];
  for (const { index, result } of merges.slice(0, count)) list.splice(index, 2, result);
  return list;
}

/** @param {BpeTrace} trace @returns {ModelSteps} */
function mergeSteps(trace) {
  const name = "byte-pair encoding (BPE)";
  if (trace.whole) {
    return single(name, "It is in the vocabulary as a whole, and this tokenizer then applies no merges: one token.");
  }
  const ranks = new Map(trace.pairs.map(([left, right, rank]) => [keyOf(left, right), rank]));
  const each = trace.merges.map(({ index }, i) => symbolsAfter(trace, i).slice(index, index + 2));
  return {
    name, unit: "Merge", count: trace.merges.length,
    draw: (done, goTo) => [
      h("p", { class: "note" }, MERGE_RULE),
      symbolRow(trace, ranks, done),
      h("p", { class: "tok-said", "aria-live": "polite" }, mergeSentence(trace, each, done)),
      mergeList(trace, each, done, goTo),
    ],
  };
}

/** @param {string} left @param {string} right */
function keyOf(left, right) {
  return JSON.stringify([left, right]);
}

/** Return the visible form of a symbol. @param {BpeTrace} trace @param {string} symbol */
function nameOf({ shown }, symbol) {
  return shown[symbol] ?? symbol;
}

/** @param {BpeTrace} trace @param {Map<string, number>} ranks @param {number} done */
function symbolRow(trace, ranks, done) {
  const symbols = symbolsAfter(trace, done);
  const [last, next] = [trace.merges[done - 1]?.index, trace.merges[done]?.index];
  return h("ol", { class: "tok-symbols", "aria-label": "Symbols" }, symbols.map((symbol, i) => {
    const isNext = next !== undefined && (i === next || i === next + 1);
    const rank = i < symbols.length - 1 ? ranks.get(keyOf(symbol, symbols[i + 1])) : null;
    return h("li", { class: i === next ? "tok-joined" : null },
      h("b", { class: `tok-symbol${isNext ? " tok-next" : i === last ? " tok-new" : ""}` }, nameOf(trace, symbol)),
      rank === null ? null : h("span", { class: `tok-rank${rank === undefined ? " tok-none" : ""}` },
        rank === undefined ? "no merge" : COUNT.format(rank)));
  }));
}

/** @param {BpeTrace} trace @param {string[][]} each the pair of each merge @param {number} done @returns {Child[]} */
function mergeSentence(trace, each, done) {
  const { symbols, merges } = trace;
  const say = (/** @type {string} */ symbol) => token(nameOf(trace, symbol));
  const last = merges[done - 1];
  /** @type {Child[]} */
  const before = last
    ? [`Merge ${done}: `, say(each[done - 1][0]), " + ", say(each[done - 1][1]), " becomes ", say(last.result),
      `, rank ${COUNT.format(last.rank)}. `]
    : [`Start: ${symbols.length === 1 ? "one symbol" : `${symbols.length} symbols`}. `];
  const next = merges[done];
  if (next) {
    return [...before, "Next: ", say(each[done][0]), " + ", say(each[done][1]),
      `, rank ${COUNT.format(next.rank)}, the lowest here.`];
  }
  const left = symbolsAfter(trace, done);
  if (left.length === 1) return [...before, h("b", null, "One symbol is left: one token.")];
  const pairs = left.slice(1).map((symbol, i) => [i ? ", " : "", say(left[i]), " + ", say(symbol)]);
  return [...before, h("b", null, "It stops: "), pairs.slice(0, 3), pairs.length > 3 ? ", …" : "",
    pairs.length === 1 ? " has no merge in the list. " : " have no merge in the list. ", whyUnmerged(left),
    `So it is ${left.length} tokens.`];
}

/** Return why no pair of these symbols has a merge. @param {string[]} symbols */
function whyUnmerged(symbols) {
  const pairs = symbols.slice(1).map((symbol, i) => BYTE.test(symbol) || BYTE.test(symbols[i]));
  const others = pairs.filter((hasByte) => !hasByte).length;
  const hasBytes = others < pairs.length;
  const which = `${hasBytes ? "the other" : others === 1 ? "this" : "these"} pair${others === 1 ? "" : "s"}. `;
  return `${hasBytes ? BYTES : ""}${others ? ENDED + which : ""}`;
}

/**
 * Create the list of all merges, to go to each.
 * @param {BpeTrace} trace
 * @param {string[][]} each
 * @param {number} done
 * @param {(done: number) => void} goTo
 */
function mergeList(trace, each, done, goTo) {
  if (!each.length) return null;
  return oneTabStop(h("ol", { class: "tok-list", "aria-label": "Merges" }, each.map(([left, right], i) => h("li", null,
    h("button", {
      type: "button", "aria-current": i === done - 1 ? "step" : "false", class: i < done ? "tok-done" : null,
      onClick: () => goTo(i + 1),
    }, h("span", null, h("bdi", null, nameOf(trace, left)), " + ", h("bdi", null, nameOf(trace, right))),
    h("small", null, `rank ${COUNT.format(trace.merges[i].rank)}`))))));
}

// WordPiece

/** @param {WordPieceTrace} trace @param {string} text @returns {ModelSteps} */
function trySteps({ tries, too_long: isTooLong }, text) {
  const name = "WordPiece, the longest match first";
  if (isTooLong) return single(name, "This word is longer than the model accepts, so the whole word is unknown.");
  return {
    name, unit: "Try", count: tries.length,
    draw: (done) => [
      matchRow(tries.slice(0, done), text),
      h("p", { class: "tok-said", "aria-live": "polite" }, trySentence(tries, done, text)),
      tryList(tries, done),
    ],
  };
}

/** @typedef {WordPieceTrace["tries"]} Tries */

/** Show the tokens so far, and the rest of the word. @param {Tries} made @param {string} text */
function matchRow(made, text) {
  const matches = made.filter(({ id }) => id !== null);
  const rest = [...text].slice(matches.at(-1)?.stop ?? 0).join("");
  return h("ol", { class: "tok-symbols", "aria-label": "Tokens so far, and the rest" },
    matches.map((each) => h("li", null, h("b", { class: "tok-symbol tok-new" }, each.text))),
    rest ? h("li", null, h("b", { class: "tok-symbol tok-rest" }, rest)) : null);
}

/** Show the tries at the place of the last one, under each other. @param {Tries} tries @param {number} done */
function tryList(tries, done) {
  const { start } = tries[Math.max(0, done - 1)];
  const here = tries.filter((each) => each.start === start);
  const first = tries.indexOf(here[0]);
  return scroller("Tries", "tok-tries", h("ol", null, here.map(({ text, id }, i) => {
    const made = first + i < done;
    return h("li", { class: `${made ? "" : "tok-later"}${id === null ? "" : " tok-fits"}` },
      h("b", null, text), h("span", null, id === null ? "not in the vocabulary" : `ID ${COUNT.format(id)}`));
  })));
}

/** @param {Tries} tries @param {number} done @param {string} text @returns {Child[]} */
function trySentence(tries, done, text) {
  if (!done) return ["Start: is the whole word in the vocabulary?"];
  const { text: tried, id, stop } = tries[done - 1];
  const isLast = done === tries.length;
  if (id === null) {
    return [token(tried), " is not in the vocabulary. ", isLast
      ? h("b", null, "Nothing shorter is left, so the whole word is unknown.") : "Next: one character less."];
  }
  const count = tries.filter((each) => each.id !== null).length;
  return [token(tried), ` is in the vocabulary, ID ${COUNT.format(id)}. `, isLast || stop === [...text].length
    ? h("b", null, `The word is used up: ${count === 1 ? "one token" : `${count} tokens`}.`)
    : "Next: the rest, with the mark of a token inside a word."];
}

// Unigram

/** @param {UnigramTrace} trace */
function drawPaths({ paths }) {
  const names = ["best", "second best"];
  return [
    h("ol", { class: "tok-paths" }, paths.map(({ pieces, score }, i) => h("li", { class: i ? null : "tok-best" },
      h("span", null, names[i]),
      h("ol", { class: "tok-symbols" }, pieces.map((piece, place) => h("li", null,
        h("span", { class: "tok-scored" }, h("b", { class: `tok-symbol${i ? "" : " tok-new"}` }, piece.text),
          h("small", null, fixed(piece.score, DIGITS)), h("small", { class: "tok-id" }, `ID ${piece.ids.join(", ")}`)),
        place < pieces.length - 1 ? h("span", { class: "tok-plus" }, "+") : null))),
      h("b", { class: "tok-sum" }, `= ${fixed(score, DIGITS)}`)))),
    h("p", { class: "tok-said" }, pathSentence(paths)),
  ];
}

/** @param {UnigramTrace["paths"]} paths */
function pathSentence(paths) {
  const rule = "Each token has a score, the logarithm of its probability; numbers are rounded to three digits. The "
    + "split with the largest sum is taken";
  if (paths.length < 2) return `${rule}; here there is one split alone.`;
  const times = Math.exp(paths[0].score - paths[1].score);
  const factor = times >= 1e6 ? "more than a million" : COUNT.format(Number(times.toPrecision(2)));
  return `${rule}: the best is ${factor} times as likely as the second best.`;
}
