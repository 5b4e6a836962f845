/** What a scene of the story draws on: its part of the URL, the parts to close, and the verdict about its task. */

/** @import { Changes, Child, Closable, ViewContext } from "../types" */

/**
 * @typedef {object} Scene
 * @property {string} id part of the URL
 * @property {string} name short title
 * @property {string} question heading
 * @property {string[]} sentences
 * @property {string} task
 * @property {string[]} [words] special words of the picture, names of the glossary
 * @property {(stage: Stage) => Child[] | Promise<Child[]>} draw return the picture and its controls
 */

export class Stage {
  /** @type {(() => void)[]} */ #closers = [];
  isClosed = false;

  /**
   * @param {string} id
   * @param {ViewContext} context
   * @param {(isDone: boolean, ...text: Child[]) => void} judge
   * @param {Set<string>} [seen] special words that the scene's sentences explain
   */
  constructor(id, context, judge, seen = new Set()) {
    this.id = id;
    this.context = context;
    this.seen = seen;
    /** Say whether the task is done, and why. */
    this.judge = judge;
  }

  /** Return a text of the URL. @param {string} key @param {string} [fallback] */
  text(key, fallback = "") {
    return this.context.state.get(`${this.id}.${key}`, fallback);
  }

  /**
   * Return a number of the URL between two limits.
   * @param {string} key
   * @param {number} fallback
   * @param {number} low
   * @param {number} high
   */
  number(key, fallback, low, high) {
    const found = Number.parseFloat(this.text(key, String(fallback)));
    return Math.min(high, Math.max(low, Number.isFinite(found) ? found : fallback));
  }

  /** Change the URL; null removes a key. @param {Changes} changes */
  set(changes) {
    const news = Object.entries(changes).filter(([key, value]) => String(value ?? "") !== this.text(key));
    if (this.isClosed || !news.length) return;
    this.context.state.set(Object.fromEntries(news.map(([key, value]) => [`${this.id}.${key}`, value])));
  }

  /** Close a part with the scene; return its element. @param {Closable} part */
  keep(part) {
    this.#closers.push(() => part.close());
    return part.element;
  }

  /** Call a function when the scene is closed. @param {() => void} close */
  onClose(close) {
    this.#closers.push(close);
  }

  close() {
    this.isClosed = true;
    for (const close of this.#closers) close();
    this.#closers = [];
  }
}
