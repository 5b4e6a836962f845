/** The token card: a panel about the chosen token, below the view as one line, beside it when opened. */

import { h, token, visibleText } from "../dom.js";
import { factList, listOf, summaryOf, verdict } from "./facts.js";
import { seeIt } from "./links.js";

/** @import { Changes, Data, SourceManifest, TokenFacts } from "../types" */

/**
 * @typedef {object} About the source whose token is shown
 * @property {number} source
 * @property {SourceManifest} manifest
 * @property {Data} data
 * @property {boolean} isComparable whether there is a second table to compare with
 * @property {(view: string, changes?: Changes) => string} hash of a view, with the chosen token
 * @property {(view: string, changes?: Changes) => void} go to a view
 *
 * @typedef {{id: number, texts: string[], about: About, isStale: () => boolean}} Shown
 *
 * @typedef {object} Host
 * @property {(isOpen: boolean) => void} opened the card was opened or closed
 * @property {() => void} dismissed no token is to be chosen
 */

const NEIGHBORS = 20; // as many as the map asks for, so that both share an answer
const SHOWN = 8;

export class TokenCard {
  #isOpen = false;
  #key = ""; // source and token
  /** @type {Shown | null} */ #shown = null;
  /** @type {HTMLElement | null} what had the focus before the card */ #before = null;

  /** @param {HTMLElement} element @param {Host} host */
  constructor(element, host) {
    this.element = element;
    this.host = host;
    this.toggle = h("button", {
      type: "button", class: "card-toggle", "aria-controls": "card-body", onClick: () => this.setOpen(!this.#isOpen),
    });
    const dismiss = h("button", {
      type: "button", class: "icon", title: "Choose no token", "aria-label": "Choose no token",
      onClick: () => host.dismissed(),
    }, "×");
    this.body = h("div", {
      id: "card-body", class: "card-body", role: "region", "aria-label": "Facts about the token",
    });
    element.replaceChildren(h("div", { class: "card-line" }, this.toggle, dismiss), this.body);
    this.setOpen(false);
  }

  /** Whether all is shown, not one line. */
  get isOpen() {
    return this.#isOpen;
  }

  /** Show all, or one line. @param {boolean} isOpen */
  setOpen(isOpen) {
    const isNews = isOpen !== this.#isOpen;
    this.#isOpen = isOpen;
    this.body.hidden = !isOpen;
    this.element.classList.toggle("is-open", isOpen);
    this.toggle.setAttribute("aria-expanded", String(isOpen));
    this.toggle.title = isOpen ? "Close the token card (c, Esc)" : "Open the token card (c)";
    if (isOpen) this.#fill();
    if (isNews) this.host.opened(isOpen);
  }

  /** Open or close the card by a key: the focus goes into it, and back. @param {boolean} isOpen */
  setOpenByKey(isOpen) {
    if (this.element.hidden) return;
    const { activeElement } = document;
    const isInside = this.element.contains(activeElement);
    if (isOpen && !isInside) this.#before = /** @type {HTMLElement | null} */ (activeElement);
    this.setOpen(isOpen);
    if (isOpen) this.toggle.focus();
    else if (isInside) this.#before?.focus();
  }

  /** Show a token; null shows none. @param {number | null} id @param {About} about */
  async show(id, about) {
    const key = id === null ? "" : `${about.source} ${id}`;
    if (key === this.#key) return;
    this.#key = key;
    this.#shown = null;
    this.element.hidden = id === null;
    if (id === null) return;
    /** @type {{texts: string[]}} */
    const { texts } = await about.data.load("tokens");
    if (key !== this.#key) return;
    this.#shown = { id, about, texts, isStale: () => key !== this.#key };
    this.#showLine(this.#shown);
    const hadFocus = this.body.contains(document.activeElement);
    this.body.replaceChildren();
    if (this.#isOpen) this.#fill();
    if (hadFocus) this.toggle.focus();
  }

  /** @param {Shown} shown */
  #showLine({ id, about, texts, isStale }) {
    const summary = h("span", { class: "card-summary" });
    this.toggle.replaceChildren(
      h("span", { class: "card-name" }, token(texts[id]), h("small", null, `#${id}`)), summary,
      h("span", { class: "card-mark", "aria-hidden": "true" }));
    this.element.setAttribute("aria-label", `Token card of ${visibleText(texts[id]) || "a row without a token"}`);
    about.data.load("card", { id }).then((facts) => {
      if (!isStale()) summary.textContent = summaryOf(facts);
    }, () => {}); // the opened card says why
  }

  /** Show all about the token, once. */
  #fill() {
    if (!this.#shown || this.body.hasChildNodes()) return;
    const [facts, links, variants, near] = [h("div"), h("div"), h("div"), h("div")];
    this.body.replaceChildren(facts, links, variants, near);
    this.body.scrollTop = 0;
    showFacts(this.#shown, facts, variants);
    showLinks(this.#shown, links);
    showNeighbours(this.#shown, near);
  }
}

/** @param {Shown} shown @param {HTMLElement} place @param {HTMLElement} variants the place of the spelling variants */
async function showFacts({ id, texts, about: { data, manifest }, isStale }, place, variants) {
  place.replaceChildren(h("p", { class: "note" }, "Loading …"));
  try {
    /** @type {TokenFacts} */
    const facts = await data.load("card", { id });
    if (isStale()) return;
    place.replaceChildren(verdict(facts, texts), factList(facts, manifest));
    variants.replaceChildren(h("h3", null, "Spelling variants"),
      facts.variants?.length ? listOf(facts.variants, texts, { showIds: true })
        : h("p", { class: "note" }, "No token differs from it in case, space or marker alone."));
  } catch (error) {
    if (!isStale()) place.replaceChildren(missing(/** @type {Error} */ (error)));
  }
}

/** @param {Shown} shown @param {HTMLElement} place */
async function showLinks({ id, about, isStale }, place) {
  const links = await seeIt(id, about);
  if (!isStale()) place.replaceChildren(...links);
}

/** @param {Shown} shown @param {HTMLElement} place */
async function showNeighbours({ id, texts, about: { data }, isStale }, place) {
  const found = await data.load("neighbors", { plus: String(id), minus: "", topn: NEIGHBORS })
    .then((near) => listOf(near.slice(0, SHOWN), texts), missing);
  if (!isStale()) place.replaceChildren(h("h3", null, "Nearest by cosine similarity"), found);
}

/** Say why something cannot be shown. @param {Error} error */
function missing({ message }) {
  return h("p", { class: "note" }, message);
}
