/** Heat maps on Canvas2D: a colour for each number, and the number under the pointer or the arrow keys as text. */

import { fit, h, onResize } from "../dom.js";
import { theme } from "../theme.js";
import { binColumns, cellImage, hatch, shadedPath } from "./heat_cells.js";
import { heatLegend } from "./heat_legend.js";
import { largestOf, limitOf, shown } from "./numbers.js";

/** @import { CellTest, Context2D, HeatMark, Matrix, Theme } from "../types" */
/** @import { Bins } from "./heat_cells.js" */

/**
 * @typedef {object} HeatOptions
 * @property {string} label
 * @property {string} unit
 * @property {(row: number) => string} rowName
 * @property {(column: number) => string} columnName
 * @property {(row: number) => string} [rowLabel] text beside a row; `rowName` by default
 * @property {(number: number, row: number, column: number) => string} [format]
 * @property {boolean} [isSequential] whether numbers start at 0
 * @property {number} [cellHeight] in CSS pixels
 * @property {boolean} [square] whether cells are square
 * @property {boolean} [rowLabels] whether names are written beside the rows
 * @property {string[]} [axes] names of the horizontal and of the vertical axis
 * @property {(row: number, column: number) => void} [onPick]
 * @property {(cell: {row: number, column: number} | null) => void} [onPoint] called when the cursor moves or goes
 *
 * @typedef {object} Picture
 * @property {Matrix} matrix
 * @property {number} limit absolute value at which colours end
 * @property {CellTest | null} shade cells that are hatched
 * @property {CellTest | null} blank cells that are drawn as missing
 */

/** @type {Record<string, [number, number]>} */
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** A heat map. Where there are more columns than pixels, a pixel shows the number of largest absolute value. */
export class HeatMap {
  /** @type {Picture | null} */ #picture = null;
  /** @type {Bins | null} */ #bins = null;
  /** @type {OffscreenCanvas | null} */ #image = null;
  /** @type {Path2D | null} */ #shaded = null;
  /** @type {HeatMark[]} */ #marks = [];
  /** @type {{row: number, column: number} | null} */ #cursor = null;
  #width = 0;

  /** @param {HeatOptions} options */
  constructor(options) {
    const { unit, axes = [], rowLabels = false, isSequential = false, onPick } = options;
    this.options = options;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", class: onPick ? "heat-canvas heat-pick" : "heat-canvas" });
    this.names = h("div", { class: "heat-names", "aria-hidden": "true" });
    this.readout = h("output", { class: "heat-readout", "aria-live": "polite" });
    this.legend = heatLegend(isSequential, unit);
    const box = h("div", { class: "heat-canvas-box" }, this.canvas);
    this.element = h("figure", { class: "heat" },
      axes[0] ? h("div", { class: "heat-axis" },
        h("span", null, axes[1] ? `${axes[1]} ↓` : ""), h("span", null, `${axes[0]} →`)) : null,
      h("div", { class: rowLabels ? "heat-body heat-named" : "heat-body" }, this.names, box),
      h("figcaption", { class: "heat-foot" }, this.readout, this.legend.element));
    this.#listen();
    this.stopResize = onResize(box, (width) => this.#resize(width));
    document.addEventListener("themechange", this.#refresh);
  }

  /**
   * Show a matrix.
   * @param {Matrix} matrix
   * @param {{limit?: number, shade?: CellTest | null, blank?: CellTest | null, marks?: HeatMark[]}} [more]
   */
  show(matrix, { limit = limitOf(matrix), shade = null, blank = null, marks = [] } = {}) {
    const { label, rowName, rowLabel = rowName, rowLabels, cellHeight = 18 } = this.options;
    this.#picture = { matrix, limit: limit || 1, shade, blank };
    this.#marks = marks;
    const cursor = this.#cursor;
    if (cursor && (cursor.row >= matrix.rows || cursor.column >= matrix.cols)) this.#cursor = null;
    this.canvas.setAttribute("aria-label",
      `${label}: ${matrix.rows} rows, ${matrix.cols} columns. Arrow keys read the numbers.`);
    if (rowLabels) {
      this.names.replaceChildren(...Array.from({ length: matrix.rows }, (_, r) =>
        h("span", { title: rowName(r) }, rowLabel(r))));
      this.names.style.setProperty("--cell", `${cellHeight}px`);
    }
    this.#refresh();
  }

  /** Draw other marks over the same numbers. @param {HeatMark[]} marks */
  mark(marks) {
    this.#marks = marks;
    this.#draw();
  }

  close() {
    this.stopResize();
    document.removeEventListener("themechange", this.#refresh);
  }

  /** @param {number} width */
  #resize(width) {
    if (Math.abs(width - this.#width) < 1) return;
    this.#width = width;
    this.#refresh();
  }

  #height() {
    const { square, cellHeight = 18 } = this.options;
    const { rows, cols } = /** @type {Picture} */ (this.#picture).matrix;
    return square ? Math.max(1, Math.round((this.#width * rows) / cols)) : rows * cellHeight;
  }

  #refresh = () => {
    if (!this.#picture || this.#width < 2) return;
    const { matrix, limit, shade, blank } = this.#picture;
    const pixels = Math.max(1, Math.floor(this.#width * Math.min(globalThis.devicePixelRatio || 1, 2)));
    const isSequential = this.options.isSequential ?? false;
    this.#bins = binColumns(matrix, pixels);
    this.#image = cellImage(matrix, this.#bins, { limit, blank, isSequential }, theme());
    this.#shaded = shade && shadedPath(shade, matrix, this.#width, this.#height());
    this.#draw();
    this.#read();
    this.legend.draw(limit, Math.max(limitOf(matrix), largestOf(matrix)) > limit * 1.001);
  };

  #draw() {
    if (!this.#picture || !this.#image || this.#width < 2) return;
    const { matrix } = this.#picture;
    const [width, height, colours] = [this.#width, this.#height(), theme()];
    const context = fit(this.canvas, width, height);
    const cell = { width: width / matrix.cols, height: height / matrix.rows };
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#image, 0, 0, width, height);
    if (!this.options.square && cell.height > 8) {
      context.fillStyle = colours.paper;
      for (let r = 1; r < matrix.rows; r++) context.fillRect(0, Math.round(r * cell.height) - 1, width, 1);
    }
    if (this.#shaded) hatch(context, this.#shaded, width, height, colours);
    for (const mark of this.#marks) drawMark(context, mark, cell, width, height, colours);
    if (this.#cursor) drawCursor(context, this.#cursor, cell, colours);
  }

  /** Write the number at the cursor. */
  #read() {
    if (!this.#picture) return;
    const { rows, cols, data } = this.#picture.matrix;
    if (!this.#cursor) {
      const wide = this.#bins?.wide ?? 1;
      const bins = wide > 1 ? ` · ${wide} columns in each pixel, the largest value is shown` : "";
      const hint = `${rows} × ${cols} · use the pointer or the arrow keys${bins}`;
      return this.readout.replaceChildren(h("span", { class: "heat-hint" }, hint));
    }
    const { row, column } = this.#cursor;
    const { rowName, columnName, format = shown } = this.options;
    const value = format(data[row * cols + column], row, column);
    return this.readout.replaceChildren(h("b", null, value), ` ${rowName(row)} · ${columnName(column)}`);
  }

  /** Move the cursor to a cell, or remove it. @param {{row: number, column: number} | null} cursor */
  #point(cursor) {
    this.#cursor = cursor;
    this.options.onPoint?.(cursor);
    this.#read();
    this.#draw();
  }

  /**
   * Call `use` with the cell under the pointer.
   * @param {MouseEvent} event
   * @param {(row: number, column: number) => void} use
   */
  #atPointer(event, use) {
    if (!this.#picture || !this.#bins) return;
    const box = this.canvas.getBoundingClientRect();
    const row = inside((event.clientY - box.top) / box.height, this.#picture.matrix.rows);
    const bin = inside((event.clientX - box.left) / box.width, this.#bins.columns);
    use(row, this.#bins.at[row * this.#bins.columns + bin]);
  }

  #listen() {
    const { canvas } = this;
    /** @param {PointerEvent} event */
    const follow = (event) => this.#atPointer(event, (row, column) => this.#point({ row, column }));
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && this.#point(null));
    canvas.addEventListener("click", (event) => this.#atPointer(event, (r, c) => this.options.onPick?.(r, c)));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("focus", () => {
      if (this.#picture && !this.#cursor && canvas.matches(":focus-visible")) this.#point({ row: 0, column: 0 });
    });
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    if (!this.#picture || event.altKey || event.ctrlKey || event.metaKey) return;
    const { rows, cols } = this.#picture.matrix;
    const { row, column } = this.#cursor ?? { row: 0, column: 0 };
    const step = STEPS[event.key];
    if (step) {
      const [down, across] = [row + step[0], column + step[1] * (event.shiftKey ? 10 : 1)];
      this.#point({
        row: Math.min(rows - 1, Math.max(0, down)), column: Math.min(cols - 1, Math.max(0, across)),
      });
    } else if (event.key === "Home") this.#point({ row, column: 0 });
    else if (event.key === "End") this.#point({ row, column: cols - 1 });
    else if (event.key === "Enter" && this.options.onPick) this.options.onPick(row, column);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Return the cell of `count` cells at a share of the width. @param {number} share @param {number} count */
function inside(share, count) {
  return Math.min(count - 1, Math.max(0, Math.floor(share * count)));
}

/**
 * @param {Context2D} context
 * @param {HeatMark} mark
 * @param {{width: number, height: number}} cell
 * @param {number} width
 * @param {number} height
 * @param {Theme} colours
 */
function drawMark(context, mark, cell, width, height, colours) {
  for (const [line, stroke] of frames(3.5, colours.paper, mark.colour ?? colours.ink)) {
    context.lineWidth = line;
    context.strokeStyle = stroke;
    if (mark.row !== undefined) {
      context.strokeRect(1, mark.row * cell.height + 1, width - 2, Math.max(3, cell.height - 2));
    }
    if (mark.column !== undefined) {
      context.strokeRect(mark.column * cell.width, 1, Math.max(3, cell.width), height - 2);
    }
  }
}

/**
 * @param {Context2D} context
 * @param {{row: number, column: number}} cursor
 * @param {{width: number, height: number}} cell
 * @param {Theme} colours
 */
function drawCursor(context, { row, column }, cell, colours) {
  const [width, height] = [Math.max(4, cell.width), Math.max(4, cell.height)];
  const left = column * cell.width + (cell.width - width) / 2;
  const top = row * cell.height + (cell.height - height) / 2;
  for (const [line, stroke] of frames(3, colours.paper, colours.ink)) {
    context.lineWidth = line;
    context.strokeStyle = stroke;
    context.strokeRect(left, top, width, height);
  }
}

/**
 * Return the widths and colours of a frame with an outline, the outline first.
 * @param {number} outline
 * @param {string} paper
 * @param {string} colour
 * @returns {[number, string][]}
 */
function frames(outline, paper, colour) {
  return [[outline, paper], [1.5, colour]];
}
