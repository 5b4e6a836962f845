/** Builders for elements and controls. */

/** @import { Child, Context2D } from "./types" */

/**
 * Create an element. Properties that start with "on" become listeners. `class`, `role`, names with a hyphen and names
 * that the element has no property for become attributes; all others are set as properties.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown> | null} [properties]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    const isAttribute = name === "class" || name === "role" || name.includes("-") || !(name in element);
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2).toLowerCase(), /** @type {EventListener} */ (value));
    } else if (isAttribute) element.setAttribute(name, value === true ? "" : String(value));
    else Object.assign(element, { [name]: value });
  }
  element.append(...nodesOf(children));
  return element;
}

/** Return the nodes and texts of some children; null, undefined and false are none. @param {Child[]} children */
export function nodesOf(children) {
  const list = /** @type {unknown[]} */ (children).flat(Infinity);
  return /** @type {(Node | string)[]} */ (list.filter((child) => (child ?? false) !== false));
}

/**
 * Create a range input with its label and its value as text.
 * @param {{label: string, min: number, max: number, step?: number, value: number,
 *   format?: (value: number) => string, onInput: (value: number) => void}} options
 * @returns {HTMLElement & {set: (value: number) => void}}
 */
export function slider({ label, min, max, step = 1, value, format = String, onInput }) {
  const output = h("output", null, format(value));
  /** @param {number} number */
  const show = (number) => {
    output.textContent = format(number);
    input.setAttribute("aria-valuetext", format(number));
  };
  const input = h("input", {
    type: "range", min, max, step, value: String(value), "aria-label": label,
    onInput: () => {
      show(Number(input.value));
      onInput(Number(input.value));
    },
  });
  show(value);
  const field = h("label", { class: "field" }, h("span", null, label, output), input);
  /** @param {number} number */
  const set = (number) => {
    input.value = String(number);
    show(number);
  };
  return Object.assign(field, { set });
}

/**
 * Create a drop-down list with its label. Each option is a value and its text.
 * @param {{label: string, options: [string, string][], value: string, onChange: (value: string) => void}} options
 * @returns {HTMLElement & {set: (value: string) => void}}
 */
export function select({ label, options, value, onChange }) {
  const choice = h("select", { onChange: () => onChange(choice.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  const field = h("label", { class: "field" }, h("span", null, label), choice);
  /** @param {string} key */
  const set = (key) => {
    choice.value = key;
  };
  return Object.assign(field, { set });
}

/**
 * Create the switch of a group of which one is pressed. Each option is a value and its text.
 * @param {string} label
 * @param {[string, string][]} options
 * @param {string} value
 * @param {(value: string) => void} onChoose
 */
export function segments(label, options, value, onChoose) {
  return h("div", { class: "segments", role: "group", "aria-label": label }, options.map(([key, text]) =>
    h("button", { type: "button", "aria-pressed": String(key === value), onClick: () => onChoose(key) }, text)));
}

/** Class of a button for a token that does nothing but open the token card. */
export const OPENS_CARD = "opens-card";

/** @type {Record<string, string>} */
const INVISIBLE = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "\\r" };

/**
 * Replace invisible characters and mark them.
 * @param {string} text
 * @returns {{text: string, mark: boolean}[]} runs of characters
 */
export function visible(text) {
  /** @type {{text: string, mark: boolean}[]} */
  const runs = [];
  for (const character of text) {
    const shown = INVISIBLE[character] ?? (/[\p{C}\p{Z}\p{DI}]/u.test(character) ? escaped(character) : null);
    const last = runs.at(-1);
    if (last && last.mark === (shown !== null)) last.text += shown ?? character;
    else runs.push({ text: shown ?? character, mark: shown !== null });
  }
  return runs;
}

/** Return the escape that Python writes. @param {string} character */
function escaped(character) {
  const digits = (character.codePointAt(0) ?? 0).toString(16);
  const [letter, length] = digits.length > 4 ? ["U", 8] : digits.length > 2 ? ["u", 4] : ["x", 2];
  return `\\${letter}${digits.padStart(length, "0")}`;
}

/** Return a text with its invisible characters replaced. @param {string} text */
export function visibleText(text) {
  return visible(text).map((run) => run.text).join("");
}

/**
 * Return the children that show a text with its invisible characters marked.
 * @param {string} text
 * @returns {Child[]}
 */
export function visibleRuns(text) {
  return visible(text).map((run) => (run.mark ? h("i", null, run.text) : run.text));
}

/**
 * Create a chip for a token, with its ID if one is passed. With an ID it is a button: a click chooses the token, and
 * opens the token card unless `onClick` says what else it does.
 * @param {string} text
 * @param {{id?: number, of?: number, onClick?: (event: Event) => void, title?: string}} [options] `of`: an ID that is
 *   not shown
 */
export function token(text, { id, of = id, onClick, title } = {}) {
  const content = text ? visibleRuns(text) : [h("i", null, "no token")];
  if (id !== undefined) content.push(h("small", null, id));
  if (of === undefined && !onClick) return h("span", { class: "token", title }, content);
  const kind = onClick ? "token" : `token ${OPENS_CARD}`;
  return h("button", { class: kind, type: "button", title, onClick, "data-token": of }, content);
}

/**
 * Make a row of buttons one stop of the Tab key, now and when its buttons change: the one that has the focus, else the
 * pressed one, else the first. Arrows, Home and End move the focus, unless a pointer gave it.
 * @template {HTMLElement} Row
 * @param {Row} row
 * @returns {Row}
 */
export function oneTabStop(row) {
  const buttons = () => [...row.querySelectorAll("button")].filter((button) => !button.disabled);
  const mark = () => {
    const all = buttons();
    const stop = all.find((button) => button === document.activeElement)
      ?? all.find((button) => button.getAttribute("aria-pressed") === "true") ?? all[0];
    for (const button of all) button.tabIndex = button === stop ? 0 : -1;
  };
  let isPointed = false;
  row.addEventListener("pointerdown", () => { isPointed = true; });
  row.addEventListener("focusin", mark);
  row.addEventListener("focusout", ({ relatedTarget }) => {
    if (row.contains(/** @type {Node | null} */ (relatedTarget))) return;
    isPointed = false;
    mark();
  });
  row.addEventListener("keydown", (event) => {
    const all = buttons();
    const [at, last] = [all.findIndex((button) => button === document.activeElement), all.length - 1];
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -last, End: last }[event.key];
    if (!by || at < 0 || isPointed || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    all[Math.min(last, Math.max(0, at + by))].focus();
  });
  new MutationObserver(mark).observe(row, { childList: true, subtree: true, attributeFilter: ["aria-pressed"] });
  mark();
  return row;
}

/**
 * Create a region that scrolls, by the keyboard too.
 * @param {string} label
 * @param {string} className
 * @param {...Child} children
 */
export function scroller(label, className, ...children) {
  return h("div", { class: className, role: "region", "aria-label": label, tabIndex: 0 }, children);
}

/**
 * Create the message of an empty view or panel: the reason, and what to do.
 * @param {string} title
 * @param {...(string | Node)} sentence
 */
export function empty(title, ...sentence) {
  return h("div", { class: "empty" }, h("h2", null, title), h("p", null, sentence));
}

/**
 * Create a list of names and values.
 * @param {string} className
 * @param {[Child, ...Child[]][]} entries
 */
export function definitions(className, entries) {
  return h("dl", { class: className }, entries.map(([name, ...value]) =>
    h("div", null, h("dt", null, name), h("dd", null, value))));
}

/**
 * Call `callback(width, height)` now and when the element's size changes; return a function that stops it.
 * @param {Element} element
 * @param {(width: number, height: number) => void} callback
 */
export function onResize(element, callback) {
  const observer = new ResizeObserver(() => callback(element.clientWidth, element.clientHeight));
  observer.observe(element);
  return () => observer.disconnect();
}

/**
 * Set a canvas to as many pixels as the screen has in its place; return its context, scaled to CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width in CSS pixels
 * @param {number} height in CSS pixels
 */
export function fit(canvas, width, height) {
  const scale = Math.min(globalThis.devicePixelRatio || 1, 2);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = contextOf(canvas);
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

/**
 * Return the 2D context of a canvas.
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasRenderingContext2DSettings} [settings]
 * @returns {Context2D}
 */
export function contextOf(canvas, settings) {
  return /** @type {Context2D} */ (canvas.getContext("2d", settings));
}
