/** The map of two tables: each token moves from its place in one to its place in the other. */

import { parse, sequential } from "../colour.js";
import { h, segments, slider, token, visibleText } from "../dom.js";
import { paletteOf, ramp } from "./colouring.js";
import { outsideNote, paintOver } from "./painting.js";
import { pixel } from "./splat.js";
import { Stage, emptyScene } from "./stage.js";
import { fitViewport, toScreen } from "./viewport.js";

/** @import { Comparison, Context2D, MovedRow, ViewContext, Viewport } from "../types" */
/** @import { Frame } from "./stage.js" */

/**
 * @typedef {"moved_most" | "moved_least"} Order
 *
 * @typedef {object} About
 * @property {ViewContext} context
 * @property {string[]} texts
 * @property {string} other the second table: "before", or its number
 * @property {Comparison} comparison
 * @property {ArrayBuffer} places five columns of float32 and two of int32, a number for each pair of rows
 * @property {HTMLElement} choice of the second table
 */

const SHOWN = 100;
const NEIGHBORS = 8;
const DURATION = 3000; // milliseconds

/** A share of the way that changes smoothly at both ends. @param {number} t 0 to 1 */
function eased(t) {
  return t * t * (3 - 2 * t);
}

/** Concatenate. @param {Float32Array} a @param {Float32Array} b */
function joined(a, b) {
  const both = new Float32Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

export class ComparisonMap {
  #share = 1; // 0: the second table, 1: the first
  #playing = 0;
  #isClosed = false;

  /** @param {HTMLElement} body @param {About} about */
  constructor(body, about) {
    const { context: { state, manifest }, comparison, other, choice } = about;
    this.about = about;
    this.state = state;
    this.title = manifest.title;
    this.otherTitle = comparison.title;
    this.isBefore = other === "before";
    const { first, second, cosines, ids, otherIds } = readPlaces(about.places, comparison.shared);
    this.first = first;
    this.second = second;
    this.cosines = cosines;
    this.ids = ids;
    this.otherIds = otherIds;
    this.placeOf = new Map([...ids].map((id, place) => [id, place]));
    this.scene = { ...emptyScene(comparison.shared), showAxes: false };
    this.palette = paletteOf();
    this.legend = h("div", { class: "map-legend" });
    this.stage = this.#makeStage();
    this.time = this.#makeSlider(Number(state.get("t", "1")));
    this.play = h("button", {
      type: "button", onClick: () => (this.#playing ? this.#stop() : this.#start()),
    }, "Play");
    this.side = h("section", { class: "panel map-side", tabIndex: 0,
      "aria-label": "Tokens by how much they changed direction" });
    body.replaceChildren(h("div", { class: "panel map-main" },
      h("p", { class: "verdict" }, comparison.relation.headline), this.#measured(),
      h("div", { class: "map-tools" }, choice, this.time, this.play), this.stage.element, this.legend), this.side);
    document.addEventListener("themechange", this.#recolour);
    this.#recolour();
    this.#setShare(Number(state.get("t", "1")));
    this.#showSide();
  }

  close() {
    this.#isClosed = true;
    this.#stop();
    this.stage.close();
    document.removeEventListener("themechange", this.#recolour);
  }

  #makeStage() {
    const { texts } = this.about;
    return new Stage(this.scene, "Map of the tokens of both tables. Arrow keys move, plus and minus zoom.", {
      fitted: (width, height) => fitViewport(joined(this.first.xs, this.second.xs),
        joined(this.first.ys, this.second.ys), width, height),
      above: (context, viewport, frame) => this.#paintAbove(context, viewport, frame),
      textOf: (place) => texts[this.ids[place]],
      details: (place) => `cosine ${this.cosines[place].toFixed(3)}`,
      pick: (place) => this.choose(this.ids[place]),
      closest: 1000,
      reach: 12,
      more: { escape: () => this.choose(null) },
    });
  }

  /** @param {number} value */
  #makeSlider(value) {
    const [from, to] = this.isBefore ? ["before", "now"] : [this.otherTitle, this.title];
    const field = slider({
      label: this.isBefore ? "Before training to now" : `${from} to ${to}`, min: 0, max: 1, step: 0.01, value,
      format: (share) => (share === 0 ? from : share === 1 ? to : `${Math.round(share * 100)} %`),
      onInput: (share) => {
        this.#stop();
        this.#setShare(share);
        this.state.set({ t: share === 1 ? null : share });
      },
    });
    field.classList.add("search");
    return field;
  }

  /** Move all points to a share of the way from the second table to the first. @param {number} share */
  #setShare(share) {
    const { scene, first, second } = this;
    this.#share = share;
    for (let i = 0; i < scene.xs.length; i++) {
      scene.xs[i] = second.xs[i] + (first.xs[i] - second.xs[i]) * share;
      scene.ys[i] = second.ys[i] + (first.ys[i] - second.ys[i]) * share;
    }
    this.stage.place(scene.xs, scene.ys);
    this.stage.draw();
  }

  #start() {
    this.play.textContent = "Stop";
    const began = performance.now() - (this.#share >= 1 ? 0 : this.#share) * DURATION;
    /** @param {number} now */
    const step = (now) => {
      const share = Math.min(1, (now - began) / DURATION);
      this.time.set(share);
      this.#setShare(eased(share));
      if (share < 1 && !this.#isClosed) this.#playing = requestAnimationFrame(step);
      else this.#stop();
    };
    this.#playing = requestAnimationFrame(step);
  }

  #stop() {
    cancelAnimationFrame(this.#playing);
    this.#playing = 0;
    this.play.textContent = "Play";
  }

  /** @param {Context2D} context @param {Viewport} viewport @param {Frame} frame */
  #paintAbove(context, viewport, frame) {
    const chosen = this.#chosenPlace();
    paintOver(context, this.scene, viewport, {
      ...frame, colours: this.palette, rings: chosen >= 0 ? [chosen] : [], first: [], groups: [],
      names: this.#named(chosen), most: 24,
      axes: [`principal component 1 of ${this.title} →${outsideNote(frame.outside, "token")}`,
        "principal component 2 →"], lasso: null,
      textOf: (place) => visibleText(this.about.texts[this.ids[place]]),
    });
    if (chosen >= 0) this.#paintPath(context, viewport, chosen, frame);
  }

  /** @param {Context2D} context @param {Viewport} viewport @param {number} place @param {Frame} frame */
  #paintPath(context, viewport, place, { width, height }) {
    const { first, second } = this;
    context.strokeStyle = this.palette.warm;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(...toScreen(viewport, second.xs[place], second.ys[place], width, height));
    context.lineTo(...toScreen(viewport, first.xs[place], first.ys[place], width, height));
    context.stroke();
  }

  /** @returns {Order} */
  #order() {
    return this.state.get("order") === "moved_least" ? "moved_least" : "moved_most";
  }

  /** Yield the points in the order in which they are named. @param {number} chosen */
  * #named(chosen) {
    if (chosen >= 0) yield chosen;
    for (const [id] of this.about.comparison[this.#order()]) {
      const place = this.placeOf.get(id);
      if (place !== undefined && place !== chosen) yield place;
    }
  }

  #chosenPlace() {
    return this.placeOf.get(this.about.context.token.get() ?? -1) ?? -1;
  }

  #recolour = () => {
    this.palette = paletteOf();
    const { palette, scene } = this;
    const steps = Array.from({ length: 256 }, (_, i) => pixel(sequential(i / 255, palette.dark)));
    this.cosines.forEach((value, i) => {
      scene.colours[i] = steps[Math.round(255 * Math.min(1, Math.max(0, 1 - value)))];
    });
    scene.paper = parse(palette.paper);
    scene.markColour = pixel(parse(palette.warm));
    this.legend.replaceChildren(h("span", { class: "ramp" }, "same direction (cosine 1)", ramp(palette.dark),
      "orthogonal (cosine 0)"));
    this.stage.draw();
  };

  #showSide() {
    const { comparison } = this.about;
    const order = this.#order();
    const place = this.#chosenPlace();
    const lists = comparison.relation.verdict === "unrelated"
      ? [h("p", { class: "note" }, "Tokens of unrelated tables have no common place from which they could have moved.")]
      : [segments("List", [["moved_most", this.isBefore ? "Most changed" : "Most different"],
        ["moved_least", this.isBefore ? "Least changed" : "Least different"]], order, (name) => {
        this.state.set({ order: name === "moved_most" ? null : name });
        this.#showSide();
        this.stage.draw();
      }), this.#list(order), order === "moved_most" ? this.#neverList() : ""];
    this.side.replaceChildren(this.#figures(), place >= 0 ? this.#card(place) : this.#absent(), ...lists);
  }

  /** Say in one line what the verdict follows from. */
  #measured() {
    const { shared, relation: { verdict, held_out: heldOut, shuffled, as_stored: stored,
      as_stored_shuffled: storedShuffled } } = this.about.comparison;
    const isStored = ["same", "changed"].includes(verdict);
    const [mean, chance] = isStored ? [stored, storedShuffled] : [heldOut, shuffled];
    return mean === null || chance === null ? "" : h("p", { class: "note" },
      `Mean cosine of the two rows of a token${isStored ? "" : ", rotated"}: ${besideShuffled(mean, chance)}. `
      + `${shared.toLocaleString("en")} common tokens.`);
  }

  /** Show what was measured, folded. */
  #figures() {
    const { shared, only, mean_cosine: mean, residual, scale, relation } = this.about.comparison;
    const { held_out: heldOut, shuffled, as_stored: stored } = relation;
    /** @type {[string, string][]} */
    const facts = [["Common tokens", shared.toLocaleString("en")]];
    for (const { title, rows, tokens } of only) {
      if (rows) facts.push([`Only in ${title}`, `${rows.toLocaleString("en")}: ${namedOf(tokens, rows)}`]);
    }
    if (stored !== null && relation.as_stored_shuffled !== null) {
      facts.push(["Mean cosine", besideShuffled(stored, relation.as_stored_shuffled)]);
    }
    if (heldOut !== null && shuffled !== null && !["same", "changed"].includes(relation.verdict)) {
      facts.push(["Rotated, held out", besideShuffled(heldOut, shuffled)]);
    }
    if (residual !== null) {
      facts.push(["Rotated, all rows", `${fixed(mean)} (overfitted); ${(100 * residual).toFixed(0)} % unexplained`]);
    }
    facts.push(["Norms", `× ${scale.toFixed(3)} of ${this.isBefore ? "those before" : this.otherTitle}, median${
      residual === null ? "; undone in the map" : ""}`]);
    return h("details", { class: "map-figures" }, h("summary", null, "All figures"),
      h("p", { class: "note" }, relation.details),
      h("dl", { class: "facts", title: "Mean cosines of the two rows of a token" },
        facts.map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
  }

  /** @param {Order} order */
  #list(order) {
    const { comparison } = this.about;
    const rows = comparison[order].slice(0, SHOWN).map((moved) => this.#row(moved, order));
    if (!rows.length) return h("p", { class: "note" }, "No row changed by more than rounding.");
    const text = comparison.moved_never === null ? "" : " of the training text";
    const measure = order === "moved_most" ? "1 − cosine" : "the cosine";
    const rotated = comparison.residual === null ? "" : ", after the rotation that fits all of them best";
    return h("div", null, h("p", { class: "note" }, `Tokens${text} by ${measure} of their two rows${rotated}. `
      + "× 2: twice as long, relative to the other table and to the median token."),
    h("ol", { class: "near" }, rows));
  }

  /** List the tokens that never occur in the training text, folded. */
  #neverList() {
    const { moved_never: never } = this.about.comparison;
    if (!never?.length) return "";
    return h("details", null, h("summary", null, `Tokens that never occur in the text (${never.length} listed)`),
      h("ol", { class: "near" }, never.slice(0, SHOWN).map((moved) => this.#row(moved, "moved_most"))));
  }

  /** @param {MovedRow} moved @param {Order} order */
  #row([id, , cosine, norm], order) {
    const number = order === "moved_most" ? Number((1 - cosine).toPrecision(3)) : cosine.toFixed(3);
    const item = h("li", null, h("button", { type: "button", "data-token": id, onClick: () => this.choose(id) },
      token(this.about.texts[id]), h("span", { class: "score" }, `${number} · ×${norm.toFixed(2)}`)));
    const share = order === "moved_most" ? 1 - cosine : cosine;
    item.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
    return item;
  }

  /** Say why the token that is chosen in the page is not shown. */
  #absent() {
    const { context, texts } = this.about;
    const id = context.token.get();
    return id === null ? "" : h("p", { class: "note" }, token(texts[id], { of: id }),
      " is not compared: it is not in both tables, or one of its rows is zero or not finite.");
  }

  /** Show a token with its neighbours in both tables. @param {number} place */
  #card(place) {
    const { context: { data }, texts, other } = this.about;
    const id = this.ids[place];
    const sum = { minus: "", topn: NEIGHBORS };
    const now = data.load("neighbors", { ...sum, plus: id }).then((near) =>
      near.map((/** @type {[number, number]} */ [neighbor]) => neighbor));
    const before = data.load("compare-neighbors", { ...sum, other, plus: this.otherIds[place] }).then((near) =>
      near.map((/** @type {[string, number]} */ [text]) => text));
    const name = this.isBefore ? "Neighbours before training" : `Neighbours in ${this.otherTitle}`;
    return h("div", { class: "map-card" }, token(texts[id], { id }),
      h("p", { class: "note" }, `cosine of its two rows ${this.cosines[place].toFixed(3)}`),
      neighbours("Neighbours now", now, texts), neighbours(name, before, texts));
  }

  /** Select a token; null selects none. @param {number | null} id */
  choose(id) {
    this.about.context.token.choose(id);
    this.#showSide();
    this.stage.draw();
  }
}

/**
 * Read the coordinates in both tables, the cosines, and the IDs in both tables.
 * @param {ArrayBuffer} places
 * @param {number} count
 */
function readPlaces(places, count) {
  const [ax, ay, bx, by, cosines] = [0, 1, 2, 3, 4].map((k) => new Float32Array(places, 4 * count * k, count));
  const [ids, otherIds] = [5, 6].map((k) => new Int32Array(places, 4 * count * k, count));
  return { first: { xs: ax, ys: ay }, second: { xs: bx, ys: by }, cosines, ids, otherIds };
}

/**
 * Show neighbours as soon as they are loaded: IDs, or texts of the other table.
 * @param {string} name
 * @param {Promise<(number | string)[]>} loading
 * @param {string[]} texts of the first table
 */
function neighbours(name, loading, texts) {
  const chips = h("div", { class: "chips" }, "…");
  loading.then((found) => chips.replaceChildren(...found.map((each) => chipOf(each, texts))), (error) => {
    const message = error.name === "NotExported" ? "This file does not contain them." : error.message;
    chips.replaceChildren(h("span", { class: "note" }, message));
  });
  return h("div", null, h("h3", null, name), chips);
}

/** Create the chip of a token of the first table, or of a text of the other. */
function chipOf(/** @type {number | string} */ each, /** @type {string[]} */ texts) {
  if (typeof each === "number") return token(texts[each], { of: each });
  const id = texts.indexOf(each);
  return token(each, id < 0 || !each ? {} : { of: id });
}

/** Write a cosine with three digits, and no minus before zero. @param {number} cosine */
function fixed(cosine) {
  return cosine.toFixed(3).replace(/^-(?=0\.000$)/, "").replace("-", "−");
}

/** @param {number} cosine mean of the pairs @param {number} shuffled the same of tokens paired at random */
function besideShuffled(cosine, shuffled) {
  return `${fixed(cosine)}; shuffled tokens ${fixed(shuffled)}`;
}

/** The first tokens that only one table has. @param {string[]} tokens @param {number} rows */
function namedOf(tokens, rows) {
  return tokens.map(visibleText).join("  ") + (rows > tokens.length ? "  ..." : "");
}
