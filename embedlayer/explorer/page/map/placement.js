/** Where the points of the map are: on two axes, or in the neighbour layout, which they move to when it is there. */

import { LAYOUT } from "./axes.js";
import { FoldedRows } from "./folded.js";
import { glide, isStill, redrawn } from "./glide.js";
import { LayoutRequest, NoLayout } from "./layout.js";

/** @import { Data, Layout, LayoutProgress } from "../types" */
/** @import { Axes } from "./axes.js" */
/** @import { Controls } from "./controls.js" */
/** @import { Stage } from "./stage.js" */

/**
 * @typedef {object} About
 * @property {Data} data
 * @property {number} size number of tokens
 * @property {Axes} axes
 * @property {Controls} controls
 * @property {Stage} stage
 * @property {HTMLElement} inset place of the rows that are not learned
 * @property {() => void} arrived the layout is there
 */

export class Placement {
  /** @type {FoldedRows | null} */ #folded = null;
  #isClosed = false;
  #isArriving = false; // the layout is being loaded
  #stopGlide = () => {};
  isGliding = false;

  /** @param {About} about */
  constructor(about) {
    this.about = about;
    this.layout = new LayoutRequest(about.data, about.size);
  }

  close() {
    this.#isClosed = true;
    this.#stopGlide();
    this.layout.close();
    document.removeEventListener("themechange", this.#onTheme);
  }

  /** Show the first two components before anything else is there. */
  start() {
    this.#place(this.about.axes.first(), this.about.axes.firstTwo);
    this.about.stage.measure();
  }

  /** Learn which rows are not learned: they are left out of the layout, and shown in an inset. */
  async fold() {
    const { data } = this.about;
    const [isFolded, norms] = await Promise.all([data.load("folded"), data.load("norms")]);
    if (this.#isClosed) return;
    const [xs, ys] = this.about.axes.first();
    this.#folded = new FoldedRows(new Uint8Array(isFolded), new Float32Array(norms), xs, ys);
    this.about.inset.replaceChildren(this.#folded.element);
    this.#folded.show(!this.about.stage.scene.showAxes);
    this.#folded.draw();
    document.addEventListener("themechange", this.#onTheme);
  }

  #onTheme = () => this.#folded?.draw();

  /** Whether a row is not learned. @param {number} id */
  isFolded(id) {
    return this.#folded?.isFolded[id] === 1;
  }

  /** Return the coordinates of all points; null while the layout is not there. */
  places() {
    const { axes, stage } = this.about;
    return axes.isLayout() ? axes.layout : stage.scene;
  }

  /**
   * Show the axes that the URL says.
   * @param {boolean} [isNew] whether to show all points, instead of the viewport in the URL
   */
  async show(isNew = true) {
    const { axes, controls } = this.about;
    controls.showAxes(); // until the others are there
    if (axes.isLayout()) return this.#showLayout(isNew);
    controls.showProgress("");
    const ids = axes.wanted();
    try {
      const coordinates = await axes.load(ids);
      if (this.#isClosed || axes.isLayout() || String(ids) !== String(axes.wanted())) return;
      this.#stopGlide();
      this.#place(coordinates, ids);
      this.#view(isNew);
    } catch (error) {
      if (!this.#isClosed) controls.showProgress(/** @type {Error} */ (error).message);
    }
  }

  /** @param {boolean} isNew */
  #view(isNew) {
    if (isNew) this.about.stage.home();
    else this.about.stage.reset();
  }

  /** Load the layout, and move the points to it. @param {boolean} isNew */
  async #showLayout(isNew) {
    const { axes, controls } = this.about;
    if (axes.layout) return this.#arrive(axes.layout, isNew);
    if (this.#isArriving) return;
    this.#isArriving = true;
    try {
      axes.layout = await this.layout.load((progress) => this.#showProgress(progress));
      this.#isArriving = false;
      if (this.#isClosed) return;
      controls.showProgress("");
      if (axes.isLayout()) this.#arrive(axes.layout, isNew);
      this.about.arrived();
    } catch (error) {
      this.#isArriving = false;
      if (this.#isClosed || !axes.isLayout()) return;
      this.#explain(/** @type {Error} */ (error));
    }
  }

  /** Say why there is no layout. @param {Error} error */
  #explain(error) {
    const wasCancelled = error instanceof NoLayout;
    const isExported = this.about.data.exported;
    const why = wasCancelled ? "The neighbour layout was cancelled."
      : isExported ? "This file has no neighbour layout: the table is too large." : error.message;
    this.about.controls.showProgress(why,
      isExported ? undefined : [wasCancelled ? "Compute it" : "Try again", () => this.#showLayout(true)]);
  }

  /** @param {LayoutProgress} progress */
  #showProgress({ stage, share }) {
    const { axes, controls } = this.about;
    if (!axes.isLayout()) return controls.showProgress("");
    controls.showProgress(`Neighbour layout: ${stage} · ${Math.round(100 * share)} %`,
      ["Cancel", () => this.layout.cancel()]);
  }

  /** Move the points to the layout. @param {Layout} layout @param {boolean} isNew */
  #arrive(layout, isNew) {
    const { stage, axes } = this.about;
    const { scene } = stage;
    const [before, places, wasLayout] = [scene.viewport, { xs: scene.xs, ys: scene.ys }, !scene.showAxes];
    this.#stopGlide();
    this.#place([layout.xs, layout.ys], [LAYOUT, axes.drawn[1]]);
    this.#view(isNew);
    const after = scene.viewport;
    if (wasLayout || isStill() || !before || !after) return;
    this.isGliding = true;
    this.#stopGlide = glide(redrawn(places, before, after), layout, ({ xs, ys }) => {
      stage.place(xs, ys);
      stage.draw();
    }, () => {
      this.isGliding = false;
      stage.place(layout.xs, layout.ys);
      stage.draw();
    });
  }

  /** Draw points, and say along which axes. @param {Float32Array[]} coordinates @param {string[]} ids of the axes */
  #place([xs, ys], ids) {
    const { stage, axes, controls } = this.about;
    this.isGliding = false;
    stage.place(xs, ys);
    axes.drawn = ids;
    stage.scene.showAxes = !axes.isLayoutDrawn();
    controls.showAxes();
    this.#folded?.show(axes.isLayoutDrawn());
  }
}
