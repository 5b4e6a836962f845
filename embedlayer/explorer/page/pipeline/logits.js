/** The head of a small vocabulary, written out: a hidden state, the rows of W, logits, exponentials, probabilities. */

import { h } from "../dom.js";
import { fixed, numberCell } from "../learn/parts.js";
import { dot, indexOfLargest, row } from "../math.js";
import { bar, percent } from "./pictures.js";
import { digitsOf } from "./vector.js";

/** @import { Closable, Matrix } from "../types" */

/**
 * What a head computes of one hidden state.
 * @typedef {object} HeadReading
 * @property {ArrayLike<number>} hidden
 * @property {ArrayLike<number>} logits
 * @property {ArrayLike<number>} probabilities
 * @property {number} temperature
 * @property {number} chosen token whose product is written out
 */

const DIGITS = 4; // of a logit
export const ROUNDED = "Numbers are rounded where they are shown, so a result that you compute from them may differ by "
  + "1 or 2 in its last digit.";

/**
 * Create the table of all tokens, and the arithmetic of the chosen one.
 * @param {object} options
 * @param {string[]} options.names
 * @param {Matrix} options.weights W
 * @param {number} options.digits digits of a hidden state after the point
 * @param {(token: number) => void} options.choose
 * @returns {Closable & {show: (reading: HeadReading) => void}}
 */
export function logitTable({ names, weights, digits, choose }) {
  const buttons = names.map((name, id) => h("button", {
    type: "button", class: "learn-row", title: `Write out z of “${name}”`, onClick: () => choose(id),
  }, h("b", null, String(id)), h("span", null, name)));
  const heads = ["z", "exp(z)"].map((name) => h("th", { scope: "col" }, name));
  const lines = ["h", ...buttons, "sum"].map((name) => h("tr", null, h("th", { scope: "row" }, name)));
  const sum = h("p", { class: "pipe-fact logit-sum", "data-value": "logit" });
  const table = h("table", { class: "learn-grid logit-table" },
    h("caption", null, "h above the columns of W, one row of W for each token"),
    h("thead", null, h("tr", null, h("td"), Array.from({ length: weights.cols }, (_, d) =>
      h("th", { scope: "col" }, String(d))), heads, h("th", { scope: "col" }, "p"), h("td", { class: "logit-bar" }))),
    h("tbody", null, lines));
  /** @type {HeadReading | null} */
  let last = null;
  const draw = () => {
    if (!last) return;
    const { chosen, temperature } = last;
    const cells = cellsOf(weights, last, digits);
    lines.forEach((line, i) => { // the heading stays where it is, and so does the focus
      while (line.children.length > 1) line.lastElementChild?.remove();
      line.append(...cells[i]);
    });
    heads[1].textContent = temperature === 1 ? "exp(z)" : temperature ? `exp(z / ${temperature.toFixed(2)})` : "";
    lines.forEach((line, i) => line.classList.toggle("learn-marked", i === chosen + 1));
    buttons.forEach((button, id) => button.setAttribute("aria-pressed", String(id === chosen)));
    sum.replaceChildren(...arithmetic(names[chosen], weights, last, digits).map((text) => h("span", null, text)));
  };
  document.addEventListener("themechange", draw);
  return {
    element: h("div", { class: "logit-head" }, table, sum, h("p", { class: "note" }, ROUNDED)),
    show: (reading) => {
      last = reading;
      draw();
    },
    close: () => document.removeEventListener("themechange", draw),
  };
}

/**
 * Return the cells of each line: the hidden state, the tokens, the sums.
 * @param {Matrix} weights
 * @param {HeadReading} reading
 * @param {number} digits
 */
function cellsOf(weights, { hidden, logits, probabilities, temperature }, digits) {
  const limit = Math.max(...weights.data.map(Math.abs)) || 1;
  const state = Array.from(hidden, (value) => numberCell(value, 2 * limit, digits, false));
  const most = indexOfLargest(probabilities);
  /** @param {string} text @param {string} [kind] */
  const plain = (text, kind = "") => h("td", { class: kind }, text);
  const tokens = Array.from({ length: weights.rows }, (_, id) => [
    ...Array.from(row(weights, id), (value) => numberCell(value, limit, digitsOf(weights.data), false)),
    plain(logitText(logits[id], temperature), "logit-z"),
    plain(temperature ? exponential(logits[id] / temperature) : "–"),
    plain(percent(probabilities[id]), id === most ? "logit-most" : ""),
    h("td", { class: "logit-bar" }, bar(probabilities[id])),
  ]);
  const sum = [h("td", { colSpan: weights.cols }), plain(""),
    plain(temperature ? fourDigits(sumOf(logits, temperature)) : "–"), plain("100%"), plain("", "logit-bar")];
  return [[...state, h("td", { colSpan: 3 }), plain("", "logit-bar")], ...tokens, sum];
}

/** @param {ArrayLike<number>} logits @param {number} temperature */
function sumOf(logits, temperature) {
  return Array.from(logits).reduce((sum, logit) => sum + Math.exp(logit / temperature), 0);
}

/**
 * Write a logit, with more digits at a low temperature, so that they give exp(z / temperature).
 * @param {number} logit
 * @param {number} temperature
 */
function logitText(logit, temperature) {
  return fixed(logit, DIGITS + (temperature ? Math.max(0, Math.ceil(-Math.log10(temperature))) : 0));
}

/** @param {number} exponent */
function exponential(exponent) {
  return fourDigits(Math.exp(exponent));
}

/** Write a number with four digits. @param {number} value */
function fourDigits(value) {
  if (!Number.isFinite(value)) return "∞";
  const [digits, power] = value.toPrecision(4).split("e");
  return power ? `${digits}·10^${power.replace("+", "").replace("-", "−")}` : digits;
}

/**
 * Write out the logit and the probability of the chosen token.
 * @param {string} name
 * @param {Matrix} weights
 * @param {HeadReading} reading
 * @param {number} digits
 * @returns {string[]}
 */
function arithmetic(name, weights, { hidden, logits, probabilities, temperature, chosen }, digits) {
  const weight = row(weights, chosen);
  const rowDigits = digitsOf(weights.data);
  const products = Array.from(weight, (value, d) => `${factor(hidden[d], digits)} · ${factor(value, rowDigits)}`);
  const z = fixed(dot(hidden, weight), DIGITS);
  const lines = [`z of “${name}” = h · W[${chosen}] = ${products.join(" + ")} = ${z}`];
  const own = fixed(logits[chosen], DIGITS);
  if (own !== z) lines.push(`What this head does after the product makes it ${own}; see the formula.`);
  return [...lines, probabilityOf(name, { logits, probabilities, temperature, chosen }, "sum")];
}

/**
 * Write out the probability of the chosen token.
 * @param {string} name
 * @param {Omit<HeadReading, "hidden">} reading
 * @param {string} sum what the exponentials are divided by
 */
export function probabilityOf(name, { logits, probabilities, temperature, chosen }, sum) {
  const own = logitText(logits[chosen], temperature);
  const divided = temperature === 1 ? own : `${own} / ${temperature.toFixed(2)}`;
  return temperature
    ? `p of “${name}” = exp(${divided}) / ${sum} = ${exponential(logits[chosen] / temperature)} / `
      + `${fourDigits(sumOf(logits, temperature))} = ${percent(probabilities[chosen])}`
    : "At temperature 0 the largest logit has p = 100%.";
}

/** Write a factor, a negative one in parentheses. @param {number} value @param {number} digits */
function factor(value, digits) {
  const text = fixed(value, digits);
  return text.startsWith("−") ? `(${text})` : text;
}
