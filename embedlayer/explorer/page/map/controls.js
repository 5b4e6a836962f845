/** The controls of the map: search, axes, colour, density and lasso. */

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
    this.searchField = this.#makeSearch(host);
    this.hits = h("output", { "aria-live": "polite" });
    this.xAxis = this.#choice("x axis", axes.horizontal, "x", LAYOUT, host.setAxes);
    this.yAxis = this.#choice("y axis", axes.options, "y", "2", host.setAxes);
    this.colourBy = this.#choice("Colour", columns.options, "c", "cluster", host.setColours);
    this.message = h("span", { role: "status" });
    this.action = h("button", { type: "button" });
    this.progress = h("p", { class: "map-progress", hidden: true }, this.message, this.action);
    this.density = toggle("Density", "Show the density of the points", host.toggleDensity);
    this.lasso = toggle("Lasso", "Draw a line around points", host.toggleLasso);
    this.modes = h("div", { class: "segments map-modes" }, this.density, this.lasso);
    this.element = h("div", { class: "map-tools" },
      h("label", { class: "field search" }, h("span", null, "Search", this.hits), this.searchField),
      this.colourBy, this.xAxis, this.yAxis);
  }

  /** @param {Host} host */
  #makeSearch(host) {
    return h("input", {
      type: "search", placeholder: "text, /regex/, #id, 0xE2 96", spellcheck: false, autocomplete: "off",
      "aria-label": "Search tokens by text, /regex/, #id or bytes",
      onInput: host.search,
      onKeydown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key === "Enter") host.enter();
        else if (event.key === "Escape") host.escape();
      },
    });
  }

  /**
   * Create a choice that is stored in the URL.
   * @param {string} label
   * @param {[string, string][]} options
   * @param {string} key of the URL
   * @param {string} usual the value that the URL leaves out
   * @param {() => void} onChange
   */
  #choice(label, options, key, usual, onChange) {
    return select({
      label, options, value: this.state.get(key, usual),
      onChange: (value) => {
        this.state.set({ [key]: value === usual ? null : value });
        onChange();
      },
    });
  }

  /** Show what the URL says. */
  follow() {
    this.searchField.value = this.state.get("q", "");
    this.xAxis.set(this.state.get("x", LAYOUT));
    this.yAxis.set(this.state.get("y", "2"));
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
