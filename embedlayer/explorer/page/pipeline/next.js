/** The step Next token: logits, probabilities at any temperature, and buttons that append a token to the text. */

import { COUNT } from "../charts/numbers.js";
import { h, oneTabStop, slider } from "../dom.js";
import { fixed } from "../learn/parts.js";
import { factsOf } from "./facts.js";
import { drawNorm, smallHead } from "./final_norm.js";
import { probabilityOf, ROUNDED } from "./logits.js";
import { bar, chip, fact, percent, picture, valueOf } from "./pictures.js";
import { drawn, entropyOf, softmax } from "./probabilities.js";

/** @import { ShownToken } from "../types" */
/** @import { Scene } from "./pictures.js" */

const CONTEXT_TOKENS = 12;
const HOTTEST = 2;
const ABOUT_TEMPERATURE = "A temperature divides the logits first: below 1 the likely tokens gain, above 1 the others.";

/** Draw what the model says next, after the whole text. @param {Scene} scene */
export function drawNext(scene) {
  const list = h("ol", { class: "next-list next-logits" });
  const spread = h("p", { class: "pipe-fact", "aria-live": "polite" });
  const mark = h("p", { class: "note" }, "The mark on each bar is the probability at temperature 1.");
  const logits = valueOf(scene, "logits").data;
  const plain = softmax(logits, 1);
  let temperature = stated(scene.state.get("temperature", "1"));
  let probabilities = plain;
  const small = smallHead(scene);
  const { candidates = [] } = factsOf(scene.step, "head");
  const written = h("p", { class: "pipe-fact", "data-value": "probability" });
  const show = () => {
    probabilities = softmax(logits, temperature);
    small?.show(probabilities, temperature);
    const reading = { logits, probabilities, temperature, chosen: candidates[0].id };
    written.textContent = small ? "" : probabilityOf(candidates[0].text, reading, `Σ exp(${temperature === 1 ? "z"
      : "z / temperature"})`);
    list.replaceChildren(headsOf(temperature), ...rowsOf(scene, probabilities, plain, temperature));
    spread.replaceChildren(...spreadOf(probabilities));
    mark.style.visibility = temperature === 1 ? "hidden" : "visible";
  };
  const range = slider({
    label: "Temperature", min: 0, max: HOTTEST, step: 0.05, value: temperature,
    format: (value) => (value ? value.toFixed(2) : "0, always the most likely token"),
    onInput: (value) => {
      temperature = value;
      scene.state.set({ temperature: value === 1 ? null : value });
      show();
    },
  });
  show();
  const sample = sampling(scene, (seed) => drawn(probabilities, seed));
  const arithmetic = small ? null : [written, h("p", { class: "note" }, ROUNDED)];
  return [h("div", { class: "grid-2" }, picture("The most likely next tokens", list, arithmetic, mark),
    picture("After this text", textSoFar(scene), range, h("p", { class: "note" }, ABOUT_TEMPERATURE), spread, sample)),
  drawNorm(scene), small?.element];
}

/** Return a temperature of the URL, in the range of the slider. @param {string} text */
function stated(text) {
  const value = Number.parseFloat(text);
  return Number.isNaN(value) ? 1 : Math.min(HOTTEST, Math.max(0, value));
}

/** Return how many samples were drawn: the seed of the next one. @param {Scene} scene */
function draws(scene) {
  return Math.max(0, Number.parseInt(scene.state.get("draws", "0"), 10) || 0);
}

/** @param {Scene} scene */
function textSoFar({ pipeline }) {
  const { tokens } = pipeline;
  return oneTabStop(h("p", { class: "pipe-sofar", role: "group", "aria-label": "The text so far" },
    tokens.length > CONTEXT_TOKENS ? "… " : "", tokens.slice(-CONTEXT_TOKENS).map((token) => chip(token)), " → ?"));
}

/**
 * Return the list: for each candidate its logit over the temperature, and a bar with a mark at its probability at
 * temperature 1; and a bar for the rest.
 * @param {Scene} scene
 * @param {Float64Array} probabilities
 * @param {Float64Array} plain probabilities at temperature 1
 * @param {number} temperature
 */
function rowsOf(scene, probabilities, plain, temperature) {
  const logits = valueOf(scene, "logits").data;
  const { candidates = [] } = factsOf(scene.step, "head");
  const others = plain.length - candidates.length;
  const [rest, plainRest] = [probabilities, plain].map((p) =>
    others > 0 ? Math.max(0, 1 - candidates.reduce((sum, token) => sum + p[token.id], 0)) : 0);
  const most = Math.max(rest, plainRest, probabilities[candidates[0].id], plain[candidates[0].id]);
  /** @param {string} logit @param {number} p @param {number} before */
  const line = (logit, p, before) => {
    const mark = h("b");
    mark.style.left = `${(100 * before) / most}%`;
    const made = bar(p / most);
    if (p !== before) made.append(mark);
    return [made, h("span", { class: "pipe-logit" }, logit), h("span", { class: "pipe-value" }, percent(p))];
  };
  const rows = candidates.map((token) => h("li", null, chip(token),
    line(fixed(logits[token.id] / (temperature || 1), 2), probabilities[token.id], plain[token.id]),
    appendButton(scene, token)));
  if (others <= 0) return rows;
  return [...rows, h("li", { class: "next-rest" }, h("span", null, `${COUNT.format(others)} others`),
    line("", rest, plainRest))];
}

/** Create the headings of the list. @param {number} temperature */
function headsOf(temperature) {
  const divided = temperature && temperature !== 1 ? `z / ${temperature.toFixed(2)}` : "z";
  return h("li", { class: "next-rest" }, h("span"), h("span"), h("span", { class: "pipe-logit" }, divided),
    h("span", { class: "pipe-logit" }, "p"));
}

/** @param {Scene} scene @param {ShownToken} token */
function appendButton(scene, token) {
  return h("button", {
    type: "button", class: "next-append", disabled: refusal(scene) !== "", "aria-label": `Append ${token.text}`,
    title: `Append “${token.text}” to the text`, onClick: () => scene.append(token.id),
  }, "Append");
}

/** Say how even the distribution is. @param {Float64Array} probabilities */
function spreadOf(probabilities) {
  const bits = entropyOf(probabilities);
  const tokens = 2 ** bits;
  const even = tokens < 10 ? tokens.toFixed(1) : COUNT.format(Math.round(tokens));
  return ["Entropy ", h("b", null, `${bits.toFixed(2)} bits`), even === "1.0" ? ": almost certain."
    : `: as uncertain as an even choice among ${even} tokens.`];
}

/**
 * Return the button that appends a sample, and notes.
 * @param {Scene} scene
 * @param {(seed: number) => number} sample
 */
function sampling(scene, sample) {
  const seed = draws(scene);
  const refused = refusal(scene);
  const button = h("button", {
    type: "button", disabled: refused !== "", onClick: () => scene.append(sample(seed), { draws: seed + 1 }),
  }, "Append a sample");
  const { appended } = scene.pipeline;
  const undo = h("button", { type: "button", onClick: () => scene.removeAppended() },
    `Remove ${COUNT.format(appended.length)} appended`);
  const note = `Drawn from all ${COUNT.format(scene.pipeline.vocab_size)} probabilities with seed ${seed}, so the same `
    + "link gives the same token. Each sample adds 1 to the seed.";
  return [h("div", { class: "toolbar" }, button, appended.length ? undo : null),
    h("p", { class: "note" }, refused || note), appended.length ? fact(appendedNote(appended.length)) : null];
}

/** @param {number} count */
function appendedNote(count) {
  return `The last ${count === 1 ? "token is" : `${COUNT.format(count)} tokens are`} not in the text field. It has one `
    + "line, and holds only what the tokenizer splits into the same tokens.";
}

/** Say why no token can be appended; "" if one can. @param {Scene} scene */
function refusal(scene) {
  if (scene.exported) {
    return "This is an exported page. To append tokens, open the model itself: embedlayer explore DIR.";
  }
  const { tokens_left: left = 0 } = factsOf(scene.step, "head");
  return left > 0 ? "" : "The text is as long as this page shows, so no token can be appended.";
}
