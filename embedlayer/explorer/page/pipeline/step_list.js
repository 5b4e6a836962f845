/** The list of steps: a slider and buttons for those that do something, and one line for all others. */

import { h } from "../dom.js";

/** @import { Pipeline } from "../types" */

/** The list of steps. */
export class StepList {
  /** @type {number[]} */ #order = [];
  /** @type {Pipeline | null} */ #pipeline = null;
  #step = 0;

  /** @param {(step: number) => void} goTo */
  constructor(goTo) {
    this.goTo = goTo;
    this.range = h("input", {
      type: "range", min: "0", max: "1", value: "0", "aria-label": "Step",
      onInput: () => goTo(this.#order[Number(this.range.value)]),
    });
    this.rail = h("ol", { class: "pipe-rail" });
    this.back = this.#button("‹", "Previous step", -1);
    this.next = this.#button("›", "Next step", 1);
    this.summary = h("summary");
    this.idle = h("details", { class: "pipe-idle" }, this.summary, h("ul"));
    this.element = h("div", { class: "pipe-steps" }, this.back,
      h("div", { class: "pipe-track" }, this.range, this.rail), this.next, this.idle);
  }

  /** @param {string} text @param {string} label @param {number} by */
  #button(text, label, by) {
    return h("button", { type: "button", class: "icon", "aria-label": label, onClick: () => this.move(by) }, text);
  }

  /** Go to the next or previous step that does something. @param {number} by */
  move(by) {
    const found = by > 0 ? this.#order.find((i) => i > this.#step) : this.#order.filter((i) => i < this.#step).at(-1);
    if (found !== undefined) this.goTo(found);
  }

  /** @param {Pipeline} pipeline */
  show(pipeline) {
    const { steps } = pipeline;
    this.#pipeline = pipeline;
    this.#order = [...steps.keys()].filter((i) => !steps[i].idle);
    this.element.hidden = false;
    this.element.style.setProperty("--steps", String(this.#order.length));
    this.range.max = String(this.#order.length - 1);
    this.rail.replaceChildren(...this.#order.map((i, number) => h("li", null,
      h("button", { type: "button", tabIndex: -1, onClick: () => this.goTo(i) },
        h("b", null, String(number + 1)), h("span", null, steps[i].title)))));
    const idle = [...steps.keys()].filter((i) => steps[i].idle);
    this.idle.hidden = !idle.length;
    this.idle.open = false;
    this.summary.textContent = `${idle.length} ${idle.length === 1 ? "step changes" : "steps change"} nothing here: `
      + idle.map((i) => steps[i].title).join(", ");
    this.idle.querySelector("ul")?.replaceChildren(...idle.map((i) => h("li", null,
      h("button", { type: "button", class: "link", onClick: () => this.goTo(i) }, steps[i].title),
      ` ${steps[i].sentence}`)));
  }

  /** Mark the step that is shown. @param {number} step */
  mark(step) {
    const pipeline = this.#pipeline;
    if (!pipeline) return;
    this.#step = step;
    const number = this.#order.filter((i) => i <= step).length - 1;
    const isIdle = pipeline.steps[step].idle;
    this.range.value = String(number);
    this.range.setAttribute("aria-valuetext",
      `${number + 1} of ${this.#order.length}: ${pipeline.steps[this.#order[number]].title}`);
    this.back.disabled = step <= this.#order[0];
    this.next.disabled = step >= /** @type {number} */ (this.#order.at(-1));
    [...this.rail.children].forEach((item, i) =>
      item.firstElementChild?.setAttribute("aria-current", i === number && !isIdle ? "step" : "false"));
    if (isIdle) this.idle.open = true;
  }

  /** Return the number of a step among those that do something; null for another one. @param {number} step */
  numberOf(step) {
    const index = this.#order.indexOf(step);
    return index < 0 ? null : index + 1;
  }
}
