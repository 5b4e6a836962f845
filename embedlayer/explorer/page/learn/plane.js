/** A plane with named points and arrows, on Canvas2D. */

import { scale, straight, ticks } from "../charts/lines.js";
import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";

/** @import { Closable, Context2D, Point, Theme } from "../types" */

/**
 * @typedef {object} PlanePoint
 * @property {string} name
 * @property {number} x
 * @property {number} y
 * @property {number} colour number of a colour of the theme, from 0
 * @property {boolean} [faint]
 * @property {Point} [arrow] vector of an arrow that starts at the point
 *
 * @typedef {{points: PlanePoint[], reach: number, axes: [string, string]}} PlanePicture `reach`: the axes show
 *   -reach to reach
 */

/**
 * Create a plane.
 * @param {{label: string, aspect?: number}} options `aspect`: height divided by width
 * @returns {Closable & {show: (picture: PlanePicture) => void}}
 */
export function plane({ label, aspect = 0.72 }) {
  const canvas = h("canvas", { role: "img", "aria-label": label });
  const element = h("div", { class: "learn-plane" }, canvas);
  /** @type {PlanePicture | null} */
  let last = null;
  let width = 0;
  const redraw = () => {
    if (last && width > 40) drawPlane(fit(canvas, width, Math.round(width * aspect)), last, width, width * aspect);
  };
  const stop = onResize(element, (wide) => {
    width = wide;
    redraw();
  });
  document.addEventListener("themechange", redraw);
  return {
    element,
    show: (picture) => {
      last = picture;
      canvas.setAttribute("aria-label",
        `${label}: ${picture.points.map(({ name, x, y }) => `${name} ${x.toFixed(2)}, ${y.toFixed(2)}`).join("; ")}`);
      redraw();
    },
    close: () => {
      stop();
      document.removeEventListener("themechange", redraw);
    },
  };
}

/** @param {Context2D} context @param {PlanePicture} picture @param {number} width @param {number} height */
function drawPlane(context, { points, reach, axes }, width, height) {
  const colours = theme();
  const tall = (reach * height) / width;
  const [x, y] = [scale(-reach, reach, 0, width), scale(-tall, tall, height, 0)];
  const placed = points.map((point) => boxAround(x(point.x), y(point.y)));
  context.font = `11px ${getComputedStyle(context.canvas).fontFamily}`;
  context.fillStyle = colours.muted;
  for (const value of ticks(-reach, reach, 6)) {
    straight(context, x(value), 0, x(value), height, value === 0 ? colours.muted : colours.line);
    if (Math.abs(value) < tall) straight(context, 0, y(value), width, y(value), value ? colours.line : colours.muted);
    if (value <= 0 || x(value) >= width - 60) continue;
    context.fillText(String(value), x(value) + 3, y(0) + 12);
    placed.push([x(value) + 1, y(0) + 2, x(value) + 22, y(0) + 14]);
  }
  context.textAlign = "right";
  context.fillText(axes[0], width - 6, height - 7);
  context.textAlign = "left";
  context.fillText(axes[1], x(0) + 5, 12);
  for (const point of points) if (point.arrow) drawArrow(context, point, x, y, colours);
  for (const point of [...points].sort((a, b) => Number(b.faint ?? false) - Number(a.faint ?? false))) {
    drawPoint(context, point, x(point.x), y(point.y), placed, { colours, width });
  }
}

/** Return the box of a point: left, top, right, bottom. @param {number} x @param {number} y */
function boxAround(x, y) {
  return [x - 6, y - 6, x + 6, y + 6];
}

/**
 * @param {Context2D} context
 * @param {PlanePoint} point
 * @param {number} x
 * @param {number} y
 * @param {number[][]} placed boxes of all points, of the numbers of the axis and of the names so far
 * @param {{colours: Theme, width: number}} frame
 */
function drawPoint(context, { name, colour, faint }, x, y, placed, { colours, width }) {
  context.globalAlpha = faint ? 0.45 : 1;
  context.fillStyle = colours.series[colour];
  context.beginPath();
  context.arc(x, y, 6, 0, 7);
  context.fill();
  context.font = `${faint ? "" : "600 "}13px ${getComputedStyle(context.canvas).fontFamily}`;
  const wide = context.measureText(name).width;
  const places = [[9, 4], [-9 - wide, 4], [-wide / 2, -11], [-wide / 2, 20], [9, -10], [9, 18], [-9 - wide, -10],
    [-9 - wide, 18], [-wide / 2, -25], [-wide / 2, 34], [16, -22], [16, 30], [-16 - wide, -22], [-16 - wide, 30]];
  const [left, base] = places.map(([dx, dy]) => [x + dx, y + dy]).find(([at, up]) => at > 2 && at + wide < width - 2
    && !placed.some((box) => at < box[2] && at + wide > box[0] && up - 10 < box[3] && up + 3 > box[1]))
    ?? [x + 9, y + 4];
  placed.push([left - 2, base - 10, left + wide + 2, base + 3]);
  context.lineWidth = 3;
  context.strokeStyle = colours.paper;
  context.lineJoin = "round";
  context.strokeText(name, left, base);
  context.fillStyle = colours.ink;
  context.fillText(name, left, base);
  context.globalAlpha = 1;
}

/**
 * @param {Context2D} context
 * @param {PlanePoint} point
 * @param {(value: number) => number} x
 * @param {(value: number) => number} y
 * @param {Theme} colours
 */
function drawArrow(context, { x: fromX, y: fromY, arrow = [0, 0], colour }, x, y, colours) {
  const [x0, y0, x1, y1] = [x(fromX), y(fromY), x(fromX + arrow[0]), y(fromY + arrow[1])];
  const angle = Math.atan2(y1 - y0, x1 - x0);
  if (Math.hypot(x1 - x0, y1 - y0) < 2) return;
  context.strokeStyle = colours.series[colour];
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  for (const side of [-0.45, 0.45]) {
    context.moveTo(x1, y1);
    context.lineTo(x1 - 8 * Math.cos(angle + side), y1 - 8 * Math.sin(angle + side));
  }
  context.stroke();
}
