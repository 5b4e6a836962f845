/** The view Map: all tokens as points. */

import { h } from "../dom.js";
import { examplesOf, sumText } from "../examples.js";
import { SCENES } from "../learn/scenes.js";
import { Axes } from "../map/axes.js";
import { clusterColumn, clusterNames } from "../map/clusters.js";
import { Colouring } from "../map/colouring.js";
import { Columns, namesInOrder } from "../map/columns.js";
import { Controls } from "../map/controls.js";
import { kinds, rowsAlone } from "../map/groups.js";
import { Naming } from "../map/naming.js";
import { outsideNote, paintOver } from "../map/painting.js";
import { Placement } from "../map/placement.js";
import { bytesOfAll, idsByText, parseExpression, parseQuery, search, variants } from "../map/search.js";
import { idsOf, isEmpty, selectedTokens, sumParams } from "../map/selection.js";
import { inside, lineFromText, lineToText, makeGrid } from "../map/grid.js";
import { Side } from "../map/side.js";
import { Stage, emptyScene, measured } from "../map/stage.js";
import { subwordsOf } from "../map/subwords.js";
import { fitViewport } from "../map/viewport.js";

/** @import { Context2D, OwnColumn, Point, TokenSum, View, ViewContext, Viewport } from "../types" */
/** @import { Tab } from "../map/side.js" */
/** @import { Frame, Host as StageHost } from "../map/stage.js" */
/** @import { Subwords } from "../map/subwords.js" */

/** @type {View} */
export const view = {
  id: "map",
  title: "Map",
  sentence: "Every row of the table is a point; rows with similar vectors are close.",
  needs: ["vectors"],
  keys: [
    ["arrows, + −, 0", "move, zoom, show all (with the map in focus)"], ["Enter", "select the token at the cross"],
    ["Esc", "clear search and selection"],
  ],
  open,
};

const NEIGHBORS = 20;
const NAMED_FOUND = 400;
const NARROW = 600; // pixels
const [TYPING_DELAY, MOVING_DELAY, ENCODING_DELAY] = [60, 300, 1500]; // milliseconds

/**
 * @typedef {object} Tokens
 * @property {string[]} texts
 * @property {number[]} special
 * @property {number[]} explained
 * @property {ArrayBuffer} coordinates
 * @property {ArrayBuffer} norms
 * @property {OwnColumn[]} own columns of the user's own
 */

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const { data, manifest } = context;
  const count = manifest.exported ? "3" : "6";
  const [{ texts, special }, { explained }, coordinates, norms, own] = await Promise.all([
    data.load("tokens"), data.load("axes"), data.load("coordinates", { count }), data.load("norms"),
    data.load("columns"),
    ...(manifest.has.includes("frequency") ? [data.load("frequencies")] : []), // so that open() waits for nothing
  ]);
  const map = new MapView(element, context, { texts, special, explained, coordinates, norms, own });
  await map.open();
  return map;
}

class MapView {
  /** @type {Int32Array | null} */ #found = null;
  /** @type {[id: number, cosine: number][]} */ #near = [];
  /** @type {Point[] | null} */ #lasso = null;
  /** @type {Tab} */ #tab = "near";
  #isIsolated = false;
  #isLassoOn = false;
  #problem = "";
  /** @type {Subwords[]} */ #subwords = []; // of the typed texts that are no tokens
  #request = 0;
  #loading = -1; // the request that waits for neighbours
  #isClosed = false;
  #typing = 0;
  #moving = 0;
  #encoding = 0;

  /** @param {HTMLElement} element @param {ViewContext} context @param {Tokens} tokens */
  constructor(element, context, { texts, special, explained, coordinates, norms, own }) {
    const { data, manifest, state } = context;
    const selected = () => selectedTokens(state, texts.length);
    this.context = context;
    this.texts = texts;
    this.selected = selected;
    const hasTokens = manifest.has.includes("tokens");
    this.kind = hasTokens ? kinds(texts, special) : rowsAlone(texts.length);
    this.lower = texts.map((text) => text.toLowerCase());
    this.axes = new Axes({ size: texts.length, coordinates, explained, state, data, selected });
    this.columns = new Columns({
      texts, kind: this.kind, norms: new Float32Array(norms), data, own, selected,
      hasTokens, hasFrequency: manifest.has.includes("frequency"),
      clusters: () => (this.axes.layout ? clusterColumn(this.axes.layout, texts) : null),
    });
    this.inOrder = once(() => namesInOrder(texts, this.kind, this.columns.frequency()));
    this.scene = emptyScene(texts.length);
    this.naming = new Naming(texts, this.scene, this.inOrder);
    this.colouring = new Colouring(this.scene, this.columns, {
      column: () => this.#column(),
      highlighted: () => ({
        found: this.#found, hasNeighbours: this.#near.length > 0, isIsolated: this.#isIsolated && this.#found !== null,
      }),
      draw: () => this.stage.draw(),
    });
    this.controls = this.#makeControls();
    this.stage = this.#makeStage();
    const inset = h("div");
    this.placement = this.#makePlacement(inset);
    this.side = this.#makeSide();
    this.start = startBlock();
    element.replaceChildren(h("div", { class: "map" }, this.start,
      h("div", { class: "panel map-main" }, this.controls.element, this.stage.element,
        h("div", { class: "map-foot" }, this.colouring.legend, inset)),
      this.side.element));
  }

  #makeControls() {
    return new Controls(this.context.state, this.axes, this.columns, {
      search: () => {
        clearTimeout(this.#typing);
        this.#typing = setTimeout(() => this.#search(this.controls.searchField.value), TYPING_DELAY);
      },
      enter: () => {
        if (this.#found?.length) this.#choose({ plus: [this.#found[0]], minus: [] });
      },
      escape: () => this.#clear(),
      setAxes: () => this.placement.show(),
      setColours: () => this.#setColours(),
      toggleDensity: () => {
        this.scene.dense = !this.scene.dense;
        this.context.state.set({ v: this.scene.dense ? "density" : null });
        this.#showColour();
        this.colouring.describe();
      },
      toggleLasso: () => this.#setLasso(!this.#isLassoOn),
    });
  }

  #makeStage() {
    /** @param {string} text @param {string} label @param {() => void} onClick */
    const button = (text, label, onClick) =>
      h("button", { type: "button", "aria-label": label, title: label, onClick }, text);
    return new Stage(this.scene,
      "Map of all tokens. Arrow keys move, plus and minus zoom, Enter selects the token at the cross.",
      this.#stageHost(),
      h("div", { class: "map-zoom" }, button("+", "Zoom in", () => this.stage.zoom(1.5)),
        button("−", "Zoom out", () => this.stage.zoom(1 / 1.5)), button("⤢", "Show all", () => this.stage.home())),
      this.controls.modes, this.controls.progress);
  }

  /** @returns {StageHost} */
  #stageHost() {
    return {
      fitted: (width, height) => this.#fitted(width, height),
      opening: (all) => this.#opening(all),
      above: (context, viewport, frame) => this.#paintAbove(context, viewport, frame),
      moved: () => this.#rememberViewport(),
      textOf: (id) => this.texts[id],
      details: (id) => `#${id}`,
      pick: (id, more) => {
        const { plus, minus } = this.selected();
        this.#choose(more ? { plus: [...plus, id], minus } : { plus: [id], minus: [] });
      },
      closest: 3000,
      more: {
        lasso: () => this.#isLassoOn,
        draw: (line) => {
          this.#lasso = line;
          this.stage.draw();
        },
        drawn: () => this.#takeLasso(),
        escape: () => this.#clear(),
      },
    };
  }

  /** @param {HTMLElement} inset */
  #makePlacement(inset) {
    const { axes, controls, stage, texts, context: { data } } = this;
    return new Placement({
      data, size: texts.length, axes, controls, stage, inset,
      arrived: () => {
        this.#setColours();
        this.#applyLasso();
      },
    });
  }

  #makeSide() {
    const { texts, kind, columns, inOrder } = this;
    const { exported, left_out: leftOut } = this.context.manifest;
    return new Side({ texts, kind, columns, inOrder, notes: exported ? leftOut : [] }, {
      choose: (sum) => this.#choose(sum),
      typed: (text, last) => this.#onExpression(text, last),
      meant: (text) => this.#meant(text),
      showTab: (tab) => {
        this.#tab = tab;
        this.#showSide();
      },
      isolate: () => {
        this.#isIsolated = !this.#isIsolated;
        this.colouring.restrict();
        this.#showSide();
      },
      point: (id) => this.stage.showTip(id),
      leave: () => this.stage.hideTip(),
    });
  }

  // Opening, closing, and the URL

  async open() {
    const { manifest } = this.context;
    this.#agree();
    this.#showColour();
    this.#encoding = setTimeout(() => bytesOfAll(this.texts), ENCODING_DELAY); // the first search by bytes is fast too
    this.placement.start();
    this.placement.fold().then(() => this.#showSide());
    examplesOf(this.context).then((found) => {
      this.side.offer(found);
      this.#showSide();
    }, () => {}); // a file without vectors has none
    if (manifest.has.includes("frequency")) await this.columns.load("frequency");
    this.#apply();
  }

  close() {
    this.#isClosed = true;
    this.placement.close();
    this.stage.close();
    this.colouring.close();
    for (const timer of [this.#typing, this.#moving, this.#encoding]) clearTimeout(timer);
  }

  async stateChanged() {
    this.#found = null;
    this.controls.hits.textContent = "";
    await this.#apply();
  }

  /** Show what the URL says. */
  async #apply() {
    const { state } = this.context;
    const typed = state.get("q", "");
    this.#agree();
    this.start.hidden = typed !== "" || !isEmpty(this.selected());
    this.controls.follow();
    this.scene.dense = state.get("v") === "density";
    this.placement.show(false);
    const request = ++this.#request;
    this.#writeSelection();
    await this.#setColours();
    if (request !== this.#request) return; // the user has typed or chosen something meanwhile
    await this.#showSelection();
    if (!typed) return this.#applyLasso();
    this.#search(typed);
    this.#tab = "found";
    this.#showSide();
  }

  // What is drawn above the points

  /** @param {Context2D} context @param {Viewport} viewport @param {Frame} frame */
  #paintAbove(context, viewport, frame) {
    const isNarrow = frame.width < NARROW;
    const titles = this.scene.showAxes ? this.axes.titles() : [this.axes.layoutNote(isNarrow), ""];
    titles[0] += outsideNote(frame.outside, "token");
    const first = this.#firstNamed();
    paintOver(context, this.scene, viewport, {
      ...frame, colours: this.colouring.palette, axes: titles, rings: idsOf(this.selected()), first,
      groups: this.#groupNames(viewport), names: this.#otherNames(viewport, frame, first),
      textOf: (id) => this.naming.nameOf(id), most: isNarrow ? 22 : 60, lasso: this.#lasso,
    });
  }

  /** Return the names of clusters in a viewport. @param {Viewport} viewport */
  #groupNames(viewport) {
    const { layout } = this.axes;
    if (!layout || this.scene.showAxes || this.placement.isGliding || this.#isIsolated) return [];
    return clusterNames(layout, this.texts, viewport.zoom / this.scene.home);
  }

  /** Return the tokens that are named before all others. @returns {Set<number>} */
  #firstNamed() {
    const found = this.#found?.subarray(0, NAMED_FOUND) ?? [];
    return new Set([...idsOf(this.selected()), ...this.#near.map(([id]) => id), ...found]);
  }

  /**
   * Return further tokens to name in a viewport.
   * @param {Viewport} viewport
   * @param {Frame} frame
   * @param {Set<number>} first
   */
  #otherNames(viewport, frame, first) {
    if (this.placement.isGliding || (this.#found?.length && this.#isIsolated)) return [];
    return this.naming.at(this.stage, viewport, frame).filter((id) => !first.has(id));
  }

  // The viewport

  /**
   * Return the viewport of all points between the buttons and the note.
   * @param {number} width
   * @param {number} height
   */
  #fitted(width, height) {
    const [over, under] = width < NARROW ? [48, 40] : [0, 24];
    const { xs, ys } = this.placement?.places() ?? this.scene; // where points will be, if they are on their way
    const all = fitViewport(xs, ys, width, height - over - under);
    return { ...all, y: all.y - (under - over) / 2 / all.zoom };
  }

  /** @param {Viewport} all */
  #opening(all) {
    const [x, y, zoom] = this.context.state.get("at", "").split(",").map(Number);
    return Number.isFinite(zoom) && zoom > 0 ? { x, y, zoom: all.zoom * zoom } : all;
  }

  #rememberViewport() {
    clearTimeout(this.#moving);
    this.#moving = setTimeout(() => {
      const { viewport } = this.scene;
      if (this.#isClosed || !viewport) return;
      const all = this.#fitted(this.stage.element.clientWidth, this.stage.element.clientHeight);
      const zoom = viewport.zoom / all.zoom;
      const distance = Math.hypot(viewport.x - all.x, viewport.y - all.y) * all.zoom;
      const isAll = Math.abs(zoom - 1) <= 0.01 && distance <= 3;
      const numbers = [viewport.x, viewport.y, zoom].map((n) => Number(n.toPrecision(5)));
      this.context.state.set({ at: isAll ? null : numbers.join(",") });
    }, MOVING_DELAY);
  }

  // Colours

  /** Return the name of the column that colours the points. */
  #column() {
    const name = this.context.state.get("c", "cluster");
    const isKnown = this.columns.options.some(([key]) => key === name) && (name !== "cluster" || this.axes.layout);
    if (isKnown) return name;
    return this.columns.hasTokens ? "kind" : "norm"; // until the clusters are there
  }

  #setColours() {
    this.#showColour();
    return this.colouring.show();
  }

  /** Show in the list of colours what colours the points. */
  #showColour() {
    this.controls.showColour(this.#column(), this.scene.dense);
  }

  /** @param {boolean} isOn */
  #setLasso(isOn) {
    this.#isLassoOn = isOn;
    this.controls.lasso.setAttribute("aria-pressed", String(isOn));
    this.stage.over.classList.toggle("is-lasso", isOn);
  }

  // Search

  /** @param {string} typed */
  #search(typed) {
    const start = performance.now();
    const query = parseQuery(typed);
    const isBroken = query.kind === "error";
    const ids = query.kind === "none" || isBroken ? null : search(query, this.texts, this.lower);
    measured("map: search", start);
    this.controls.searchField.title = isBroken ? query.message : "";
    this.context.state.set({ q: typed || null, lasso: null });
    this.#subwords = [];
    this.#take(ids, isBroken ? "not a pattern" : ids ? `${ids.length.toLocaleString("en")} found` : "");
    if (query.kind === "text" && !ids?.length) this.#offerSubwords([query.text]);
  }

  #takeLasso() {
    const line = this.#lasso ?? [];
    this.#lasso = null;
    this.#setLasso(false);
    if (line.length <= 2) return this.stage.draw();
    const [x, y] = this.axes.drawn;
    this.controls.searchField.value = "";
    this.context.state.set({ q: null, lasso: lineToText(this.stage.inData(line)) });
    if (this.axes.isLayout() && !this.axes.isLayoutDrawn()) { // the line is one among the points that are drawn
      this.context.state.set({ x, y });
      this.placement.show(false);
    }
    return this.#applyLasso();
  }

  /** Highlight the tokens inside the line that the URL says. */
  #applyLasso() {
    const line = lineFromText(this.context.state.get("lasso", ""));
    const places = this.placement.places();
    if (line.length <= 2 || !places) return;
    const ids = inside(makeGrid(places.xs, places.ys), line).filter((id) => this.stage.isShown(id));
    this.#take(ids, `${ids.length.toLocaleString("en")} inside`);
  }

  /** Highlight tokens that were found. @param {Int32Array | null} ids @param {string} message */
  #take(ids, message) {
    this.#found = ids;
    this.controls.hits.textContent = message;
    if (!ids) this.#isIsolated = false;
    this.#tab = ids?.length ? "found" : "near";
    this.#mark();
    this.colouring.restrict();
    this.colouring.fade();
    this.#showSide();
  }

  /** Clear search and selection. */
  #clear() {
    this.controls.searchField.value = "";
    this.#lasso = null;
    this.#setLasso(false);
    this.context.state.set({ q: null, lasso: null });
    this.#take(null, "");
    this.#choose({ plus: [], minus: [] });
  }

  // Selection and neighbours

  /** Select the token that is chosen in the page; if there is none, choose there what the URL selects. */
  #agree() {
    const { state, token } = this.context;
    const [id, ids] = [token.get(), idsOf(this.selected())];
    if (id === null) token.choose(ids[0] ?? null);
    else if (!ids.includes(id)) state.set({ ...sumParams({ plus: [id], minus: [] }), at: null });
  }

  /** @param {number | null} id */
  tokenChosen(id) {
    if (id === null || !idsOf(this.selected()).includes(id)) this.#choose({ plus: id === null ? [] : [id], minus: [] });
  }

  /** @param {TokenSum} sum */
  #choose(sum) {
    const { state, token } = this.context;
    const ids = idsOf(sum);
    state.set(sumParams(sum));
    if (!ids.includes(token.get() ?? -1)) token.choose(ids[0] ?? null);
    this.#tab = "near";
    this.#writeSelection();
    this.#showSelection();
  }

  /** Write the selection into the field of sums, before anything is awaited: the user may type into it then. */
  #writeSelection() {
    this.side.write(sumText(this.selected(), this.texts));
  }

  async #showSelection() {
    const request = ++this.#request;
    this.#subwords = [];
    await this.#loadNeighbours(request);
    if (this.#isClosed || request !== this.#request) return;
    this.#mark();
    this.columns.invalidate("along");
    if (this.axes.isSelection()) await this.placement.show();
    if (this.#column() === "along" || this.axes.isSelection()) await this.#setColours();
    else this.colouring.fade();
    this.#showSide();
    this.stage.draw();
  }

  /** @param {number} request */
  async #loadNeighbours(request) {
    const sum = this.selected();
    this.#problem = "";
    if (isEmpty(sum)) {
      this.#near = [];
      return;
    }
    this.#loading = request;
    this.#showSide();
    try {
      const near = await this.context.data.load("neighbors", { ...sumParams(sum), topn: NEIGHBORS });
      if (request === this.#request) this.#near = near;
    } catch (error) {
      if (request !== this.#request) return;
      this.#near = [];
      this.#problem = /** @type {Error} */ (error).message;
    } finally {
      if (this.#loading === request) this.#loading = -1;
    }
  }

  /** Return the IDs that the last term of a sum can mean. @param {string} text */
  #meant(text) {
    const last = parseExpression(text).at(-1);
    return last ? variants(last.text, idsByText(this.texts)).filter((id) => id < this.texts.length) : [];
  }

  /** Select a typed sum. @param {string} text @param {number} [last] */
  #onExpression(text, last) {
    const terms = parseExpression(text).map((term) => ({ ...term, id: variants(term.text, idsByText(this.texts))[0] }));
    const lastTerm = terms.at(-1);
    if (lastTerm && last !== undefined) lastTerm.id = last;
    const unknown = terms.filter(({ id }) => id === undefined || id >= this.texts.length);
    if (unknown.length) {
      this.#offerSubwords(unknown.map((term) => term.text));
      return;
    }
    /** @param {number} sign */
    const ofSign = (sign) => terms.filter((term) => term.sign === sign).map(({ id }) => id);
    this.#choose({ plus: ofSign(1), minus: ofSign(-1) });
  }

  /** Offer the subwords of texts that are no tokens. @param {string[]} texts */
  async #offerSubwords(texts) {
    const request = ++this.#request;
    const { data, manifest } = this.context;
    const hasTokenizer = manifest.has.includes("tokenizer");
    const different = [...new Set(texts.map((text) => text.trim()))];
    const subwords = await Promise.all(different.map((text) => subwordsOf(data, text, hasTokenizer)));
    if (request !== this.#request || this.#isClosed) return;
    this.#subwords = subwords;
    this.#showSide();
  }

  /** Draw the found tokens, or the selection and its neighbours, above the others. */
  #mark() {
    this.scene.marked = this.#found ?? Int32Array.from([...this.#near.map(([id]) => id), ...idsOf(this.selected())]);
  }

  #showSide() {
    if (this.#isClosed) return;
    const isFirst = isEmpty(this.selected()) && !this.#found && !this.#problem && !this.#subwords.length;
    this.start.classList.toggle("is-past", !isFirst); // on a phone it stays, so that the map does not jump
    this.side.show({
      sum: this.selected(), near: this.#near, found: this.#found, isIsolated: this.#isIsolated, tab: this.#tab,
      problem: this.#problem, isLoading: this.#loading === this.#request, isFolded: (id) => this.placement.isFolded(id),
      subwords: this.#subwords,
    });
  }
}

/** Create the block that says where to begin, while nothing is selected. */
function startBlock() {
  return h("section", { class: "map-start", "aria-label": "Where to begin" },
    h("p", null, h("b", null, "New to embeddings?"), " Start with ", h("a", { href: "#learn" }, "Learn"),
      h("span", null, `: ${SCENES.length} short scenes`), "."),
    h("p", null, h("b", null, "You know them?"), " Search or click a token. ", h("a", { href: "#health" }, "Health"),
      " says whether the table is sound."));
}

/** Return a function that calls `make` once. @template T @param {() => T} make @returns {() => T} */
function once(make) {
  /** @type {{value: T} | null} */
  let made = null;
  return () => {
    made ??= { value: make() };
    return made.value;
  };
}
