/** Small builders for elements: what every room makes its controls from. */

/**
 * An element. `properties` that start with "on" are listeners, `class`, `aria-*`, `data-*`, `role`, `for` and names of
 * attributes that are no properties are set as attributes, the rest as properties.
 * @param {string} tag
 * @param {Record<string, any> | null} [properties]
 * @param {...(Node | string | number | null | undefined | false | any[])} children
 * @returns {HTMLElement}
 */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "class" || name === "role" || name.includes("-") || !(name in element)) element.setAttribute(name, value === true ? "" : value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * A range with its label and its value as text.
 * @param {{label: string, min: number, max: number, step?: number, value: number, format?: (value: number) => string,
 *   onInput: (value: number) => void}} options
 * @returns {HTMLElement & {set: (value: number) => void}}
 */
export function slider({ label, min, max, step = 1, value, format = String, onInput }) {
  const output = h("output", null, format(value));
  const input = h("input", {
    type: "range", min, max, step, value: String(value), "aria-label": label,
    onInput: () => { show(Number(input.value)); onInput(Number(input.value)); },
  });
  const show = (number) => { output.textContent = format(number); input.setAttribute("aria-valuetext", format(number)); };
  show(value);
  const field = h("label", { class: "field" }, h("span", null, label, output), input);
  return Object.assign(field, { set: (number) => { input.value = String(number); show(number); } });
}

/**
 * A choice with its label.
 * @param {{label: string, options: [string, string][], value: string, onChange: (value: string) => void}} options
 *   each option a value and a text
 * @returns {HTMLElement & {set: (value: string) => void}}
 */
export function select({ label, options, value, onChange }) {
  const choice = h("select", { onChange: () => onChange(choice.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  const field = h("label", { class: "field" }, h("span", null, label), choice);
  return Object.assign(field, { set: (key) => { choice.value = key; } });
}

const UNSEEN = { " ": "·", "\n": "⏎", "\t": "⇥" };

/**
 * A text's characters, the unseen ones replaced and marked.
 * @param {string} text
 * @returns {{text: string, mark: boolean}[]} runs
 */
export function visible(text) {
  const runs = [];
  for (const character of text) {
    const shown = UNSEEN[character] ?? (/[\p{C}\p{Z}]/u.test(character) ? escaped(character) : null);
    const last = runs.at(-1);
    if (last && last.mark === (shown !== null)) last.text += shown ?? character;
    else runs.push({ text: shown ?? character, mark: shown !== null });
  }
  return runs;
}

function escaped(character) {
  return "\\u" + character.codePointAt(0).toString(16).padStart(4, "0");
}

/** A text with its unseen characters shown, as plain text. @param {string} text */
export function visibleText(text) {
  return visible(text).map((run) => run.text).join("");
}

/**
 * A token as a chip: unseen characters marked, its ID behind if given; a button if `onClick` is given.
 * @param {string} text
 * @param {{id?: number, onClick?: (event: Event) => void, title?: string}} [options]
 */
export function token(text, { id, onClick, title } = {}) {
  const content = visible(text).map((run) => (run.mark ? h("i", null, run.text) : run.text));
  if (!content.length) content.push(h("i", null, "no token"));
  if (id !== undefined) content.push(h("small", null, id));
  return onClick ? h("button", { class: "token", type: "button", title, onClick }, content) : h("span", { class: "token", title }, content);
}

/**
 * What stands where there is nothing to show: why, and what to do.
 * @param {string} title
 * @param {...(string | Node)} sentence
 */
export function empty(title, ...sentence) {
  return h("div", { class: "empty" }, h("h2", null, title), h("p", null, sentence));
}

/**
 * Call `callback(width, height)` now and when the element's size changes; returns how to stop.
 * @param {Element} element
 * @param {(width: number, height: number) => void} callback
 */
export function onResize(element, callback) {
  const observer = new ResizeObserver(() => callback(element.clientWidth, element.clientHeight));
  observer.observe(element);
  return () => observer.disconnect();
}

/**
 * Give a canvas as many pixels as the screen shows there; returns its context, scaled to CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width in CSS pixels
 * @param {number} height
 */
export function fit(canvas, width, height) {
  const scale = Math.min(globalThis.devicePixelRatio || 1, 2);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
