/**
 * The machine of the view Pipeline: the table, the row of the chosen token, and all vectors that lead from it to the
 * input of the first block. It stays on the screen while the steps move through it.
 */

import { shown } from "../charts/numbers.js";
import { h } from "../dom.js";
import { norm } from "../math.js";
import { chainOf } from "./chain.js";
import { stepOf } from "./facts.js";
import { move } from "./motion.js";
import { tableOfPositions, tableOfProducts, tableOfRows } from "./tables.js";
import { VectorPicture } from "./vector.js";

/** @import { Pipeline } from "../types" */
/** @import { Link } from "./chain.js" */
/** @import { MachineTable } from "./tables.js" */

/**
 * What the machine calls.
 * @typedef {object} MachineCalls
 * @property {(dimension: number | null) => void} pin keep a dimension lit
 * @property {(dimension: number | null, dims: number) => void} lit a dimension of vectors of `dims` numbers is lit
 * @property {(step: string) => void} goTo
 */

const HINT = "Point at a number, tap it, or use the arrow keys here: its dimension lights in every step.";

/** The machine. */
export class Machine {
  /** @type {Link[]} */ #links = [];
  /** @type {VectorPicture[]} */ #chain = [];
  /** @type {MachineTable[]} */ #tables = [];
  /** @type {HTMLElement[]} */ #lines = [];
  /** @type {Pipeline | null} */ #pipeline = null;
  /** @type {number | null} */ #pinned = null;

  /** @param {MachineCalls} calls */
  constructor(calls) {
    this.calls = calls;
    this.sum = h("output", { class: "mach-sum", "aria-live": "polite" });
    this.list = h("div", { class: "mach-chain", role: "slider", tabIndex: 0, "aria-label": "Dimension",
      "aria-valuemin": "0", "aria-valuenow": "0" });
    this.body = h("div", { class: "mach-body" });
    this.element = h("div", { class: "mach" }, this.body, this.sum);
    this.element.addEventListener("pointermove", (event) => this.#atPointer(event, (d, s) => this.#light(d, s)));
    this.element.addEventListener("pointerleave", () => this.#light(this.#pinned, 0));
    this.element.addEventListener("click", (event) => this.#atPointer(event, (d, s) => this.#pin(d, s)));
    this.list.addEventListener("keydown", (event) => this.#onKey(event));
  }

  close() {
    for (const vector of this.#vectors()) vector.close();
    this.#chain = [];
    this.#tables = [];
  }

  /**
   * Draw the machine of a token.
   * @param {Pipeline} pipeline
   * @param {number} token
   * @param {number | null} pinned the dimension that is lit
   */
  show(pipeline, token, pinned) {
    const hadFocus = document.activeElement === this.list;
    this.close();
    this.#pipeline = pipeline;
    this.#links = chainOf(pipeline, token);
    this.#chain = this.#links.map(({ numbers, limit, space }) =>
      new VectorPicture(numbers, { limit, space, isExact: true }));
    const products = tableOfProducts(pipeline, token);
    const rows = tableOfRows(pipeline, token);
    const space = this.#links.find((link) => link.step === "position")?.space ?? 0;
    const positions = tableOfPositions(pipeline, token, space, this.calls.goTo);
    this.#tables = [rows, ...(products ? [products] : []), positions];
    this.#lines = this.#links.map((link, i) => this.#line(link, this.#chain[i]));
    this.list.replaceChildren(...this.#lines);
    this.list.setAttribute("aria-valuemax", String(this.#links[0].numbers.length - 1));
    const chain = h("section", { class: "mach-middle" }, h("div", { class: "mach-title" },
      h("h3", null, "One token, from its row to the first block"), h("span", null, "length")),
    this.list, this.#after(pipeline));
    this.body.replaceChildren(...this.#tables.slice(0, -1).map((table) => table.element), chain, positions.element);
    this.body.classList.toggle("mach-small", products !== null);
    this.#pinned = pinned === null ? null : Math.min(pinned, this.#links[0].numbers.length - 1);
    this.#light(this.#pinned, 0);
    if (hadFocus) this.list.focus();
  }

  /**
   * Move the highlight to a step.
   * @param {string} step
   * @param {boolean} isMoving whether the step's vector moves into its place
   */
  highlight(step, isMoving) {
    const last = this.#links.map((link) => link.step).lastIndexOf(step);
    const names = (this.#pipeline?.steps ?? []).map((each) => each.name);
    this.#lines.forEach((line, i) => {
      line.classList.toggle("mach-now", this.#links[i].step === step);
      line.classList.toggle("mach-later", names.indexOf(this.#links[i].step) > names.indexOf(step));
    });
    this.body.dataset.step = step;
    for (const button of this.list.parentElement?.querySelectorAll(".mach-after button") ?? []) {
      button.setAttribute("aria-current", /** @type {HTMLElement} */ (button).dataset.step === step ? "step" : "false");
    }
    if (isMoving && last >= 0) this.#move(last);
  }

  /**
   * Light a dimension of the vectors that have `dims` numbers; null lights the one that was chosen.
   * @param {number | null} dimension
   * @param {number} dims
   */
  light(dimension, dims) {
    const link = this.#links.find(({ numbers }) => numbers.length === dims);
    if (dimension === null) this.#light(this.#pinned, 0);
    else if (link) this.#light(dimension, link.space);
  }

  /** @param {Link} link @param {VectorPicture} vector */
  #line(link, vector) {
    return h("div", { class: "mach-line", "data-link": link.step },
      h("span", { class: "mach-sign", "aria-hidden": "true" }, link.sign),
      h("span", { class: "mach-label" }, h("b", null, link.name), h("small", null, link.about)),
      vector.element,
      h("span", { class: "mach-norm", title: "Length of the vector" }, shown(norm(link.numbers))));
  }

  /** Create what follows the chain: the names of the later steps. @param {Pipeline} pipeline */
  #after(pipeline) {
    const done = this.#links.at(-1)?.step;
    const start = pipeline.steps.findIndex((step) => step.name === done);
    const later = pipeline.steps.slice(start + 1).filter((step) => !step.idle && step.name !== "dropout");
    const scheme = stepOf(pipeline, "position")?.facts.scheme;
    const isTable = scheme === "Position" && !later.length;
    const end = isTable ? "This source has rows only: no positions, and no blocks that read them."
      : "↓ input of the first block";
    return h("p", { class: "mach-after" }, h("span", null, end), later.map((step) =>
      h("button", { type: "button", "data-step": step.name, onClick: () => this.calls.goTo(step.name) }, step.title)));
  }

  #vectors() {
    return [...this.#chain, ...this.#tables.flatMap((table) => table.vectors)];
  }

  /** Move a vector of the chain out of what it is computed from. @param {number} index */
  #move(index) {
    const to = this.#chain[index].element;
    const link = this.#links[index];
    const source = link.step === "look_up" ? this.#tables.at(-2)?.chosen
      : link.step === "position" ? this.#tables.at(-1)?.chosen : this.#chain[index - 1];
    const froms = [source, link.step === "sum" || link.step === "types" ? this.#chain[index - 2] : null];
    move(this.element, froms.flatMap((from) => (from ? [from.element] : [])), to);
  }

  /**
   * Light a dimension in every vector of its space, and write its sum.
   * @param {number | null} dimension
   * @param {number} space
   */
  #light(dimension, space) {
    for (const vector of this.#vectors()) vector.light(vector.space === space ? dimension : null);
    this.calls.lit(dimension, this.#links.find((link) => link.space === space)?.numbers.length ?? 0);
    if (dimension === null) {
      this.sum.replaceChildren(h("span", { class: "note" }, HINT));
      this.list.setAttribute("aria-valuetext", "none");
      return;
    }
    const sums = this.#links.filter((link) => link.space === space).map((link) => link.sum(dimension)).filter(Boolean);
    this.sum.replaceChildren(h("b", null, `dimension ${dimension}`), ...sums.map((sum) => h("span", null, sum)));
    this.list.setAttribute("aria-valuenow", String(dimension));
    this.list.setAttribute("aria-valuetext", `${dimension}: ${sums.join("; ")}`);
  }

  /** @param {number} dimension @param {number} space */
  #pin(dimension, space) {
    this.#pinned = space === 0 && this.#pinned !== dimension ? dimension : null;
    this.calls.pin(this.#pinned);
    this.#light(this.#pinned, 0);
  }

  /** @param {MouseEvent} event @param {(dimension: number, space: number) => void} use */
  #atPointer(event, use) {
    const target = /** @type {Element} */ (event.target).closest?.(".vec");
    const vector = target && this.#vectors().find((each) => each.element === target);
    if (vector) use(vector.dimensionAt(event.clientX), vector.space);
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.#links[0].numbers.length - 1;
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    const at = this.#pinned ?? (by === 1 ? -1 : 1);
    if (by) this.#pinned = Math.min(last, Math.max(0, at + by * (event.shiftKey ? 10 : 1)));
    else if (event.key === "Home") this.#pinned = 0;
    else if (event.key === "End") this.#pinned = last;
    else if (event.key === "Escape") this.#pinned = null;
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.calls.pin(this.#pinned);
    this.#light(this.#pinned, 0);
  }
}
