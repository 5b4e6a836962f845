/** Colour scales for numbers, readable with any colour vision, on light and on dark pages. */

/** @import { Rgb } from "./types" */

// blue to yellow in even steps of lightness: cividis, cut where it would not differ from the page
/** @type {{light: Rgb[], dark: Rgb[]}} */
const SEQUENTIAL = {
  light: [[0, 48, 111], [62, 82, 108], [102, 112, 117], [137, 135, 118], [178, 162, 104], [214, 187, 74]],
  dark: [[60, 94, 154], [98, 118, 150], [132, 138, 136], [170, 162, 120], [212, 192, 90], [253, 231, 55]],
};
// blue, the page, orange
/** @type {{light: Rgb[], dark: Rgb[]}} */
const DIVERGING = {
  light: [[18, 72, 150], [92, 146, 214], [246, 247, 249], [232, 150, 70], [150, 66, 0]],
  dark: [[140, 190, 255], [52, 104, 178], [24, 30, 38], [176, 98, 24], [255, 190, 120]],
};

/** Interpolate between colours. @param {Rgb[]} stops @param {number} t 0 to 1 @returns {Rgb} */
function between(stops, t) {
  const place = Math.min(Math.max(Number.isFinite(t) ? t : 0, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const share = place - index;
  return /** @type {Rgb} */ (stops[index].map((low, i) => Math.round(low + (stops[index + 1][i] - low) * share)));
}

/**
 * Return the colour of a number on the scale from low to high.
 * @param {number} t 0 to 1
 * @param {boolean} dark
 * @returns {Rgb}
 */
export function sequential(t, dark) {
  return between(dark ? SEQUENTIAL.dark : SEQUENTIAL.light, t);
}

/**
 * Return the colour of a number on the scale from negative to positive.
 * @param {number} t -1 to 1
 * @param {boolean} dark
 * @returns {Rgb}
 */
export function diverging(t, dark) {
  return between(dark ? DIVERGING.dark : DIVERGING.light, (t + 1) / 2);
}

/**
 * Return the colours of a cell with a number in it: of the background, and of a text that can be read on it.
 * @param {number} t -1 to 1
 * @param {boolean} dark
 */
export function cellColours(t, dark) {
  const rgb = diverging(t, dark);
  return { background: css(rgb), color: textOn(rgb) };
}

/** Format a colour for CSS. @param {Rgb} rgb */
export function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}

/**
 * Return black or white, whichever has more contrast with a background: 4.58 or more, by WCAG's relative luminance.
 * @param {Rgb} rgb
 */
export function textOn(rgb) {
  const [red, green, blue] = rgb.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

/** Parse a colour of `getComputedStyle`, such as "rgb(1, 2, 3)". @param {string} text @returns {Rgb} */
export function parse(text) {
  const numbers = text.match(/[\d.]+/g) ?? [];
  return [Number(numbers[0] ?? 0), Number(numbers[1] ?? 0), Number(numbers[2] ?? 0)];
}
