/** Scene: neighbours in the table that is open, or in another opened source that has everyday words. */

import { h, nodesOf, oneTabStop, select, token } from "../dom.js";
import { examplesOf } from "../examples.js";
import { parseQuery, search } from "../map/search.js";
import { bar } from "../pipeline/pictures.js";
import { changed, formatHash } from "../state.js";
import { directionPart } from "./direction.js";
import { fixed } from "./parts.js";

/** @import { OtherExamples } from "../examples.js" */
/** @import { Child, Examples, SourceManifest } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */
/** @typedef {[id: number, cosine: number][]} Neighbors */

const [COUNT, OFFERED, SUGGESTED] = [10, 8, 6];

/** @type {Scene} */
export const scene = {
  id: "real",
  name: "A trained table",
  question: "What does a trained table look like?",
  sentences: [
    "Choose a token of a trained table: the list shows the rows with the largest cosine to its row, computed over all "
    + "rows and all dimensions.",
    "Click a neighbour to see its own neighbours. Being near is not mutual: B can be the nearest to A while A is not "
    + "among the nearest to B.",
  ],
  task: "Find two tokens that are in each other's list: choose one, then click a neighbour that lists it too.",
  draw,
};

/**
 * @typedef {object} Table a table that the scene shows
 * @property {number} number of its source
 * @property {boolean} isOwn whether it is the source of the page
 * @property {SourceManifest} manifest
 * @property {string[]} texts
 * @property {number[]} words to begin with
 */

/** @param {Stage} stage */
async function draw(stage) {
  const { sources } = stage.context;
  const place = h("div", { class: "learn-part" });
  const { own, other } = await examplesOf(stage.context);
  const isFree = stage.text("word") !== "" || (stage.text("id") === "" && chosenIn(stage) === null);
  const preferred = other && isFree ? other.source : stage.context.source;
  const stored = stage.number("table", preferred, 0, sources.length); // of a table that was open then
  const first = Number.isInteger(stored) && stored < sources.length ? stored : preferred;
  /** @param {number} number @param {boolean} isNew whether to begin with another token */
  const show = async (number, isNew) => {
    const table = await tableOf(stage, number, own, other);
    if (stage.isClosed) return;
    const isFirst = stage.text("direction") !== ""; // a link names it
    const near = await explore(stage, table, isNew);
    const direction = await directionPart(stage, number, table.texts);
    if (!stage.isClosed) place.replaceChildren(...nodesOf(isFirst ? [direction, near] : [near, direction]));
  };
  await show(first, first !== stored);
  const choice = sources.length < 2 ? null : select({
    label: "Table", options: sources.map(({ title }, i) => /** @type {[string, string]} */ ([String(i), title])),
    value: String(first), onChange: (value) => {
      stage.set({ table: value, id: null, from: null });
      show(Number(value), true);
    },
  });
  const hint = own.is_everyday || other ? null : h("p", { class: "note" },
    "This table has few words of everyday language. ", h("code", null, `${stage.context.command} explore`),
    " shows this scene with 4,000 words of MiniLM.");
  return [choice && h("div", { class: "learn-controls" }, choice), place, hint];
}

/** Return the token that is chosen in the page, or null. @param {Stage} stage */
function chosenIn({ context: { token: chosen } }) {
  return chosen.get();
}

/**
 * @param {Stage} stage
 * @param {number} number
 * @param {Examples} own
 * @param {OtherExamples | null} other
 * @returns {Promise<Table>}
 */
async function tableOf({ context: { data, source, sources } }, number, own, other) {
  /** @type {{texts: string[]}} */
  const { texts } = await data.load("tokens", { source: number });
  const words = number === source ? own.words : number === other?.source ? other.words : [];
  return { number, isOwn: number === source, manifest: sources[number], texts, words };
}

/**
 * Create the search field and the list of neighbours of a table.
 * @param {Stage} stage
 * @param {Table} table
 * @param {boolean} isNew whether to begin with another token than that of the URL
 */
async function explore(stage, table, isNew) {
  const { data } = stage.context;
  const { number, isOwn, manifest, texts, words } = table;
  const list = h("div", { class: "learn-neighbors" });
  const asked = texts.indexOf(stage.text("word") || "\0"); // a link names the word: its ID depends on the table
  const usual = asked < 0 ? words[0] ?? Math.floor(texts.length / 2) : asked;
  const isOther = isNew || stage.text("word") !== "";
  const last = isOther ? usual : Math.round(stage.number("id", usual, 0, texts.length - 1));
  let chosen = (isOwn && !isOther ? chosenIn(stage) : null) ?? last;
  let from = !isOther && chosen === last ? Math.round(stage.number("from", -1, -1, texts.length - 1)) : -1;
  const show = async () => {
    const id = chosen;
    stage.set({ id, word: null, from: from < 0 ? null : from, table: isOwn ? null : number });
    /** @type {Neighbors} */
    let near = [];
    try {
      near = await data.load("neighbors", { source: number, plus: String(id), topn: String(COUNT) });
    } catch (error) {
      list.replaceChildren(h("p", { class: "note" }, /** @type {Error} */ (error).message));
      return stage.judge(false, "The neighbours are not known here, so this task needs the table itself.");
    }
    if (id !== chosen || stage.isClosed) return undefined;
    list.replaceChildren(...listOf(table, id, near, (next) => choose(next, id)));
    const [isDone, ...said] = verdict(texts, id, from, near);
    return stage.judge(isDone, h("span", { "data-other-table": !isOwn }, said));
  };
  /** @param {number} id @param {number} before the token whose neighbour was clicked, or -1 */
  const choose = (id, before) => {
    [chosen, from] = [id, before];
    return show();
  };
  await show();
  const label = `Find a token of ${manifest.title}, ${texts.length.toLocaleString("en")} rows × ${manifest.embed_dim}`;
  return [h("div", { class: "learn-part", "data-other-table": !isOwn },
    searchField(label, texts, words.slice(0, SUGGESTED), (id) => choose(id, -1)),
    manifest.has.includes("tokens") ? null : h("p", { class: "note" }, "This source has no names of tokens: #17 is row "
      + "17. What its neighbours mean is not known without the tokenizer (--tokenizer FILE)."),
    list)];
}

/**
 * Create the field that searches for a token, with the tokens that were found, at first some to begin with.
 * @param {string} label
 * @param {string[]} texts
 * @param {number[]} words to begin with
 * @param {(id: number) => void} choose
 */
function searchField(label, texts, words, choose) {
  const lower = texts.map((text) => text.toLowerCase());
  /** @type {number[]} */
  let found = [];
  const offers = oneTabStop(h("div", { class: "chips", role: "group", "aria-label": "Tokens found" }));
  /** @param {number[]} ids */
  const chips = (ids) => ids.map((id) => token(texts[id], { of: id, onClick: () => choose(id) }));
  offers.replaceChildren(...chips(words));
  const input = h("input", {
    type: "search", id: "learn-token", autocomplete: "off", spellcheck: false, placeholder: "a word, or #17",
    onInput: () => {
      found = [...search(parseQuery(input.value), texts, lower).slice(0, OFFERED)];
      if (!input.value.trim()) return offers.replaceChildren(...chips(words));
      const nothing = h("p", { class: "note" }, `No token matches “${input.value.trim()}”.`);
      return offers.replaceChildren(...found.map((id) => token(texts[id], { id, onClick: () => choose(id) })),
        found.length ? "" : nothing);
    },
    onKeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && found.length) choose(found[0]);
    },
  });
  return h("div", { class: "learn-search" },
    h("div", { class: "pipe-entry" }, h("label", { class: "note", for: "learn-token" }, label), input), offers);
}

/**
 * @param {Table} table
 * @param {number} id
 * @param {Neighbors} near
 * @param {(id: number) => void} choose
 */
function listOf({ manifest, number, texts }, id, near, choose) {
  const href = formatHash("map", changed({}, { plus: id, source: number || null }));
  const typical = 1 / Math.sqrt(manifest.embed_dim);
  const lines = near.map(([other, score]) => h("li", null,
    token(texts[other], { of: other, onClick: () => choose(other), title: `ID ${other}` }), bar(Math.max(0, score)),
    h("span", { class: "pipe-value" }, fixed(score, 3))));
  return [
    h("h3", null, "Nearest to ", token(texts[id], { id }), ` in ${manifest.title}`),
    h("ol", { class: "learn-near" }, lines),
    h("p", { class: "note" }, `For comparison: two random directions in D = ${manifest.embed_dim} have a cosine of `
      + `about ±${fixed(typical, 2)}.`),
    h("p", { class: "learn-link" }, h("a", { href }, "See this token on the map"))];
}

/**
 * @param {string[]} texts
 * @param {number} id
 * @param {number} from
 * @param {Neighbors} near
 * @returns {[boolean, ...Child[]]}
 */
function verdict(texts, id, from, near) {
  if (from < 0) return [false, "Click one of the neighbours."];
  const [a, b] = [token(texts[from], { of: from }), token(texts[id], { of: id })];
  const place = near.findIndex(([other]) => other === from);
  if (place < 0) return [false, b, " is in the list of ", a, ", but not the other way round. Try another one."];
  return [true, a, " and ", b, ` are in each other's list: cosine ${fixed(near[place][1], 3)}.`];
}
