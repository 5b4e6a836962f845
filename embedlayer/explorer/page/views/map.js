/** The view Map: all tokens as points. */

import { h } from "../dom.js";
import { examplesOf, sumText } from "../examples.js";
import { SCENES } from "../learn/scenes.js";
import { Axes } from "../map/axes.js";
import { Choice } from "../map/choice.js";
import { clusterColumn, clusterNames } from "../map/clusters.js";
import { Colouring } from "../map/colouring.js";
import { Columns, namesInOrder } from "../map/columns.js";
import { Controls } from "../map/controls.js";
import { Found } from "../map/found.js";
import { kinds, rowsAlone } from "../map/groups.js";
import { Naming } from "../map/naming.js";
import { outsideNote, paintOver } from "../map/painting.js";
import { Placement } from "../map/placement.js";
import { RememberedViewport, isNarrow } from "../map/remembered.js";
import { bytesOfAll } from "../map/search.js";
import { idsOf, isEmpty, selectedTokens } from "../map/selection.js";
import { Side } from "../map/side.js";
import { Stage, emptyScene } from "../map/stage.js";

/** @import { Context2D, OwnColumn, View, ViewContext, Viewport } from "../types" */
/** @import { Tab } from "../map/side.js" */
/** @import { Frame, Host as StageHost } from "../map/stage.js" */

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

const NAMED_FOUND = 400;
const [TYPING_DELAY, ENCODING_DELAY] = [60, 1500]; // milliseconds

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
  /** @type {Tab} */ #tab = "near";
  #isClosed = false;
  #typing = 0;
  #encoding = 0;

  /** @param {HTMLElement} element @param {ViewContext} context @param {Tokens} tokens */
  constructor(element, context, { texts, special, explained, coordinates, norms, own }) {
    const { data, manifest, state } = context;
    const selected = () => selectedTokens(state, texts.length);
    this.context = context;
    this.texts = texts;
    this.choice = new Choice(context, texts,
      { chosen: (isTyped) => this.#chosen(isTyped), changed: () => this.#showSide() });
    const hasTokens = manifest.has.includes("tokens");
    this.kind = hasTokens ? kinds(texts, special) : rowsAlone(texts.length);
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
        found: this.found.ids, hasNeighbours: this.choice.near.length > 0,
        isIsolated: this.found.isIsolated && this.found.ids !== null,
      }),
      draw: () => this.stage.draw(),
    });
    this.viewport = new RememberedViewport(state, this.scene, () => this.placement?.places() ?? null);
    this.controls = this.#makeControls();
    this.stage = this.#makeStage();
    const inset = h("div");
    this.placement = this.#makePlacement(inset);
    this.found = this.#makeFound();
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
      enter: () => this.#takeFirst(),
      escape: () => this.#clear(),
      setAxes: () => this.placement.show(),
      setColours: () => this.#setColours(),
      toggleDensity: () => {
        this.scene.dense = !this.scene.dense;
        this.context.state.set({ v: this.scene.dense ? "density" : null });
        this.#showColour();
        this.colouring.describe();
      },
      toggleLasso: () => this.found.setLasso(!this.found.isLassoOn),
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
      fitted: (width, height) => this.viewport.fitted(width, height),
      opening: (all) => this.viewport.opening(all),
      above: (context, viewport, frame) => this.#paintAbove(context, viewport, frame),
      moved: () => this.viewport.remember(this.stage.element),
      textOf: (id) => this.texts[id],
      details: (id) => `#${id}`,
      pick: (id, more) => {
        const { plus, minus } = this.choice.sum;
        this.choice.choose(more ? { plus: [...plus, id], minus } : { plus: [id], minus: [] });
      },
      closest: 3000,
      more: {
        lasso: () => this.found.isLassoOn,
        draw: (line) => this.found.draw(line),
        drawn: () => this.found.takeLasso(),
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
        this.found.applyLasso();
      },
    });
  }

  #makeFound() {
    const { axes, controls, stage, placement, texts, context: { state } } = this;
    return new Found({
      texts, state, axes, controls, stage, placement,
      changed: () => {
        this.#tab = this.found.ids?.length ? "found" : "near";
        this.#mark();
        this.colouring.restrict();
        this.colouring.fade();
        this.#showSide();
      },
    });
  }

  #makeSide() {
    const { texts, kind, columns, inOrder } = this;
    const { exported, left_out: leftOut } = this.context.manifest;
    return new Side({ texts, kind, columns, inOrder, notes: exported ? leftOut : [] }, {
      choose: (sum) => this.choice.choose(sum),
      typed: (text, last) => this.choice.typed(text, last),
      meant: (text) => this.choice.meant(text),
      showTab: (tab) => {
        this.#tab = tab;
        this.#showSide();
      },
      isolate: () => {
        this.found.isIsolated = !this.found.isIsolated;
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
    this.choice.agree();
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
    this.choice.close();
    this.viewport.close();
    this.placement.close();
    this.stage.close();
    this.colouring.close();
    for (const timer of [this.#typing, this.#encoding]) clearTimeout(timer);
  }

  async stateChanged() {
    this.found.forget();
    await this.#apply();
  }

  /** Show what the URL says. */
  async #apply() {
    const { state } = this.context;
    const typed = state.get("q", "");
    this.choice.agree();
    this.start.hidden = typed !== "" || !isEmpty(this.choice.sum);
    this.controls.follow();
    this.scene.dense = state.get("v") === "density";
    this.placement.show(false);
    const isLast = this.choice.begin();
    this.#writeSelection();
    await this.#setColours();
    if (!isLast()) return; // the user has typed or chosen something meanwhile
    await this.#showSelection();
    if (!typed) return this.found.applyLasso();
    this.#search(typed);
    this.#tab = "found";
    this.#showSide();
  }

  // What is drawn above the points

  /** @param {Context2D} context @param {Viewport} viewport @param {Frame} frame */
  #paintAbove(context, viewport, frame) {
    const narrow = isNarrow(frame.width);
    const titles = this.scene.showAxes ? this.axes.titles() : [this.axes.layoutNote(narrow), ""];
    titles[0] += outsideNote(frame.outside, "token");
    const first = this.#firstNamed();
    paintOver(context, this.scene, viewport, {
      ...frame, colours: this.colouring.palette, axes: titles, rings: idsOf(this.choice.sum), first,
      groups: this.#groupNames(viewport), names: this.#otherNames(viewport, frame, first),
      textOf: (id) => this.naming.nameOf(id), most: narrow ? 22 : 60, lasso: this.found.line,
    });
  }

  /** Return the names of clusters in a viewport. @param {Viewport} viewport */
  #groupNames(viewport) {
    const { layout } = this.axes;
    if (!layout || this.scene.showAxes || this.placement.isGliding || this.found.isIsolated) return [];
    return clusterNames(layout, this.texts, viewport.zoom / this.scene.home);
  }

  /** Return the tokens that are named before all others. @returns {Set<number>} */
  #firstNamed() {
    const found = this.found.ids?.subarray(0, NAMED_FOUND) ?? [];
    return new Set([...idsOf(this.choice.sum), ...this.choice.near.map(([id]) => id), ...found]);
  }

  /**
   * Return further tokens to name in a viewport.
   * @param {Viewport} viewport
   * @param {Frame} frame
   * @param {Set<number>} first
   */
  #otherNames(viewport, frame, first) {
    if (this.placement.isGliding || (this.found.ids?.length && this.found.isIsolated)) return [];
    return this.naming.at(this.stage, viewport, frame).filter((id) => !first.has(id));
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

  // Search and selection

  /** @param {string} typed */
  #search(typed) {
    this.choice.subwords = [];
    const unknown = this.found.search(typed);
    if (unknown !== null) this.choice.offerSubwords([unknown]);
  }

  /** Select the first token that is found for what is typed now; nothing if there is none. */
  #takeFirst() {
    const typed = this.controls.searchField.value;
    clearTimeout(this.#typing);
    this.#search(typed);
    if (!this.found.ids) return;
    const first = [...this.found.ids.subarray(0, 1)];
    this.choice.choose({ plus: first, minus: [] });
    if (!first.length) this.#search(typed); // which says what is not found
  }

  /** Clear search and selection. */
  #clear() {
    this.found.clear();
    this.choice.choose({ plus: [], minus: [] });
  }

  /** @param {number | null} id */
  tokenChosen(id) {
    if (id === null || !idsOf(this.choice.sum).includes(id)) {
      this.choice.choose({ plus: id === null ? [] : [id], minus: [] });
    }
  }

  /** @param {boolean} isTyped whether the field keeps what is typed in it */
  #chosen(isTyped) {
    this.#tab = "near";
    if (!isTyped) this.#writeSelection();
    this.#showSelection();
  }

  /** Write the selection into the field of sums, before anything is awaited: the user may type into it then. */
  #writeSelection() {
    this.side.write(sumText(this.choice.sum, this.texts));
  }

  async #showSelection() {
    if (!await this.choice.load()) return;
    this.#mark();
    this.columns.invalidate("along");
    if (this.axes.isSelection()) await this.placement.show();
    if (this.#column() === "along" || this.axes.isSelection()) await this.#setColours();
    else this.colouring.fade();
    this.#showSide();
    this.stage.draw();
  }

  /** Draw the found tokens, or the selection and its neighbours, above the others. */
  #mark() {
    const { near, sum } = this.choice;
    this.scene.marked = this.found.ids ?? Int32Array.from([...near.map(([id]) => id), ...idsOf(sum)]);
  }

  #showSide() {
    if (this.#isClosed) return;
    const { near, problem, subwords, isLoading, sum } = this.choice;
    const { ids: found, isIsolated } = this.found;
    const isFirst = isEmpty(sum) && !found && !problem && !subwords.length;
    this.start.classList.toggle("is-past", !isFirst); // on a phone it stays, so that the map does not jump
    this.side.show({
      sum, near, found, isIsolated, tab: this.#tab, problem, isLoading, subwords,
      isFolded: (id) => this.placement.isFolded(id),
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
