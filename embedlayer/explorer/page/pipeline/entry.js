/** The text field of the view Pipeline, or the list of texts of an exported page. */

import { h, oneTabStop, select } from "../dom.js";

/** @typedef {{element: HTMLElement, set: (text: string) => void}} Entry */

/**
 * Create a text field with example texts.
 * @param {string[]} texts
 * @param {string} placeholder
 * @param {(text: string) => void} onText
 * @returns {Entry}
 */
export function textField(texts, placeholder, onText) {
  const input = h("input", {
    type: "text", id: "pipe-text", maxLength: 4000, autocomplete: "off", spellcheck: false, placeholder,
    onInput: () => onText(input.value),
  });
  const examples = texts.map((text) => h("button", {
    type: "button", class: "pipe-example",
    onClick: () => {
      input.value = text;
      onText(text);
    },
  }, text));
  return {
    element: h("div", { class: "pipe-entry" }, h("label", { for: "pipe-text" }, "Text"), input,
      oneTabStop(h("div", { class: "pipe-examples", role: "group", "aria-label": "Example texts" }, examples))),
    set: (text) => {
      if (input.value !== text) input.value = text;
    },
  };
}

/**
 * Create the list of the texts that an exported page contains.
 * @param {string[]} texts
 * @param {(text: string) => void} onText
 * @returns {Entry}
 */
export function textList(texts, onText) {
  const choice = select({
    label: "Text", options: texts.map((text) => [text, text]), value: texts[0] ?? "", onChange: onText,
  });
  const note = "This is an exported page: it contains these texts only. Other texts need the model: "
    + "embedlayer explore DIR.";
  return { element: h("div", { class: "pipe-entry" }, choice, h("p", { class: "note" }, note)), set: choice.set };
}
