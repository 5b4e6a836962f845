/** What the map can be coloured by, and the order in which tokens are named on it. */

import { KIND, VERDICTS, VERDICT_COLOURS, lengths, scripts } from "./groups.js";
import { isEmpty, sumParams } from "./selection.js";
import { spread } from "./viewport.js";

/** @import { Column, Data, Groups, NumberColumn, OwnColumn, TokenSum } from "../types" */

/** @type {[string, string][]} */
const OPTIONS = [
  ["cluster", "cluster"], ["kind", "kind of token"], ["script", "script"], ["length", "length"], ["norm", "norm"],
  ["frequency", "frequency"], ["trained", "learned or not"], ["along", "cosine similarity"],
];

const OWN = "own:"; // begins the name of a column of the user's own
const MOST_GROUPS = 24; // of a column of the user's own that get a colour

/** Columns that only tokens have. */
const OF_TOKENS = ["kind", "script", "length"];

/** The columns that the map can be coloured by; each is computed or loaded when it is first used. */
export class Columns {
  /** @type {Map<string, Column>} */ #known = new Map();

  /**
   * @param {object} about
   * @param {string[]} about.texts
   * @param {Groups} about.kind
   * @param {Float32Array} about.norms
   * @param {Data} about.data
   * @param {boolean} about.hasFrequency
   * @param {boolean} about.hasTokens whether the rows have tokens, not numbers alone
   * @param {OwnColumn[]} about.own columns of the user's own
   * @param {() => TokenSum} about.selected
   * @param {() => Groups | null} about.clusters clusters of the layout, null until it is there
   */
  constructor({ texts, kind, norms, data, hasFrequency, hasTokens, own, selected, clusters }) {
    this.texts = texts;
    this.hasTokens = hasTokens;
    this.kind = kind;
    this.data = data;
    this.selected = selected;
    this.clusters = clusters;
    this.norms = numeric(norms, "norm of the row", (value) => value.toPrecision(3));
    this.own = own;
    /** @type {[string, string][]} */
    const ownOptions = own.map(({ name }) => [OWN + name, `${name} (own)`]);
    const isKnown = (/** @type {string} */ name) => (name === "frequency" ? hasFrequency
      : hasTokens || !OF_TOKENS.includes(name));
    this.options = [...OPTIONS.filter(([name]) => isKnown(name)), ...ownOptions];
    this.#known.set("kind", kind).set("norm", this.norms);
  }

  /** Return what a column is called on the page. @param {string} name */
  labelOf(name) {
    return this.options.find(([key]) => key === name)?.[1] ?? name;
  }

  /** Return a column without values, which is drawn in grey: of a column that there is not. @returns {NumberColumn} */
  none() {
    return { ...this.norms, values: new Float32Array(this.texts.length).fill(Number.NaN) };
  }

  /** Return the logarithm of 1 + the count of each token if it is loaded. */
  frequency() {
    return /** @type {NumberColumn | undefined} */ (this.#known.get("frequency"));
  }

  /** Compute a column again when it is used next. @param {string} name */
  invalidate(name) {
    this.#known.delete(name);
  }

  /** @param {string} name @returns {Promise<Column>} */
  async load(name) {
    const column = this.#known.get(name) ?? await this.#make(name);
    this.#known.set(name, column);
    return column;
  }

  /** @param {string} name @returns {Promise<Column> | Column} */
  #make(name) {
    if (name === "cluster") return this.#makeClusters();
    if (name === "script") return scripts(this.texts, this.kind);
    if (name === "length") return numeric(lengths(this.texts), "characters", (value) => String(Math.round(value)));
    if (name === "frequency") return this.#makeFrequency();
    if (name.startsWith(OWN)) return this.#makeOwn(name.slice(OWN.length));
    return name === "trained" ? this.#makeVerdicts() : this.#makeCosines();
  }

  #makeClusters() {
    const clusters = this.clusters();
    if (!clusters) throw new Error("The clusters are known when the neighbour layout is there.");
    return clusters;
  }

  async #makeFrequency() {
    const counts = new Float32Array(await this.data.load("frequencies"));
    return numeric(counts.map((count) => Math.log10(1 + count)), "occurrences in the corpus", (value) =>
      Math.round(10 ** value - 1).toLocaleString("en"));
  }

  /** @param {string} name */
  async #makeOwn(name) {
    const values = new Float32Array(await this.data.load("column", { name }));
    const groups = this.own.find((column) => column.name === name)?.groups;
    if (groups) return ofGroups(values, groups);
    return numeric(values, name, (value) => String(Number(value.toPrecision(4))));
  }

  /** @returns {Promise<Groups>} */
  async #makeVerdicts() {
    return { names: VERDICTS, colours: VERDICT_COLOURS, of: new Uint8Array(await this.data.load("verdicts")) };
  }

  async #makeCosines() {
    const sum = this.selected();
    if (isEmpty(sum)) throw new Error("Select a token first: the colour is the cosine with it.");
    const cosines = new Float32Array(await this.data.load("along", sumParams(sum)));
    return numeric(cosines, "cosine with the selection", (value) => value.toFixed(2));
  }
}

/**
 * @param {Float32Array} values
 * @param {string} label
 * @param {(value: number) => string} format
 * @returns {NumberColumn}
 */
function numeric(values, label, format) {
  return { values, range: spread(values, 0.01), label, format };
}

/**
 * Return the most frequent groups of a column; the others together are one group, and so are tokens without a value.
 * @param {Float32Array} values the group of each token, or NaN
 * @param {string[]} names of the groups, most frequent first
 * @returns {Groups}
 */
function ofGroups(values, names) {
  const first = names.slice(0, MOST_GROUPS);
  const none = first.length + 1;
  return {
    names: [...first, "other values", "no value"], rest: first.length,
    of: Uint8Array.from(values, (group) => (Number.isNaN(group) ? none : Math.min(group, first.length))),
  };
}

/**
 * Return the tokens in the order in which they are named: words first, by frequency; by ID where it is not known.
 * @param {string[]} texts
 * @param {Groups} kind
 * @param {NumberColumn} [frequency]
 */
export function namesInOrder(texts, kind, frequency) {
  /** @param {number} id */
  const isWord = (id) => kind.of[id] === KIND.start && texts[id].trim().length > 2;
  /** @param {number} id */
  const weight = (id) => (frequency ? -frequency.values[id] : id);
  const ids = Array.from(texts, (_, id) => id).sort((a, b) => weight(a) - weight(b));
  return Int32Array.from([
    ...ids.filter(isWord), ...ids.filter((id) => kind.of[id] !== KIND.none && !isWord(id)),
  ]);
}
