/** Scene: byte-pair encoding merges the bytes of a word, after a space in another way than without. */

import { h, select, token } from "../dom.js";
import { fourTokenizers, sideBySide, tokenizations } from "../pipeline/side_by_side.js";
import { symbolsAfter } from "../pipeline/token_models.js";
import { chosenAt, tokenPlayer } from "../pipeline/token_player.js";
import { changingPlace, check } from "./parts.js";

/** @import { BpeTrace, Child, Tokenization } from "../types" */
/** @import { Scene, Stage } from "./stage.js" */

const [WAIT, LONGEST] = [350, 40]; // milliseconds, characters
const START = "unhappiness";
const SMALL = { tokenizer: "small" };

/** @type {Scene} */
export const scene = {
  id: "pieces",
  name: "Parts of words",
  question: "When is a word one token, and when several?",
  sentences: [
    "Byte-pair encoding starts with single bytes. Of all neighbours it joins the pair whose merge comes first in the "
    + "tokenizer's list, again and again, until no pair has a merge.",
    "The list is all that it knows. It was trained on words with a space before each, so most of its merges begin with "
    + "the space, which is shown as “·”.",
  ],
  words: ["pre-token", "UTF-8"],
  task: "Find a word that is one token after a space, and several without.",
  draw,
};

/** @param {Stage} stage */
async function draw(stage) {
  const { data } = stage.context;
  const { pieces } = await data.load("pipeline-choices");
  const words = pieces.filter((text) => pieces.includes(` ${text}`));
  let [word, hasSpace, waiting] = [stage.text("word", START), stage.text("space") === "1", 0];
  stage.onClose(() => clearTimeout(waiting));
  const counts = h("p", { class: "pipe-fact", "data-value": "counts" });
  const { element: place, show } = changingPlace(stage, "tok-page");
  const current = () => (hasSpace ? ` ${word}` : word);
  const update = async () => {
    const text = current();
    const isLate = () => stage.isClosed || text !== current();
    stage.set({ word: word === START ? null : word, space: hasSpace ? "1" : null });
    if (!word.trim()) return stage.judge(false, "Type a word.");
    try {
      const [plain, spaced] = await Promise.all([word, ` ${word}`].map((each) =>
        data.load("tokenization", { text: each, ...SMALL })));
      const list = await tokenizations(data.load, text, fourTokenizers(SMALL, stage.context));
      if (isLate()) return undefined;
      counts.replaceChildren(countOf(plain, word), ", ", countOf(spaced, ` ${word}`), ".");
      show([tokenPlayer(list[0], text, chosenAt(0)), ...(list.length > 1 ? [sideBySide(list, text)] : [])]);
      return stage.judge(...verdict(word, plain, spaced));
    } catch (error) {
      if (isLate()) return undefined;
      show([], h("p", { class: "note" }, /** @type {Error} */ (error).message));
      return stage.judge(false, "This word cannot be shown here.");
    }
  };
  const onWord = (/** @type {string} */ next) => {
    word = next;
    clearTimeout(waiting);
    waiting = setTimeout(update, data.exported ? 0 : WAIT); // a list is not typed
  };
  const space = check("with a space before it", hasSpace, (checked) => {
    hasSpace = checked;
    update();
  });
  await update();
  return [h("div", { class: "learn-controls" }, wordField(stage, words, word, onWord), space), counts, place];
}

/**
 * Create the field of a word; in an exported page the list of the words that it holds.
 * @param {Stage} stage
 * @param {string[]} words
 * @param {string} word
 * @param {(word: string) => void} onWord
 */
function wordField({ context: { data } }, words, word, onWord) {
  if (data.exported) {
    return select({ label: "Word", options: words.map((each) => [each, each]), value: word, onChange: onWord });
  }
  const input = h("input", {
    type: "text", value: word, maxLength: LONGEST, autocomplete: "off", spellcheck: false,
    onInput: () => onWord(input.value.trim()),
  });
  return h("label", { class: "field" }, h("span", null, "Word"), input);
}

/** @param {Tokenization} tokenization @param {string} text */
function countOf({ tokens }, text) {
  return h("span", null, token(text), ` is ${tokens.length === 1 ? "one token" : `${tokens.length} tokens`}`);
}

/** @param {string} word @param {Tokenization} plain @param {Tokenization} spaced @returns {[boolean, ...Child[]]} */
function verdict(word, plain, spaced) {
  if (/\s/u.test(word)) return [false, "These are several words. Type one."];
  const [without, after] = [plain.tokens.length, spaced.tokens.length];
  if (after > 1) return [false, "After a space it is several tokens, too. Try a more frequent word."];
  if (without === 1) return [false, "It is one token both times. Try a longer or a less frequent word."];
  return [true, ...reason(plain, spaced)];
}

/**
 * Say which merge the list has after a space, and which it lacks without.
 * @param {Tokenization} plain
 * @param {Tokenization} spaced
 * @returns {Child[]}
 */
function reason(plain, spaced) {
  const [lacking, having] = [plain, spaced].map(({ pieces: [{ trace }] }) => /** @type {BpeTrace} */ (trace));
  const say = (/** @type {BpeTrace} */ trace, /** @type {string[]} */ pair) =>
    pair.map((symbol, i) => [i ? " + " : "", token(trace.shown[symbol] ?? symbol)]);
  const last = having.merges[having.merges.length - 1];
  const joined = symbolsAfter(having, having.merges.length - 1);
  const left = symbolsAfter(lacking, lacking.merges.length).slice(0, 2);
  return ["The list has a merge ", say(having, joined), `, rank ${last.rank.toLocaleString("en")}, and none of `,
    say(lacking, left), ". A space belongs to the word after it, so these are two different beginnings."];
}
