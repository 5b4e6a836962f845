/**
 * The view Pipeline: one text, and every step from its tokens to the gradient of its loss, with the model's numbers.
 */

import { openWithToken } from "../card/links.js";
import { COUNT } from "../charts/numbers.js";
import { empty, h, nodesOf, oneTabStop } from "../dom.js";
import { definitionBox, withTerms } from "../learn/terms.js";
import { drawBias } from "../pipeline/attention_bias.js";
import { drawBlock } from "../pipeline/block.js";
import { textField, textList } from "../pipeline/entry.js";
import { drawGradient } from "../pipeline/gradient.js";
import { drawHead } from "../pipeline/head.js";
import { drawLens } from "../pipeline/lens.js";
import { drawDropout, drawPositions, drawResult, drawScale, drawSum, drawTypes } from "../pipeline/input.js";
import { drawLookUp, drawOneHot } from "../pipeline/lookup.js";
import { Machine } from "../pipeline/machine.js";
import { chip } from "../pipeline/pictures.js";
import { drawRotation } from "../pipeline/rotation.js";
import { StepList } from "../pipeline/step_list.js";
import { chosenLayer, switches } from "../pipeline/switches.js";
import { drawTokenize } from "../pipeline/tokenize.js";

/** @import { Changes, Child, Closable, Params, Pipeline, PipelineChoices, View, ViewContext } from "../types" */
/** @import { Scene } from "../pipeline/pictures.js" */
/** @import { Layer } from "../pipeline/switches.js" */

/** @type {View} */
export const view = {
  id: "pipeline",
  title: "Pipeline",
  sentence: "How a text becomes vectors, and vectors become next-token probabilities: step with the slider or the "
    + "arrow keys.",
  needs: [],
  keys: [["← →", "previous or next step (Pipeline)"], ["[ ]", "previous or next token (Pipeline)"]],
  open,
};

const TYPING_DELAY = 300; // milliseconds
/** @type {Record<string, string>} */
const KINDS = { byte: "part of a character", special: "a special token" };
const FOCUSABLE = "canvas, select, button";
/** @type {Record<string, string>} */
const PLACEHOLDERS = {
  tokenizer: "Type a text …", names: "Names of rows, or IDs such as #17 #42", ids: "IDs of rows, such as #17 #42",
};

/** @type {Record<string, (scene: Scene) => Child[]>} */
const DRAW = {
  tokenize: drawTokenize,
  one_hot: drawOneHot,
  look_up: drawLookUp,
  scale: drawScale,
  types: drawTypes,
  position: drawPositions,
  sum: drawSum,
  norm: drawResult,
  project: drawResult,
  dropout: drawDropout,
  rotation: drawRotation,
  bias: drawBias,
  block: drawBlock,
  head: drawHead,
  gradient: drawGradient,
  lens: drawLens,
};

/** Steps before the table, and those that begin where the input ends: their pictures come before that of the input. */
const OUTSIDE = ["tokenize", "block", "head", "gradient", "lens"];

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const choices = await context.data.load("pipeline-choices");
  if (!chosenLayer(context, choices).tiny) await openWithToken(context);
  return new PipelineView(element, context, choices);
}

class PipelineView {
  /** @type {Pipeline | null} */ #pipeline = null;
  /** @type {Closable[]} */ #parts = [];
  /** @type {((dimension: number | null, dims: number) => void)[]} */ #lights = [];
  /** @type {Layer | null} */ #layer = null;
  /** @type {import("../pipeline/entry.js").Entry | null} */ #entry = null;
  #step = 0;
  #token = 0;
  #head = 0;
  #request = 0;
  #timer = 0;

  /** @param {HTMLElement} element @param {ViewContext} context @param {PipelineChoices} choices */
  constructor(element, context, choices) {
    this.element = element;
    this.context = context;
    this.choices = choices;
    this.entryPlace = h("div", { class: "pipe-place" });
    this.switchPlace = h("div", { class: "pipe-place" });
    this.fold = h("button", {
      type: "button", class: "pipe-fold", "aria-expanded": "false",
      onClick: () => this.fold.setAttribute("aria-expanded", String(this.fold.ariaExpanded !== "true")),
    });
    this.chips = oneTabStop(h("div", { class: "pipe-chips", role: "group", "aria-label": "Tokens" }));
    this.about = h("p", { class: "note pipe-about", "aria-live": "polite" });
    this.steps = new StepList((step) => this.#goTo(step));
    this.head = h("header", { class: "pipe-head" });
    this.machine = new Machine({
      pin: (dimension) => context.state.set({ dim: dimension }),
      lit: (dimension, dims) => this.#lights.forEach((light) => light(dimension, dims)),
      goTo: (name) => this.#goTo(this.#pipeline?.steps.findIndex((step) => step.name === name) ?? 0),
    });
    this.whole = h("article", { class: "panel pipe-whole" }, this.head, this.machine.element);
    this.stage = h("article", { class: "panel pipe-stage", "aria-live": "off" });
    const tokens = h("div", { class: "pipe-tokens" }, this.chips, this.about);
    this.definitions = definitionBox(element);
    element.replaceChildren(this.entryPlace, this.switchPlace, tokens, this.steps.element, this.whole, this.stage,
      this.definitions.element);
    document.addEventListener("keydown", this.#onKey);
    document.addEventListener("themechange", this.#redraw);
    this.stateChanged();
  }

  close() {
    clearTimeout(this.#timer);
    this.#request += 1;
    this.#clear();
    this.machine.close();
    this.definitions.close();
    document.removeEventListener("keydown", this.#onKey);
    document.removeEventListener("themechange", this.#redraw);
  }

  stateChanged() {
    const layer = chosenLayer(this.context, this.choices);
    this.element.toggleAttribute("data-other-table", layer.tiny);
    if (layer.tiny !== this.#layer?.tiny) {
      if (this.#layer) this.context.state.set({ appended: null, draws: null }); // tokens of the other layer
      this.#makeEntry(layer.tiny);
      this.#pipeline = null;
    }
    this.#layer = layer;
    this.#showSwitches();
    const text = this.context.state.get("text", this.#texts()[0] ?? "");
    this.#entry?.set(text);
    this.#load(text);
  }

  #texts(tiny = this.#layer?.tiny) {
    return tiny ? this.choices.tiny.texts : this.choices.texts;
  }

  /** @param {boolean} tiny */
  #makeEntry(tiny) {
    const texts = this.#texts(tiny);
    const [unknown, ...words] = this.choices.tiny.words;
    const hint = tiny ? `Words: ${words.join(", ")}; others become ${unknown}` : PLACEHOLDERS[this.choices.reads];
    /** @param {string} text */
    const onText = (text) => this.#onText(text);
    this.#entry = this.context.data.exported ? textList(texts, onText) : textField(texts, hint, onText);
    this.entryPlace.replaceChildren(this.#entry.element);
  }

  #showSwitches() {
    const layer = /** @type {Layer} */ (this.#layer);
    const pipeline = layer.tiny ? null : this.#pipeline;
    const focused = [...this.switchPlace.querySelectorAll("button")].findIndex((b) => b === document.activeElement);
    const change = (/** @type {Changes} */ changes) => this.#change(changes);
    const made = switches(this.context, this.choices, layer, pipeline, change);
    this.fold.textContent = [...made.querySelectorAll("[aria-pressed=true]")].map((b) => b.textContent).join(" · ");
    this.switchPlace.replaceChildren(...(this.choices.refused ? [] : [this.fold]), made);
    if (focused >= 0) this.switchPlace.querySelectorAll("button")[focused]?.focus();
  }

  /** Change the URL; with another layer, its text and that of the layer that is left. @param {Changes} changes */
  #change(changes) {
    const tiny = changes.layer === "tiny";
    let texts = {};
    if ("layer" in changes) {
      if (tiny === this.#layer?.tiny) return;
      const [left, own] = ["text", "other"].map((key) => this.context.state.get(key, ""));
      texts = { text: own || (this.#canRead(left, tiny) ? left : null), other: left };
    }
    this.context.state.set({ ...changes, ...texts });
    this.stateChanged();
  }

  /** Whether the text of one layer is shown in the other, too. @param {string} text @param {boolean} tiny the other */
  #canRead(text, tiny) {
    if (this.context.data.exported) return this.#texts(tiny).includes(text);
    if (!tiny) return this.choices.reads === "tokenizer";
    /** @type {string[]} */
    const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    return this.choices.tiny.words.some((word) => words.includes(word.toLowerCase()));
  }

  /** @param {string} text */
  #onText(text) {
    clearTimeout(this.#timer);
    this.context.state.set({ text, token: null, appended: null, draws: null });
    this.#timer = setTimeout(() => this.#load(text), this.context.data.exported ? 0 : TYPING_DELAY);
  }

  /** @param {string} text */
  async #load(text) {
    clearTimeout(this.#timer); // of a text that was typed before the layer changed
    const request = ++this.#request;
    const readsSpaces = !this.#layer?.tiny && this.choices.reads === "tokenizer";
    const isEmpty = readsSpaces ? !text : !text.trim();
    if (isEmpty) return this.#fail("Type a text", "Its tokens and every step through the model are shown here.");
    const waiting = setTimeout(() => this.whole.classList.add("pipe-wait"), 200);
    try {
      const appended = this.context.state.get("appended");
      const asked = { text, ...this.#layerParams(), ...(appended ? { appended } : {}) };
      const pipeline = await this.context.data.load("pipeline", asked);
      if (request === this.#request) this.#show(pipeline);
    } catch (error) {
      if (request === this.#request) this.#fail("This text cannot be shown", /** @type {Error} */ (error).message);
    } finally {
      clearTimeout(waiting);
      if (request === this.#request) this.whole.classList.remove("pipe-wait");
    }
  }

  /** @param {Pipeline} pipeline */
  #show(pipeline) {
    const { state } = this.context;
    /** @param {string} key @param {string} fallback */
    const number = (key, fallback) => Math.max(0, Number.parseInt(state.get(key, fallback), 10) || 0);
    if (state.get("appended")) state.set({ text: pipeline.text, appended: pipeline.appended.join() || null });
    this.#entry?.set(pipeline.text);
    this.#pipeline = pipeline;
    this.#step = Math.max(0, pipeline.steps.findIndex((step) => step.name === state.get("step", "tokenize")));
    this.#token = Math.min(number("token", "1"), pipeline.tokens.length - 1);
    this.#head = number("head", "0");
    this.whole.hidden = false;
    this.#showSwitches();
    this.#showTokens(pipeline);
    this.steps.show(pipeline);
    this.#redraw();
  }

  /** @param {string} title @param {string} sentence */
  #fail(title, sentence) {
    this.#pipeline = null;
    this.#clear();
    this.chips.replaceChildren();
    this.about.textContent = "";
    this.steps.element.hidden = true;
    this.whole.hidden = true;
    this.stage.replaceChildren(empty(title, sentence));
  }

  /** @param {Pipeline} pipeline */
  #showTokens(pipeline) {
    this.chips.replaceChildren(...pipeline.tokens.map((token, t) => chip(token, {
      id: token.id,
      title: `position ${t}, ID ${token.id}${token.kind === "text" ? "" : ` (${KINDS[token.kind]})`}`,
      pressed: t === this.#token,
      onClick: () => this.#choose(t),
    })));
    this.about.textContent = describe(pipeline);
    this.#showChosen();
  }

  /** @param {number} step */
  #goTo(step) {
    if (!this.#pipeline) return;
    const { steps } = this.#pipeline;
    const isForward = step > this.#step;
    this.#step = Math.min(Math.max(step, 0), steps.length - 1);
    this.context.state.set({ step: this.#step ? steps[this.#step].name : null });
    this.#draw(isForward);
  }

  /** @param {number} token */
  #choose(token) {
    if (!this.#pipeline) return;
    this.#token = Math.min(Math.max(token, 0), this.#pipeline.tokens.length - 1);
    this.context.state.set({ token: this.#token === 1 ? null : this.#token });
    [...this.chips.children].forEach((button, t) => button.setAttribute("aria-pressed", String(t === this.#token)));
    this.#showChosen();
    this.#showMachine(this.#pipeline);
    this.#draw(this.#pipeline.steps[this.#step].name === "look_up");
  }

  /** Scroll the row of tokens to the chosen one. */
  #showChosen() {
    const chosen = /** @type {HTMLElement} */ (this.chips.children[this.#token]);
    const [row, { left, right }] = [this.chips.getBoundingClientRect(), chosen.getBoundingClientRect()];
    if (left < row.left || right > row.right) this.chips.scrollLeft += (left + right - row.left - row.right) / 2;
  }

  /** @param {Pipeline} pipeline */
  #showMachine(pipeline) {
    const pinned = Number.parseInt(this.context.state.get("dim", ""), 10);
    this.machine.show(pipeline, this.#token, pinned >= 0 ? pinned : null);
  }

  #clear() {
    for (const part of this.#parts) part.close();
    this.#parts = [];
    this.#lights = [];
  }

  #redraw = () => {
    if (!this.#pipeline) return;
    this.#showMachine(this.#pipeline);
    this.#draw(false);
  };

  /** Show the step. @param {boolean} isMoving whether its vector moves into its place */
  #draw(isMoving) {
    if (!this.#pipeline) return;
    const scene = this.#scene(this.#pipeline);
    const { step } = scene;
    const focused = [...this.stage.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement ?? this.stage);
    this.steps.mark(this.#step);
    this.machine.highlight(step.name, isMoving);
    const number = this.steps.numberOf(this.#step);
    const isOutside = OUTSIDE.includes(step.name);
    if (isOutside) this.whole.before(this.stage);
    else this.whole.after(this.stage);
    this.head.replaceChildren(
      h("h2", null, h("span", { class: "pipe-number" }, number === null ? "–" : `${number}`), step.title),
      h("code", null, step.formula), h("span", { class: "note" }, step.note),
      h("p", null, withTerms(step.sentence, new Set())));
    this.definitions.hide();
    this.#clear();
    const pictures = (DRAW[step.name] ?? drawResult)(scene);
    this.stage.replaceChildren(...nodesOf(pictures));
    (isOutside ? this.stage : this.whole).prepend(this.head);
    this.machine.light(null, 0);
    if (focused < 0) return;
    const target = /** @type {HTMLElement | undefined} */ ([...this.stage.querySelectorAll(FOCUSABLE)][focused]);
    target?.focus();
  }

  /** @param {Pipeline} pipeline @returns {Scene} */
  #scene(pipeline) {
    return {
      pipeline,
      step: pipeline.steps[this.#step],
      token: this.#token,
      head: this.#head,
      choose: (token) => this.#choose(token),
      chooseHead: (head) => {
        this.#head = head;
        this.context.state.set({ head: head || null });
        this.#draw(false);
      },
      showTiny: this.#layer?.tiny ? null : () => this.#change({ layer: "tiny", token: null, dim: null }),
      light: (dimension, dims) => this.machine.light(dimension, dims),
      onLight: (dims, show) => this.#lights.push((dimension, of) => show(of === dims ? dimension : null)),
      keep: (part) => {
        this.#parts.push(part);
        return part.element;
      },
      state: this.context.state,
      load: (name, params) => this.context.data.load(name, { ...params, ...this.#layerParams() }),
      exported: this.context.data.exported,
      append: (id, changes = {}) => this.#append([...pipeline.appended, id], changes),
      removeAppended: () => this.#append([], {}),
      context: this.context,
    };
  }

  /** Return the parameters of requests that say which layer is shown. @returns {Params} */
  #layerParams() {
    const { tiny, position, tied } = /** @type {Layer} */ (this.#layer);
    return tiny ? { layer: "tiny", position, tied: tied ? "1" : "0" } : {};
  }

  /** Read the text again with these tokens after it. @param {number[]} appended @param {Changes} changes */
  #append(appended, changes) {
    const text = this.#pipeline?.text ?? "";
    this.context.state.set({ ...changes, appended: appended.join() || null });
    this.#load(text);
  }

  #onKey = (/** @type {KeyboardEvent} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.closest?.("input, textarea, select, canvas, [role=tab], [role=slider], dialog[open]")) return;
    if (event.key === "ArrowRight") this.steps.move(1);
    else if (event.key === "ArrowLeft") this.steps.move(-1);
    else if (event.key === "]") this.#choose(this.#token + 1);
    else if (event.key === "[") this.#choose(this.#token - 1);
    else return;
    event.preventDefault();
  };
}

/** Say how many tokens there are and what their marks mean. @param {Pipeline} pipeline */
function describe({ tokens, how, left_out: leftOut, vocab_size: size, embed_dim: width }) {
  const kinds = [...new Set(tokens.map((token) => token.kind))].filter((kind) => kind !== "text");
  const legend = [
    ...(tokens.some((token) => token.decoded.includes(" ")) ? ["· is a space"] : []),
    ...kinds.map((kind) => `${kind === "byte" ? "<0x..>" : "a dashed frame"} is ${KINDS[kind]}`),
  ];
  const count = `${COUNT.format(tokens.length)} ${tokens.length === 1 ? "token" : "tokens"}`;
  return `${count} of a vocabulary of ${COUNT.format(size)}, each a vector of ${COUNT.format(width)} numbers`
    + `${legend.length ? `; ${legend.join(", ")}` : ""}.`
    + (leftOut ? ` ${COUNT.format(leftOut)} more tokens are not shown.` : "") + (how ? ` ${how}` : "");
}
