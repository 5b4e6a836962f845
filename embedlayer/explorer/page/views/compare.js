/** The view Compare: two tables on one map, and the tokens that moved most. */

import { ComparisonMap } from "../map/comparison.js";
import { empty, h, select } from "../dom.js";
import { next } from "../missing.js";

/** @import { View, ViewContext } from "../types" */

/** @type {View} */
export const view = {
  id: "compare",
  title: "Compare",
  sentence: "Whether two tables are related, both on one map, and the tokens whose rows changed direction most.",
  needs: ["vectors"],
  open,
};

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const options = optionsOf(context);
  if (!options.length) {
    element.replaceChildren(empty("There is only one table",
      "Open a second table to compare it with, or a training run, whose table before training is known. With two, this "
      + "view says whether they are related, and which tokens moved most.",
      next(h("code", null, `${context.command} explore A B`), h("span", null, "or, with the table of this package,"),
        h("code", null, `${context.command} explore A --words`))));
    return { close() {} };
  }
  const { texts } = await context.data.load("tokens");
  const comparison = new CompareView(element, context, options, texts);
  await comparison.show();
  return comparison;
}

/** Return what the source can be compared with. @param {ViewContext} context @returns {[string, string][]} */
function optionsOf({ manifest, sources, source }) {
  /** @type {[string, string][]} */
  const others = sources.map((other, i) => [String(i), other.title]);
  return [
    .../** @type {[string, string][]} */ (manifest.has.includes("before") ? [["before", "before training"]] : []),
    ...others.filter(([i]) => Number(i) !== source),
  ];
}

class CompareView {
  /** @type {ComparisonMap | null} */ #map = null;
  #request = 0;

  /**
   * @param {HTMLElement} element
   * @param {ViewContext} context
   * @param {[string, string][]} options
   * @param {string[]} texts
   */
  constructor(element, context, options, texts) {
    this.context = context;
    this.options = options;
    this.texts = texts;
    this.body = h("div", { class: "map" });
    this.choice = select({
      label: "Compare with", options, value: this.#other(),
      onChange: (value) => {
        context.state.set({ with: value === options[0][0] ? null : value });
        this.show();
      },
    });
    element.replaceChildren(this.body);
  }

  #other() {
    const first = this.options[0][0];
    const other = this.context.state.get("with", first);
    return this.options.some(([key]) => key === other) ? other : first;
  }

  async show() {
    const request = ++this.#request;
    const { data } = this.context;
    this.#map?.close();
    this.#map = null;
    this.body.replaceChildren(h("p", { class: "loading" }, "Aligning the tables …"));
    const other = this.#other();
    try {
      const [comparison, places] = await Promise.all([data.load("compare", { other }),
        data.load("compare-places", { other })]);
      if (request !== this.#request) return;
      const { texts, context, choice } = this;
      this.#map = new ComparisonMap(this.body, { context, texts, other, comparison, places, choice });
    } catch (error) {
      if (request !== this.#request) return;
      const { message } = /** @type {Error} */ (error);
      this.body.replaceChildren(h("div", null, this.choice, empty("These tables cannot be compared", message)));
    }
  }

  close() {
    this.#request++;
    this.#map?.close();
  }

  /** @param {number | null} id */
  tokenChosen(id) {
    this.#map?.choose(id);
  }

  stateChanged() {
    this.choice.set(this.#other());
    this.show();
  }
}
