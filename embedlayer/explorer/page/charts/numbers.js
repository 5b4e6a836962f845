/** Numbers as text, and the range of a picture's colours. */

/** @import { Matrix } from "../types" */

export const COUNT = new Intl.NumberFormat("en");

/**
 * Format a number with a sign and four digits after the point, or an exponent where those digits would be zeros.
 * @param {number} number
 */
export function shown(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "none" : number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const text = size && (size < 0.001 || size >= 1e5) ? size.toExponential(2) : size.toFixed(size >= 100 ? 2 : 4);
  return (number < 0 ? "−" : "") + text;
}

/** Format a factor without trailing zeros. @param {number} number */
export function trimmed(number) {
  return String(Number(number.toPrecision(6))).replace("-", "−");
}

/** Format a number with three digits, and M for millions. @param {number} value */
export function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 0.001) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}

/** Format an end of a colour legend with two digits. @param {number} number */
export function shortest(number) {
  const size = Math.abs(number);
  const sign = number < 0 ? "−" : "";
  if (size >= 100) return sign + size.toFixed(0);
  return sign + (size >= 0.01 ? String(Number(size.toPrecision(2))) : size.toExponential(0));
}

/**
 * Return the absolute value at which colours end: the largest, or the 99.5th percentile where a few numbers are far
 * larger than the others.
 * @param {...Matrix} matrices
 */
export function limitOf(...matrices) {
  const sizes = [];
  for (const { data } of matrices) {
    const stride = Math.max(1, Math.floor(data.length / 20000));
    for (let i = 0; i < data.length; i += stride) if (Number.isFinite(data[i])) sizes.push(Math.abs(data[i]));
  }
  sizes.sort((a, b) => a - b);
  const largest = sizes.at(-1) || 1;
  const usual = sizes[Math.floor(0.995 * (sizes.length - 1))] || largest;
  return largest > 2 * usual ? usual : largest;
}

/** Return the largest absolute value. @param {Matrix} matrix */
export function largestOf({ data }) {
  let largest = 0;
  for (let i = 0; i < data.length; i++) if (Math.abs(data[i]) > largest) largest = Math.abs(data[i]);
  return largest;
}
