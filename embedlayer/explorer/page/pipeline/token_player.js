/** From a text to its tokens: normalisation, pre-tokens, the steps of the tokenizer's model on one of them, and IDs. */

import { COUNT } from "../charts/numbers.js";
import { h, nodesOf, oneTabStop, slider, token as tokenOf, visibleRuns } from "../dom.js";
import { playButton } from "../learn/parts.js";
import { byteStrips, hex } from "./byte_strips.js";
import { chip, picture } from "./pictures.js";
import { modelSteps } from "./token_models.js";

/** @import { Child, Closable, Tokenization, TracedToken } from "../types" */
/** @import { ByteBox } from "./byte_strips.js" */
/** @import { ModelSteps } from "./token_models.js" */

/**
 * What the reader chose; it outlives a picture.
 * @typedef {object} Chosen
 * @property {number} token index of the token
 * @property {number | null} piece index of the pre-token; null: that of the token
 * @property {Map<number, number>} done steps of the model that were made, by pre-token
 */

const WAIT = 900; // milliseconds between steps of the model
const WIDE_BYTE = 24; // pixels, so that a code point has place
const [MOST_SHOWN, MOST_COMPARED] = [80, 400]; // tokens, characters

/** Return what is chosen at first. @param {number} token @returns {Chosen} */
export function chosenAt(token) {
  return { token, piece: null, done: new Map() };
}

/**
 * Return the pre-token to begin with: the first that is several tokens, else the first.
 * @param {Tokenization} tokenization
 */
export function firstSplit({ pieces }) {
  return Math.max(0, pieces.findIndex(({ first, behind }) => behind - first > 1));
}

/**
 * Create the picture of a text's way to its tokens.
 * @param {Tokenization} tokenization
 * @param {string} text
 * @param {Chosen} chosen
 * @param {{onToken?: (token: number) => void, opensCard?: boolean}} [options] `onToken` is called with the token that
 *   is chosen; `opensCard`: whether a click at a token opens its card
 * @returns {Closable}
 */
export function tokenPlayer(tokenization, text, chosen, { onToken, opensCard = false } = {}) {
  const { pieces } = tokenization;
  /** @type {Closable[]} */
  let parts = [];
  const buttons = pieces.map((_, number) => pieceButton(tokenization, number, () => choose(number)));
  const detail = h("div", { class: "tok-detail" });
  const close = () => parts.forEach((part) => part.close());
  const show = () => {
    const number = chosenPiece(tokenization, chosen);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
    close();
    parts = pieces[number] ? partsOf(tokenization, text, number, chosen) : [];
    detail.replaceChildren(...parts.map((part) => part.element));
  };
  const choose = (/** @type {number} */ number) => {
    const { first, behind } = pieces[number];
    chosen.piece = number;
    show();
    if (behind > first && onToken) onToken(first);
  };
  show();
  return {
    close,
    element: h("div", { class: "tok" }, normalised(tokenization),
      tokenization.refused ? h("p", { class: "note" }, tokenization.refused) : null,
      pieces.length > 1 ? picture(splitTitle(tokenization), splitNote(tokenization), groupOf(buttons)) : null,
      detail, onToken ? null : allTokens(tokenization, opensCard)),
  };
}

/** @param {HTMLButtonElement[]} buttons */
function groupOf(buttons) {
  return oneTabStop(h("div", { class: "tok-pieces", role: "group", "aria-label": "Pre-tokens" }, buttons));
}

/** Return the index of the pre-token that is shown. @param {Tokenization} tokenization @param {Chosen} chosen */
function chosenPiece({ pieces }, { token, piece }) {
  if (piece !== null && piece < pieces.length) return piece;
  return Math.max(0, pieces.findIndex(({ first, behind }) => first <= token && token < behind));
}

// Normalisation and pre-tokens

/** Show the normalised text, with what changed marked; null where nothing changed. */
/** @param {Tokenization} tokenization */
function normalised({ text, normalized }) {
  if (normalized === text) return null;
  return picture("Normalised: the tokenizer changes the text first", h("p", { class: "tok-text" },
    changedParts(text, normalized).map(([part, isNew]) => (isNew ? h("mark", null, part) : part))));
}

/**
 * Split a text into parts that are in another text too, in this order, and parts that are not.
 * @param {string} before
 * @param {string} after
 * @returns {[part: string, isNew: boolean][]} of `after`
 */
export function changedParts(before, after) {
  const [a, b] = [[...before], [...after]];
  if (a.length > MOST_COMPARED || b.length > MOST_COMPARED) return [[after, false]];
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  /** @type {[string, boolean][]} */
  const parts = [];
  for (let i = 0, j = 0; j < b.length;) {
    const isSame = i < a.length && a[i] === b[j];
    if (!isSame && i < a.length && common[i + 1][j] >= common[i][j + 1]) i += 1;
    else {
      const last = parts.at(-1);
      if (last && last[1] !== isSame) last[0] += b[j];
      else parts.push([b[j], !isSame]);
      if (isSame) i += 1;
      j += 1;
    }
  }
  return parts;
}

/** @param {Tokenization} tokenization */
function splitTitle({ pieces, model }) {
  if (model === "ids") return "IDs that were typed";
  if (model === "names") return "Split by the names of the rows";
  return `Split into ${COUNT.format(pieces.length)} pre-tokens`;
}

/** @param {Tokenization} tokenization */
function splitNote({ model }) {
  if (model === "ids" || model === "names") return null;
  return h("p", { class: "note" },
    "Each is split by itself, below it are its tokens: no token goes beyond a pre-token. Choose one.");
}

/** @param {Tokenization} tokenization @param {number} number @param {() => void} onClick */
function pieceButton({ pieces, tokens }, number, onClick) {
  const { text, first, behind } = pieces[number];
  const own = tokens.slice(first, behind);
  return h("button", { type: "button", class: "tok-piece", onClick },
    h("span", null, text || h("i", null, "empty")), h("small", null, own.length
      ? own.map((each) => h("span", null, each.text)) : h("i", null, "no token")));
}

// One pre-token

/**
 * Return the parts of a pre-token: the steps of the model, its tokens, and its bytes if some are not ASCII.
 * @param {Tokenization} tokenization
 * @param {string} text
 * @param {number} number
 * @param {Chosen} chosen
 * @returns {Closable[]}
 */
function partsOf(tokenization, text, number, chosen) {
  const piece = tokenization.pieces[number];
  const own = tokenization.tokens.slice(piece.first, piece.behind);
  const steps = modelSteps(piece);
  const bytes = new TextEncoder().encode(text).subarray(piece.start, piece.stop);
  const isWhole = tokenization.pieces.length === 1 && /\S[\s·▁]+\S/u.test(piece.text);
  const name = isWhole ? "The whole text, which this tokenizer does not split first" : tokenOf(piece.text);
  const parts = [stepsPart(steps, name, chosen.done.get(number) ?? 0, (done) => chosen.done.set(number, done))];
  if (bytes.some((byte) => byte > 127)) parts.push(bytesPart(bytes, own, piece.start));
  return parts;
}

/**
 * Create the player of the steps of a model.
 * @param {ModelSteps} steps
 * @param {Child} name of the pre-token
 * @param {number} start
 * @param {(done: number) => void} remember
 * @returns {Closable}
 */
function stepsPart(steps, name, start, remember) {
  /** @type {(() => void)[]} */
  const closers = [];
  const place = h("div", { class: "tok-steps" });
  let done = Math.min(start, steps.count);
  const show = (/** @type {number} */ next) => {
    done = next;
    remember(done);
    range.set(done);
    place.replaceChildren(...nodesOf(steps.draw(done, goTo)));
  };
  const range = slider({
    label: steps.unit, min: 0, max: steps.count, value: done, format: (value) => `${value} of ${steps.count}`,
    onInput: (value) => goTo(value),
  });
  const player = playButton({ onClose: (close) => closers.push(close) }, () => {
    show(done < steps.count ? done + 1 : 0);
    return done < steps.count;
  }, { wait: WAIT });
  const goTo = (/** @type {number} */ next) => {
    const focused = [...place.querySelectorAll("button")].findIndex((each) => each === document.activeElement);
    player.pause();
    show(next);
    if (focused >= 0) place.querySelectorAll("button")[focused].focus();
  };
  show(done);
  const controls = steps.count ? h("div", { class: "tok-controls" }, range, player.element) : null;
  return {
    element: picture(null, h("h3", null, name, `: ${steps.name}`), controls, place),
    close: () => closers.forEach((close) => close()),
  };
}

/**
 * Create the strips of a pre-token's characters, bytes and tokens.
 * @param {Uint8Array} bytes
 * @param {TracedToken[]} tokens
 * @param {number} offset of the pre-token in the text, in bytes
 * @returns {Closable}
 */
function bytesPart(bytes, tokens, offset) {
  const strips = byteStrips(WIDE_BYTE);
  const characters = new TextDecoder().decode(bytes);
  const clusters = [...new Intl.Segmenter().segment(characters)].map(({ segment }) => segment);
  const isJoined = clusters.some((cluster) => [...cluster].length > 1);
  const points = [...characters];
  strips.show([
    ...(isJoined ? [{ name: "seen", boxes: boxesOf(clusters, (cluster) => cluster) }] : []),
    { name: "characters", boxes: boxesOf(points, (point) =>
      [visibleRuns(point), isAscii(point) ? null : h("small", null, codePoint(point))]) },
    { name: "bytes", boxes: Array.from(bytes, (byte, i) => ({
      start: i, stop: i + 1, title: `byte ${hex(byte)}`, kind: "tok-hex", label: () => hex(byte),
    })) },
    { name: "tokens", boxes: tokenBoxes(tokens, offset) },
  ], bytes);
  const note = isJoined ? "What is seen as one character can be several, each with a code point of its own. "
    : "";
  return {
    element: picture("Its bytes in UTF-8", h("p", { class: "note" }, `${note}A character outside of ASCII has two to `
      + "four bytes; a token may end inside of it."), strips.element),
    close: strips.close,
  };
}

/** @param {string[]} texts @param {(text: string) => Child} label @returns {ByteBox[]} */
function boxesOf(texts, label) {
  let start = 0;
  return texts.map((text) => {
    const stop = start + new TextEncoder().encode(text).length;
    const box = { start, stop, title: [...text].map(codePoint).join(" "), label: () => label(text) };
    start = stop;
    return box;
  });
}

/** @param {string} character */
function isAscii(character) {
  return character < "\u0080";
}

/** Return the number of a character in Unicode. @param {string} character */
function codePoint(character) {
  return `U+${(character.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/**
 * Return a box for each token that has bytes; tokens of the same bytes share one. A special token shows its name: an
 * unknown one is not the text that it stands for.
 * @param {TracedToken[]} tokens
 * @param {number} [offset] byte that is the first of the strip
 * @returns {ByteBox[]}
 */
export function tokenBoxes(tokens, offset = 0) {
  /** @type {ByteBox[]} */
  const boxes = [];
  for (const { start, stop, text, id, kind } of tokens) {
    const last = boxes.at(-1);
    const said = `${text}, ID ${id}`;
    if (start === stop) continue;
    if (last && start - offset < last.stop) {
      last.title += `; ${said}`;
      last.stop = Math.max(last.stop, stop - offset);
    } else boxes.push({ start: start - offset, stop: stop - offset, title: said, kind: `tok-of-${kind}`,
      ...(kind === "special" && { label: () => text }) });
  }
  return boxes;
}

/** @param {Tokenization} tokenization @param {boolean} opensCard */
function allTokens({ tokens, left_out: leftOut, vocab_size: size }, opensCard) {
  const shown = tokens.slice(0, MOST_SHOWN);
  const more = tokens.length - shown.length + leftOut;
  return picture(`${COUNT.format(tokens.length + leftOut)} ${tokens.length + leftOut === 1 ? "token" : "tokens"} of `
    + `${COUNT.format(size)}, and their IDs`,
  oneTabStop(h("ol", { class: "pipe-chips", "data-other-table": !opensCard },
    shown.map((each) => h("li", null, chip(each, { id: each.id }))))),
  more ? h("p", { class: "note" }, `${COUNT.format(more)} more tokens are not shown.`) : null);
}
