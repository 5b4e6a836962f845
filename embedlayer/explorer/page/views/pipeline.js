/**
 * The view Pipeline: one text, and every step from its tokens to the gradient of its loss, with the model's numbers.
 */

import { COUNT } from "../charts/numbers.js";
import { empty, h } from "../dom.js";
import { drawBias } from "../pipeline/attention_bias.js";
import { textField, textList } from "../pipeline/entry.js";
import { drawGradient } from "../pipeline/gradient.js";
import { drawHead } from "../pipeline/head.js";
import { drawLens } from "../pipeline/lens.js";
import { drawDropout, drawPositions, drawResult, drawScale, drawSum, drawTypes } from "../pipeline/input.js";
import { drawLookUp, drawOneHot } from "../pipeline/lookup.js";
import { chip } from "../pipeline/pictures.js";
import { drawRotation } from "../pipeline/rotation.js";

/** @import { Child, Closable, Pipeline, View, ViewContext } from "../types" */
/** @import { Scene } from "../pipeline/pictures.js" */

/** @type {View} */
export const view = {
  id: "pipeline",
  title: "Pipeline",
  sentence: "How a text becomes vectors, and vectors become next-token probabilities: step with the slider or the "
    + "arrow keys.",
  needs: ["input", "tokenizer"],
  keys: [["← →", "previous or next step (Pipeline)"], ["[ ]", "previous or next token (Pipeline)"]],
  open,
};

const TYPING_DELAY = 300; // milliseconds
/** @type {Record<string, string>} */
const KINDS = { byte: "part of a character", special: "a special token" };
const FOCUSABLE = "canvas, select, button";

/** @type {Record<string, (scene: Scene) => Child[]>} */
const DRAW = {
  one_hot: drawOneHot,
  rows: drawLookUp,
  scale: drawScale,
  types: drawTypes,
  positions: drawPositions,
  sum: drawSum,
  norm: drawResult,
  project: drawResult,
  dropout: drawDropout,
  rotation: drawRotation,
  bias: drawBias,
  head: drawHead,
  gradient: drawGradient,
  lens: drawLens,
};

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const { texts } = await context.data.load("pipeline");
  return new PipelineView(element, context, texts);
}

class PipelineView {
  /** @type {Pipeline | null} */ #pipeline = null;
  /** @type {Closable[]} */ #parts = [];
  #step = 0;
  #token = 0;
  #head = 0;
  #request = 0;
  #timer = 0;

  /** @param {HTMLElement} element @param {ViewContext} context @param {string[]} texts */
  constructor(element, context, texts) {
    this.context = context;
    this.texts = texts;
    const makeEntry = context.data.exported ? textList : textField;
    this.entry = makeEntry(texts, (text) => this.#onText(text));
    this.chips = h("div", { class: "pipe-chips", role: "group", "aria-label": "Tokens" });
    this.about = h("p", { class: "note pipe-about", "aria-live": "polite" });
    this.range = h("input", {
      type: "range", min: "0", max: "1", value: "0", "aria-label": "Step",
      onInput: () => this.#goTo(Number(this.range.value)),
    });
    this.rail = h("ol", { class: "pipe-rail" });
    this.back = this.#stepButton("‹", "Previous step", -1);
    this.next = this.#stepButton("›", "Next step", 1);
    this.steps = h("div", { class: "pipe-steps" }, this.back,
      h("div", { class: "pipe-track" }, this.range, this.rail), this.next);
    this.stage = h("article", { class: "panel pipe-stage", "aria-live": "off" });
    const tokens = h("div", { class: "pipe-tokens" }, this.chips, this.about);
    element.replaceChildren(this.entry.element, tokens, this.steps, this.stage);
    document.addEventListener("keydown", this.#onKey);
    document.addEventListener("themechange", this.#draw);
    this.stateChanged();
  }

  close() {
    clearTimeout(this.#timer);
    this.#request += 1;
    this.#clear();
    document.removeEventListener("keydown", this.#onKey);
    document.removeEventListener("themechange", this.#draw);
  }

  stateChanged() {
    const text = this.context.state.get("text", this.texts[0] ?? "");
    this.entry.set(text);
    this.#load(text);
  }

  /** @param {string} text @param {string} label @param {number} by */
  #stepButton(text, label, by) {
    const onClick = () => this.#goTo(this.#step + by);
    return h("button", { type: "button", class: "icon", "aria-label": label, onClick }, text);
  }

  /** @param {string} text */
  #onText(text) {
    clearTimeout(this.#timer);
    this.context.state.set({ text, token: null, appended: null, draws: null });
    this.#timer = setTimeout(() => this.#load(text), this.context.data.exported ? 0 : TYPING_DELAY);
  }

  /** @param {string} text */
  async #load(text) {
    const request = ++this.#request;
    if (!text) return this.#fail("Type a text", "Its tokens and every step through the model are shown here.");
    const waiting = setTimeout(() => this.stage.classList.add("pipe-wait"), 200);
    try {
      const appended = this.context.state.get("appended");
      const pipeline = await this.context.data.load("pipeline", appended ? { text, appended } : { text });
      if (request === this.#request) this.#show(pipeline);
    } catch (error) {
      if (request === this.#request) this.#fail("This text cannot be shown", /** @type {Error} */ (error).message);
    } finally {
      clearTimeout(waiting);
      if (request === this.#request) this.stage.classList.remove("pipe-wait");
    }
  }

  /** @param {Pipeline} pipeline */
  #show(pipeline) {
    const { state } = this.context;
    /** @param {string} key @param {string} fallback */
    const number = (key, fallback) => Math.max(0, Number.parseInt(state.get(key, fallback), 10) || 0);
    if (state.get("appended")) state.set({ text: pipeline.text, appended: pipeline.appended.join() || null });
    this.entry.set(pipeline.text);
    this.#pipeline = pipeline;
    this.#step = Math.max(0, pipeline.steps.findIndex((step) => step.name === state.get("step", "one_hot")));
    this.#token = Math.min(number("token", "1"), pipeline.tokens.length - 1);
    this.#head = number("head", "0");
    this.#showTokens(pipeline);
    this.#showSteps(pipeline);
    this.#draw();
  }

  /** @param {string} title @param {string} sentence */
  #fail(title, sentence) {
    this.#pipeline = null;
    this.#clear();
    this.chips.replaceChildren();
    this.about.textContent = "";
    this.steps.hidden = true;
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
  }

  /** @param {Pipeline} pipeline */
  #showSteps({ steps }) {
    this.steps.hidden = false;
    this.steps.style.setProperty("--steps", String(steps.length));
    this.range.max = String(steps.length - 1);
    this.rail.replaceChildren(...steps.map((step, i) => h("li", null,
      h("button", { type: "button", tabIndex: -1, onClick: () => this.#goTo(i) },
        h("b", null, String(i + 1)), h("span", null, step.title)))));
  }

  /** @param {number} step */
  #goTo(step) {
    if (!this.#pipeline) return;
    const { steps } = this.#pipeline;
    this.#step = Math.min(Math.max(step, 0), steps.length - 1);
    this.context.state.set({ step: this.#step ? steps[this.#step].name : null });
    this.#draw();
  }

  /** @param {number} token */
  #choose(token) {
    if (!this.#pipeline) return;
    this.#token = Math.min(Math.max(token, 0), this.#pipeline.tokens.length - 1);
    this.context.state.set({ token: this.#token === 1 ? null : this.#token });
    [...this.chips.children].forEach((button, t) => button.setAttribute("aria-pressed", String(t === this.#token)));
    this.#draw();
  }

  #clear() {
    for (const part of this.#parts) part.close();
    this.#parts = [];
  }

  #draw = () => {
    if (!this.#pipeline) return;
    const scene = this.#scene(this.#pipeline);
    const { step } = scene;
    this.#showPlace(this.#pipeline);
    const focused = [...this.stage.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement ?? this.stage);
    this.#clear();
    const pictures = (DRAW[step.name] ?? drawResult)(scene);
    this.stage.replaceChildren(
      h("header", { class: "pipe-head" },
        h("h2", null, h("span", { class: "pipe-number" }, `${this.#step + 1}`), step.title),
        h("code", null, step.formula), h("p", null, step.sentence), h("p", { class: "note" }, step.note)),
      .../** @type {Node[]} */ (pictures.filter(Boolean)));
    if (focused < 0) return;
    const target = /** @type {HTMLElement | undefined} */ ([...this.stage.querySelectorAll(FOCUSABLE)][focused]);
    target?.focus();
  };

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
        this.#draw();
      },
      keep: (part) => {
        this.#parts.push(part);
        return part.element;
      },
      state: this.context.state,
      load: this.context.data.load,
      exported: this.context.data.exported,
      append: (id, changes = {}) => this.#append([...pipeline.appended, id], changes),
      removeAppended: () => this.#append([], {}),
    };
  }

  /** Read the text again with these tokens after it. @param {number[]} appended @param {Record<string, any>} changes */
  #append(appended, changes) {
    const text = this.#pipeline?.text ?? "";
    this.context.state.set({ ...changes, appended: appended.join() || null });
    this.#load(text);
  }

  /** Show in the slider and the buttons which step is shown. @param {Pipeline} pipeline */
  #showPlace({ steps }) {
    this.range.value = String(this.#step);
    this.range.setAttribute("aria-valuetext", `${this.#step + 1} of ${steps.length}: ${steps[this.#step].title}`);
    this.back.disabled = this.#step === 0;
    this.next.disabled = this.#step === steps.length - 1;
    [...this.rail.children].forEach((item, i) =>
      item.firstElementChild?.setAttribute("aria-current", i === this.#step ? "step" : "false"));
  }

  #onKey = (/** @type {KeyboardEvent} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.closest?.("input, textarea, select, canvas, [role=tab], dialog[open]")) return;
    const [step, token] = [this.#step, this.#token];
    if (event.key === "ArrowRight") this.#goTo(step + 1);
    else if (event.key === "ArrowLeft") this.#goTo(step - 1);
    else if (event.key === "]") this.#choose(token + 1);
    else if (event.key === "[") this.#choose(token - 1);
    else return;
    event.preventDefault();
  };
}

/** Say how many tokens there are and what their marks mean. @param {Pipeline} pipeline */
function describe({ tokens, left_out: leftOut, vocab_size: size, embed_dim: width }) {
  const kinds = [...new Set(tokens.map((token) => token.kind))].filter((kind) => kind !== "text");
  const legend = [
    ...(tokens.some((token) => token.decoded.includes(" ")) ? ["· is a space"] : []),
    ...kinds.map((kind) => `${kind === "byte" ? "<0x..>" : "a dashed frame"} is ${KINDS[kind]}`),
  ];
  const count = `${COUNT.format(tokens.length)} ${tokens.length === 1 ? "token" : "tokens"}`;
  return `${count} of a vocabulary of ${COUNT.format(size)}, each a vector of ${COUNT.format(width)} numbers`
    + `${legend.length ? `; ${legend.join(", ")}` : ""}.`
    + (leftOut ? ` ${COUNT.format(leftOut)} more tokens are not shown.` : "");
}
