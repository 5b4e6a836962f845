/** Boxes over the bytes of a text, in lines that fit the width: in all rows, the same byte is at the same place. */

import { h, onResize, visibleText } from "../dom.js";

/** @import { Child } from "../types" */

/**
 * @typedef {object} ByteBox
 * @property {number} start first byte
 * @property {number} stop byte after the last
 * @property {string} title
 * @property {string} [kind] class
 * @property {(start: number, stop: number) => Child} [label] of the part from byte `start` to `stop`; without it, the
 *   text of these bytes
 */
/** @typedef {{name: string, boxes: ByteBox[]}} ByteRow */

const NARROWEST = 17; // pixels
const EARLIEST = 0.6; // share of a line after which it may end
const FEWEST = 24; // bytes that a line has place for, so that a short text is not drawn large

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Return the visible text of some bytes, or their hexadecimal digits if they are no text. @param {Uint8Array} bytes */
export function textOfBytes(bytes) {
  try {
    return visibleText(UTF8.decode(bytes));
  } catch {
    return Array.from(bytes, hex).join("");
  }
}

/** Return the two hexadecimal digits of a byte. @param {number} byte */
export function hex(byte) {
  return byte.toString(16).toUpperCase().padStart(2, "0");
}

/**
 * Return the bytes at which lines start: where no box is cut, if a line of at most `most` bytes can end there.
 * @param {ByteRow[]} rows
 * @param {number} size bytes of the text
 * @param {number} most
 */
export function lineStarts(rows, size, most) {
  const cut = new Set(rows.flatMap(({ boxes }) => boxes.flatMap(({ start, stop }) =>
    Array.from({ length: Math.max(0, stop - start - 1) }, (_, i) => start + 1 + i))));
  const starts = [0];
  while (starts[starts.length - 1] + most < size) {
    const first = starts[starts.length - 1];
    let end = first + most;
    while (end > first + EARLIEST * most && cut.has(end)) end -= 1;
    starts.push(cut.has(end) ? first + most : end);
  }
  return starts;
}

/** Create the strips. @param {number} [narrowest] pixels of a byte, at least */
export function byteStrips(narrowest = NARROWEST) {
  const element = h("div", { class: "tok-strips" });
  /** @type {{rows: ByteRow[], bytes: Uint8Array} | null} */
  let shown = null;
  let most = 0;
  const draw = () => {
    if (!most || !shown) return;
    const { rows, bytes } = shown;
    const starts = lineStarts(rows, bytes.length, most);
    element.replaceChildren(...starts.map((start, i) => line(rows, bytes, start, starts[i + 1] ?? bytes.length, most)));
  };
  const ruler = h("div", { class: "tok-strip-row tok-ruler" }, h("span"), h("div"));
  const box = h("div", null, ruler, element);
  const stop = onResize(/** @type {Element} */ (ruler.lastElementChild), (width) => {
    const fitting = Math.max(4, Math.floor(width / narrowest));
    if (fitting === most) return;
    most = fitting;
    draw();
  });
  return {
    element: box,
    close: stop,
    /** @param {ByteRow[]} rows @param {Uint8Array} bytes */
    show: (rows, bytes) => {
      shown = { rows, bytes };
      element.replaceChildren();
      draw();
    },
  };
}

/**
 * @param {ByteRow[]} rows
 * @param {Uint8Array} bytes
 * @param {number} start
 * @param {number} stop
 * @param {number} most bytes of a full line
 */
function line(rows, bytes, start, stop, most) {
  const columns = `repeat(${Math.min(most, Math.max(bytes.length, FEWEST))}, minmax(0, 1fr))`;
  return h("div", { class: "tok-strip" }, rows.map(({ name, boxes }) => {
    const strip = h("div", { class: "tok-boxes", role: "img", "aria-label": `${name}: ${spoken(boxes, bytes)}` },
      boxes.filter((box) => box.start < stop && box.stop > start).map((box) => boxOf(box, bytes, start, stop)));
    strip.style.gridTemplateColumns = columns;
    return h("div", { class: "tok-strip-row" }, h("span", { title: name }, name), strip);
  }));
}

/** Return the boxes as text. @param {ByteBox[]} boxes @param {Uint8Array} bytes */
function spoken(boxes, bytes) {
  return boxes.map(({ start, stop, kind, title }) =>
    (kind === "tok-of-special" ? title : textOfBytes(bytes.subarray(start, stop)))).join(" | ");
}

/** @param {ByteBox} box @param {Uint8Array} bytes @param {number} start @param {number} stop of the line */
function boxOf({ start: first, stop: end, title, kind, label }, bytes, start, stop) {
  const [from, to] = [Math.max(first, start), Math.min(end, stop)];
  const text = label ? label(from, to) : textOfBytes(bytes.subarray(from, to));
  const open = `${from > first ? " tok-open-start" : ""}${to < end ? " tok-open-end" : ""}`;
  const element = h("span", { class: `tok-box ${kind ?? ""}${open}`, title }, text);
  element.style.gridColumn = `${from - start + 1} / ${to - start + 1}`;
  return element;
}
