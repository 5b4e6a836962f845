/** The neighbour layout: the server computes it in the background; an exported page holds it. */

/** @import { Data, Layout, LayoutProgress } from "../types" */

const INTERVAL = 250; // milliseconds between two questions

/** The layout is not there, and nothing failed: the user has cancelled it, or it was never started. */
export class NoLayout extends Error {
  name = "NoLayout";
}

/** Requests the layout of one table. */
export class LayoutRequest {
  #isClosed = false;

  /** @param {Data} data @param {number} size number of tokens */
  constructor(data, size) {
    this.data = data;
    this.size = size;
  }

  close() {
    this.#isClosed = true;
  }

  /** Cancel the computation. */
  async cancel() {
    await this.data.act("layout-cancel");
  }

  /**
   * Start the computation if need be, wait for it, and return the layout.
   * @param {(progress: LayoutProgress) => void} onProgress
   * @returns {Promise<Layout>}
   */
  async load(onProgress) {
    const { data } = this;
    let progress = await (data.exported ? data.ask("layout-progress") : data.act("layout-start"));
    while (progress.state === "running") {
      onProgress(progress);
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
      if (this.#isClosed) throw new NoLayout("The view was closed.");
      progress = await this.data.ask("layout-progress");
    }
    if (progress.state === "failed") throw new Error(progress.error ?? "The neighbour layout failed.");
    if (progress.state !== "ready") throw new NoLayout("The neighbour layout was cancelled.");
    return this.#read();
  }

  /** @returns {Promise<Layout>} */
  async #read() {
    const { data, size } = this;
    const [places, { recall }, { clusters }, of] = await Promise.all([
      data.load("layout"), data.load("layout-recall"), data.load("clusters"), data.load("cluster-of"),
    ]);
    return {
      xs: new Float32Array(places, 0, size), ys: new Float32Array(places, 4 * size, size), recall, clusters,
      of: new Int32Array(of, 0, size),
    };
  }
}
