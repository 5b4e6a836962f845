/** The names of tokens on the map: shortened, and chosen per cell of the screen. */

import { visibleText } from "../dom.js";
import { NameCells } from "./names.js";

/** @import { PointScene, Viewport } from "../types" */
/** @import { Frame, Stage } from "./stage.js" */

const LONGEST_NAME = 24;

export class Naming {
  /** @type {Map<number, string>} */ #shortened = new Map();
  /** @type {NameCells | null} */ #cells = null;

  /**
   * @param {string[]} texts
   * @param {PointScene} scene
   * @param {() => Int32Array} inOrder tokens in the order in which they are named
   */
  constructor(texts, scene, inOrder) {
    this.texts = texts;
    this.scene = scene;
    this.inOrder = inOrder;
  }

  /** @param {number} id */
  nameOf(id) {
    const known = this.#shortened.get(id);
    if (known !== undefined) return known;
    const text = visibleText(this.texts[id]);
    const name = text.length > LONGEST_NAME ? `${text.slice(0, LONGEST_NAME - 1)}…` : text;
    this.#shortened.set(id, name);
    return name;
  }

  /**
   * Return the tokens to name in a viewport, at most one for each cell of the screen.
   * @param {Stage} stage
   * @param {Viewport} viewport
   * @param {Frame} frame
   */
  at(stage, viewport, { width, height }) {
    const { xs, ys, only } = this.scene;
    if (this.#cells?.xs !== xs || this.#cells.only !== only) {
      this.#cells = new NameCells({
        xs, ys, only, order: this.inOrder(), visit: (low, high, visit) => stage.visit(low, high, visit),
      });
    }
    return this.#cells.at(viewport, width, height);
  }
}
