/** The token card: a panel about the chosen token, below the view as one line, beside it when opened. */

import { h, token, visibleText } from "../dom.js";
import { factList, listOf, summaryOf, verdict } from "./facts.js";
import { seeIt } from "./links.js";

/** @import { Data, SourceManifest, TokenFacts } from "../types" */

/**
 * @typedef {object} About the source whose token is shown
 * @property {number} source
 * @property {SourceManifest} manifest
 * @property {Data} data
 * @property {boolean} isComparable whether there is a second table to compare with
 * @property {(view: string, changes?: Record<string, any>) => string} hash of a view, with the chosen token
 * @property {(view: string, changes?: Record<string, any>) => void} go to a view
 *
 * @typedef {object} Host
 * @property {(isOpen: boolean) => void} opened the card was opened or closed
 * @property {() => void} dismissed no token is to be chosen
 */

const NEIGHBORS = 20; // as many as the map asks for, so that both share an answer
const SHOWN = 8;

export class TokenCard {
  #request = 0;
  #isOpen = false;
  #shown = ""; // source and token
  /** @type {HTMLElement | null} what had the focus before the card */ #before = null;

  /** @param {HTMLElement} element @param {Host} host */
  constructor(element, host) {
    this.element = element;
    this.host = host;
    this.name = h("span", { class: "card-name" });
    this.summary = h("span", { class: "card-summary" });
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
    const shown = id === null ? "" : `${about.source} ${id}`;
    if (shown === this.#shown) return;
    const request = ++this.#request;
    this.#shown = shown;
    this.element.hidden = id === null;
    if (id === null) return;
    const hadFocus = this.body.contains(document.activeElement);
    /** @type {{texts: string[]}} */
    const { texts } = await about.data.load("tokens");
    if (request !== this.#request) return;
    this.name.replaceChildren(token(texts[id]), h("small", null, `#${id}`));
    this.summary.textContent = "";
    this.toggle.replaceChildren(this.name, this.summary, h("span", { class: "card-mark", "aria-hidden": "true" }));
    this.element.setAttribute("aria-label", `Token card of ${visibleText(texts[id]) || "a row without a token"}`);
    const parts = { facts: h("div"), variants: h("div"), near: h("div"), links: h("div") };
    this.body.replaceChildren(parts.facts, parts.links, parts.variants, parts.near);
    this.body.scrollTop = 0;
    if (hadFocus) this.toggle.focus();
    const isStale = () => request !== this.#request;
    this.#showNeighbours(parts.near, id, texts, about.data, isStale);
    seeIt(id, about).then((links) => isStale() || parts.links.replaceChildren(...links));
    this.#showFacts(parts, id, texts, about, isStale);
  }

  /**
   * @param {{facts: HTMLElement, variants: HTMLElement}} parts
   * @param {number} id
   * @param {string[]} texts
   * @param {About} about
   * @param {() => boolean} isStale
   */
  async #showFacts({ facts: place, variants }, id, texts, { data, manifest }, isStale) {
    place.replaceChildren(h("p", { class: "note" }, "Loading …"));
    try {
      /** @type {TokenFacts} */
      const facts = await data.load("card", { id });
      if (isStale()) return;
      this.summary.textContent = summaryOf(facts);
      place.replaceChildren(verdict(facts, texts), factList(facts, manifest));
      variants.replaceChildren(h("h3", null, "Spelling variants"),
        facts.variants?.length ? listOf(facts.variants, texts, { showIds: true })
          : h("p", { class: "note" }, "No other spelling of it is in the vocabulary."));
    } catch (error) {
      if (!isStale()) place.replaceChildren(missing(error));
    }
  }

  /**
   * @param {HTMLElement} place
   * @param {number} id
   * @param {string[]} texts
   * @param {Data} data
   * @param {() => boolean} isStale
   */
  async #showNeighbours(place, id, texts, data, isStale) {
    /** @type {HTMLElement} */
    let found;
    try {
      const near = await data.load("neighbors", { plus: String(id), minus: "", topn: NEIGHBORS });
      found = listOf(near.slice(0, SHOWN), texts);
    } catch (error) {
      found = missing(error);
    }
    if (!isStale()) place.replaceChildren(h("h3", null, "Nearest by cosine similarity"), found);
  }
}

/** Say why something cannot be shown. @param {unknown} error */
function missing(error) {
  return h("p", { class: "note" }, /** @type {Error} */ (error).message);
}
