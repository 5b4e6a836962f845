/** What the map can be coloured by, and in which order tokens get their names. */

import { lengths, scripts } from "./groups.js";
import { spread } from "./view.js";

/**
 * @typedef {{values: Float32Array, range: [number, number], label: string, format: (value: number) => string}} Numbers
 * @typedef {import("./groups.js").Groups | Numbers} Column
 */

/** The columns that the map can be coloured by, each computed or loaded when it is first wanted. */
export function columnsOf({ texts, kind, norms, data, manifest, choice }) {
  const kept = new Map([["kind", kind], ["norm", numeric(norms, "norm of the row", (value) => value.toPrecision(3))]]);
  const makers = {
    script: () => scripts(texts, kind),
    length: () => numeric(lengths(texts), "characters", (value) => String(Math.round(value))),
    frequency: async () => numeric(new Float32Array(await data.load("frequencies")).map((seen) => Math.log10(1 + seen)), "times in the text", (value) => Math.round(10 ** value - 1).toLocaleString("en")),
    trained: async () => {
      const scores = new Float32Array(await data.load("scores"));
      return numeric(scores, "how little it has learned; above 0 is under-trained", (value) => value.toFixed(2));
    },
    along: async () => {
      const { plus, minus } = choice();
      if (!plus.length && !minus.length) throw new Error("Choose a token first: then colour is likeness to it.");
      return numeric(new Float32Array(await data.load("along", { plus: plus.join(","), minus: minus.join(",") })), "cosine with what is chosen", (value) => value.toFixed(2));
    },
  };
  const options = [["kind", "kind of token"], ["script", "script"], ["length", "length"], ["norm", "norm"], ["trained", "under-training"], ["along", "likeness to what is chosen"]];
  if (manifest.has.includes("frequency")) options.splice(4, 0, ["frequency", "frequency"]);
  return {
    options,
    known: (name) => kept.get(name),
    forget: (name) => kept.delete(name),
    async load(name) {
      if (!kept.has(name)) kept.set(name, await makers[name]());
      return kept.get(name);
    },
  };
}

function numeric(values, label, format) {
  return { values, range: spread(values, 0.01), label, format };
}

/** Tokens in the order in which they get a name: frequent words first; without a count, by ID, as tokenizers keep them. */
export function namesInOrder(texts, kind, frequency) {
  const word = (id) => kind.of[id] <= 1 && texts[id].trim().length > 2;
  const ids = Array.from(texts, (_, id) => id);
  const weight = frequency ? (id) => -frequency.values[id] : (id) => id;
  const words = ids.filter((id) => word(id) && kind.of[id] === 0).sort((a, b) => weight(a) - weight(b));
  return Int32Array.from([...words, ...ids.filter((id) => kind.of[id] !== 6 && !(word(id) && kind.of[id] === 0)).sort((a, b) => weight(a) - weight(b))]);
}
