/** Axes and lines on a canvas: what charts and curves are drawn with. */

/**
 * Round numbers that divide a range well.
 * @param {number} low @param {number} high @param {number} about how many
 * @returns {number[]}
 */
export function ticks(low, high, about) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

/** Powers of ten inside a range. */
export function logTicks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.floor(Math.log10(high) + 1e-9); power++) found.push(10 ** power);
  return found;
}

/** A number as short as it can be read. @param {number} value */
export function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}

/** From values to pixels. @returns {(value: number) => number} */
export function scale(low, high, from, to, isLog) {
  const at = isLog ? (value) => Math.log(Math.max(value, low)) : (value) => value;
  const [a, b] = [at(low), at(high)];
  return (value) => from + ((at(value) - a) / (b - a || 1)) * (to - from);
}

/** A straight line, one pixel wide. @param {number[]} [dash] */
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
 * A line through values, broken where one is no number; or a dot for each.
 * @param {(i: number) => number} x @param {(value: number) => number} y in pixels @param {ArrayLike<number>} values
 * @param {{colour: string, width?: number, dots?: boolean}} look
 */
export function trace(context, x, y, values, { colour, width = 2, dots = false }) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  for (let i = 0; i < values.length; i++) {
    if (!Number.isFinite(values[i])) continue;
    const [across, up] = [x(i), y(values[i])];
    if (dots) { context.moveTo(across + 2.5, up); context.arc(across, up, 2.5, 0, 2 * Math.PI); }
    else if (i && Number.isFinite(values[i - 1])) context.lineTo(across, up);
    else context.moveTo(across, up);
  }
  if (dots) context.fill();
  else context.stroke();
}
