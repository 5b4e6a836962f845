/** Axes, straight lines and curves on a canvas. */

/** @import { Context2D } from "../types" */
/** @typedef {(value: number) => number} Scale from a value to pixels */

/**
 * Return round numbers that divide a range into about `count` parts.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 * @returns {number[]}
 */
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

/** Return the powers of ten inside a range. @param {number} low @param {number} high */
export function logTicks(low, high) {
  const found = [];
  const last = Math.floor(Math.log10(high) + 1e-9);
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= last; power++) found.push(10 ** power);
  return found;
}

/**
 * Return the map of [low, high] to the pixels [from, to].
 * @param {number} low
 * @param {number} high
 * @param {number} from
 * @param {number} to
 * @param {boolean} [isLog]
 * @returns {Scale}
 */
export function scale(low, high, from, to, isLog = false) {
  /** @type {Scale} */
  const at = isLog ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const [a, b] = [at(low), at(high)];
  return (value) => from + ((at(value) - a) / (b - a || 1)) * (to - from);
}

/**
 * Draw a straight line, one pixel wide.
 * @param {Context2D} context
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 * @param {string} colour
 * @param {number[]} [dash]
 */
export function straight(context, x0, y0, x1, y1, colour, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.setLineDash([]);
}

/**
 * Draw a curve through values, interrupted where one is not a number; or a dot for each value.
 * @param {Context2D} context
 * @param {(i: number) => number} x pixels of value i
 * @param {Scale} y
 * @param {ArrayLike<number>} values
 * @param {{colour: string, width?: number, dots?: boolean}} style
 */
export function trace(context, x, y, values, { colour, width = 2, dots = false }) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (let i = 0; i < values.length; i++) {
    if (!Number.isFinite(values[i])) continue;
    const [across, up] = [x(i), y(values[i])];
    if (dots) {
      context.moveTo(across + 2.5, up);
      context.arc(across, up, 2.5, 0, 2 * Math.PI);
    } else if (i && Number.isFinite(values[i - 1])) context.lineTo(across, up);
    else context.moveTo(across, up);
  }
  if (dots) context.fill();
  else context.stroke();
}

/**
 * Fill a rectangle with diagonal lines; the caller has set the clip.
 * @param {Context2D} context
 * @param {number} from left edge
 * @param {number} right
 * @param {number} height
 * @param {string} colour
 */
export function diagonals(context, from, right, height, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = from - height; x < right; x += 7) {
    context.moveTo(x, height);
    context.lineTo(x + height, 0);
  }
  context.stroke();
}
