/** The shell: opens rooms, keeps the state in the URL, switches source and theme. */

import { fromFile, fromServer } from "./data.js";
import { empty, h } from "./dom.js";
import { compute } from "./local.js";
import { room as compare } from "./rooms/compare.js";
import { room as health } from "./rooms/health.js";
import { room as map } from "./rooms/map.js";
import { room as pipeline } from "./rooms/pipeline.js";
import { room as positions } from "./rooms/positions.js";
import { room as training } from "./rooms/training.js";
import { changed, formatHash, parseHash } from "./state.js";
import { startTheme, switchTheme, theme } from "./theme.js";

const ROOMS = [map, pipeline, positions, compare, health, training];
const KEYS = [
  ["1 … 6", "go to a room"],
  ["t", "light or dark"],
  ["/", "search"],
  ["?", "this list"],
];
const MISSING = {
  tokenizer: ["There is no tokenizer", "This needs one to turn text into tokens: put tokenizer.json beside the table, or start with --tokenizer FILE."],
  metrics: ["No run is known", "This shows what a training run wrote down: open the folder of one, the result of embedlayer train."],
  position: ["No position scheme is known", "This source holds a table alone: open a whole checkpoint, or a run's folder."],
};

/** @typedef {{close: () => void, stateChanged?: (state: Record<string, string>) => void}} OpenRoom */

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const page = { data: null, manifest: null, current: null, opened: null, source: 0, states: {}, opening: 0 };

start();

async function start() {
  startTheme();
  const baked = document.getElementById("baked");
  page.data = baked ? fromFile(JSON.parse(baked.textContent ?? "{}"), compute) : fromServer();
  try {
    page.manifest = await page.data.load("manifest");
  } catch (error) {
    return element("room").replaceChildren(empty("Nothing can be shown", error.message));
  }
  element("tabs").append(...ROOMS.map(tab));
  fillSources();
  element("theme").addEventListener("click", switchTheme);
  element("help").addEventListener("click", showKeys);
  addEventListener("hashchange", follow);
  document.addEventListener("keydown", onKey);
  follow();
}

/** A room's button among the tabs. */
function tab(room) {
  return h("button", { role: "tab", type: "button", id: `tab-${room.id}`, "aria-controls": "room", onClick: () => go(room.id) }, room.title);
}

function fillSources() {
  const choice = /** @type {HTMLSelectElement} */ (element("source"));
  const { sources } = page.manifest;
  choice.hidden = sources.length < 2;
  choice.replaceChildren(...sources.map((source, i) => h("option", { value: String(i) }, source.title)));
  choice.addEventListener("change", () => {
    page.states = {}; // what was chosen in one table means nothing in another
    location.hash = formatHash(page.current.id, changed({}, { source: choice.value === "0" ? null : choice.value }));
  });
}

/** Go to a room, as it was left. */
function go(id) {
  location.hash = formatHash(id, changed(page.states[id] ?? {}, { source: page.source || null }));
}

/** Show what the hash says. */
function follow() {
  const { room: id, state } = parseHash(location.hash);
  const room = ROOMS.find((candidate) => candidate.id === id) ?? ROOMS[0];
  const source = Math.min(Math.max(Number.parseInt(state.source ?? "0", 10) || 0, 0), page.manifest.sources.length - 1);
  const isNew = room !== page.current || source !== page.source;
  const { source: _, ...own } = state;
  page.states[room.id] = own;
  if (isNew) return open(room, source);
  page.opened?.stateChanged?.(own);
}

async function open(room, source) {
  page.opened?.close();
  Object.assign(page, { current: room, source, opened: null, opening: page.opening + 1 });
  const turn = page.opening;
  const about = page.manifest.sources[source];
  showSource(about, source);
  for (const button of element("tabs").children) {
    const isChosen = button.id === `tab-${room.id}`;
    button.setAttribute("aria-selected", String(isChosen));
    button.tabIndex = isChosen ? 0 : -1;
    if (isChosen) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  const body = h("div", { class: "room-body", id: `room-${room.id}` }, h("p", { class: "loading" }, "Loading …"));
  element("room").setAttribute("aria-labelledby", `tab-${room.id}`);
  element("room").replaceChildren(h("div", { class: "room-head" }, h("h1", null, room.title), h("p", null, room.sentence)), body);
  document.title = `${room.title} · ${about.title}`;
  const lacking = room.needs.find((name) => !about.has.includes(name));
  if (lacking) return body.replaceChildren(empty(...(MISSING[lacking] ?? ["Nothing to show", `This source has no ${lacking}.`])));
  try {
    const opened = await room.open(body, contextOf(room, about, source));
    if (turn !== page.opening) return opened.close();
    page.opened = opened;
    body.querySelector(":scope > .loading")?.remove();
  } catch (error) {
    if (turn === page.opening) body.replaceChildren(empty("This cannot be shown", error.message));
    if (error.name !== "NotBaked" && !(error.message ?? "").match(/server/)) console.error(error);
  }
}

/** What a room is given. */
function contextOf(room, about, source) {
  return {
    manifest: { ...about, exported: page.manifest.exported, leftOut: page.manifest.leftOut ?? [] },
    sources: page.manifest.sources,
    source,
    theme,
    data: { exported: page.data.exported, baked: page.data.baked, load: (name, params = {}) => page.data.load(name, { source, ...params }) },
    state: {
      get: (key, fallback) => page.states[room.id]?.[key] ?? fallback,
      set: (changes) => {
        page.states[room.id] = changed(page.states[room.id] ?? {}, changes);
        if (page.current !== room) return;
        history.replaceState(null, "", formatHash(room.id, changed(page.states[room.id], { source: page.source || null })));
      },
    },
  };
}

function showSource(about, source) {
  element("title").textContent = about.title;
  const facts = `${about.vocabSize.toLocaleString("en")} tokens × ${about.embedDim.toLocaleString("en")}`;
  element("facts").textContent = page.manifest.exported ? `${facts} · exported page` : facts;
  /** @type {HTMLSelectElement} */ (element("source")).value = String(source);
}

function showKeys() {
  const list = element("keys").querySelector("dl");
  const keys = [...KEYS, ...(page.current?.keys ?? [])];
  list?.replaceChildren(...keys.flatMap(([key, what]) => [h("dt", null, key), h("dd", null, what)]));
  /** @type {HTMLDialogElement} */ (element("keys")).showModal();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.getAttribute?.("role") === "tab" && onTabKey(event, target)) return;
  if (target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select, dialog[open]")) return;
  if (/^[1-9]$/.test(event.key) && ROOMS[Number(event.key) - 1]) go(ROOMS[Number(event.key) - 1].id);
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
  else if (event.key === "/" && document.querySelector("main input[type=search], main input[type=text]")) {
    event.preventDefault();
    /** @type {HTMLElement} */ (document.querySelector("main input[type=search], main input[type=text]")).focus();
  }
}

function onTabKey(event, target) {
  const tabs = [...element("tabs").children];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step === undefined) return false;
  event.preventDefault();
  const next = /** @type {HTMLElement} */ (tabs[(tabs.indexOf(target) + step + tabs.length) % tabs.length]);
  next.click();
  next.focus();
  return true;
}
