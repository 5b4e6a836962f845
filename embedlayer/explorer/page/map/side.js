/** The panel beside the map: the selection, its nearest neighbours, and the tokens that were found. */

import { empty, h, nodesOf, oneTabStop, segments, token, visibleText } from "../dom.js";
import { sumText } from "../examples.js";
import { changed, formatHash } from "../state.js";
import { KIND, hex } from "./groups.js";
import { isEmpty, sumParams } from "./selection.js";
import { subwordButtons } from "./subwords.js";
import { download, toTsv } from "./tsv.js";

/** @import { Child, Groups, TokenSum } from "../types" */
/** @import { FoundExamples } from "../examples.js" */
/** @import { Columns } from "./columns.js" */
/** @import { Subwords } from "./subwords.js" */

const LISTED = 200;
const SUGGESTED = 10;
const MOST_FREQUENT = 300;

/**
 * @typedef {"near" | "found"} Tab
 *
 * @typedef {object} Shown
 * @property {TokenSum} sum the selection
 * @property {[id: number, cosine: number][]} near
 * @property {Int32Array | null} found
 * @property {boolean} isIsolated whether only the found tokens are on the map
 * @property {Tab} tab
 * @property {string} problem
 * @property {Subwords[]} subwords of the typed texts that are no tokens; the panel then shows nothing else
 * @property {boolean} isLoading
 * @property {(id: number) => boolean} isFolded whether a row is not in the neighbour layout: not learned, zero, or NaN
 *
 * @typedef {object} Host
 * @property {(sum: TokenSum) => void} choose
 * @property {(typed: string, last?: number) => void} typed a sum was typed; `last`: the ID of its last term, where the
 *   user chose among several
 * @property {(typed: string) => number[]} meant IDs that the last term of a sum can mean, best first
 * @property {(tab: Tab) => void} showTab
 * @property {() => void} isolate
 * @property {(id: number) => void} point a token has the pointer or the focus
 * @property {() => void} leave
 *
 * @typedef {object} About
 * @property {string[]} texts
 * @property {Groups} kind
 * @property {Columns} columns
 * @property {() => Int32Array} inOrder tokens in the order in which they are named
 * @property {string[]} notes
 */

export class Side {
  /** @type {Shown | null} */ #shown = null;
  /** @type {FoundExamples | null} */ #examples = null;

  /** @param {About} about @param {Host} host */
  constructor(about, host) {
    this.about = about;
    this.host = host;
    this.input = h("input", {
      id: "expression", type: "text", placeholder: "a token, or #17", spellcheck: false, autocomplete: "off",
      onInput: () => this.#offer(),
      onKeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter") host.typed(this.input.value);
      },
    });
    this.offers = oneTabStop(h("div", { class: "map-offers", role: "group", "aria-label": "Tokens with this text" }));
    this.answer = h("div", { class: "map-answer" });
    const name = "Selected tokens and their neighbours";
    this.element = h("section", { class: "panel map-side", tabIndex: 0, "aria-label": name },
      h("label", { class: "field" }, h("span", null, "Nearest rows of a token or a sum a − b + c"), this.input),
      this.offers, this.answer);
  }

  /** Write a selection into the field; never while only its neighbours arrive. @param {string} expression */
  write(expression) {
    this.input.value = expression;
    this.#offer();
  }

  /** @param {Shown} shown */
  show(shown) {
    this.#shown = shown;
    const { subwords } = shown;
    const parts = subwords.length ? subwords.map((each) => this.#subwords(each)) : this.#answer(shown);
    if (this.about.notes.length) parts.push(h("p", { class: "note" }, this.about.notes.join(" ")));
    this.answer.replaceChildren(...nodesOf(parts));
  }

  /** @param {Subwords} subwords @returns {Child} */
  #subwords(subwords) {
    return subwordButtons(subwords, this.about.texts, (ids) => this.host.choose({ plus: ids, minus: [] }));
  }

  /** Return the selection with its neighbours, or what was found. @param {Shown} shown */
  #answer(shown) {
    const { sum, found, tab, problem } = shown;
    /** @type {Child[]} */
    const parts = [];
    if (problem) parts.push(h("p", { class: "note", role: "status" }, problem));
    if (sum.plus.length === 1 && !sum.minus.length) parts.push(this.#card(sum.plus[0]));
    else if (!isEmpty(sum)) parts.push(this.#terms(sum));
    if (found) {
      parts.push(segments("List", [["near", "Neighbours"], ["found", `Found ${found.length.toLocaleString("en")}`]],
        tab, (which) => this.host.showTab(/** @type {Tab} */ (which))));
    }
    parts.push(tab === "found" && found ? this.#foundList(found, shown.isIsolated) : this.#neighbours(shown));
    return parts;
  }

  /** Offer a button for each token that the last term can mean, if there are several. */
  #offer() {
    const ids = this.host.meant(this.input.value);
    this.offers.replaceChildren(...(ids.length < 2 ? [] : ids.map((id) => token(this.about.texts[id], {
      id, title: "Select this token", onClick: () => {
        this.host.typed(this.input.value, id);
        this.input.focus();
      },
    }))));
  }

  /** Add a token to the sum with a sign, or remove it with 0. @param {number} id @param {-1 | 0 | 1} sign */
  #toggle(id, sign) {
    const { plus, minus } = /** @type {Shown} */ (this.#shown).sum;
    /** @param {number[]} list @param {number} own */
    const changed = (list, own) => [...list.filter((other) => other !== id), ...(sign === own ? [id] : [])];
    this.host.choose({ plus: changed(plus, 1), minus: changed(minus, -1) });
  }

  /** @param {number} id */
  #chooseOne(id) {
    this.host.choose({ plus: [id], minus: [] });
  }

  /** @param {TokenSum} sum */
  #terms({ plus, minus }) {
    const { texts } = this.about;
    /** @param {number} id @param {string} sign */
    const term = (id, sign) => h("span", { class: "term" }, sign,
      token(texts[id], { id, onClick: () => this.#chooseOne(id) }),
      h("button", {
        type: "button", "aria-label": `Remove ${visibleText(texts[id])}`, onClick: () => this.#toggle(id, 0),
      }, "×"));
    return h("div", { class: "terms" }, plus.map((id) => term(id, "+")), minus.map((id) => term(id, "−")));
  }

  /** @param {number} id */
  #card(id) {
    const { texts, kind, columns } = this.about;
    const frequency = columns.frequency();
    const facts = [
      ["ID", id.toLocaleString("en")],
      ...(columns.hasTokens ? [["Bytes", hex(texts[id]) || "none"], ["Kind", kind.names[kind.of[id]]]] : []),
      ["Norm", columns.norms.values[id].toFixed(3)],
    ];
    if (frequency) {
      const count = Math.round(10 ** frequency.values[id] - 1);
      facts.push(["Frequency", `${count.toLocaleString("en")} occurrences in the corpus`]);
    }
    return h("div", { class: "map-card" }, token(texts[id], { of: id, title: "Open the token card (c)" }),
      h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
      this.#shown?.isFolded(id) ? h("p", { class: "note" }, `${whyFolded(columns.norms.values[id])}, so the neighbour `
        + "layout leaves it out. ", h("a", { href: "#health" }, "See it in Health")) : null);
  }

  /** @param {Shown} shown @returns {Child} */
  #neighbours({ sum, near, isLoading }) {
    if (isLoading && !near.length) return h("p", { class: "note" }, "Searching all rows …");
    if (near.length) {
      return h("div", null,
        h("div", { class: "side-head" }, h("p", { class: "note" }, "Nearest by cosine similarity"),
          this.#downloadButton(near.map(([id]) => id), "neighbours.tsv")),
        h("ol", { class: "near", "aria-label": "Nearest tokens by cosine similarity" },
          near.map(([id, cosine]) => this.#row(id, cosine))));
    }
    return isEmpty(sum) ? this.#suggestions() : null;
  }

  /** @param {number} id @param {number | null} cosine */
  #row(id, cosine) {
    const { host, about: { texts } } = this;
    const name = visibleText(texts[id]);
    /** @param {string} label @param {string} title @param {string} text @param {-1 | 1} sign */
    const signButton = (label, title, text, sign) => h("button", {
      type: "button", class: "term-button", "aria-label": label, title, onClick: () => this.#toggle(id, sign),
    }, text);
    const item = h("li", null,
      h("button", {
        type: "button", "data-token": id, onClick: () => this.#chooseOne(id), onMouseenter: () => host.point(id),
        onMouseleave: host.leave, onFocus: () => host.point(id), onBlur: host.leave,
      }, token(texts[id]), h("span", { class: "score" }, cosine === null ? `#${id}` : cosine.toFixed(3))),
      signButton(`Add ${name}`, "Add to the sum", "+", 1),
      signButton(`Subtract ${name}`, "Subtract from the sum", "−", -1));
    item.style.setProperty("--share", String(Math.max(0, cosine ?? 0)));
    return item;
  }

  /** @param {Int32Array} found @param {boolean} isIsolated @returns {Child} */
  #foundList(found, isIsolated) {
    const { texts } = this.about;
    if (!found.length) return empty("Nothing found", "Try a shorter text, or a regular expression between slashes.");
    const isolate = h("button", {
      type: "button", "aria-pressed": String(isIsolated), title: "Show these tokens only", onClick: this.host.isolate,
    }, "Isolate");
    const copy = h("button", {
      type: "button", onClick: () => copyText([...found].map((id) => `${id}\t${texts[id]}`).join("\n"), copy),
    }, "Copy");
    const count = found.length > LISTED ? `The first ${LISTED} of ${found.length.toLocaleString("en")}` : "";
    return h("div", null,
      h("div", { class: "side-head" }, h("p", { class: "note" }, count),
        h("div", { class: "segments" }, isolate, copy, this.#downloadButton(found, "found.tsv"))),
      h("ol", { class: "near" }, [...found.subarray(0, LISTED)].map((id) => this.#row(id, null))));
  }

  /** @param {Iterable<number>} ids @param {string} name of the file */
  #downloadButton(ids, name) {
    const { texts, columns } = this.about;
    const cosines = new Map(/** @type {Shown} */ (this.#shown).near);
    return h("button", {
      type: "button", title: "Download this list as a TSV file", onClick: () =>
        download(toTsv(ids, texts, columns, cosines), name),
    }, "TSV");
  }

  /** Return some words of a table about something unknown; the most frequent are words such as "the". */
  #frequentWords() {
    const { texts, kind, inOrder } = this.about;
    const words = [...inOrder().subarray(0, 4 * MOST_FREQUENT)].filter((id) =>
      kind.of[id] === KIND.start && texts[id].trim().length > 3);
    const others = words.slice(Math.min(MOST_FREQUENT, words.length >> 1));
    return others.filter((_, i) => i % Math.ceil(others.length / SUGGESTED) === 0);
  }

  /** Offer examples to begin with. @param {FoundExamples} found */
  offer(found) {
    this.#examples = found;
    const [sum] = found.own.sums;
    const [word] = found.own.words;
    if (sum) this.input.placeholder = sumText(sum, this.about.texts);
    else if (word !== undefined) this.input.placeholder = visibleText(this.about.texts[word]);
  }

  #suggestions() {
    if (!this.#examples) return null;
    const { own: { words: known, sums }, other } = this.#examples;
    const { texts } = this.about;
    const words = known.length ? known : this.#frequentWords();
    /** @param {TokenSum} sum */
    const sumButton = (sum) => h("button", {
      class: "token", type: "button", onClick: () => this.host.choose({ plus: sum.plus, minus: sum.minus }),
    }, sumText(sum, texts));
    const ways = words.length || sums.length ? "Select a point, type a token, or start with one of these."
      : "Select a point, or type a token.";
    return h("div", { class: "map-examples" },
      h("p", { class: "note" }, `${ways} + and − beside a neighbour add it to a sum.`),
      oneTabStop(h("div", { class: "chips", role: "group", "aria-label": "Examples" },
        words.map((id) => token(texts[id], { of: id, onClick: () => this.#chooseOne(id) })), sums.map(sumButton))),
      other ? elsewhere(other) : null);
  }
}

/** Say why a row is not in the neighbour layout. @param {number} norm */
function whyFolded(norm) {
  return Number.isNaN(norm) ? "This row holds NaN or infinity" : norm ? "This row is not learned" : "This row is zero";
}

/** Say where everyday words are. @param {import("../examples.js").OtherExamples} other */
function elsewhere({ source, title, texts, words, sums: [sum] }) {
  const state = sum ? sumParams(sum) : { plus: words[0] };
  return h("p", { class: "note" }, `Words of everyday language are in ${title}: `,
    h("a", { href: formatHash("map", changed({}, { ...state, source: source || null })) },
      sum ? sumText(sum, texts) : visibleText(texts[words[0]])));
}

/** Copy a text to the clipboard and say so on the button. @param {string} text @param {HTMLElement} button */
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
}
