/** Beside the map: what is chosen, what lies near it, and what was found. */

import { empty, h, token, visibleText } from "../dom.js";
import { KINDS, hex } from "./groups.js";

const LISTED = 200;

/**
 * @typedef {import("./groups.js").Groups} Groups
 * @typedef {object} Shown
 * @property {number[]} plus @property {number[]} minus what is chosen: a sum of tokens
 * @property {[number, number][]} near IDs and cosines
 * @property {Int32Array | null} found
 * @property {boolean} isolated whether only what was found is on the map
 * @property {"near" | "found"} tab @property {string} problem @property {boolean} loading
 * @property {string} expression what is chosen, as text
 *
 * @typedef {object} On
 * @property {(plus: number[], minus?: number[]) => void} choose
 * @property {(typed: string, field: HTMLElement, last?: number) => void} typed a sum was typed; `last`: the ID that its
 *   last term means, where the person chose among several
 * @property {(typed: string) => number[]} meant IDs that the last term of a sum can mean, best first
 * @property {(tab: "near" | "found") => void} tab
 * @property {() => void} isolate
 * @property {(id: number) => void} point a token has the pointer or the focus
 * @property {() => void} leave
 */

/**
 * @param {{texts: string[], kind: Groups, columns: any, inOrder: () => Int32Array, notes: string[]}} about
 *   `inOrder`: tokens as they get their names
 * @param {On} on
 * @returns {{element: HTMLElement, show: (shown: Shown) => void}}
 */
export function makeSide({ texts, kind, columns, inOrder, notes }, on) {
  const element = h("aside", { class: "panel map-side", "aria-label": "Chosen tokens and their neighbours" });
  let now = null;

  function show(shown) {
    now = shown;
    const { plus, minus, near, found, tab, problem, loading, expression } = shown;
    const focused = document.activeElement?.id === "expression";
    const field = h("input", { id: "expression", type: "text", value: expression, placeholder: "king − man + woman", spellcheck: false, autocomplete: "off",
      onInput: () => offers.replaceChildren(...offered(field)),
      onKeydown: (event) => { if (event.key === "Enter") on.typed(field.value, field); } });
    const offers = h("div", { class: "map-offers", role: "group", "aria-label": "Tokens written so" }, offered(field));
    const parts = [h("label", { class: "field" }, h("span", null, "Near what? One token, or a sum"), field), offers];
    if (problem) parts.push(h("p", { class: "note", role: "status" }, problem));
    if (plus.length === 1 && !minus.length) parts.push(card(plus[0]));
    else if (plus.length + minus.length) parts.push(terms(plus, minus));
    if (found) parts.push(h("div", { class: "segments", role: "group", "aria-label": "Which list" }, ["near", "found"].map((which) =>
      h("button", { type: "button", "aria-pressed": String(tab === which), onClick: () => on.tab(which) }, which === "near" ? "Neighbours" : `Found ${found.length.toLocaleString("en")}`))));
    if (tab === "found" && found) parts.push(foundList());
    else if (loading && !near.length) parts.push(h("p", { class: "note" }, "Looking through all rows …"));
    else if (near.length) parts.push(h("ol", { class: "near", "aria-label": "Nearest tokens, by cosine" }, near.map(([id, score]) => row(id, score))));
    else if (!plus.length && !minus.length) parts.push(suggestions());
    if (notes.length) parts.push(h("p", { class: "note" }, notes.join(" ")));
    element.replaceChildren(...parts);
    if (focused) field.focus();
  }

  /** Where the last term is written as several tokens are, a button for each: the text alone cannot say which. */
  function offered(field) {
    const ids = on.meant(field.value);
    if (ids.length < 2) return [];
    return ids.map((id) => token(texts[id], { id, title: "Choose this token", onClick: () => on.typed(field.value, field, id) }));
  }

  /** Take a token into the sum with a sign, or out of it with 0. */
  function toggle(id, sign) {
    const without = (list) => list.filter((other) => other !== id);
    const [plus, minus] = [without(now.plus), without(now.minus)];
    on.choose(sign > 0 ? [...plus, id] : plus, sign < 0 ? [...minus, id] : minus);
  }

  function terms(plus, minus) {
    return h("div", { class: "terms" }, [...plus.map((id) => [id, "+"]), ...minus.map((id) => [id, "−"])].map(([id, sign]) =>
      h("span", { class: "term" }, sign, token(texts[id], { id, onClick: () => on.choose([id]) }), h("button", { type: "button", "aria-label": `Leave out ${visibleText(texts[id])}`, onClick: () => toggle(id, 0) }, "×"))));
  }

  function card(id) {
    const frequency = columns.known("frequency");
    const facts = [["ID", id.toLocaleString("en")], ["Bytes", hex(texts[id]) || "none"], ["Kind", KINDS[kind.of[id]]], ["Norm", columns.known("norm").values[id].toFixed(3)]];
    if (frequency) facts.push(["Seen", `${Math.round(10 ** frequency.values[id] - 1).toLocaleString("en")} times in the text`]);
    return h("div", { class: "map-card" }, token(texts[id]), h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
  }

  function row(id, score) {
    const item = h("li", null,
      h("button", { type: "button", onClick: () => on.choose([id]), onMouseenter: () => on.point(id), onMouseleave: on.leave, onFocus: () => on.point(id), onBlur: on.leave },
        token(texts[id]), h("span", { class: "score" }, score === null ? `#${id}` : score.toFixed(3))),
      h("button", { type: "button", class: "term-button", "aria-label": `Add ${visibleText(texts[id])}`, title: "Add to the sum", onClick: () => toggle(id, 1) }, "+"),
      h("button", { type: "button", class: "term-button", "aria-label": `Subtract ${visibleText(texts[id])}`, title: "Subtract from the sum", onClick: () => toggle(id, -1) }, "−"));
    item.style.setProperty("--share", String(Math.max(0, score ?? 0)));
    return item;
  }

  function foundList() {
    const { found, isolated } = now;
    if (!found.length) return empty("Nothing found", "Try a shorter text, or a pattern between slashes.");
    const isolate = h("button", { type: "button", "aria-pressed": String(isolated), onClick: on.isolate }, "Isolate");
    const copy = h("button", { type: "button", onClick: () => copyText([...found].map((id) => `${id}\t${texts[id]}`).join("\n"), copy) }, "Copy");
    return h("div", null, h("div", { class: "side-head" },
      h("p", { class: "note" }, found.length > LISTED ? `The first ${LISTED} of ${found.length.toLocaleString("en")}` : ""), h("div", { class: "segments" }, isolate, copy)),
    h("ol", { class: "near" }, [...found.subarray(0, LISTED)].map((id) => row(id, null))));
  }

  function suggestions() {
    const some = [...inOrder().subarray(0, 400)].filter((id) => kind.of[id] <= 1 && texts[id].trim().length > 3).filter((_, i) => i % 12 === 3).slice(0, 10);
    return h("div", null, h("p", { class: "note" }, "Choose a point, type a token, or begin with one of these. + and − beside a neighbour make a sum: a − b + c."),
      h("div", { class: "chips" }, some.map((id) => token(texts[id], { onClick: () => on.choose([id]) }))));
  }

  return { element, show };
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
}
