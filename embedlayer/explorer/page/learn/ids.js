/** Scene: a text becomes a list of IDs. */

import { h, select } from "../dom.js";
import { KIND, kinds } from "../map/groups.js";
import { chosenAt, firstSplit, tokenPlayer } from "../pipeline/token_player.js";
import { PADDING, UNKNOWN, WORDS, tokenize } from "./words.js";

/** @import { Child, Closable, Tokenization } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */
/** @typedef {{texts: string[], special: number[]}} Names of the tokens, and the IDs of the special ones */

const START = "the cat sat";
const WAIT = 350; // milliseconds
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
  words: ["pre-token"],
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

/**
 * Create the place of a picture that is shown for one text after another.
 * @param {Stage} stage
 * @param {string} className
 */
export function changingPlace(stage, className) {
  const element = h("div", { class: className });
  /** @type {Closable[]} */
  let last = [];
  const show = (/** @type {Closable[]} */ parts, /** @type {Child[]} */ ...more) => {
    last.forEach((part) => part.close());
    last = parts;
    if (stage.isClosed) return last.forEach((part) => part.close());
    return element.replaceChildren(...h("div", null, parts.map((part) => part.element), more).childNodes);
  };
  stage.onClose(() => last.forEach((part) => part.close()));
  return { element, show };
}

/**
 * Show the way to the tokens of the source's own tokenizer: of the text that is typed, or of the texts that an exported
 * page holds.
 * @param {Stage} stage
 */
function ownTokens(stage) {
  const { manifest, data } = stage.context;
  const { element: body, show } = changingPlace(stage, "learn-own tok");
  const which = data.exported ? "A text" : "The same text";
  const element = h("section", { class: "learn-part" },
    h("h3", null, `${which} in the tokenizer of ${manifest.title}`), body);
  let waiting = 0;
  let asked = "";
  stage.onClose(() => clearTimeout(waiting));
  const note = (/** @type {string} */ text) => show([], h("p", { class: "note" }, text));
  /** @param {string} text */
  const ask = async (text) => {
    asked = text;
    try {
      const [found, names] = await Promise.all([data.load("tokenization", { text }), data.load("tokens")]);
      if (asked !== text) return;
      const chosen = { ...chosenAt(0), piece: firstSplit(found) };
      show([tokenPlayer(found, text, chosen, { opensCard: true })], aboutTokens(found, names));
    } catch (error) {
      if (asked === text) note(/** @type {Error} */ (error).message);
    }
  };
  const follow = (/** @type {string} */ text) => {
    clearTimeout(waiting);
    element.hidden = !text.trim(); // no heading over an empty place
    if (element.hidden) return show([]);
    waiting = setTimeout(() => ask(text), body.childElementCount ? WAIT : 0);
    if (!body.childElementCount) note("Loading …");
  };
  const isReady = manifest.has.includes("tokenizer");
  if (!isReady) note("This source has a table and no tokenizer. --tokenizer FILE adds one.");
  else if (data.exported) offerTexts(stage, ask).then((list) => body.before(list));
  return { element, show: isReady && !data.exported ? follow : () => {} };
}

/** Create the list of an exported page's texts. @param {Stage} stage @param {(text: string) => void} ask */
async function offerTexts({ context: { data } }, ask) {
  const { texts } = await data.load("pipeline-choices");
  ask(texts[0]);
  return h("div", { class: "learn-part" },
    select({ label: "Text of this page", options: texts.map((text) => [text, text]), value: texts[0], onChange: ask }),
    h("p", { class: "note" }, "This exported page holds the tokens of these texts only. Other texts need the model."));
}

/** @param {Tokenization} tokenization @param {Names} names */
function aboutTokens({ tokens, left_out: leftOut, vocab_size: size }, names) {
  const count = tokens.length + leftOut;
  const dot = tokens.some(({ decoded }) => decoded.includes(" ")) ? "A dot is a space." : "";
  const about = [`${count === 1 ? "1 token" : `${count} tokens`}; the vocabulary has ${size.toLocaleString("en")}.`,
    unknownWords(names), dot];
  return h("p", { class: "note", "data-value": "about" }, about.filter(Boolean).join(" "));
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
