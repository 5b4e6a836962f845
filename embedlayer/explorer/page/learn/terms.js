/** Special words in the texts of the story: buttons that show a definition, by pointer, touch and keyboard. */

import { h } from "../dom.js";
import { GLOSSARY } from "./glossary.js";

/** @import { Child } from "../types" */

const WORD = new RegExp(GLOSSARY.map(([, pattern], i) =>
  `(?<t${i}>(?<![\\p{L}\\p{N}_.])(?:${pattern})(?![\\p{L}\\p{N}_]))`).join("|"), "giu");
const MARGIN = 8; // pixels between a definition and the window's edge
const BOX = "learn-definition";

/**
 * Split a text into strings and buttons of special words, each word once.
 * @param {string} text
 * @param {Set<string>} seen names of words that need no button; the words of this text are added
 * @returns {Child[]}
 */
export function withTerms(text, seen) {
  const parts = /** @type {Child[]} */ ([]);
  let end = 0;
  for (const match of text.matchAll(WORD)) {
    const index = Number(Object.entries(match.groups ?? {}).find(([, found]) => found)?.[0].slice(1));
    const [name] = GLOSSARY[index];
    if (seen.has(name)) continue;
    seen.add(name);
    parts.push(text.slice(end, match.index), termButton(name, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

/**
 * Create the list of special words that a scene shows outside of its sentences; null if all were explained.
 * @param {string[]} names
 * @param {Set<string>} seen
 */
export function termLine(names, seen) {
  const rest = names.filter((name) => !seen.has(name));
  rest.forEach((name) => seen.add(name));
  if (!rest.length) return null;
  return h("p", { class: "note learn-words" }, "Words in the picture: ",
    rest.flatMap((name, i) => [i ? ", " : "", termButton(name, name)]));
}

/** @param {string} name @param {string} text */
function termButton(name, text) {
  return h("button", {
    type: "button", class: "learn-term", "aria-expanded": "false", "aria-controls": BOX, "data-term": name,
  }, text);
}

/** Create the box of definitions for an element that holds special words. @param {HTMLElement} root */
export function definitionBox(root) {
  const element = h("div", { id: BOX, class: "learn-definition", popover: "manual", role: "status" });
  /** @type {HTMLElement | null} */
  let shown = null;
  const hide = () => {
    if (shown?.isConnected) shown.setAttribute("aria-expanded", "false");
    if (shown) element.hidePopover();
    shown = null;
  };
  const onClick = (/** @type {MouseEvent} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const button = /** @type {HTMLElement | null} */ (target.closest?.(".learn-term"));
    if (!button && target.closest?.(`#${BOX}`)) return;
    const isSame = button === shown;
    hide();
    if (!button || isSame || !root.contains(button)) return;
    shown = button;
    show(element, button);
  };
  const onKey = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape" || !shown) return;
    event.preventDefault();
    hide();
  };
  const panel = root.closest("#view");
  document.addEventListener("click", onClick);
  document.addEventListener("keydown", onKey, true);
  panel?.addEventListener("scroll", hide);
  const close = () => {
    hide();
    document.removeEventListener("click", onClick);
    document.removeEventListener("keydown", onKey, true);
    panel?.removeEventListener("scroll", hide);
  };
  return { element, hide, close };
}

/** Show the definition of a word under its button, or above it. @param {HTMLElement} box @param {HTMLElement} button */
function show(box, button) {
  const [name, , definition] = GLOSSARY.find(([each]) => each === button.dataset.term) ?? ["", "", ""];
  box.replaceChildren(h("b", null, name), " ", definition);
  box.showPopover();
  button.setAttribute("aria-expanded", "true");
  const [at, size] = [button.getBoundingClientRect(), box.getBoundingClientRect()];
  const below = at.bottom + MARGIN / 2;
  const fits = below + size.height + MARGIN <= innerHeight;
  box.style.top = `${fits ? below : Math.max(MARGIN, at.top - size.height - MARGIN / 2)}px`;
  box.style.left = `${Math.max(MARGIN, Math.min(at.left, innerWidth - size.width - MARGIN))}px`;
}
