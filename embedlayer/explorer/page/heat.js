/** Heat strips and heat maps on Canvas2D: a colour for each number, and the number under the pointer or the arrow keys. */

import { css, diverging, parse, sequential } from "./colour.js";
import { fit, h, onResize } from "./dom.js";
import { theme } from "./theme.js";

let known = null;

/** The page's colours, read once for each theme: asking the browser costs a layout. */
export function palette() {
  if (!known) {
    known = theme();
    document.addEventListener("themechange", () => { known = null; }, { once: true, capture: true });
  }
  return known;
}

/** @typedef {{rows: number, cols: number, data: ArrayLike<number>}} Matrix numbers row by row; NaN for none */

/** A number as people read it: signed, four digits behind the point, or an exponent where those would be zeros. */
export function shown(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "none" : number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  const text = size && (size < 0.001 || size >= 1e5) ? size.toExponential(2) : size.toFixed(size >= 100 ? 2 : 4);
  return (number < 0 ? "−" : "") + text;
}

/**
 * The size at which colours end: the largest, or where a few numbers stand far out, what 99.5 % stay below.
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

/**
 * A heat map. Where there are more columns than pixels, a pixel shows the number of largest size among its columns.
 *
 * @param {{label: string, unit: string, rowName: (row: number) => string, columnName: (column: number) => string,
 *   rowLabel?: (row: number) => string, format?: (number: number, row: number, column: number) => string, scale?: "diverging" | "sequential", cellHeight?: number,
 *   square?: boolean, rowLabels?: boolean, axes?: string[], onPick?: (row: number, column: number) => void}} options
 *   `axes`: what runs across, and what runs down
 */
export function heatMap(options) {
  const { label, unit, rowName, columnName, rowLabel = rowName, cellHeight = 18, square = false, rowLabels = false, axes = [], onPick } = options;
  const format = options.format ?? shown;
  const colour = options.scale === "sequential" ? (t, dark) => sequential(t, dark) : diverging;
  const canvas = h("canvas", { tabIndex: 0, role: "img", class: onPick ? "heat-canvas heat-pick" : "heat-canvas" });
  const names = h("div", { class: "heat-names", "aria-hidden": "true" });
  const readout = h("output", { class: "heat-readout", "aria-live": "polite" });
  const legend = legendOf(options.scale, unit);
  const body = h("div", { class: rowLabels ? "heat-body heat-named" : "heat-body" }, names, h("div", { class: "heat-canvas-box" }, canvas));
  const element = h("figure", { class: "heat" },
    axes[0] ? h("div", { class: "heat-axis" }, h("span", null, axes[1] ? `${axes[1]} ↓` : ""), h("span", null, `${axes[0]} →`)) : null,
    body, h("figcaption", { class: "heat-foot" }, readout, legend.element));
  const view = { matrix: null, limit: 1, shade: null, blank: null, marks: [], cursor: null, width: 0, image: null, bins: null, hatched: null };

  const heightOf = () => {
    if (!view.matrix) return 0;
    if (!square) return view.matrix.rows * cellHeight;
    return Math.max(1, Math.round((view.width * view.matrix.rows) / view.matrix.cols));
  };

  /** The numbers as an image of one pixel a cell. */
  const paint = () => {
    const { matrix, limit } = view;
    const { dark, paper, muted } = palette();
    const pixels = Math.max(1, Math.floor(view.width * Math.min(globalThis.devicePixelRatio || 1, 2)));
    const wide = Math.ceil(matrix.cols / Math.max(1, Math.min(matrix.cols, pixels)));
    const columns = Math.ceil(matrix.cols / wide);
    const image = new ImageData(columns, matrix.rows);
    const nothing = parse(muted).map((part, i) => Math.round(0.42 * part + 0.58 * parse(paper)[i]));
    view.bins = { wide, columns, at: new Int32Array(columns * matrix.rows) };
    for (let r = 0; r < matrix.rows; r++) {
      for (let c = 0; c < columns; c++) {
        let at = c * wide;
        for (let k = at + 1; k < Math.min(matrix.cols, at + wide); k++) {
          if (Math.abs(matrix.data[r * matrix.cols + k]) > Math.abs(matrix.data[r * matrix.cols + at])) at = k;
        }
        const number = matrix.data[r * matrix.cols + at];
        const isBlank = Number.isNaN(number) || view.blank?.(r, at);
        const rgb = isBlank ? nothing : colour(number / limit, dark);
        const place = r * columns + c;
        view.bins.at[place] = at;
        image.data.set([...rgb, 255], 4 * place);
      }
    }
    view.hatched = view.shade && pathOf(view.shade, matrix, view.width, heightOf());
    view.image = new OffscreenCanvas(columns, matrix.rows);
    view.image.getContext("2d").putImageData(image, 0, 0);
  };

  const draw = () => {
    if (!view.matrix || view.width < 2) return;
    const { matrix, width } = view;
    const height = heightOf();
    const colours = palette();
    const context = fit(canvas, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(view.image, 0, 0, width, height);
    const cell = { width: width / matrix.cols, height: height / matrix.rows };
    if (!square && cell.height > 8) {
      context.fillStyle = colours.paper;
      for (let r = 1; r < matrix.rows; r++) context.fillRect(0, Math.round(r * cell.height) - 1, width, 1);
    }
    if (view.hatched) hatch(context, view.hatched, width, height, colours);
    for (const mark of view.marks) {
      for (const [line, stroke] of [[3.5, colours.paper], [1.5, mark.colour ?? colours.ink]]) {
        context.lineWidth = line;
        context.strokeStyle = stroke;
        if (mark.row !== undefined) context.strokeRect(1, mark.row * cell.height + 1, width - 2, Math.max(3, cell.height - 2));
        if (mark.column !== undefined) context.strokeRect(mark.column * cell.width, 1, Math.max(3, cell.width), height - 2);
      }
    }
    if (view.cursor) {
      const { row, column } = view.cursor;
      const size = [Math.max(4, cell.width), Math.max(4, cell.height)];
      for (const [line, stroke] of [[3, colours.paper], [1.5, colours.ink]]) {
        context.lineWidth = line;
        context.strokeStyle = stroke;
        context.strokeRect(column * cell.width + (cell.width - size[0]) / 2, row * cell.height + (cell.height - size[1]) / 2, ...size);
      }
    }
  };

  const say = () => {
    const { cursor, matrix, bins } = view;
    if (!matrix) return;
    const many = bins && bins.wide > 1 ? ` · ${bins.wide} columns to a pixel, the largest shows` : "";
    if (!cursor) readout.replaceChildren(h("span", { class: "heat-hint" }, `${matrix.rows} × ${matrix.cols} · point, or use the arrow keys${many}`));
    else {
      const { row, column } = cursor;
      readout.replaceChildren(h("b", null, format(matrix.data[row * matrix.cols + column], row, column)), ` ${rowName(row)} · ${columnName(column)}`);
    }
  };

  const point = (row, column) => {
    view.cursor = row === null ? null : { row, column };
    say();
    draw();
  };

  const cellAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const { matrix, bins } = view;
    const row = Math.min(matrix.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * matrix.rows)));
    const bin = Math.min(bins.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * bins.columns)));
    return [row, bins.at[row * bins.columns + bin]];
  };
  canvas.addEventListener("pointermove", (event) => view.matrix && point(...cellAt(event)));
  canvas.addEventListener("pointerdown", (event) => view.matrix && point(...cellAt(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && point(null));
  canvas.addEventListener("click", (event) => view.matrix && onPick?.(...cellAt(event)));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("focus", () => view.matrix && !view.cursor && canvas.matches(":focus-visible") && point(0, 0));
  canvas.addEventListener("keydown", (event) => {
    const { matrix } = view;
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!matrix || event.altKey || event.ctrlKey || event.metaKey) return;
    const { row, column } = view.cursor ?? { row: 0, column: 0 };
    if (by) {
      const next = [row + by[0], column + by[1] * (event.shiftKey ? 10 : 1)];
      point(Math.min(matrix.rows - 1, Math.max(0, next[0])), Math.min(matrix.cols - 1, Math.max(0, next[1])));
    } else if (event.key === "Home") point(row, 0);
    else if (event.key === "End") point(row, matrix.cols - 1);
    else if (event.key === "Enter" && onPick) onPick(row, column);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  const refresh = () => {
    if (!view.matrix || view.width < 2) return;
    paint();
    draw();
    say();
    legend.draw(view.limit, limitOf(view.matrix) > view.limit * 1.001 || largestOf(view.matrix) > view.limit * 1.001);
  };
  const stop = onResize(canvas.parentElement, (width) => {
    if (Math.abs(width - view.width) < 1) return;
    view.width = width;
    refresh();
  });
  document.addEventListener("themechange", refresh);

  return {
    element,
    canvas,
    /**
     * @param {Matrix} matrix
     * @param {{limit?: number, shade?: (row: number, column: number) => boolean, blank?: (row: number, column: number) => boolean,
     *   marks?: {row?: number, column?: number, colour?: string}[]}} [more]
     */
    show(matrix, { limit = limitOf(matrix), shade = null, blank = null, marks = [] } = {}) {
      Object.assign(view, { matrix, limit: limit || 1, shade, blank, marks });
      if (view.cursor && (view.cursor.row >= matrix.rows || view.cursor.column >= matrix.cols)) view.cursor = null;
      canvas.setAttribute("aria-label", `${label}: ${matrix.rows} rows, ${matrix.cols} columns. Arrow keys read the numbers.`);
      if (rowLabels) {
        names.replaceChildren(...Array.from({ length: matrix.rows }, (_, r) => h("span", { title: rowName(r) }, rowLabel(r))));
        names.style.setProperty("--cell", `${cellHeight}px`);
      }
      refresh();
    },
    /** Other marks over the same numbers. */
    mark(marks) {
      view.marks = marks;
      draw();
    },
    close() {
      stop();
      document.removeEventListener("themechange", refresh);
    },
  };
}

function largestOf({ data }) {
  let largest = 0;
  for (let i = 0; i < data.length; i++) if (Math.abs(data[i]) > largest) largest = Math.abs(data[i]);
  return largest;
}

/** The cells that `shade` names, a run of columns at a time, as a path. */
function pathOf(shade, { rows, cols }, width, height) {
  const path = new Path2D();
  const cell = { width: width / cols, height: height / rows };
  for (let r = 0; r < rows; r++) {
    let start = -1;
    for (let c = 0; c <= cols; c++) {
      const inside = c < cols && shade(r, c);
      if (inside && start < 0) start = c;
      if (!inside && start >= 0) {
        path.rect(start * cell.width, r * cell.height, (c - start) * cell.width, cell.height);
        start = -1;
      }
    }
  }
  return path;
}

/** Diagonal lines over a path. */
function hatch(context, path, width, height, colours) {
  context.save();
  context.clip(path);
  context.globalAlpha = 0.45;
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width, height);
  context.globalAlpha = 0.6;
  context.strokeStyle = colours.muted;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = -height; x < width; x += 7) {
    context.moveTo(x, height);
    context.lineTo(x + height, 0);
  }
  context.stroke();
  context.restore();
}

/** The colours with the numbers they stand for. */
function legendOf(scale, unit) {
  const bar = h("canvas", { class: "heat-bar", "aria-hidden": "true" });
  const low = h("span");
  const high = h("span");
  const element = h("div", { class: "heat-legend" }, h("span", { class: "heat-unit" }, unit), low, bar, high);
  return {
    element,
    draw(limit, cut) {
      const { dark } = palette();
      const context = fit(bar, 96, 10);
      for (let x = 0; x < 96; x++) {
        const rgb = scale === "sequential" ? sequential(x / 95, dark) : diverging((2 * x) / 95 - 1, dark);
        context.fillStyle = css(rgb);
        context.fillRect(x, 0, 1, 10);
      }
      low.textContent = scale === "sequential" ? "0" : `${cut ? "≤ " : ""}${short(-limit)}`;
      high.textContent = `${cut ? "≥ " : ""}${scale === "sequential" ? "" : "+"}${short(limit)}`;
    },
  };
}

function short(number) {
  const size = Math.abs(number);
  const text = size >= 100 ? size.toFixed(0) : size >= 0.01 ? String(Number(size.toPrecision(2))) : size.toExponential(0);
  return (number < 0 ? "−" : "") + text;
}
