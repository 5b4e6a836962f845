/** One text of the story as windows of T tokens, and its windows as batches. */

import { tokenize } from "./words.js";

export const TEXT = "the cat sat on the mat and the dog sat on the cat and the dog sat on the code "
  + "the dog sat on the cat and the cat sat on the mat and the dog sat on the mat";
export const IDS = tokenize(TEXT).map(({ id }) => id);

/**
 * @typedef {object} Cut
 * @property {number} tokens of the text
 * @property {number} length tokens in a window, T
 * @property {number} stride tokens from the start of one window to the start of the next
 * @property {number} batchSize windows in a batch, B
 * @property {boolean} dropLast whether a last batch with fewer windows is left out
 */

/**
 * Return the starts of all windows, those of each batch, and how often each token is an input.
 *
 * A window needs T inputs and one more token, its last target. Equal to `embedlayer.create_dataloader` without
 * shuffling.
 * @param {Cut} cut
 */
export function windowsOf({ tokens, length, stride, batchSize, dropLast }) {
  /** @type {number[]} */
  const starts = [];
  for (let start = 0; start < tokens - length; start += stride) starts.push(start);
  const used = dropLast ? starts.length - (starts.length % batchSize) : starts.length;
  const batches = Array.from({ length: Math.ceil(used / batchSize) }, (_, b) =>
    starts.slice(b * batchSize, Math.min(used, (b + 1) * batchSize)));
  const reads = Array.from({ length: tokens }, (_, i) =>
    starts.slice(0, used).filter((start) => start <= i && i < start + length).length);
  return { starts, batches, reads };
}

/**
 * Return the IDs of windows, one row for each.
 * @param {number[]} starts
 * @param {number} length
 * @param {number} shift 1 for targets
 */
export function idsOf(starts, length, shift = 0) {
  return starts.map((start) => IDS.slice(start + shift, start + shift + length));
}
