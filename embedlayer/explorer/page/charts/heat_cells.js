/** The cells of a heat map as an image, and hatching over some of them. */

import { diverging, parse, sequential } from "../colour.js";
import { diagonals } from "./lines.js";

/** @import { CellTest, Context2D, Matrix, Rgb, Theme } from "../types" */

/**
 * Columns of a matrix that share a pixel.
 * @typedef {object} Bins
 * @property {number} wide columns in a bin
 * @property {number} columns bins in a row
 * @property {Int32Array} at the column shown for each bin, row by row: the one of largest absolute value
 */

/**
 * Group the columns of a matrix so that there is no more than one bin for each pixel.
 * @param {Matrix} matrix
 * @param {number} pixels
 * @returns {Bins}
 */
export function binColumns({ rows, cols, data }, pixels) {
  const wide = Math.ceil(cols / Math.max(1, Math.min(cols, pixels)));
  const columns = Math.ceil(cols / wide);
  const at = new Int32Array(columns * rows);
  for (let place = 0; place < at.length; place++) {
    const first = Math.floor(place / columns) * cols;
    const start = (place % columns) * wide;
    let largest = start;
    for (let k = start + 1; k < Math.min(cols, start + wide); k++) {
      if (Math.abs(data[first + k]) > Math.abs(data[first + largest])) largest = k;
    }
    at[place] = largest;
  }
  return { wide, columns, at };
}

/**
 * Paint a matrix as an image of one pixel for each bin.
 * @param {Matrix} matrix
 * @param {Bins} bins
 * @param {{limit: number, blank: CellTest | null, isSequential: boolean}} options `blank`: cells drawn as missing
 * @param {Theme} colours
 */
export function cellImage(matrix, bins, { limit, blank, isSequential }, colours) {
  const image = new ImageData(bins.columns, matrix.rows);
  const missing = blend(parse(colours.muted), parse(colours.paper), 0.42);
  for (let place = 0; place < bins.at.length; place++) {
    const [r, c] = [Math.floor(place / bins.columns), bins.at[place]];
    const number = matrix.data[r * matrix.cols + c];
    const isMissing = Number.isNaN(number) || blank?.(r, c);
    const scaled = number / limit;
    const rgb = isMissing ? missing : isSequential ? sequential(scaled, colours.dark) : diverging(scaled, colours.dark);
    image.data.set([...rgb, 255], 4 * place);
  }
  const canvas = new OffscreenCanvas(bins.columns, matrix.rows);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** @param {Rgb} first @param {Rgb} second @param {number} share of the first */
function blend(first, second, share) {
  return first.map((part, i) => Math.round(share * part + (1 - share) * second[i]));
}

/**
 * Return the cells for which `shade` is true as a path, a run of columns at a time.
 * @param {CellTest} shade
 * @param {Matrix} matrix
 * @param {number} width
 * @param {number} height
 */
export function shadedPath(shade, { rows, cols }, width, height) {
  const path = new Path2D();
  const cell = { width: width / cols, height: height / rows };
  for (let r = 0; r < rows; r++) {
    let start = -1;
    for (let c = 0; c <= cols; c++) {
      const isShaded = c < cols && shade(r, c);
      if (isShaded && start < 0) start = c;
      if (!isShaded && start >= 0) {
        path.rect(start * cell.width, r * cell.height, (c - start) * cell.width, cell.height);
        start = -1;
      }
    }
  }
  return path;
}

/**
 * Hatch a path.
 * @param {Context2D} context
 * @param {Path2D} path
 * @param {number} width
 * @param {number} height
 * @param {Theme} colours
 */
export function hatch(context, path, width, height, colours) {
  context.save();
  context.clip(path);
  context.globalAlpha = 0.45;
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width, height);
  context.globalAlpha = 0.6;
  diagonals(context, 0, width, height, colours.muted);
  context.restore();
}
