/** The viewport of the map in the URL. */

import { fitViewport } from "./viewport.js";

/** @import { PointScene, ViewState, Viewport } from "../types" */

const NARROW = 600; // pixels
const MOVING_DELAY = 300; // milliseconds

/** Whether a picture has no place for all names. @param {number} width */
export function isNarrow(width) {
  return width < NARROW;
}

export class RememberedViewport {
  #timer = 0;

  /**
   * @param {ViewState} state
   * @param {PointScene} scene
   * @param {() => {xs: Float32Array, ys: Float32Array} | null} places of the points, or where they will be
   */
  constructor(state, scene, places) {
    this.state = state;
    this.scene = scene;
    this.places = places;
  }

  close() {
    clearTimeout(this.#timer);
  }

  /**
   * Return the viewport of all points between the buttons and the note.
   * @param {number} width
   * @param {number} height
   */
  fitted(width, height) {
    const [over, under] = isNarrow(width) ? [48, 40] : [0, 24];
    const { xs, ys } = this.places() ?? this.scene;
    const all = fitViewport(xs, ys, width, height - over - under);
    return { ...all, y: all.y - (under - over) / 2 / all.zoom };
  }

  /** Return the viewport in the URL; `all` without one. @param {Viewport} all */
  opening(all) {
    const [x, y, zoom] = this.state.get("at", "").split(",").map(Number);
    return Number.isFinite(zoom) && zoom > 0 ? { x, y, zoom: all.zoom * zoom } : all;
  }

  /** Write the viewport of an element into the URL, once it rests. @param {HTMLElement} element */
  remember(element) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      const { viewport } = this.scene;
      if (!viewport) return;
      const all = this.fitted(element.clientWidth, element.clientHeight);
      const zoom = viewport.zoom / all.zoom;
      const distance = Math.hypot(viewport.x - all.x, viewport.y - all.y) * all.zoom;
      const isAll = Math.abs(zoom - 1) <= 0.01 && distance <= 3;
      const numbers = [viewport.x, viewport.y, zoom].map((n) => Number(n.toPrecision(5)));
      this.state.set({ at: isAll ? null : numbers.join(",") });
    }, MOVING_DELAY);
  }
}
