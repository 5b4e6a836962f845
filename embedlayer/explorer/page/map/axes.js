/** Where points lie: along components, along a likeness, or so that neighbours stay together. */

import { spread } from "./view.js";

const SLOW = 20000; // rows, from which on a layout takes a while

/**
 * @param {{size: number, coordinates: ArrayBuffer, explained: number[], state: any, data: any,
 *   direction: () => {plus: number[], minus: number[]}}} about `coordinates`: one component after the other
 */
export function axesOf({ size, coordinates, explained, state, data, direction }) {
  const count = Math.round(coordinates.byteLength / 4 / size);
  const component = (number) => new Float32Array(coordinates, 4 * size * (Math.min(number, count) - 1), size);
  const share = (value) => (value === undefined ? "" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`);
  const wanted = () => [state.get("x", "1"), state.get("y", "2")];

  async function likeness() {
    const { plus, minus } = direction();
    if (!plus.length && !minus.length) return new Float32Array(size);
    return new Float32Array(await data.load("along", { plus: plus.join(","), minus: minus.join(",") }));
  }

  function title(id) {
    if (id === "n") return title("1"); // not laid out yet
    if (id === "e") return "cosine with what is chosen →";
    return `principal component ${id} · ${share(explained[Number(id) - 1])} of the variance →`;
  }

  return {
    options: [...Array.from({ length: count }, (_, k) => [String(k + 1), `component ${k + 1} · ${share(explained[k])}`]), ["e", "likeness to what is chosen"]],
    first: () => [component(1), component(2)],
    /** Whether both axes are one layout. */
    isLayout: () => state.get("x") === "n",
    isLikeness: () => wanted().includes("e"),
    titles: () => wanted().map(title),
    waiting: size > SLOW ? "Laying out neighbourhoods: this takes a while the first time …" : "Laying out neighbourhoods …",
    async layout() {
      const places = await data.load("layout");
      return [new Float32Array(places, 0, size), new Float32Array(places, 4 * size, size)];
    },
    async chosen() {
      const ids = wanted();
      const values = await Promise.all(ids.map((id) => (id === "e" ? likeness() : component(Number(id)))));
      return ids.includes("e") ? values.map(standard) : values;
    },
  };
}

/** Values around 0, so that two of different units fit one picture. */
function standard(values) {
  const [low, high] = spread(values, 0.01);
  return values.map((value) => (value - (low + high) / 2) / (high - low || 1));
}
