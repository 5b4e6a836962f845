/** Names beside points, placed without overlap. */

/** @import { Point } from "../types" */
/** @typedef {{id: number, x: number, y: number, width: number}} Candidate point on the screen, and its text's width */
/** @typedef {{id: number, x: number, y: number}} Placed left end and middle line of the text */
/** @typedef {{width: number, height: number, line: number, gap: number, most: number}} Space */

/** A grid of cells that are taken by names. */
class Cells {
  /** @param {number} width @param {number} height @param {number} size of a cell */
  constructor(width, height, size) {
    this.size = size;
    this.columns = Math.ceil(width / size) + 1;
    this.taken = new Uint8Array(this.columns * (Math.ceil(height / size) + 1));
  }

  /** @param {number[]} box left, top, right, bottom */
  * #inside([left, top, right, bottom]) {
    for (let row = Math.floor(top / this.size); row <= Math.floor(bottom / this.size); row++) {
      const start = row * this.columns;
      for (let column = Math.floor(left / this.size); column <= Math.floor(right / this.size); column++) {
        yield start + column;
      }
    }
  }

  /** Take a box if it is free; return whether it was. @param {number[]} box */
  take(box) {
    const cells = [...this.#inside(box)];
    if (cells.some((cell) => this.taken[cell] === 1)) return false;
    for (const cell of cells) this.taken[cell] = 1;
    return true;
  }
}

/**
 * Place each name to the right, left, above or below its point, in the order of the candidates. Names without free
 * space are left out.
 * @param {Iterable<Candidate>} candidates
 * @param {Space} space
 */
export function placeLabels(candidates, space) {
  const { width, height, line, gap, most } = space;
  const cells = new Cells(width, height, line);
  /** @type {Placed[]} */
  const placed = [];
  for (const { id, x, y, width: wide } of candidates) {
    if (placed.length >= most) break;
    /** @type {Point[]} */
    const places = [[x + gap, y], [x - gap - wide, y], [x - wide / 2, y - line], [x - wide / 2, y + line]];
    const found = places.find(([left, middle]) => {
      const box = [left, middle - line / 2 + 1, left + wide, middle + line / 2 - 1];
      const isInside = box[0] >= 26 && box[1] >= 2 && box[2] <= width - 2 && box[3] <= height - 24; // beside the axes
      return isInside && cells.take(box);
    });
    if (found) placed.push({ id, x: found[0], y: found[1] });
  }
  return placed;
}
