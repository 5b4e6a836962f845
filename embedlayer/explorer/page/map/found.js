/** The tokens of the map that a search or a lasso finds. */

import { inside, lineFromText, lineToText, makeGrid } from "./grid.js";
import { parseQuery, search } from "./search.js";
import { measured } from "./stage.js";

/** @import { Point, ViewState } from "../types" */
/** @import { Axes } from "./axes.js" */
/** @import { Controls } from "./controls.js" */
/** @import { Placement } from "./placement.js" */
/** @import { Stage } from "./stage.js" */

/**
 * @typedef {object} About
 * @property {string[]} texts
 * @property {ViewState} state
 * @property {Axes} axes
 * @property {Controls} controls
 * @property {Stage} stage
 * @property {Placement} placement
 * @property {() => void} changed other tokens were found
 */

export class Found {
  /** @type {Int32Array | null} */ ids = null;
  /** @type {Point[] | null} */ line = null; // that is being drawn
  isIsolated = false;
  isLassoOn = false;

  /** @param {About} about */
  constructor(about) {
    this.about = about;
    this.lower = about.texts.map((text) => text.toLowerCase());
  }

  /** Find what is typed; return the text if no token has it, else null. @param {string} typed */
  search(typed) {
    const { texts, state, controls } = this.about;
    const start = performance.now();
    const query = parseQuery(typed);
    const isBroken = query.kind === "error";
    const ids = query.kind === "none" || isBroken ? null : search(query, texts, this.lower);
    measured("map: search", start);
    controls.searchField.title = isBroken ? query.message : "";
    state.set({ q: typed || null, lasso: null });
    this.#take(ids, isBroken ? "not a pattern" : ids ? `${ids.length.toLocaleString("en")} found` : "");
    return query.kind === "text" && !ids?.length ? query.text : null;
  }

  /** @param {boolean} isOn */
  setLasso(isOn) {
    const { controls, stage } = this.about;
    this.isLassoOn = isOn;
    controls.lasso.setAttribute("aria-pressed", String(isOn));
    stage.over.classList.toggle("is-lasso", isOn);
  }

  /** Draw the line of the lasso. @param {Point[] | null} line */
  draw(line) {
    this.line = line;
    this.about.stage.draw();
  }

  /** Find the tokens inside the line that was drawn. */
  takeLasso() {
    const { axes, controls, placement, stage, state } = this.about;
    const { line } = this;
    this.line = null;
    this.setLasso(false);
    if (!line || line.length <= 2) return stage.draw();
    const [x, y] = axes.drawn;
    controls.searchField.value = "";
    state.set({ q: null, lasso: lineToText(stage.inData(line)) });
    if (axes.isLayout() && !axes.isLayoutDrawn()) { // the line is one among the points that are drawn
      state.set({ x, y });
      placement.show(false);
    }
    return this.applyLasso();
  }

  /** Find the tokens inside the line that the URL says. */
  applyLasso() {
    const { placement, stage, state } = this.about;
    const line = lineFromText(state.get("lasso", ""));
    const places = placement.places();
    if (line.length <= 2 || !places) return;
    const ids = inside(makeGrid(places.xs, places.ys), line).filter((id) => stage.isShown(id));
    this.#take(ids, `${ids.length.toLocaleString("en")} inside`);
  }

  /** @param {Int32Array | null} ids @param {string} message */
  #take(ids, message) {
    this.ids = ids;
    this.about.controls.hits.textContent = message;
    if (!ids) this.isIsolated = false;
    this.about.changed();
  }

  /** Find nothing, until the URL is followed. */
  forget() {
    this.ids = null;
    this.about.controls.hits.textContent = "";
  }

  /** Find nothing, and say so in the URL. */
  clear() {
    this.about.controls.searchField.value = "";
    this.line = null;
    this.setLasso(false);
    this.about.state.set({ q: null, lasso: null });
    this.#take(null, "");
  }
}
