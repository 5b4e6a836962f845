/** The controls of the map: search, axes, colour, density and lasso. The lists show what is drawn. */

import { h, select } from "../dom.js";
import { LAYOUT } from "./axes.js";

/** @import { ViewState } from "../types" */
/** @import { Axes } from "./axes.js" */
/** @import { Columns } from "./columns.js" */

/**
 * @typedef {object} Host
 * @property {() => void} search the text of the search field has changed
 * @property {() => void} enter Enter was pressed in the search field
 * @property {() => void} escape Escape was pressed in the search field
 * @property {() => void} setAxes
 * @property {() => void} setColours
 * @property {() => void} toggleDensity
 * @property {() => void} toggleLasso
 */

export class Controls {
  /** @param {ViewState} state @param {Axes} axes @param {Columns} columns @param {Host} host */
  constructor(state, axes, columns, host) {
    this.state = state;
    this.axes = axes;
    this.searchField = this.#makeSearch(host);
    this.hits = h("output", { "aria-live": "polite" });
    this.xAxis = select({
      label: "x axis", options: axes.horizontal, value: "1", onChange: (x) => this.#setAxes(x, axes.drawn[1], host),
    });
    this.yAxis = select({
      label: "y axis", options: axes.options, value: "2", onChange: (y) => this.#setAxes(axes.drawn[0], y, host),
    });
    this.colourBy = select({
      label: "Colour", options: columns.options, value: "kind", onChange: (name) => {
        state.set({ c: name === "cluster" ? null : name });
        host.setColours();
      },
    });
    this.message = h("span", { role: "status" });
    this.action = h("button", { type: "button" });
    this.progress = h("p", { class: "map-progress", hidden: true }, this.message, this.action);
    this.density = toggle("Density", "Show the density of the points", host.toggleDensity);
    this.lasso = toggle("Lasso", "Draw a line around points", host.toggleLasso);
    this.modes = h("div", { class: "segments map-modes" }, this.density, this.lasso);
    this.element = h("div", { class: "map-tools" },
      h("label", { class: "field search" }, h("span", null, "Find tokens on the map", this.hits), this.searchField),
      this.colourBy, this.xAxis, this.yAxis);
  }

  /** @param {Host} host */
  #makeSearch(host) {
    return h("input", {
      type: "search", placeholder: "text, /regex/, #id, 0xE2 96", spellcheck: false, autocomplete: "off",
      "aria-label": "Find tokens on the map by text, /regex/, #id or bytes",
      onInput: host.search,
      onKeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter") host.enter();
        else if (event.key === "Escape") host.escape();
      },
    });
  }

  /** Show the search that the URL says. */
  follow() {
    this.searchField.value = this.state.get("q", "");
  }

  /** Request two axes. @param {string} x @param {string} y @param {Host} host */
  #setAxes(x, y, host) {
    this.state.set(x === LAYOUT ? { x: null } : { x, y: y === "2" ? null : y });
    host.setAxes();
  }

  /** Show the axes that are drawn. */
  showAxes() {
    const [x, y] = this.axes.drawn;
    this.xAxis.set(x);
    this.yAxis.set(y);
    this.yAxis.hidden = this.axes.isLayoutDrawn();
  }

  /**
   * Show the column that colours the points.
   * @param {string} name
   * @param {boolean} isDense whether their density is drawn instead
   */
  showColour(name, isDense) {
    const list = /** @type {HTMLSelectElement} */ (this.colourBy.querySelector("select"));
    const clusters = /** @type {HTMLOptionElement | null} */ (list.querySelector('option[value="cluster"]'));
    if (clusters) clusters.disabled = !this.axes.layout; // they are those of the layout
    this.colourBy.set(name);
    list.disabled = isDense;
    this.density.setAttribute("aria-pressed", String(isDense));
  }

  /**
   * Show a message above the map, with a button.
   * @param {string} text no message if it is empty
   * @param {[label: string, onClick: () => void]} [action]
   */
  showProgress(text, action) {
    this.progress.hidden = !text;
    this.message.textContent = text;
    this.action.hidden = !action;
    if (!action) return;
    this.action.textContent = action[0];
    this.action.onclick = action[1];
  }
}

/** Create a button that is pressed or not. @param {string} text @param {string} title @param {() => void} onClick */
function toggle(text, title, onClick) {
  return h("button", { type: "button", "aria-pressed": "false", title, onClick }, text);
}
