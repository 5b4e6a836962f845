/** The coordinates of the points: principal components, cosine with the selection, or a layout of neighbours. */

import { isEmpty, sumParams } from "./selection.js";
import { spread } from "./viewport.js";

/** @import { Data, Layout, TokenSum, ViewState } from "../types" */

/** The axis that stands for both axes of the neighbour layout. */
export const LAYOUT = "n";
const SELECTION = "e";

/** The two axes that the URL says. */
export class Axes {
  /**
   * @param {object} about
   * @param {number} about.size number of tokens
   * @param {ArrayBuffer} about.coordinates one component after the other
   * @param {number[]} about.explained share of the variance of each component
   * @param {ViewState} about.state
   * @param {Data} about.data
   * @param {() => TokenSum} about.selected
   */
  constructor({ size, coordinates, explained, state, data, selected }) {
    this.size = size;
    this.coordinates = coordinates;
    this.explained = explained;
    this.state = state;
    this.data = data;
    this.selected = selected;
    /** @type {Layout | null} the neighbour layout, once it is there */
    this.layout = null;
    this.count = Math.round(coordinates.byteLength / 4 / size);
    /** @type {string[]} the axes of the points that are drawn; those of the URL may still be loading */
    this.drawn = this.firstTwo = ["1", String(Math.min(2, this.count))];
    /** @type {[string, string][]} */
    this.options = Array.from({ length: this.count }, (_, k) =>
      [String(k + 1), `component ${k + 1} · ${this.#share(k)}`]);
    this.options.push([SELECTION, "cosine similarity"]);
    /** @type {[string, string][]} */
    this.horizontal = [[LAYOUT, "neighbour layout"], ...this.options];
  }

  /** @param {number} index of the component */
  #share(index) {
    const value = this.explained[index];
    return value === undefined ? "" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
  }

  /** @param {number} number of the component, from 1 */
  #component(number) {
    return new Float32Array(this.coordinates, 4 * this.size * (number - 1), this.size);
  }

  #wanted() {
    return [this.state.get("x", LAYOUT), this.state.get("y", "2")];
  }

  /** Return the first two components. */
  first() {
    return this.firstTwo.map((id) => this.#component(Number(id)));
  }

  /** Whether both axes are one layout. */
  isLayout() {
    return this.state.get("x", LAYOUT) === LAYOUT;
  }

  /** Whether an axis depends on the selection. */
  isSelection() {
    return !this.isLayout() && this.#wanted().includes(SELECTION);
  }

  /** Return the note under a layout. @param {boolean} isNarrow whether it needs two lines */
  layoutNote(isNarrow) {
    const recall = this.layout?.recall ?? 1;
    const found = recall < 1 ? ` (${(100 * recall).toFixed(1)} % recall)` : "";
    return `neighbours are close${found};${isNarrow ? "\n" : " "}distances between groups mean little`;
  }

  /** Whether the points that are drawn are those of the layout. */
  isLayoutDrawn() {
    return this.drawn[0] === LAYOUT;
  }

  /** Return the titles of the axes that are drawn. */
  titles() {
    return this.drawn.map((id) => (id === SELECTION ? "cosine with the selection →"
      : `principal component ${id} · ${this.#share(Number(id) - 1)} of the variance →`));
  }

  /** Return the two axes of the URL, which are not the layout, as axes that there are. */
  wanted() {
    return this.#wanted().map((id, i) => (this.options.some(([key]) => key === id) ? id : this.firstTwo[i]));
  }

  /** Return the coordinates along two axes that are not the layout. @param {string[]} ids */
  async load(ids) {
    const values = await Promise.all(ids.map((id) =>
      (id === SELECTION ? this.#cosines() : this.#component(Number(id)))));
    return ids.includes(SELECTION) ? values.map(standardized) : values;
  }

  async #cosines() {
    const sum = this.selected();
    if (isEmpty(sum)) return new Float32Array(this.size);
    return new Float32Array(await this.data.load("along", sumParams(sum)));
  }
}

/** Centre and scale values, so that two of different units fit one picture. @param {Float32Array} values */
function standardized(values) {
  const [low, high] = spread(values, 0.01);
  return values.map((value) => (value - (low + high) / 2) / (high - low || 1));
}
