/** The picture of the map: points into pixels, and above them axes, names and rings. */

import { disc, density, pixel, splat } from "./splat.js";
import { placeLabels } from "./labels.js";
import { toScreen } from "./view.js";

/**
 * What is painted.
 * @typedef {object} Scene
 * @property {Float32Array} xs @property {Float32Array} ys
 * @property {import("./view.js").View} view in CSS pixels
 * @property {Uint32Array} colours a pixel per point
 * @property {Uint8Array | null} only points that are shown
 * @property {Int32Array} marked points drawn larger, above the others
 * @property {boolean} dense density instead of points
 * @property {Uint32Array} scale 256 pixels for density
 * @property {[number, number, number]} paper
 */

/** Pixels that are blended in a frame, at most about so many: points get smaller where more would be. */
const BLENDED = 1.6e6;

/** A canvas that points are painted into. @param {HTMLCanvasElement} canvas */
export function pointPainter(canvas) {
  const context = canvas.getContext("2d", { alpha: false });
  let image = null;
  let pixels = new Uint32Array();
  let drawn = 1; // points in the last picture
  let picked = { of: null, xs: new Float32Array(), ys: new Float32Array(), colours: new Uint32Array() };
  return { paint };

  /** @param {Scene} scene @param {number} width @param {number} height in CSS pixels @param {number} scale */
  function paint(scene, width, height, scale) {
    const columns = Math.max(1, Math.round(width * scale));
    const rows = Math.max(1, Math.round(height * scale));
    if (!image || image.width !== columns || image.height !== rows) {
      canvas.width = columns;
      canvas.height = rows;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      image = context.createImageData(columns, rows);
      pixels = new Uint32Array(image.data.buffer);
    }
    const view = { ...scene.view, zoom: scene.view.zoom * scale };
    if (scene.dense) density(pixels, columns, rows, scene.xs, scene.ys, view, scene.scale, scene.only);
    else {
      pixels.fill(pixel(scene.paper));
      const radius = Math.min(radiusOf(scene.xs.length, scene.view.zoom / scene.home) * scale, Math.sqrt(BLENDED / drawn) / 2 - 0.5);
      drawn = 1 + splat(pixels, columns, rows, scene.xs, scene.ys, view, scene.colours, disc(radius, opacityOf(scene.xs.length)), scene.only);
    }
    if (scene.marked.length) {
      gather(scene);
      const radius = Math.max(3, radiusOf(scene.xs.length, scene.view.zoom / scene.home) * 1.6) * scale;
      splat(pixels, columns, rows, picked.xs, picked.ys, view, picked.colours, disc(radius, 1), null);
    }
    context.putImageData(image, 0, 0);
  }

  function gather({ xs, ys, marked, markColour }) {
    if (picked.of !== marked) {
      picked = { of: marked, xs: new Float32Array(marked.length), ys: new Float32Array(marked.length), colours: new Uint32Array(marked.length) };
    }
    marked.forEach((id, k) => { picked.xs[k] = xs[id]; picked.ys[k] = ys[id]; });
    picked.colours.fill(markColour);
  }
}

/** Radius of a point in CSS pixels: small where there are many, growing as one comes closer. */
function radiusOf(count, zoomed) {
  return Math.min(7, 2.3 * (4096 / (count + 64)) ** 0.21 * Math.min(Math.max(zoomed, 0.5), 400) ** 0.38);
}

function opacityOf(count) {
  return count > 100000 ? 0.55 : count > 12000 ? 0.7 : 0.85;
}

/**
 * Axes, rings, names, lasso and cross above the points.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene
 * @param {{width: number, height: number, colours: any, axes: [string, string], rings: number[], names: Iterable<number>,
 *   textOf: (id: number) => string, most: number, lasso: [number, number][] | null, cross: boolean}} options
 */
export function paintOver(context, scene, { width, height, colours, axes, rings, names, textOf, most, lasso, cross }) {
  context.clearRect(0, 0, width, height);
  const [x0, y0] = toScreen(scene.view, 0, 0, width, height);
  context.lineWidth = 1;
  context.strokeStyle = colours.line;
  context.beginPath();
  context.moveTo(Math.round(x0) + 0.5, 0);
  context.lineTo(Math.round(x0) + 0.5, height);
  context.moveTo(0, Math.round(y0) + 0.5);
  context.lineTo(width, Math.round(y0) + 0.5);
  if (scene.showAxes) context.stroke();
  context.font = `12px ${colours.font}`;
  context.textBaseline = "middle";
  paintAxisLabels(context, axes, width, height, colours);
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  for (const id of rings) {
    const [x, y] = toScreen(scene.view, scene.xs[id], scene.ys[id], width, height);
    context.beginPath();
    context.arc(x, y, 8, 0, 7);
    context.stroke();
  }
  paintNames(context, scene, { width, height, colours, names, textOf, most });
  if (lasso && lasso.length > 1) {
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
  if (cross) {
    context.strokeStyle = colours.accent;
    context.beginPath();
    context.moveTo(width / 2 - 9, height / 2);
    context.lineTo(width / 2 + 9, height / 2);
    context.moveTo(width / 2, height / 2 - 9);
    context.lineTo(width / 2, height / 2 + 9);
    context.stroke();
  }
}

function paintAxisLabels(context, [across, up], width, height, colours) {
  context.fillStyle = colours.muted;
  context.textAlign = "left";
  halo(context, across, 12, height - 16, colours);
  context.save();
  context.translate(16, 12);
  context.rotate(-Math.PI / 2);
  context.textAlign = "right";
  halo(context, up, 0, 0, colours);
  context.restore();
  context.textAlign = "left";
}

const widths = new Map();

function paintNames(context, scene, { width, height, colours, names, textOf, most }) {
  context.font = `12px ${colours.mono}`;
  const wide = (text) => {
    if (!widths.has(text)) widths.set(text, context.measureText(text).width);
    return widths.get(text);
  };
  function* candidates() {
    let looked = 0;
    for (const id of names) {
      if (++looked > 2000) return;
      const [x, y] = toScreen(scene.view, scene.xs[id], scene.ys[id], width, height);
      if (x >= 0 && y >= 0 && x <= width && y <= height) yield { id, x, y, width: wide(textOf(id)) };
    }
  }
  const gap = 4 + radiusOf(scene.xs.length, scene.view.zoom / scene.home);
  context.fillStyle = colours.ink;
  for (const { id, x, y } of placeLabels(candidates(), { width, height, line: 15, gap, most })) halo(context, textOf(id), x, y, colours);
  if (widths.size > 5000) widths.clear();
}

function halo(context, text, x, y, colours) {
  context.lineWidth = 3;
  context.lineJoin = "round";
  context.strokeStyle = colours.paper;
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}
