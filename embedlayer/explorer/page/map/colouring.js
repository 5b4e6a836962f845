/** The colours of the points, the legend, and which points are shown. */

import { css, parse, sequential } from "../colour.js";
import { fit, h } from "../dom.js";
import { theme } from "../theme.js";
import { Filters, isGroups, rangeHandles } from "./filters.js";
import { pixel } from "./splat.js";

/** @import { Column, Groups, NumberColumn, PointScene, Rgb } from "../types" */
/** @import { Columns } from "./columns.js" */
/** @import { Filter } from "./filters.js" */
/** @import { Palette } from "./painting.js" */

const FADED_BY_FOUND = 0.4; // share of a colour that remains beside found tokens
const FADED_BY_NEIGHBOURS = 0.6;
const SHADE = 0.55; // share of a hue in its second shade, with ink, and its third, with paper
const SOON = 200; // milliseconds
const [RAMP_WIDTH, RAMP_HEIGHT] = [90, 10];

/** Return the page's colours and fonts, for a canvas. @returns {Palette} */
export function paletteOf() {
  const style = getComputedStyle(document.documentElement);
  return { ...theme(), mono: style.getPropertyValue("--mono"), font: style.getPropertyValue("--font") };
}

/** Draw the scale of numbers. @param {boolean} dark */
export function ramp(dark) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const context = fit(canvas, RAMP_WIDTH, RAMP_HEIGHT);
  for (let x = 0; x < RAMP_WIDTH; x++) {
    context.fillStyle = css(sequential(x / (RAMP_WIDTH - 1), dark));
    context.fillRect(x, 0, 1, RAMP_HEIGHT);
  }
  return canvas;
}

/**
 * @typedef {object} Host
 * @property {() => string} column name of the chosen column
 * @property {() => {found: Int32Array | null, hasNeighbours: boolean, isIsolated: boolean}} highlighted
 * @property {() => void} draw
 */

/** Colours the points of a scene by one column. */
export class Colouring {
  #filters = new Filters();
  #request = 0;
  #isClosed = false;

  /** @param {PointScene} scene @param {Columns} columns @param {Host} host */
  constructor(scene, columns, host) {
    this.scene = scene;
    this.columns = columns;
    this.host = host;
    this.legend = h("div", { class: "map-legend" });
    this.palette = paletteOf();
    document.addEventListener("themechange", this.#onTheme);
  }

  close() {
    this.#isClosed = true;
    document.removeEventListener("themechange", this.#onTheme);
  }

  #onTheme = () => {
    this.palette = paletteOf();
    this.show();
    this.host.draw();
  };

  /** Colour by the chosen column. */
  async show() {
    const request = ++this.#request;
    const waiting = setTimeout(() => this.#say("Loading …"), SOON); // the old legend says nothing about the new colour
    try {
      const column = await this.columns.load(this.host.column());
      if (request !== this.#request || this.#isClosed) return;
      this.#paint(column);
      this.#describe(column);
      this.restrict();
    } catch (error) {
      if (request !== this.#request || this.#isClosed) return;
      this.#paint(this.columns.none());
      this.#say(/** @type {Error} */ (error).message);
      this.restrict();
    } finally {
      clearTimeout(waiting);
    }
  }

  /** Write a message in place of the legend. @param {string} message */
  #say(message) {
    this.legend.replaceChildren(h("span", { class: "ramp", role: "status" }, message));
  }

  /** Fade the points beside the highlighted ones. */
  async fade() {
    const column = await this.columns.load(this.host.column()).catch(() => this.columns.none());
    if (this.#isClosed) return;
    this.#paint(column);
    this.host.draw();
  }

  /** Write the legend again: for points, or for their density. */
  describe() {
    this.columns.load(this.host.column()).then((column) => this.#describe(column), () => {});
    this.host.draw();
  }

  /** Leave out the points that a filter hides, or that were not found. */
  restrict() {
    const { found, isIsolated } = this.host.highlighted();
    this.scene.only = this.#filters.mask(this.scene.colours.length, isIsolated ? found : null);
    this.host.draw();
  }

  /** @param {Column} column */
  #paint(column) {
    const { found, hasNeighbours } = this.host.highlighted();
    const kept = found !== null ? FADED_BY_FOUND : hasNeighbours ? FADED_BY_NEIGHBOURS : 1;
    const { scene, palette } = this;
    const paper = parse(palette.paper);
    /** @param {Rgb} rgb @param {number} [share] of the colour */
    const faded = (rgb, share = kept) => {
      const [red, green, blue] = rgb.map((value, i) => Math.round(paper[i] + (value - paper[i]) * share));
      return pixel([red, green, blue]);
    };
    if (isGroups(column)) {
      const pixels = column.names.map((_, i) => faded(parse(this.#colourOf(column, i))));
      column.of.forEach((group, id) => {
        scene.colours[id] = pixels[group];
      });
    } else this.#paintNumbers(column, faded);
    scene.paper = paper;
    scene.markColour = pixel(parse(palette.warm));
    scene.scale = Uint32Array.from({ length: 256 }, (_, i) =>
      faded(sequential(i / 255, palette.dark), Math.min(1, i / 40)));
  }

  /** Return the colour of a group in CSS. @param {Groups} column @param {number} group */
  #colourOf({ rest, colours }, group) {
    if (rest !== undefined && group >= rest) return this.palette.muted;
    const [colour, { series, ink, paper }] = [colours?.[group] ?? group, this.palette];
    const [hue, other] = [parse(series[colour % 8]), parse(Math.floor(colour / 8) % 3 === 2 ? paper : ink)];
    if (colour < 8) return css(hue);
    return css(/** @type {Rgb} */ (hue.map((value, i) => Math.round(SHADE * value + (1 - SHADE) * other[i]))));
  }

  /** @param {NumberColumn} column @param {(rgb: Rgb) => number} faded */
  #paintNumbers({ values, range: [low, high] }, faded) {
    const steps = Array.from({ length: 256 }, (_, i) => faded(sequential(i / 255, this.palette.dark)));
    const none = faded(parse(this.palette.line));
    values.forEach((value, id) => {
      const step = Math.round((255 * (value - low)) / (high - low || 1));
      this.scene.colours[id] = Number.isFinite(value) ? steps[Math.min(255, Math.max(0, step))] : none;
    });
  }

  /** @param {Column} column */
  #describe(column) {
    const name = this.host.column();
    const { dark } = this.palette;
    const others = this.#filters.buttons(name, () => this.show());
    if (this.scene.dense) {
      return this.legend.replaceChildren(h("span", { class: "ramp" }, "few", ramp(dark), "many tokens"), ...others);
    }
    const filter = this.#filters.of(name, this.columns.labelOf(name), column);
    return this.legend.replaceChildren(
      ...(isGroups(column) ? this.#groupButtons(column, filter) : [this.#rangeOf(column, filter)]), ...others);
  }

  /** @param {NumberColumn} column @param {Filter} filter */
  #rangeOf(column, filter) {
    const handles = rangeHandles(column, filter, ramp(this.palette.dark), () => this.restrict());
    return h("span", { class: "ramp" }, handles, h("span", null, column.label));
  }

  /** @param {Groups} column @param {Filter} filter */
  #groupButtons(column, { hidden }) {
    const counts = new Uint32Array(column.names.length);
    for (const group of column.of) counts[group]++;
    return column.names.flatMap((_, i) => (counts[i] ? [this.#groupButton(column, i, counts[i], hidden)] : []));
  }

  /** @param {Groups} column @param {number} group @param {number} count @param {Set<number>} hidden */
  #groupButton(column, group, count, hidden) {
    const dot = h("i");
    dot.style.background = this.#colourOf(column, group);
    const button = h("button", {
      type: "button", "aria-pressed": String(!hidden.has(group)),
      title: `${count.toLocaleString("en")} tokens; press to hide or show them`,
      onClick: () => {
        if (!hidden.delete(group)) hidden.add(group);
        button.setAttribute("aria-pressed", String(!hidden.has(group)));
        this.restrict();
      },
    }, dot, column.names[group]);
    return button;
  }
}
