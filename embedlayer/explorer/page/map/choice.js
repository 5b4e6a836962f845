/** The selected tokens of the map: choosing them, their nearest neighbours, and sums that are typed. */

import { visibleText } from "../dom.js";
import { idsByText, parseExpression, variants } from "./search.js";
import { idsOf, isEmpty, selectedTokens, sumParams } from "./selection.js";
import { subwordsOf } from "./subwords.js";

/** @import { Neighbor, TokenSum, ViewContext } from "../types" */
/** @import { Subwords } from "./subwords.js" */

/**
 * @typedef {object} Host
 * @property {(isTyped: boolean) => void} chosen other tokens were chosen; `isTyped`: the field keeps what is in it
 * @property {() => void} changed neighbours are awaited, or subwords are there
 */

const NEIGHBORS = 20;

export class Choice {
  /** @type {Neighbor[]} */ near = [];
  problem = "";
  #replaced = ""; // says of which typed text another spelling was selected
  /** @type {Subwords[]} */ subwords = []; // of the typed texts that are no tokens
  #request = 0;
  #loading = -1; // the request that waits for neighbours
  #isClosed = false;

  /** @param {ViewContext} context @param {string[]} texts @param {Host} host */
  constructor(context, texts, host) {
    this.context = context;
    this.texts = texts;
    this.host = host;
  }

  close() {
    this.#isClosed = true;
  }

  /** Return the selected tokens. */
  get sum() {
    return selectedTokens(this.context.state, this.texts.length);
  }

  get isLoading() {
    return this.#loading === this.#request;
  }

  /** Begin a change; the result says whether it is still the last one. */
  begin() {
    const request = ++this.#request;
    return () => request === this.#request && !this.#isClosed;
  }

  /** Select the token that is chosen in the page; if there is none, choose there what the URL selects. */
  agree() {
    const { state, token } = this.context;
    const [id, ids] = [token.get(), idsOf(this.sum)];
    if (id === null) token.choose(ids[0] ?? null);
    else if (!ids.includes(id)) state.set({ ...sumParams({ plus: [id], minus: [] }), at: null });
  }

  /** @param {TokenSum} sum @param {boolean} [isTyped] whether the field keeps what is typed in it */
  choose(sum, isTyped = false) {
    const { state, token } = this.context;
    const ids = idsOf(sum);
    state.set(sumParams(sum));
    if (!ids.includes(token.get() ?? -1)) token.choose(ids[0] ?? null);
    this.host.chosen(isTyped);
  }

  /** Load the neighbours of the selected tokens; return whether nothing else was chosen meanwhile. */
  async load() {
    const isLast = this.begin();
    const [request, { sum }] = [this.#request, this];
    this.subwords = [];
    [this.problem, this.#replaced] = [this.#replaced, ""];
    if (isEmpty(sum)) {
      this.near = [];
      return true;
    }
    this.#loading = request;
    this.host.changed();
    try {
      const near = await this.context.data.load("neighbors", { ...sumParams(sum), topn: NEIGHBORS });
      if (isLast()) this.near = near;
    } catch (error) {
      if (isLast()) [this.near, this.problem] = [[], /** @type {Error} */ (error).message];
    } finally {
      if (this.#loading === request) this.#loading = -1;
    }
    return isLast();
  }

  /** Return the IDs that the last term of a sum can mean. @param {string} text */
  meant(text) {
    const last = parseExpression(text).at(-1);
    return last ? variants(last.text, idsByText(this.texts)).filter((id) => id < this.texts.length) : [];
  }

  /** Select a typed sum; nothing if a term is no token. @param {string} text @param {number} [last] its last ID */
  typed(text, last) {
    const terms = parseExpression(text).map((term, i, all) =>
      ({ ...term, id: (i === all.length - 1 ? last : undefined) ?? variants(term.text, idsByText(this.texts))[0] }));
    const unknown = terms.filter(({ id }) => id === undefined || id >= this.texts.length);
    if (unknown.length) {
      this.choose({ plus: [], minus: [] }, true);
      this.offerSubwords(unknown.map((term) => term.text));
      return;
    }
    /** @param {number} sign */
    const ofSign = (sign) => terms.filter((term) => term.sign === sign).map(({ id }) => id);
    const bare = last !== undefined ? [] : terms.filter(({ text: term, id }) =>
      /^[ ·]+[^ ·#]/.test(term) && !this.texts[id].startsWith(" "));
    this.#replaced = bare.map(({ text: term, id }) =>
      `No token is “${visibleText(term)}” with its space, so “${visibleText(this.texts[id])}” is selected.`).join(" ");
    this.choose({ plus: ofSign(1), minus: ofSign(-1) });
  }

  /** Offer the subwords of texts that are no tokens. @param {string[]} texts */
  async offerSubwords(texts) {
    const isLast = this.begin();
    const { data, manifest } = this.context;
    const hasTokenizer = manifest.has.includes("tokenizer");
    const different = [...new Set(texts.map((text) => text.trim()))];
    const subwords = await Promise.all(different.map((text) => subwordsOf(data, text, hasTokenizer)));
    if (!isLast()) return;
    this.subwords = subwords;
    this.host.changed();
  }
}
