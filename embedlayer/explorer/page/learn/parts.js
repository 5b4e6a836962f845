/** Parts that several scenes of the story share: claims with what is true of them, switches, tables of numbers. */

import { cellColours } from "../colour.js";
import { h, nodesOf, segments, slider } from "../dom.js";
import { changed, formatHash } from "../state.js";
import { theme } from "../theme.js";
import { withTerms } from "./terms.js";

/** @import { Child, Closable, Matrix } from "../types" */
/** @import { Stage } from "./stage.js" */
/** @typedef {[quote: string, holds: boolean | null, result: string]} Claim null: it depends */
/** @typedef {{mark?: (row: number) => boolean, plainZeros?: boolean}} TableMarks which rows have a frame */

/**
 * Format a number with a fixed number of digits after the point, and − for minus.
 * @param {number} value
 * @param {number} [digits]
 */
export function fixed(value, digits = 4) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** Return "once", "2 times", and so on. @param {number} count */
export function timesOf(count) {
  return count === 1 ? "once" : `${count} times`;
}

/**
 * Create the list of what is often said, each with what this page computes.
 * @param {Stage} stage
 * @returns {{element: HTMLElement, show: (claims: Claim[]) => void}}
 */
export function claimList({ seen }) {
  const list = h("ul");
  let shown = "";
  return {
    element: h("section", { class: "learn-claims" }, h("h3", null, "What is often said"), list),
    show: (claims) => {
      if (JSON.stringify(claims) === shown) return;
      shown = JSON.stringify(claims);
      const known = new Set(seen);
      list.replaceChildren(...claims.map((claim) => claimItem(claim, known)));
    },
  };
}

/** @param {Claim} claim @param {Set<string>} known special words that need no definition */
function claimItem([quote, holds, result], known) {
  const [name, verdict] = holds === null ? ["depends", "It depends. "]
    : holds ? ["holds", "Holds here. "] : ["fails", "Not so here. "];
  return h("li", { class: `learn-${name}` },
    h("q", null, withTerms(quote, known)), h("p", null, h("b", null, verdict), withTerms(result, known)));
}

/**
 * Create a switch of a group of which one is pressed, and which shows the choice itself.
 * @param {string} label
 * @param {[string, string][]} options
 * @param {string} value
 * @param {(value: string) => void} onChoose
 */
export function choice(label, options, value, onChoose) {
  const group = segments(label, options, value, (chosen) => {
    [...group.children].forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === chosen)));
    onChoose(chosen);
  });
  return h("div", { class: "field" }, h("span", null, label), group);
}

/**
 * Create a check box with its label.
 * @param {string} label
 * @param {boolean} checked
 * @param {(checked: boolean) => void} onChange
 */
export function check(label, checked, onChange) {
  const input = h("input", { type: "checkbox", checked, onChange: () => onChange(input.checked) });
  return h("label", { class: "check" }, input, label);
}

/**
 * Create the button that calls `advance` again and again until it returns false, and then `onPause`.
 * @param {{onClose: (close: () => void) => void}} stage with which playing ends
 * @param {() => boolean} advance
 * @param {{wait?: number, onPause?: () => void}} [options] `wait`: milliseconds between calls; by default each frame
 */
export function playButton(stage, advance, { wait = 0, onPause = () => {} } = {}) {
  let [request, last] = [0, 0];
  const button = h("button", { type: "button", "aria-pressed": "false", onClick: () => (request ? pause() : play()) },
    "Play");
  const show = () => {
    button.textContent = request ? "Pause" : "Play";
    button.setAttribute("aria-pressed", String(request !== 0));
  };
  const frame = (/** @type {number} */ now) => {
    const isDue = now - last >= wait;
    if (isDue) last = now;
    if (!isDue || advance()) request = requestAnimationFrame(frame);
    else pause();
  };
  const play = () => {
    last = -Infinity;
    request = requestAnimationFrame(frame);
    show();
  };
  const pause = () => {
    cancelAnimationFrame(request);
    request = 0;
    show();
    onPause();
  };
  stage.onClose(() => cancelAnimationFrame(request));
  return { element: button, pause, isPlaying: () => request !== 0 };
}

/**
 * Create a slider over a list of numbers.
 * @param {string} label
 * @param {number[]} list
 * @param {number} value
 * @param {(value: number) => void} onInput
 */
export function listSlider(label, list, value, onInput) {
  return slider({
    label, min: 0, max: list.length - 1, value: Math.max(0, list.indexOf(value)),
    format: (i) => list[i].toLocaleString("en"), onInput: (i) => onInput(list[i]),
  });
}

/**
 * Create the place of parts that are replaced by others, and closed then or with the scene.
 * @param {Stage} stage
 * @param {string} className
 */
export function changingPlace(stage, className) {
  const element = h("div", { class: className });
  /** @type {Closable[]} */
  let last = [];
  const close = () => last.forEach((part) => part.close());
  const show = (/** @type {Closable[]} */ parts, /** @type {Child[]} */ ...more) => {
    close();
    last = parts;
    if (stage.isClosed) return close();
    return element.replaceChildren(...parts.map((part) => part.element), ...nodesOf(more));
  };
  stage.onClose(close);
  return { element, show };
}

/**
 * Create a table of numbers with a colour for each, and a heading for each row.
 * @param {{caption: string, rowNames: Child[], columnNames?: string[], digits?: number, limit: number}} options
 *   `columnNames`: by default the columns' indices; `limit`: absolute value at which colours end
 * @returns {Closable & {show: (matrix: Matrix, more?: TableMarks) => void}}
 */
export function numberTable({ caption, rowNames, columnNames, digits = 2, limit }) {
  const [head, body] = [h("tr"), h("tbody")];
  const element = h("table", { class: "learn-grid" }, h("caption", null, caption), h("thead", null, head), body);
  /** @type {[Matrix, TableMarks] | null} */
  let last = null;
  const draw = () => {
    if (!last) return;
    const [matrix, { mark, plainZeros }] = last;
    const names = columnNames ?? Array.from({ length: matrix.cols }, (_, c) => String(c));
    head.replaceChildren(h("td"), ...names.map((name) => h("th", { scope: "col" }, name)));
    body.replaceChildren(...rowNames.map((name, r) => h("tr", { class: mark?.(r) ? "learn-marked" : null },
      h("th", { scope: "row" }, name), Array.from({ length: matrix.cols }, (_, c) =>
        numberCell(matrix.data[r * matrix.cols + c], limit, digits, plainZeros ?? false)))));
  };
  document.addEventListener("themechange", draw);
  return {
    element,
    show: (matrix, more = {}) => {
      last = [matrix, more];
      draw();
    },
    close: () => document.removeEventListener("themechange", draw),
  };
}

/**
 * Create a cell with a number and its colour.
 * @param {number} value
 * @param {number} limit
 * @param {number} digits
 * @param {boolean} plainZeros whether 0 is written without digits and without a colour
 */
export function numberCell(value, limit, digits, plainZeros) {
  if (plainZeros && value === 0) return h("td", { class: "learn-zero" }, "0");
  const cell = h("td", null, fixed(value, digits));
  Object.assign(cell.style, cellColours(value / limit, theme().dark));
  return cell;
}

/** Create the link to the view Positions, with sinusoids of a width. @param {Stage} stage @param {number} dim */
export function positionsLink({ context: { source } }, dim) {
  const href = formatHash("positions", changed({}, { scheme: "sinusoidal", dim, source: source || null }));
  return h("p", { class: "note learn-link" }, h("a", { href }, "The view Positions"),
    " draws the sine and cosine of each pair as curves, and rotary positions and ALiBi.");
}

/**
 * Create the switches of a scene that has positions: which scheme, and whether rows are multiplied by √D.
 * @param {Stage} stage
 * @param {() => void} draw
 */
export function schemeSwitches(stage, draw) {
  const chosen = { scheme: stage.text("scheme", "sinusoidal"), scaled: stage.text("scale", "1") === "1" };
  /** @type {[string, string][]} */
  const options = [["sinusoidal", "sinusoidal"], ["learned", "learned"]];
  const schemes = choice("Positions", options, chosen.scheme, (value) => {
    chosen.scheme = value;
    stage.set({ scheme: value === "sinusoidal" ? null : value });
    draw();
  });
  const scale = check("multiply the row by √D", chosen.scaled, (value) => {
    chosen.scaled = value;
    stage.set({ scale: value ? null : "0" });
    draw();
  });
  return { chosen, elements: [schemes, scale] };
}
