/** What a reader of the story has done: tasks and settings of scenes, stored in the browser for each source. */

import { SCENES } from "./scenes.js";

/** @import { Changes, ViewContext, ViewState } from "../types" */
/** @typedef {{done: string[], settings: Record<string, string>}} Stored */

/** Return the key of the browser's storage for a source. @param {ViewContext} context */
function keyOf({ manifest: { title, path, vocab_size: vocab, embed_dim: dim } }) {
  return `embedlayer-learn ${path || title} ${vocab}x${dim}`;
}

/** Return the scene that a key of the URL belongs to; "" for none. @param {string} key */
function sceneOf(key) {
  return key.includes(".") ? key.split(".", 1)[0] : "";
}

export class Progress {
  /** @type {Stored | null} */ #stored = null;
  /** The view's state; a change of it is stored, too. @type {ViewState} */ state;
  #key = "";

  /** @param {ViewContext} context */
  constructor(context) {
    const { state } = context;
    this.#key = keyOf(context);
    this.#stored = read(this.#key);
    this.state = { ...state, set: (changes) => {
      state.set(changes);
      this.#keepSettings(changes);
    } };
  }

  /**
   * Return the IDs of the scenes whose tasks are done, in the order of the story: the stored ones, and those of the
   * URL if nothing is stored.
   */
  done() {
    const done = this.#stored?.done ?? this.state.get("done", "").split(".");
    return SCENES.map(({ id }) => id).filter((id) => done.includes(id));
  }

  /** @param {string} id of a scene */
  addDone(id) {
    const done = [...this.done(), id];
    this.#write({ done, settings: this.#stored?.settings ?? {} });
    this.state.set({ done: this.done().join(".") });
  }

  /** Give scenes without settings in the URL those that are stored; store those of the URL. */
  restore() {
    const own = Object.entries(this.state.all()).filter(([key]) => sceneOf(key));
    const given = new Set(own.map(([key]) => sceneOf(key)));
    const kept = Object.entries(this.#stored?.settings ?? {}).filter(([key]) => !given.has(sceneOf(key)));
    const done = this.done();
    if (this.#stored) this.#stored.settings = Object.fromEntries([...kept, ...own]);
    this.state.set({ ...Object.fromEntries(kept), done: done.join(".") });
  }

  /** Forget the tasks that are done and all settings. */
  clear() {
    const keys = Object.keys(this.state.all()).filter(sceneOf);
    this.state.set({ ...Object.fromEntries(keys.map((key) => [key, null])), done: null, s: null });
    this.#write({ done: [], settings: {} });
  }

  /** @param {Changes} changes */
  #keepSettings(changes) {
    const settings = { ...this.#stored?.settings };
    const news = Object.entries(changes).filter(([key]) => sceneOf(key));
    for (const [key, value] of news) {
      if (value === null || value === undefined || value === "") delete settings[key];
      else settings[key] = String(value);
    }
    if (news.length) this.#write({ done: this.done(), settings });
  }

  /** @param {Stored} stored */
  #write(stored) {
    this.#stored = stored;
    try {
      localStorage.setItem(this.#key, JSON.stringify(stored));
    } catch {
      // The browser stores nothing for this page: the URL and this object hold the progress.
    }
  }
}

/** Return what is stored under a key; null for nothing usable. @param {string} key @returns {Stored | null} */
function read(key) {
  try {
    const { done, settings } = JSON.parse(localStorage.getItem(key) ?? "null") ?? {};
    if (!Array.isArray(done) || typeof settings !== "object" || settings === null) return null;
    return { done, settings };
  } catch {
    return null;
  }
}
