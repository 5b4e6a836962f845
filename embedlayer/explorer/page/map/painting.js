/** The picture of the map: points as pixels, and axes, names and rings above them. */

import { contextOf } from "../dom.js";
import { placeLabels } from "./labels.js";
import { density, disc, pixel, splat } from "./splat.js";
import { toScreen } from "./viewport.js";

/** @import { Context2D, Point, PointScene, Theme, Viewport } from "../types" */
/** @import { Picture } from "./splat.js" */

/**
 * @typedef {Theme & {mono: string, font: string}} Palette the page's colours and fonts
 *
 * @typedef {"token" | "group" | "part"} Style `group`: a large group; `part`: a part of one
 * @typedef {{text: string, x: number, y: number, style: Style}} Name a text and its place in data units
 *
 * @typedef {object} Overlay
 * @property {number} width in CSS pixels
 * @property {number} height in CSS pixels
 * @property {number[][]} covered boxes without names: left, top, right, bottom
 * @property {boolean} cross whether the keyboard chooses in the middle
 * @property {Palette} colours
 * @property {string[]} axes names of the horizontal and of the vertical axis
 * @property {number[]} rings points that are circled
 * @property {Iterable<number>} first points that are named before the groups
 * @property {Name[]} groups names of groups of points
 * @property {Iterable<number>} names further points that are named, the first ones first
 * @property {(id: number) => string} textOf
 * @property {number} most names
 * @property {Point[] | null} lasso
 */

/** At most about this many pixels are blended in a frame: points get smaller where there would be more. */
const BLENDED = 1.6e6;
const LINE = 15; // pixels, height of a line of text

/** Paints points into a canvas. */
export class PointPainter {
  /** @type {ImageData | null} */ #image = null;
  #pixels = new Uint32Array();
  #drawn = 1; // points in the last picture
  #marked = { xs: new Float32Array(), ys: new Float32Array(), colours: new Uint32Array() };

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = contextOf(canvas, { alpha: false });
  }

  /**
   * @param {PointScene} scene
   * @param {Viewport} viewport
   * @param {number} width in CSS pixels
   * @param {number} height in CSS pixels
   * @param {number} scale pixels of the picture for a CSS pixel
   */
  paint(scene, viewport, width, height, scale) {
    const image = this.#resized(width, height, scale);
    const picture = { pixels: this.#pixels, width: image.width, height: image.height };
    const scaled = { ...viewport, zoom: viewport.zoom * scale };
    const radius = radiusOf(scene.xs.length, viewport.zoom / scene.home);
    if (scene.dense) density(picture, scene, scaled, scene.scale);
    else {
      this.#pixels.fill(pixel(scene.paper));
      const stamp = disc(Math.min(radius * scale, Math.sqrt(BLENDED / this.#drawn) / 2 - 0.5),
        opacityOf(scene.xs.length));
      this.#drawn = 1 + splat(picture, scene, scaled, scene.colours, stamp);
    }
    if (scene.marked.length) this.#paintMarked(picture, scene, scaled, Math.max(3, radius * 1.6) * scale);
    this.context.putImageData(image, 0, 0);
  }

  /** @param {number} width @param {number} height @param {number} scale */
  #resized(width, height, scale) {
    const columns = Math.max(1, Math.round(width * scale));
    const rows = Math.max(1, Math.round(height * scale));
    if (this.#image && this.#image.width === columns && this.#image.height === rows) return this.#image;
    this.canvas.width = columns;
    this.canvas.height = rows;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const image = this.context.createImageData(columns, rows);
    this.#pixels = new Uint32Array(image.data.buffer);
    this.#image = image;
    return image;
  }

  /** @param {Picture} picture @param {PointScene} scene @param {Viewport} viewport @param {number} radius */
  #paintMarked(picture, { xs, ys, marked, markColour }, viewport, radius) {
    const count = marked.length;
    if (this.#marked.xs.length !== count) {
      this.#marked = { xs: new Float32Array(count), ys: new Float32Array(count), colours: new Uint32Array(count) };
    }
    marked.forEach((id, k) => {
      this.#marked.xs[k] = xs[id];
      this.#marked.ys[k] = ys[id];
    });
    this.#marked.colours.fill(markColour);
    splat(picture, { ...this.#marked, only: null, order: null }, viewport, this.#marked.colours, disc(radius, 1));
  }
}

/**
 * Return the radius of a point in CSS pixels: small for many points, larger with the zoom.
 * @param {number} count
 * @param {number} zoomed
 */
function radiusOf(count, zoomed) {
  return Math.min(7, 2.3 * (4096 / (count + 64)) ** 0.21 * Math.min(Math.max(zoomed, 0.5), 400) ** 0.38);
}

/** @param {number} count */
function opacityOf(count) {
  return count > 100000 ? 0.55 : count > 12000 ? 0.7 : 0.85;
}

/**
 * Draw axes, rings, names, lasso and cross above the points.
 * @param {Context2D} context
 * @param {PointScene} scene
 * @param {Viewport} viewport
 * @param {Overlay} overlay
 */
export function paintOver(context, scene, viewport, overlay) {
  const { width, height, colours, rings, lasso, cross } = overlay;
  context.clearRect(0, 0, width, height);
  if (scene.showAxes) paintAxes(context, viewport, width, height, colours);
  context.font = `12px ${colours.font}`;
  context.textBaseline = "middle";
  const note = paintAxisNames(context, overlay);
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  for (const id of rings) {
    context.beginPath();
    context.arc(...toScreen(viewport, scene.xs[id], scene.ys[id], width, height), 8, 0, 7);
    context.stroke();
  }
  paintNames(context, scene, viewport, { ...overlay, covered: [...overlay.covered, note] });
  if (lasso && lasso.length > 1) paintLasso(context, lasso, colours);
  if (cross) paintCross(context, width / 2, height / 2, colours);
}

/**
 * Draw the lines x = 0 and y = 0.
 * @param {Context2D} context
 * @param {Viewport} viewport
 * @param {number} width
 * @param {number} height
 * @param {Palette} colours
 */
function paintAxes(context, viewport, width, height, colours) {
  const [x, y] = toScreen(viewport, 0, 0, width, height);
  context.lineWidth = 1;
  context.strokeStyle = colours.line;
  context.beginPath();
  context.moveTo(Math.round(x) + 0.5, 0);
  context.lineTo(Math.round(x) + 0.5, height);
  context.moveTo(0, Math.round(y) + 0.5);
  context.lineTo(width, Math.round(y) + 0.5);
  context.stroke();
}

/**
 * Write the names of the axes; return the box of the lower one: left, top, right, bottom.
 * @param {Context2D} context
 * @param {Overlay} overlay
 */
function paintAxisNames(context, { axes: [across, up], height, colours }) {
  context.fillStyle = colours.muted;
  context.textAlign = "left";
  const lines = across.split("\n").reverse();
  lines.forEach((line, i) => outlined(context, line, 12, height - 16 - LINE * i, colours));
  context.save();
  context.translate(16, 12);
  context.rotate(-Math.PI / 2);
  context.textAlign = "right";
  outlined(context, up, 0, 0, colours);
  context.restore();
  context.textAlign = "left";
  return [0, height - 8 - LINE * lines.length, 12 + Math.max(...lines.map((line) => widthOf(context, line))), height];
}

/** Return a line that says how many points are outside the picture. @param {number} count @param {string} what */
export function outsideNote(count, what) {
  return count ? `\n${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"} outside: zoom out` : "";
}

/** @param {Context2D} context @param {Point[]} lasso @param {Palette} colours */
function paintLasso(context, lasso, colours) {
  context.beginPath();
  lasso.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
  context.strokeStyle = colours.accent;
  context.fillStyle = colours["accent-soft"];
  context.globalAlpha = 0.35;
  context.fill();
  context.globalAlpha = 1;
  context.stroke();
}

/** @param {Context2D} context @param {number} x @param {number} y @param {Palette} colours */
function paintCross(context, x, y, colours) {
  context.strokeStyle = colours.accent;
  context.beginPath();
  context.moveTo(x - 9, y);
  context.lineTo(x + 9, y);
  context.moveTo(x, y - 9);
  context.lineTo(x, y + 9);
  context.stroke();
}

/** @type {Map<string, number>} */
const widths = new Map();

/** @param {Context2D} context @param {string} text */
function widthOf(context, text) {
  const key = context.font + text;
  const width = widths.get(key) ?? context.measureText(text).width;
  widths.set(key, width);
  return width;
}

/** @param {Context2D} context @param {PointScene} scene @param {Viewport} viewport @param {Overlay} overlay */
function paintNames(context, scene, viewport, overlay) {
  const { width, height, covered, colours, most } = overlay;
  const fonts = {
    token: `12px ${colours.mono}`, group: `600 15px ${colours.font}`, part: `500 12.5px ${colours.font}`,
  };
  /** @type {Record<Style, string>} */
  const inks = { token: colours.ink, group: colours.ink, part: colours.ink };
  function* candidates() {
    for (const { text, x: across, y: up, style } of namesOf(scene, overlay)) {
      const [x, y] = toScreen(viewport, across, up, width, height);
      if (!(x >= 0 && y >= 0 && x <= width && y <= height)) continue;
      context.font = fonts[style];
      const line = style === "group" ? 22 : LINE;
      yield { text, x, y, width: widthOf(context, text), line, centred: style !== "token", style };
    }
  }
  const gap = 4 + radiusOf(scene.xs.length, viewport.zoom / scene.home);
  for (const { text, left, middle, style } of placeLabels(candidates(), { width, height, covered, gap, most })) {
    context.font = fonts[/** @type {Style} */ (style)];
    context.fillStyle = inks[/** @type {Style} */ (style)];
    outlined(context, text, left, middle, colours);
  }
  if (widths.size > 5000) widths.clear();
}

/**
 * Yield all names, those that are placed first first.
 * @param {PointScene} scene
 * @param {Overlay} overlay
 * @returns {Generator<Name>}
 */
function* namesOf({ xs, ys }, { first, groups, names, textOf }) {
  for (const id of first) yield { text: textOf(id), x: xs[id], y: ys[id], style: "token" };
  yield* groups;
  for (const id of names) yield { text: textOf(id), x: xs[id], y: ys[id], style: "token" };
}

/**
 * Draw a text with an outline in the colour of the page.
 * @param {Context2D} context
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {Palette} colours
 */
function outlined(context, text, x, y, colours) {
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = colours.paper;
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}
