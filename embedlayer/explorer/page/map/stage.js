/** Points on a canvas that one moves over: the picture, its view, and what is under the pointer. */

import { fit, h, onResize, visibleText } from "../dom.js";
import { gestures } from "./gestures.js";
import { inside, makeGrid, nearest } from "./grid.js";
import { pointPainter } from "./painting.js";
import { pan, toData, toScreen, zoomAt } from "./view.js";

const MANY = 60000; // points, from which on a pixel of the picture is one of CSS

/**
 * @typedef {import("./painting.js").Scene} Scene
 * @typedef {import("./view.js").View} View
 * @typedef {import("./gestures.js").Handlers} Handlers
 * @typedef {{width: number, height: number, cross: boolean}} Shown size in CSS pixels, and whether the keyboard chooses in the middle
 * @typedef {object} Room
 * @property {(width: number, height: number) => View} fitted the view of all points
 * @property {(context: CanvasRenderingContext2D, shown: Shown) => void} above paint what stands above the points
 * @property {(id: number) => string} said what the tip says of a point, after its text
 * @property {(id: number) => string} textOf
 * @property {(id: number, more: boolean) => void} pick
 * @property {number} closest how often one may zoom in
 * @property {(all: View) => View} [opening] what one sees first, instead of all
 * @property {() => void} [viewed] one has moved or zoomed
 * @property {Partial<Handlers>} [more] other gestures
 * @property {number} [reach] pixels between a pointer and the point that it means, at most
 */

/** A scene of `size` points, nowhere yet. @param {number} size @returns {Scene} */
export function emptyScene(size) {
  return {
    xs: new Float32Array(size), ys: new Float32Array(size), view: null, home: 1, colours: new Uint32Array(size), only: null,
    marked: new Int32Array(), markColour: 0, dense: false, scale: new Uint32Array(256), paper: [255, 255, 255], showAxes: true,
  };
}

/**
 * @param {Scene} scene @param {string} label what screen readers call the picture
 * @param {Room} room @param {...Node} controls what stands over the picture
 */
export function makeStage(scene, label, room, ...controls) {
  const points = h("canvas", { "aria-hidden": "true" });
  const over = h("canvas", { class: "map-over", tabIndex: 0, role: "application", "aria-label": label });
  const tip = h("div", { class: "map-tip", hidden: true });
  const element = h("div", { class: "map-stage" }, points, over, controls, tip);
  const painter = pointPainter(points);
  let [width, height] = [0, 0];
  let grid = null;
  let waiting = false;
  let closed = false;

  function draw() {
    if (waiting || closed) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (closed || !width || !scene.view) return;
      const start = performance.now();
      painter.paint(scene, width, height, Math.min(devicePixelRatio || 1, scene.xs.length > MANY ? 1 : 2));
      room.above(over.getContext("2d"), { width, height, cross: document.activeElement === over && over.matches(":focus-visible") });
      measured("map: frame", start);
    });
  }

  function show(view) {
    scene.view = view;
    room.viewed?.();
    draw();
  }

  function home() {
    if (!width) return;
    const all = room.fitted(width, height);
    scene.home = all.zoom;
    show(all);
  }

  /** Look where the room says that one looks first. */
  function look() {
    if (!width) return;
    const all = room.fitted(width, height);
    scene.home = all.zoom;
    scene.view = room.opening?.(all) ?? all;
    draw();
  }

  function zoom(factor, x = width / 2, y = height / 2) {
    show(zoomAt(scene.view, factor, x, y, width, height, [scene.home * 0.1, scene.home * room.closest]));
  }

  function place(xs, ys) {
    [scene.xs, scene.ys] = [xs, ys];
    grid = null;
  }

  const shown = (id) => scene.only === null || scene.only[id] === 1;
  const gridNow = () => (grid ??= makeGrid(scene.xs, scene.ys));

  function at(x, y, radius = room.reach ?? 10) {
    if (!scene.view) return -1;
    const [dx, dy] = toData(scene.view, x, y, width, height);
    return nearest(gridNow(), scene.xs, scene.ys, dx, dy, radius / scene.view.zoom, shown);
  }

  /** Name a point, at the pointer or else at itself. */
  function showTip(id, x, y) {
    const [left, top] = x === undefined && scene.view ? toScreen(scene.view, scene.xs[id], scene.ys[id], width, height) : [x, y];
    if (left < 0 || top < 0 || left > width || top > height) return hideTip();
    tip.replaceChildren(h("b", null, visibleText(room.textOf(id)) || "no token"), ` ${room.said(id)}`);
    tip.hidden = false;
    const across = Math.min(Math.max(left + 12, 4), width - tip.offsetWidth - 4);
    const down = top + 14 + tip.offsetHeight > height ? top - tip.offsetHeight - 10 : top + 12;
    tip.style.transform = `translate(${Math.round(across)}px, ${Math.round(down)}px)`;
  }

  function hideTip() { tip.hidden = true; }

  function pick(id, more = false) { if (id >= 0) room.pick(id, more); }

  const stopGestures = gestures(over, {
    hover(where) { const id = where ? at(...where) : -1; if (id >= 0) showTip(id, ...where); else hideTip(); },
    pan: (dx, dy) => show(pan(scene.view, dx, dy)),
    zoom,
    home,
    pick: (where, { touch, more }) => pick(at(...where, touch ? 22 : undefined), more),
    enter: () => pick(at(width / 2, height / 2, 60)),
    focus: draw,
    ...room.more,
  });

  const stopResize = onResize(element, resize);

  function resize(wide, high) {
    if (!wide || !high) return;
    [width, height] = [wide, high];
    fit(over, width, height);
    if (!scene.view) look();
    draw();
  }

  return {
    element, over, draw, home, look, zoom, place, shown, showTip, hideTip,
    /** Take the size that it has on the page. */
    measure: () => resize(element.clientWidth, element.clientHeight),
    /** IDs of the shown points inside a line on the screen. */
    within: (line) => inside(gridNow(), scene.xs, scene.ys, line.map(([x, y]) => toData(scene.view, x, y, width, height))).filter(shown),
    close() { closed = true; stopResize(); stopGestures(); },
  };
}

/** Leave a measurement where tools, and the tests, find it. */
export function measured(name, start) {
  if (performance.getEntriesByName(name).length > 300) performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}
