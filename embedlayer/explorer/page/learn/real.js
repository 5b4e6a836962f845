/** Scene: neighbours in the table that is open. */

import { h, token } from "../dom.js";
import { parseQuery, search, variants } from "../map/search.js";
import { bar } from "../pipeline/pictures.js";
import { changed, formatHash } from "../state.js";
import { fixed } from "./parts.js";

/** @import { Child } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */
/** @typedef {[id: number, cosine: number][]} Neighbors */

const [COUNT, OFFERED] = [10, 8];
const FIRST_WORDS = ["cat", "dog", "king", "class", "love", "the"];

/** @type {Scene} */
export const scene = {
  id: "real",
  name: "A trained table",
  question: "What does a trained table look like?",
  sentences: [
    "This is the table that you opened. Choose a token: the list shows the rows with the largest cosine to its row, "
    + "computed over all rows and all dimensions.",
    "Click a neighbour to see its own neighbours. Being near is not mutual: B can be the nearest to A while A is not "
    + "among the nearest to B.",
  ],
  task: "Find two tokens that are in each other's list: choose one, then click a neighbour that lists it too.",
  draw,
};

/** @param {Stage} stage */
async function draw(stage) {
  const { data, manifest, token: chosenToken } = stage.context;
  /** @type {{texts: string[]}} */
  const { texts } = await data.load("tokens");
  const list = h("div", { class: "learn-neighbors" });
  const last = Math.round(stage.number("id", firstToken(texts), 0, texts.length - 1));
  let chosen = chosenToken.get() ?? last;
  let from = chosen === last ? Math.round(stage.number("from", -1, -1, texts.length - 1)) : -1;
  const show = async () => {
    const id = chosen;
    stage.set({ id, from: from < 0 ? null : from });
    /** @type {Neighbors} */
    let near = [];
    try {
      near = await data.load("neighbors", { plus: String(id), topn: String(COUNT) });
    } catch (error) {
      list.replaceChildren(h("p", { class: "note" }, /** @type {Error} */ (error).message));
      return stage.judge(false, "The neighbours are not known here, so this task needs the table itself.");
    }
    if (id !== chosen || stage.isClosed) return undefined;
    list.replaceChildren(...listOf(stage, texts, id, near, (next) => choose(next, id)));
    return stage.judge(...verdict(texts, id, from, near));
  };
  /** @param {number} id @param {number} before the token whose neighbour was clicked, or -1 */
  const choose = (id, before) => {
    [chosen, from] = [id, before];
    return show();
  };
  await show();
  const label = `A token of ${manifest.title}, ${texts.length.toLocaleString("en")} rows × ${manifest.embed_dim}`;
  return [
    searchField(label, texts, (id) => choose(id, -1)),
    manifest.has.includes("tokens") ? null : h("p", { class: "note" }, "This source has no names of tokens: #17 is row "
      + "17. What its neighbours mean is not known without the tokenizer (--tokenizer FILE)."),
    list,
  ];
}

/**
 * Create the field that searches for a token, with the tokens that were found.
 * @param {string} label
 * @param {string[]} texts
 * @param {(id: number) => void} choose
 */
function searchField(label, texts, choose) {
  const lower = texts.map((text) => text.toLowerCase());
  /** @type {number[]} */
  let found = [];
  const offers = h("div", { class: "chips", role: "group", "aria-label": "Tokens found" });
  const input = h("input", {
    type: "search", id: "learn-token", autocomplete: "off", spellcheck: false, placeholder: "a word, or #17",
    onInput: () => {
      found = [...search(parseQuery(input.value), texts, lower).slice(0, OFFERED)];
      const nothing = input.value.trim() ? h("p", { class: "note" }, `No token matches “${input.value.trim()}”.`) : "";
      offers.replaceChildren(...found.map((id) => token(texts[id], { id, onClick: () => choose(id) })),
        found.length ? "" : nothing);
    },
    onKeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && found.length) choose(found[0]);
    },
  });
  return h("div", { class: "learn-search" },
    h("div", { class: "pipe-entry" }, h("label", { class: "note", for: "learn-token" }, label), input), offers);
}

/** Return a token that most readers know, or a row in the middle of the table. @param {string[]} texts */
function firstToken(texts) {
  const ids = new Map(texts.map((text, id) => /** @type {const} */ ([text, id])).reverse());
  return FIRST_WORDS.flatMap((word) => variants(word, ids))[0] ?? Math.floor(texts.length / 2);
}

/**
 * @param {Stage} stage
 * @param {string[]} texts
 * @param {number} id
 * @param {Neighbors} near
 * @param {(id: number) => void} choose
 */
function listOf({ context: { manifest, source } }, texts, id, near, choose) {
  const href = formatHash("map", changed({}, { plus: id, source: source || null }));
  const typical = 1 / Math.sqrt(manifest.embed_dim);
  const lines = near.map(([other, score]) => h("li", null,
    token(texts[other], { of: other, onClick: () => choose(other), title: `ID ${other}` }), bar(Math.max(0, score)),
    h("span", { class: "pipe-value" }, fixed(score, 3))));
  return [
    h("h3", null, "Nearest to ", token(texts[id], { id })), h("ol", { class: "learn-near" }, lines),
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
