/** Points on a canvas that can be moved and zoomed, and the tooltip of the point under the pointer. */

import { contextOf, fit, h, onResize, visibleText } from "../dom.js";
import { Gestures } from "./gestures.js";
import { makeGrid, nearest, visitBox } from "./grid.js";
import { PointPainter } from "./painting.js";
import { drawingOrder } from "./splat.js";
import { countOutside, pan, toData, toScreen, zoomAt } from "./viewport.js";

/** @import { Context2D, Point, PointScene, Viewport } from "../types" */
/** @import { Handlers } from "./gestures.js" */
/** @import { Grid } from "./grid.js" */

const HINT = 1600; // milliseconds
const MANY = 60000; // points from which on a pixel of the picture is a CSS pixel

/**
 * @typedef {object} Frame
 * @property {number} width in CSS pixels
 * @property {number} height
 * @property {boolean} cross whether the keyboard chooses in the middle
 * @property {number[][]} covered left, top, right and bottom of each control above
 * @property {number} outside points beyond the picture that shows all but outliers; 0 after zooming or moving
 *
 * @typedef {object} Host
 * @property {(width: number, height: number) => Viewport} fitted the viewport of all points
 * @property {(context: Context2D, viewport: Viewport, frame: Frame) => void} above paint above the points
 * @property {(id: number) => string} details of a point in its tooltip, after its text
 * @property {(id: number) => string} textOf
 * @property {(id: number, more: boolean) => void} pick
 * @property {number} closest largest zoom
 * @property {(all: Viewport) => Viewport} [opening] the first viewport, instead of all points
 * @property {() => void} [moved]
 * @property {Partial<Handlers>} [more] other gestures
 * @property {number} [reach] largest distance in pixels between the pointer and the point that it chooses
 */

/** Return a scene of `size` points that have no coordinates yet. @param {number} size @returns {PointScene} */
export function emptyScene(size) {
  return {
    xs: new Float32Array(size), ys: new Float32Array(size), viewport: null, home: 1, colours: new Uint32Array(size),
    only: null, order: drawingOrder(size), marked: new Int32Array(), markColour: 0, dense: false,
    scale: new Uint32Array(256), paper: [255, 255, 255], showAxes: true,
  };
}

/** Return the box of an element in its parent: left, top, right, bottom. @param {HTMLElement} element */
function boxOf({ offsetLeft, offsetTop, offsetWidth, offsetHeight }) {
  return [offsetLeft, offsetTop, offsetLeft + offsetWidth, offsetTop + offsetHeight];
}

export class Stage {
  /** @type {Grid | null} */ #grid = null;
  #width = 0;
  #height = 0;
  #isWaiting = false;
  #isHome = false; // all points are shown, also in another size
  /** @type {{viewport: Viewport | null, xs: Float32Array | null, count: number}} */
  #outside = { viewport: null, xs: null, count: 0 };
  #hinting = 0;
  #isClosed = false;

  /**
   * @param {PointScene} scene
   * @param {string} label for screen readers
   * @param {Host} host
   * @param {...HTMLElement} controls above the picture
   */
  constructor(scene, label, host, ...controls) {
    const points = h("canvas", { "aria-hidden": "true" });
    this.scene = scene;
    this.host = host;
    this.controls = controls;
    this.over = h("canvas", { class: "map-over", tabIndex: 0, role: "application", "aria-label": label });
    this.tip = h("div", { class: "map-tip", hidden: true });
    this.hint = h("p", { class: "map-hint", hidden: true }, "Tap twice to move the map with one finger");
    this.element = h("div", { class: "map-stage" }, points, this.over, controls, this.tip, this.hint);
    this.painter = new PointPainter(points);
    this.gestures = new Gestures(this.over, this.#handlers());
    this.stopResize = onResize(this.element, (width, height) => this.#resize(width, height));
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#hinting);
    this.stopResize();
    this.gestures.close();
  }

  draw = () => {
    if (this.#isWaiting || this.#isClosed) return;
    this.#isWaiting = true;
    requestAnimationFrame(() => {
      this.#isWaiting = false;
      this.#paint();
    });
  };

  #paint() {
    const { scene, over } = this;
    const [width, height] = [this.#width, this.#height];
    if (this.#isClosed || !width || !scene.viewport) return;
    const start = performance.now();
    const scale = Math.min(devicePixelRatio || 1, scene.xs.length > MANY ? 1 : 2);
    this.painter.paint(scene, scene.viewport, width, height, scale);
    const cross = document.activeElement === over && over.matches(":focus-visible");
    this.host.above(contextOf(over), scene.viewport,
      { width, height, cross, covered: this.controls.map(boxOf), outside: this.#outsideNow() });
    measured("map: frame", start);
  }

  /** Return the number of points beyond the picture that shows all but outliers; 0 of any other picture. */
  #outsideNow() {
    const { xs, ys, viewport } = this.scene;
    if (!this.#isHome || !viewport) return 0;
    if (this.#outside.viewport !== viewport || this.#outside.xs !== xs) {
      this.#outside = { viewport, xs, count: countOutside(xs, ys, viewport, this.#width, this.#height) };
    }
    return this.#outside.count;
  }

  /** @param {Viewport} viewport */
  #show(viewport) {
    this.#isHome = false;
    this.scene.viewport = viewport;
    this.host.moved?.();
    this.draw();
  }

  /** Return the viewport of all points, which is zoom 1. */
  #fitted() {
    const all = this.host.fitted(this.#width, this.#height);
    this.scene.home = all.zoom;
    return all;
  }

  /** Show all points. */
  home() {
    if (!this.#width) return;
    this.#show(this.#fitted());
    this.#isHome = true;
  }

  /** Show the first viewport. */
  reset() {
    if (!this.#width) return;
    const all = this.#fitted();
    this.scene.viewport = this.host.opening?.(all) ?? all;
    this.#isHome = this.scene.viewport === all;
    this.draw();
  }

  /** @param {number} factor @param {number} [x] @param {number} [y] */
  zoom(factor, x = this.#width / 2, y = this.#height / 2) {
    const { scene } = this;
    if (!scene.viewport) return;
    /** @type {Point} */
    const limits = [scene.home * 0.1, scene.home * this.host.closest];
    this.#show(zoomAt(scene.viewport, factor, x, y, this.#width, this.#height, limits));
  }

  /** Set the coordinates of the points. @param {Float32Array} xs @param {Float32Array} ys */
  place(xs, ys) {
    this.scene.xs = xs;
    this.scene.ys = ys;
    this.#grid = null;
  }

  /** Whether a point is shown. @param {number} id */
  isShown(id) {
    return this.scene.only === null || this.scene.only[id] === 1;
  }

  #gridNow() {
    this.#grid ??= makeGrid(this.scene.xs, this.scene.ys, this.scene.order);
    return this.#grid;
  }

  /** Return the point at a place; -1 if there is none. @param {number} x @param {number} y @param {number} [radius] */
  #at(x, y, radius = this.host.reach ?? 10) {
    const { viewport } = this.scene;
    if (!viewport) return -1;
    const place = toData(viewport, x, y, this.#width, this.#height);
    return nearest(this.#gridNow(), place, radius / viewport.zoom, (id) => this.isShown(id));
  }

  /**
   * Call `visit` with each point in a rectangle of data units, and maybe with some beside it.
   * @param {Point} low
   * @param {Point} high
   * @param {(id: number) => void} visit
   */
  visit(low, high, visit) {
    visitBox(this.#gridNow(), low, high, visit);
  }

  /** Return a line on the screen in data units. @param {Point[]} line */
  inData(line) {
    const viewport = /** @type {Viewport} */ (this.scene.viewport);
    return line.map(([x, y]) => toData(viewport, x, y, this.#width, this.#height));
  }

  /** Show the tooltip of a point, at the point itself. @param {number} id */
  showTip(id) {
    const { viewport, xs, ys } = this.scene;
    if (viewport) this.#showTipAt(id, ...toScreen(viewport, xs[id], ys[id], this.#width, this.#height));
  }

  /** @param {number} id @param {number} left @param {number} top */
  #showTipAt(id, left, top) {
    const { tip } = this;
    const isOnScreen = left >= 0 && top >= 0 && left <= this.#width && top <= this.#height; // not if it has no place
    if (!isOnScreen) return this.hideTip();
    tip.replaceChildren(h("b", null, visibleText(this.host.textOf(id)) || "no token"), ` ${this.host.details(id)}`);
    tip.hidden = false;
    const across = Math.min(Math.max(left + 12, 4), this.#width - tip.offsetWidth - 4);
    const isBelow = top + 14 + tip.offsetHeight <= this.#height;
    const down = isBelow ? top + 12 : top - tip.offsetHeight - 10;
    tip.style.transform = `translate(${Math.round(across)}px, ${Math.round(down)}px)`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  /** @param {number} id @param {boolean} [more] whether to add it to the selection */
  #pick(id, more = false) {
    if (id >= 0) this.host.pick(id, more);
  }

  /** @returns {Handlers} */
  #handlers() {
    return {
      hover: (at) => {
        const id = at ? this.#at(...at) : -1;
        if (at && id >= 0) this.#showTipAt(id, ...at);
        else this.hideTip();
      },
      pan: (dx, dy) => this.scene.viewport && this.#show(pan(this.scene.viewport, dx, dy)),
      zoom: (factor, x, y) => this.zoom(factor, x, y),
      home: () => this.home(),
      pick: (at, { touch, more }) => this.#pick(this.#at(...at, touch ? 22 : undefined), more),
      enter: () => this.#pick(this.#at(this.#width / 2, this.#height / 2, 60)),
      focus: this.draw,
      scrolled: () => this.#showHint(),
      ...this.host.more,
    };
  }

  #showHint() {
    clearTimeout(this.#hinting);
    this.hint.hidden = false;
    this.#hinting = setTimeout(() => {
      this.hint.hidden = true;
    }, HINT);
  }

  /** Take the size of the element on the page. */
  measure() {
    this.#resize(this.element.clientWidth, this.element.clientHeight);
  }

  /** @param {number} width @param {number} height */
  #resize(width, height) {
    if (!width || !height) return;
    this.#width = width;
    this.#height = height;
    fit(this.over, width, height);
    if (!this.scene.viewport) this.reset();
    else if (this.#isHome) this.scene.viewport = this.#fitted();
    this.draw();
  }
}

/** Record a duration for tools and tests. @param {string} name @param {number} start */
export function measured(name, start) {
  if (performance.getEntriesByName(name).length > 300) performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}
