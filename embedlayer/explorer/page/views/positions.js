/** The view Positions: what each position scheme does with positions, vectors and scores, computed in the page. */

import { COUNT } from "../charts/numbers.js";
import { h, select, slider } from "../dom.js";
import { unpackMatrix } from "../math.js";
import { attentionPanel, comparedTokens } from "../positions/attention.js";
import { biasPanels } from "../positions/bias.js";
import { inputPanels } from "../positions/input.js";
import { rotationPanels } from "../positions/rotation.js";
import { alibi, fromSource, rotary, sinusoids } from "../schemes.js";

/** @import { Closable, PositionsData, View, ViewContext } from "../types" */
/** @import { Change, Scene } from "../positions/scene.js" */
/** @import { Scheme } from "../schemes.js" */

/** @type {View} */
export const view = {
  id: "positions",
  title: "Positions",
  sentence: "Attention by itself does not know which token comes first. A position scheme tells it: see how, and what "
    + "that does to vectors and scores.",
  needs: ["input"],
  open,
};

/** @type {Record<string, string>} */
const NAMES = {
  sinusoidal: "sinusoidal", learned: "learned", rotary: "rotary", rotation: "rotary", alibi: "ALiBi",
  relative: "relative biases",
};
const DIMS = [4, 8, 16, 32, 64, 128, 256, 512];
const BASES = [100, 1000, 10000, 100000, 500000, 1000000];
const LENGTHS = [16, 32, 50, 64, 128, 256, 512, 1024];
const HEADS = [1, 2, 4, 6, 8, 12, 16, 32];

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  return new PositionsView(element, context, await context.data.load("positions"));
}

class PositionsView {
  /** @type {Closable[]} */ #parts = [];

  /** @param {HTMLElement} element @param {ViewContext} context @param {PositionsData} data */
  constructor(element, context, data) {
    this.context = context;
    this.data = data;
    this.vectors = unpackMatrix(data.vectors);
    this.own = data.schemes.map(fromSource);
    this.trained = this.own.find((scheme) => scheme.trained)?.trained ?? null;
    this.choices = choicesOf(data, this.own);
    this.controls = h("div", { class: "toolbar pos-controls" });
    this.about = h("div", { class: "pos-about" });
    this.panels = h("div", { class: "pos-panels" });
    element.replaceChildren(h("section", { class: "panel pos-top" }, this.controls, this.about), this.panels);
    this.stateChanged();
  }

  close() {
    for (const part of this.#parts) part.close();
    this.#parts = [];
  }

  stateChanged() {
    const scene = this.#build();
    this.#showControls(scene);
  }

  /**
   * Return a number of the URL between two limits.
   * @param {string} key
   * @param {number} fallback
   * @param {number} low
   * @param {number} high
   */
  #number(key, fallback, low, high) {
    const found = Number.parseFloat(this.context.state.get(key, String(fallback)));
    return Math.min(high, Math.max(low, Number.isFinite(found) ? found : fallback));
  }

  /**
   * Return a whole number of the URL from 0 to `last`.
   * @param {string} key
   * @param {number} fallback
   * @param {number} last
   */
  #index(key, fallback, last) {
    return Math.round(this.#number(key, Math.min(fallback, last), 0, Math.max(0, last)));
  }

  #choice() {
    const first = this.choices[0][0];
    const choice = this.context.state.get("scheme", first);
    return this.choices.some(([key]) => key === choice) ? choice : first;
  }

  #base() {
    return this.#number("base", 10000, 2, 1e9);
  }

  /** @returns {Scheme} */
  #scheme() {
    const choice = this.#choice();
    if (choice.startsWith("own")) return this.own[Number(choice.slice(3))];
    const { trained } = this;
    const dim = Math.round(this.#number("dim", 64, 2, 1024));
    if (choice === "sinusoidal") return { ...sinusoids(dim, this.#base()), trained };
    if (choice === "rotary") return { ...rotary(dim - (dim % 2), this.#base()), trained };
    return { ...alibi(Math.round(this.#number("heads", 8, 1, 64))), trained };
  }

  /** @returns {Scene} */
  #scene() {
    const { data, trained, vectors } = this;
    const scheme = this.#scheme();
    const usual = trained ? Math.min(256, 2 ** Math.ceil(Math.log2(trained * 1.5))) : 128;
    const length = Math.round(this.#number("length", usual, 4, 1024));
    const last = Math.min(length, scheme.last + 1) - 1;
    /** @type {((change: Change) => void)[]} */
    const listeners = [];
    return {
      data, scheme, length, last, vectors,
      a: this.#index("a", 0, last), b: this.#index("b", 1, last),
      pair: this.#index("pair", 2, scheme.pairs - 1), head: this.#index("head", 0, scheme.columns - 1),
      token: this.#index("token", 1, data.tokens.length - 1), key: this.#index("key", 2, data.tokens.length - 1),
      lock: this.context.state.get("lock") === "1",
      order: orderOf(this.context.state.get("order", ""), comparedTokens(data)),
      set: (changes) => this.context.state.set(changes),
      keep: (part) => {
        this.#parts.push(part);
        return part.element;
      },
      onChange: (draw) => listeners.push(draw),
      refresh: (change) => listeners.forEach((draw) => draw(change)),
    };
  }

  /** Draw the panels of the chosen scheme. */
  #build() {
    this.close();
    const scene = this.#scene();
    this.#describe(scene.scheme);
    const panels = panelsOf(scene);
    const columns = [0, 1].map((side) =>
      h("div", { class: "pos-column" }, panels.filter((_, i) => i % 2 === side)));
    panels.forEach((each, i) => {
      each.style.order = String(i);
    });
    this.panels.replaceChildren(...columns, attentionPanel(scene));
    scene.refresh("all");
    return scene;
  }

  /** @param {Scheme} scheme */
  #describe(scheme) {
    const [{ point, sentence }] = this.own;
    const facts = [
      this.#choice().startsWith("own") ? `${scheme.name}.` : "",
      scheme.note,
      scheme.trained
        ? `This source supports or was trained on ${COUNT.format(scheme.trained)} positions; later ones are hatched.`
        : "",
    ].filter(Boolean);
    this.about.replaceChildren(
      h("p", null, point === "none" ? `${sentence} These are the usual ones. ` : "", scheme.sentence),
      h("p", null, h("code", null, scheme.formula)), facts.length ? h("p", { class: "note" }, facts.join(" ")) : "");
  }

  /** @param {Scene} scene */
  #showControls({ scheme, length }) {
    const hadFocus = this.controls.contains(document.activeElement);
    const choice = this.#choice();
    const isWave = choice === "sinusoidal" || choice === "rotary";
    const isRotary = choice === "rotary";
    const schemes = select({
      label: "Scheme", options: this.choices, value: choice,
      onChange: (value) => {
        this.context.state.set({
          scheme: value === this.choices[0][0] ? null : value, pair: null, head: null, a: null, b: null,
        });
        this.stateChanged();
      },
    });
    this.controls.replaceChildren(schemes,
      isWave ? this.#listSlider(isRotary ? "Head width K" : "Dimensions D", DIMS, "dim", scheme.width) : "",
      isWave ? this.#listSlider(isRotary ? "Base θ" : "Base", BASES, "base", this.#base()) : "",
      choice === "alibi" ? this.#listSlider("Heads H", HEADS, "heads", scheme.columns) : "",
      this.#listSlider("Positions shown", LENGTHS, "length", length));
    if (hadFocus) schemes.querySelector("select")?.focus();
  }

  /**
   * Create a slider over a list of numbers. The controls stay while it is dragged.
   * @param {string} label
   * @param {number[]} list
   * @param {string} key
   * @param {number} value
   */
  #listSlider(label, list, key, value) {
    return slider({
      label, min: 0, max: list.length - 1, value: nearest(list, value), format: (i) => COUNT.format(list[i]),
      onInput: (i) => {
        this.context.state.set({ [key]: list[i], a: null, b: null });
        this.#build();
      },
    });
  }
}

/** Return the schemes of the source and the usual ones. @param {PositionsData} data @param {Scheme[]} own */
function choicesOf(data, own) {
  /** @type {[string, string][]} */
  const choices = data.schemes.map(({ kind, layers }, i) =>
    [`own${i}`, `this source: ${NAMES[kind]}${layers ? ` (${layers})` : ""}`]);
  return [
    ...choices.filter((_, i) => own[i].point !== "none"),
    .../** @type {[string, string][]} */ (["sinusoidal", "rotary", "alibi"].map((kind) => [kind, NAMES[kind]])),
  ];
}

/** @param {Scene} scene */
function panelsOf(scene) {
  if (scene.scheme.point === "input") return inputPanels(scene);
  return scene.scheme.point === "rotation" ? rotationPanels(scene) : biasPanels(scene);
}

/** Return the index of the nearest number. @param {number[]} list @param {number} value */
function nearest(list, value) {
  return list.reduce((best, each, i) => (Math.abs(each - value) < Math.abs(list[best] - value) ? i : best), 0);
}

/**
 * Parse a permutation such as "1.0.2"; any other text is the original order.
 * @param {string} text
 * @param {number} count
 */
function orderOf(text, count) {
  const order = text.split(".").map(Number);
  const isPermutation = order.length === count && new Set(order).size === count
    && order.every((i) => Number.isInteger(i) && i >= 0 && i < count);
  return isPermutation ? order : Array.from({ length: count }, (_, i) => i);
}
