/** The page around the views: opens views, keeps state and chosen token in the URL, switches source and theme. */

import { TokenCard } from "./card/card.js";
import { sameToken } from "./card/links.js";
import { fromFile, fromServer } from "./data.js";
import { OPENS_CARD, empty, h } from "./dom.js";
import { showHelp } from "./help.js";
import { compute } from "./local.js";
import { missing } from "./missing.js";
import { changed, formatHash, parseHash } from "./state.js";
import { startTheme, switchTheme, theme } from "./theme.js";
import { view as compare } from "./views/compare.js";
import { view as health } from "./views/health.js";
import { view as learn } from "./views/learn.js";
import { view as map } from "./views/map.js";
import { view as pipeline } from "./views/pipeline.js";
import { view as positions } from "./views/positions.js";
import { view as training } from "./views/training.js";

/** @import { Changes, Data, Manifest, OpenView, SourceManifest, View, ViewContext, ViewState } from "./types" */

const VIEWS = [learn, map, pipeline, positions, compare, health, training];
const FIRST = map; // where the address names no view
/** @type {[string, string][]} */
const KEYS = [
  ["1 … 7", "go to a view"], ["c", "open or close the card of the chosen token"], ["t", "light or dark"],
  ["/", "search"], ["?", "this help"],
];
const SEARCH_FIELD = "main input[type=search], main input[type=text]";
/** What shows tokens of another table than the source's, such as a tiny one made for a lesson. */
const OTHER_TABLE = "[data-other-table]";
const CONTROL = "button, a, select, summary, label, input";
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
  #switching = 0;
  /** @type {number | null} ID of the chosen token */ #token = null;
  #mark = new CSSStyleSheet();

  /** @param {Data} data @param {Manifest} manifest */
  constructor(data, manifest) {
    this.data = data;
    this.manifest = manifest;
    document.adoptedStyleSheets = [this.#mark];
    this.card = new TokenCard(element("card"), {
      opened: () => this.#writeHash(),
      dismissed: () => this.#choose(null),
    });
    element("tabs").append(...VIEWS.map((view) => this.#tab(view)));
    this.#fillSources();
    element("theme").addEventListener("click", switchTheme);
    element("help").addEventListener("click", () => this.#showHelp());
    addEventListener("hashchange", () => this.#follow());
    document.addEventListener("keydown", (event) => this.#onKey(event));
    document.addEventListener("click", (event) => this.#onClick(event));
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
    choice.addEventListener("change", () => this.#switchSource(Number(choice.value)));
  }

  /** Show another source, with the same token if it has one of this text. @param {number} source */
  async #switchSource(source) {
    const request = ++this.#switching;
    const token = await this.#tokenIn(source);
    if (request !== this.#switching) return;
    this.#states = {}; // the state of one table has no meaning in another
    this.#navigate(formatHash(this.#current?.id ?? FIRST.id, this.#pageState({}, source, token)));
  }

  /**
   * Show what a hash says, as a new entry of the history. It is followed at once: a view that still opens may write
   * its state into the address before an event would come.
   * @param {string} hash
   */
  #navigate(hash) {
    if (hash === location.hash) return;
    history.pushState(null, "", hash);
    this.#follow();
  }

  /** Return the ID of the chosen token in another source; null if it has none of this text. @param {number} source */
  async #tokenIn(source) {
    if (this.#token === null) return null;
    try {
      const [here, there] = await Promise.all([this.#source, source].map((number) =>
        this.data.load("tokens", { source: number })));
      return sameToken(here.texts, there.texts, this.#token);
    } catch {
      return null;
    }
  }

  /**
   * Return the state of a view together with that of the page.
   * @param {Record<string, string>} own
   * @param {number} [source]
   * @param {number | null} [token]
   */
  #pageState(own, source = this.#source, token = this.#token) {
    const card = this.card.isOpen && token !== null ? "open" : null;
    return changed(own, { source: source || null, id: token, card });
  }

  /**
   * Return the hash of a view in the state in which it was left, with changes.
   * @param {string} id
   * @param {Changes} [changes]
   */
  #hash(id, changes = {}) {
    return formatHash(id, this.#pageState(changed(this.#states[id] ?? {}, changes)));
  }

  /** Write the state into the address. @param {boolean} [isNew] as a new entry of the history */
  #writeHash(isNew = false) {
    if (!this.#current) return;
    const hash = this.#hash(this.#current.id);
    if (isNew) history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
  }

  /** @param {string} id @param {Changes} [changes] */
  #go(id, changes) {
    if (isNarrow()) this.card.setOpen(false);
    this.#navigate(this.#hash(id, changes));
  }

  /** Show what the hash says. */
  #follow() {
    const { view: id, state } = parseHash(location.hash);
    const { source: number = "0", id: token, card, ...own } = state;
    const view = VIEWS.find((candidate) => candidate.id === id) ?? FIRST;
    const last = this.manifest.sources.length - 1;
    const source = Math.min(Math.max(Number.parseInt(number, 10) || 0, 0), last);
    this.#states[view.id] = own;
    const isOther = view !== this.#current || source !== this.#source;
    this.#current = view;
    this.#source = source;
    this.#setToken(idFrom(token, this.manifest.sources[source].vocab_size), card === "open");
    if (isOther) this.#open(view, source);
    else this.#opened?.stateChanged?.();
  }

  // The chosen token

  /** Show a token in the card. @param {number | null} id @param {boolean} isOpen */
  #setToken(id, isOpen) {
    this.#token = id;
    this.card.setOpen(isOpen && id !== null);
    const chips = `main :not(.map-card) > [data-token="${id}"]:not(${OTHER_TABLE} *)`;
    this.#mark.replaceSync(id === null ? "" : `${chips} { outline: 2px solid var(--accent); outline-offset: -2px; }`);
    const { sources } = this.manifest;
    const about = sources[this.#source];
    this.card.show(id, {
      source: this.#source, manifest: about, data: this.#data(this.#source),
      isComparable: sources.length > 1 || about.has.includes("before"),
      hash: (view, changes) => this.#hash(view, changes), go: (view, changes) => this.#go(view, changes),
    });
  }

  /** Choose a token, also in the open view unless that is where it was chosen. */
  #choose(/** @type {number | null} */ id, isFromView = false) {
    if (id === this.#token) return;
    this.#setToken(id, this.card.isOpen);
    this.#writeHash();
    if (!isFromView) this.#opened?.tokenChosen?.(id);
  }

  /** A click on a chip chooses its token. A chip that does nothing else opens the card. @param {MouseEvent} event */
  #onClick(event) {
    const target = /** @type {Element} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const link = target.closest?.('main a[href^="#"]')?.getAttribute("href")?.slice(1);
    if (link && VIEWS.some(({ id }) => id === link)) { // a link to a view alone keeps source and token
      event.preventDefault();
      this.#go(link);
      return;
    }
    const id = /** @type {HTMLElement | null} */ (target.closest?.("[data-token]"))?.dataset.token;
    if (id === undefined || target.closest(OTHER_TABLE)) return;
    this.#choose(Number(id));
    const control = target.closest(CONTROL);
    if (!isNarrow() && (!control || control.classList.contains(OPENS_CARD))) this.card.setOpen(true);
  }

  // Views

  /** @param {View} view @param {number} source */
  async #open(view, source) {
    const opening = ++this.#opening;
    const about = this.manifest.sources[source];
    this.#opened?.close();
    this.#opened = null;
    this.#showSource(about, source);
    const body = showFrame(view, about);
    const lack = view.needs.find((name) => !about.has.includes(name));
    if (lack) return body.replaceChildren(missing(lack, this.manifest, source, view.id));
    try {
      const token = this.#token;
      const opened = await view.open(body, this.#context(view, about, source));
      if (opening !== this.#opening) return opened.close();
      this.#opened = opened;
      if (token !== this.#token) opened.tokenChosen?.(this.#token); // chosen in the meantime
      reveal(body, this.#token);
      return body.querySelector(":scope > .loading")?.remove();
    } catch (thrown) {
      const error = /** @type {Error} */ (thrown);
      if (opening === this.#opening) body.replaceChildren(empty("This view cannot be shown", error.message));
      if (error.name !== "NotExported" && !error.message.match(/server/)) console.error(error);
    }
  }

  /** @param {View} view @param {SourceManifest} about @param {number} source @returns {ViewContext} */
  #context(view, about, source) {
    const { manifest } = this;
    return {
      manifest: { ...about, exported: manifest.exported, left_out: manifest.left_out ?? [] },
      command: manifest.command,
      course: manifest.course,
      sources: manifest.sources,
      source,
      theme,
      data: this.#data(source),
      state: this.#state(view, source),
      token: {
        get: () => (this.#source === source ? this.#token : null),
        choose: (id) => {
          if (this.#current === view && this.#source === source) this.#choose(id, true);
        },
      },
    };
  }

  /** Return the data of a source. @param {number} source @returns {Data} */
  #data(source) {
    const { data } = this;
    return {
      exported: data.exported,
      load: (name, params = {}) => data.load(name, { source, ...params }),
      ask: (name, params = {}) => data.ask(name, { source, ...params }),
      act: (name, params = {}) => data.act(name, { source, ...params }),
    };
  }

  /**
   * Return the state of a view of a source. While another source is shown it is empty and nothing changes it: a view
   * that still opens must not read the text and the token of another vocabulary.
   * @param {View} view
   * @param {number} source
   * @returns {ViewState}
   */
  #state(view, source) {
    const own = () => (this.#source === source && this.#states[view.id]) || {};
    /** @param {Changes} changes @param {boolean} [isNew] */
    const set = (changes, isNew = false) => {
      if (this.#source !== source) return;
      this.#states[view.id] = changed(this.#states[view.id] ?? {}, changes);
      if (this.#current === view) this.#writeHash(isNew);
    };
    return {
      /** @param {string} key @param {string} [fallback] */
      get: (key, fallback) => /** @type {string} */ (own()[key] ?? fallback),
      all: () => ({ ...own() }),
      set: (changes) => set(changes),
      push: (changes) => set(changes, true),
    };
  }

  /** @param {SourceManifest} about @param {number} source */
  #showSource(about, source) {
    const size = `${about.vocab_size.toLocaleString("en")} tokens × ${about.embed_dim.toLocaleString("en")}`;
    element("title").textContent = about.title;
    element("title").hidden = this.manifest.sources.length > 1; // the list of sources says it
    element("facts").textContent = this.manifest.exported ? `${size} · exported page` : size;
    /** @type {HTMLSelectElement} */ (element("source")).value = String(source);
  }

  #showHelp() {
    const keys = [...KEYS, ...(this.#current?.keys ?? [])];
    showHelp(/** @type {HTMLDialogElement} */ (element("help-dialog")),
      { views: VIEWS, keys, course: this.manifest.course, go: (view) => this.#go(view) });
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
    else if (event.key === "?") this.#showHelp();
    else if (event.key === "c") this.card.setOpenByKey(!this.card.isOpen);
    else if (event.key === "Escape" && !event.defaultPrevented) this.card.setOpenByKey(false);
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
    h("div", { class: "view-head" }, h("h1", null, view.title), h("p", null, view.sentence), view.link?.()), body);
  document.title = `${view.title} · ${about.title} · embedlayer`;
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

/** Scroll the lists of a view to a token. @param {HTMLElement} body @param {number | null} id */
function reveal(body, id) {
  for (const chip of body.querySelectorAll(`.list-scroll [data-token="${id}"]`)) {
    const list = /** @type {HTMLElement} */ (chip.closest(".list-scroll"));
    list.scrollTop += chip.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
  }
}

/** Whether the opened card lies over the view, as in card.css. */
function isNarrow() {
  return matchMedia("(max-width: 980px)").matches;
}

/** Read the ID of a token; null if there is none. @param {string | undefined} text @param {number} size */
function idFrom(text, size) {
  return text !== undefined && /^\d+$/.test(text) && Number(text) < size ? Number(text) : null;
}

async function start() {
  startTheme();
  const answers = document.getElementById("answers");
  const data = answers ? fromFile(JSON.parse(answers.textContent ?? "{}"), compute) : fromServer();
  try {
    const manifest = await data.load("manifest");
    return new Page(data, manifest);
  } catch (error) {
    return element("view").replaceChildren(empty("The page cannot be shown", /** @type {Error} */ (error).message));
  }
}

start();
