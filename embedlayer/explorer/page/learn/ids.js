/** Scene: a text becomes a list of IDs. */

import { h, oneTabStop } from "../dom.js";
import { KIND, kinds } from "../map/groups.js";
import { chip } from "../pipeline/pictures.js";
import { PADDING, UNKNOWN, WORDS, tokenize } from "./words.js";

/** @import { Child, Pipeline } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */
/** @typedef {{texts: string[], special: number[]}} Names of the tokens, and the IDs of the special ones */

const START = "the cat sat";
const [WAIT, MOST_SHOWN] = [350, 40]; // milliseconds, tokens
const UNKNOWN_TOKEN = /^\W*unk\W*$/i; // [UNK], <unk>, <|unk|>
const IS_WORD = /[\p{L}\p{N}]/u; // a comma or a full stop is unknown, too, but no word

/** @type {Scene} */
export const scene = {
  id: "ids",
  name: "Text to IDs",
  question: "How does a text become numbers?",
  sentences: [
    "A model cannot read letters. A tokenizer splits the text into tokens and looks up the number of each token in a "
    + "fixed list: the vocabulary. That number is the token's ID.",
    "The ID says which entry of the list it is, and nothing else: 5 is not more than 4, and “cat” is not near “on”.",
  ],
  task: "Write a sentence of known words in which one word occurs twice. Does it get the same ID both times?",
  draw,
};

/** @param {Stage} stage */
function draw(stage) {
  const chips = h("ol", { class: "pipe-chips learn-flow", "aria-label": "Tokens and IDs" });
  const vocabulary = vocabularyList();
  const own = ownTokens(stage);
  const input = h("input", {
    type: "text", id: "learn-text", value: stage.text("text", START), maxLength: 200, autocomplete: "off",
    spellcheck: false, onInput: () => update(),
  });
  const update = () => {
    const text = input.value;
    const tokens = tokenize(text);
    stage.set({ text: text === START ? null : text });
    chips.replaceChildren(...tokens.map(({ word, id }) => h("li", { class: "pipe-chip learn-big" },
      h("span", null, word), h("small", null, `ID ${id}`))));
    vocabulary.show(tokens.map(({ id }) => id));
    stage.judge(...verdict(tokens));
    own.show(text);
  };
  update();
  return [
    h("div", { class: "pipe-entry" }, h("label", { class: "note", for: "learn-text" }, "Text"), input), chips,
    h("section", { class: "learn-part" }, h("h3", null, "The vocabulary of this story: ten words"), vocabulary.element),
    own.element,
  ];
}

/** Create the list of the ten words; `show` marks those with some IDs. */
export function vocabularyList() {
  const element = h("ol", { class: "learn-vocabulary", "aria-label": "The vocabulary" });
  return {
    element,
    /** @param {number[]} ids */
    show: (ids) => element.replaceChildren(...WORDS.map((word, id) =>
      h("li", { class: ids.includes(id) ? "learn-used" : null }, h("b", null, String(id)), word))),
  };
}

/** @param {{word: string, id: number}[]} tokens @returns {[boolean, ...Child[]]} */
function verdict(tokens) {
  const unknown = tokens.find(({ word, id }) => id === UNKNOWN && IS_WORD.test(word));
  if (unknown) {
    return [false, `“${unknown.word}” is not in the vocabulary: it becomes <unk>, ID ${UNKNOWN}. The word is lost.`];
  }
  const ids = tokens.map(({ id }) => id);
  const twice = tokens.find(({ id }, place) => id !== PADDING && id !== UNKNOWN && ids.indexOf(id) !== place);
  if (!twice) return [false, tokens.length ? "Each word occurs once." : "The text is empty."];
  return [true, `“${twice.word}” has ID ${twice.id} each time. The same token always gets the same row of the table.`];
}

/** Show the tokens of the source's own tokenizer. @param {Stage} stage */
function ownTokens(stage) {
  const { manifest, data } = stage.context;
  const body = h("div", { class: "learn-own" });
  const element = h("section", { class: "learn-part" },
    h("h3", null, `The same text in the tokenizer of ${manifest.title}`), body);
  let waiting = 0;
  let asked = "";
  stage.onClose(() => clearTimeout(waiting));
  /** @param {string} text */
  const ask = async (text) => {
    /** @type {Child} */
    let found;
    try {
      const [pipeline, names] = await Promise.all([data.load("pipeline", { text }), data.load("tokens")]);
      found = ownChips(pipeline, names);
    } catch (error) {
      found = h("p", { class: "note" }, manifest.exported
        ? "This exported page holds the tokens of a few texts only, see the view Pipeline. Other texts need the model."
        : /** @type {Error} */ (error).message);
    }
    if (asked === text) body.replaceChildren(found);
  };
  return {
    element,
    /** @param {string} text */
    show: (text) => {
      clearTimeout(waiting);
      if (!manifest.has.includes("tokenizer")) {
        const reason = "This source has a table and no tokenizer. --tokenizer FILE adds one.";
        return body.replaceChildren(h("p", { class: "note" }, reason));
      }
      asked = text;
      element.hidden = !text.trim(); // no heading over an empty place
      if (element.hidden) return body.replaceChildren();
      waiting = setTimeout(() => ask(text), body.childElementCount ? WAIT : 0);
      if (!body.childElementCount) body.replaceChildren(h("p", { class: "note" }, "Loading …"));
    },
  };
}

/** @param {Pipeline} pipeline @param {Names} names */
function ownChips({ tokens, vocab_size: size }, names) {
  const shown = tokens.slice(0, MOST_SHOWN);
  const count = tokens.length === 1 ? "1 token" : `${tokens.length} tokens`;
  const dot = shown.some(({ decoded }) => decoded.includes(" ")) ? "A dot is a space." : "";
  const about = [`${count}; the vocabulary has ${size.toLocaleString("en")}.`, unknownWords(names), dot];
  return h("div", null,
    oneTabStop(h("ol", { class: "pipe-chips" }, shown.map((each) => h("li", null, chip(each, { id: each.id }))))),
    h("p", { class: "note" }, about.filter(Boolean).join(" ")));
}

/** Say what a tokenizer does with a word that is not in its vocabulary. @param {Names} names */
function unknownWords({ texts, special }) {
  const unknown = special.map((id) => texts[id]).find((text) => UNKNOWN_TOKEN.test(text));
  const { of } = kinds(texts, special);
  if (of.some((kind) => kind === KIND.inside || kind === KIND.byte)) {
    return "It also contains parts of words: a word that is not in it becomes several tokens"
      + (unknown ? `, or ${unknown} where no parts fit.` : ".");
  }
  return unknown ? `It has no parts of words: a word that is not in it becomes ${unknown}, and is lost.` : "";
}
