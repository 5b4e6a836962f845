/** Names beside points, placed without overlap. */

/** @import { Point } from "../types" */
/**
 * @typedef {object} Candidate
 * @property {string} text
 * @property {number} x of its point on the screen
 * @property {number} y
 * @property {number} width of the text
 * @property {number} line height of the text
 * @property {boolean} centred whether the text is placed over its point rather than beside it
 * @property {string} style
 *
 * @typedef {Candidate & {left: number, middle: number}} Placed left end and middle line of the text
 * @typedef {{width: number, height: number, covered: number[][], gap: number, most: number}} Space `covered`: boxes
 *   that no name may be in, each left, top, right and bottom
 */

const CELL = 8; // pixels

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
 * Place each name to the right, left, above or below its point, or centred over it, in the order of the candidates.
 * Names without free space are left out: of two groups that collide, the later one.
 * @param {Iterable<Candidate>} candidates
 * @param {Space} space
 */
export function placeLabels(candidates, space) {
  const { width, height, covered, gap, most } = space;
  const cells = new Cells(width, height, CELL);
  for (const box of covered) if (box[2] > box[0]) cells.take(box);
  /** @type {Placed[]} */
  const placed = [];
  for (const candidate of candidates) {
    if (placed.length >= most) break;
    const { x, y, width: wide, line, centred } = candidate;
    const middle = x - wide / 2;
    /** @type {Point[]} */
    const places = centred ? [[middle, y]]
      : [[x + gap, y], [x - gap - wide, y], [middle, y - line], [middle, y + line]];
    const found = places.find(([left, across]) => {
      const box = [left, across - line / 2 + 1, left + wide, across + line / 2 - 1];
      const isInside = box[0] >= 26 && box[1] >= 2 && box[2] <= width - 2 && box[3] <= height - 24; // beside the axes
      return isInside && cells.take(box);
    });
    if (found) placed.push({ ...candidate, left: found[0], middle: found[1] });
  }
  return placed;
}
