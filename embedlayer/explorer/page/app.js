/** The page around the views: opens views, keeps the state in the URL, switches source and theme. */

import { fromFile, fromServer } from "./data.js";
import { empty, h } from "./dom.js";
import { compute } from "./local.js";
import { changed, formatHash, parseHash } from "./state.js";
import { startTheme, switchTheme, theme } from "./theme.js";
import { view as compare } from "./views/compare.js";
import { view as health } from "./views/health.js";
import { view as learn } from "./views/learn.js";
import { view as map } from "./views/map.js";
import { view as pipeline } from "./views/pipeline.js";
import { view as positions } from "./views/positions.js";
import { view as training } from "./views/training.js";

/** @import { Data, Manifest, OpenView, SourceManifest, View, ViewContext, ViewState } from "./types" */

const VIEWS = [map, pipeline, positions, compare, health, training, learn];
/** @type {[string, string][]} */
const KEYS = [["1 … 7", "go to a view"], ["t", "light or dark"], ["/", "search"], ["?", "this list"]];
/** @type {Record<string, [string, string]>} */
const MISSING = {
  input: ["Only the table was read", "The model family of this checkpoint is not known, or a part of its embedding "
    + "layer cannot be read. The message of the command says which."],
  metrics: ["This source is not a training run", "This view shows the metrics of a run: open its folder, the output of "
    + "embedlayer train."],
};
const SEARCH_FIELD = "main input[type=search], main input[type=text]";
const EDITABLE = "input:not([type=range]):not([type=checkbox]), textarea, select, dialog[open]";

/** @param {string} id */
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** A loaded page. */
class Page {
  /** @type {View | null} */ #current = null;
  /** @type {OpenView | null} */ #opened = null;
  /** @type {Record<string, Record<string, string>>} the state of each view */ #states = {};
  #source = 0;
  #opening = 0;

  /** @param {Data} data @param {Manifest} manifest */
  constructor(data, manifest) {
    this.data = data;
    this.manifest = manifest;
    element("tabs").append(...VIEWS.map((view) => this.#tab(view)));
    this.#fillSources();
    element("theme").addEventListener("click", switchTheme);
    element("help").addEventListener("click", () => this.#showKeys());
    addEventListener("hashchange", () => this.#follow());
    document.addEventListener("keydown", (event) => this.#onKey(event));
    this.#follow();
  }

  /** @param {View} view */
  #tab(view) {
    return h("button", {
      role: "tab", type: "button", id: `tab-${view.id}`, "aria-controls": "view", onClick: () => this.#go(view.id),
    }, view.title);
  }

  #fillSources() {
    const choice = /** @type {HTMLSelectElement} */ (element("source"));
    const { sources } = this.manifest;
    choice.hidden = sources.length < 2;
    choice.replaceChildren(...sources.map((source, i) => h("option", { value: String(i) }, source.title)));
    choice.addEventListener("change", () => {
      this.#states = {}; // the state of one table has no meaning in another
      const state = changed({}, { source: choice.value === "0" ? null : choice.value });
      location.hash = formatHash(this.#current?.id ?? VIEWS[0].id, state);
    });
  }

  /** Return the hash of a view in the state in which it was left. @param {string} id */
  #hash(id) {
    return formatHash(id, changed(this.#states[id] ?? {}, { source: this.#source || null }));
  }

  /** @param {string} id */
  #go(id) {
    location.hash = this.#hash(id);
  }

  /** Show what the hash says. */
  #follow() {
    const { view: id, state } = parseHash(location.hash);
    const { source: number = "0", ...own } = state;
    const view = VIEWS.find((candidate) => candidate.id === id) ?? VIEWS[0];
    const last = this.manifest.sources.length - 1;
    const source = Math.min(Math.max(Number.parseInt(number, 10) || 0, 0), last);
    this.#states[view.id] = own;
    if (view !== this.#current || source !== this.#source) this.#open(view, source);
    else this.#opened?.stateChanged?.();
  }

  /** @param {View} view @param {number} source */
  async #open(view, source) {
    const opening = ++this.#opening;
    const about = this.manifest.sources[source];
    this.#opened?.close();
    this.#opened = null;
    this.#current = view;
    this.#source = source;
    this.#showSource(about, source);
    const body = showFrame(view, about);
    const missing = view.needs.find((name) => !about.has.includes(name));
    if (missing) {
      const message = MISSING[missing] ?? ["Nothing to show", `This source has no ${missing}.`];
      return body.replaceChildren(empty(...message));
    }
    try {
      const opened = await view.open(body, this.#context(view, about, source));
      if (opening !== this.#opening) return opened.close();
      this.#opened = opened;
      return body.querySelector(":scope > .loading")?.remove();
    } catch (thrown) {
      const error = /** @type {Error} */ (thrown);
      if (opening === this.#opening) body.replaceChildren(empty("This view cannot be shown", error.message));
      if (error.name !== "NotBaked" && !error.message.match(/server/)) console.error(error);
    }
  }

  /** @param {View} view @param {SourceManifest} about @param {number} source @returns {ViewContext} */
  #context(view, about, source) {
    const { data, manifest } = this;
    return {
      manifest: { ...about, exported: manifest.exported, left_out: manifest.left_out ?? [] },
      sources: manifest.sources,
      source,
      theme,
      data: {
        exported: data.exported,
        load: (name, params = {}) => data.load(name, { source, ...params }),
        ask: (name, params = {}) => data.ask(name, { source, ...params }),
      },
      state: this.#state(view),
    };
  }

  /** @param {View} view @returns {ViewState} */
  #state(view) {
    return {
      /** @param {string} key @param {string} [fallback] */
      get: (key, fallback) => /** @type {string} */ (this.#states[view.id]?.[key] ?? fallback),
      set: (changes) => {
        this.#states[view.id] = changed(this.#states[view.id] ?? {}, changes);
        if (this.#current === view) history.replaceState(null, "", this.#hash(view.id));
      },
    };
  }

  /** @param {SourceManifest} about @param {number} source */
  #showSource(about, source) {
    const size = `${about.vocab_size.toLocaleString("en")} tokens × ${about.embed_dim.toLocaleString("en")}`;
    element("title").textContent = about.title;
    element("facts").textContent = this.manifest.exported ? `${size} · exported page` : size;
    /** @type {HTMLSelectElement} */ (element("source")).value = String(source);
  }

  #showKeys() {
    const keys = [...KEYS, ...(this.#current?.keys ?? [])];
    element("keys").querySelector("dl")?.replaceChildren(
      ...keys.flatMap(([key, what]) => [h("dt", null, key), h("dd", null, what)]));
    /** @type {HTMLDialogElement} */ (element("keys")).showModal();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.getAttribute?.("role") === "tab" && onTabKey(event, target)) return;
    if (target.closest?.(EDITABLE)) return;
    const view = /^[1-9]$/.test(event.key) ? VIEWS[Number(event.key) - 1] : undefined;
    if (view) this.#go(view.id);
    else if (event.key === "t") switchTheme();
    else if (event.key === "?") this.#showKeys();
    else if (event.key === "/") {
      const field = /** @type {HTMLElement | null} */ (document.querySelector(SEARCH_FIELD));
      if (!field) return;
      event.preventDefault();
      field.focus();
    }
  }
}

/**
 * Show the title of a view; return the element that it is opened in.
 * @param {View} view
 * @param {SourceManifest} about
 */
function showFrame(view, about) {
  for (const child of element("tabs").children) {
    const button = /** @type {HTMLElement} */ (child);
    const isChosen = button.id === `tab-${view.id}`;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
    if (isChosen) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const body = h("div", { class: "view-body", id: `view-${view.id}` }, h("p", { class: "loading" }, "Loading …"));
  element("view").setAttribute("aria-labelledby", `tab-${view.id}`);
  element("view").replaceChildren(
    h("div", { class: "view-head" }, h("h1", null, view.title), h("p", null, view.sentence)), body);
  document.title = `${view.title} · ${about.title}`;
  return body;
}

/** Move between the tabs; return whether the key was used. @param {KeyboardEvent} event @param {HTMLElement} target */
function onTabKey(event, target) {
  const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (!step) return false;
  const tabs = [...element("tabs").children];
  const next = /** @type {HTMLElement} */ (tabs[(tabs.indexOf(target) + step + tabs.length) % tabs.length]);
  event.preventDefault();
  next.click();
  next.focus();
  return true;
}

async function start() {
  startTheme();
  const baked = document.getElementById("baked");
  const data = baked ? fromFile(JSON.parse(baked.textContent ?? "{}"), compute) : fromServer();
  try {
    const manifest = await data.load("manifest");
    return new Page(data, manifest);
  } catch (error) {
    return element("view").replaceChildren(empty("The page cannot be shown", /** @type {Error} */ (error).message));
  }
}

start();
