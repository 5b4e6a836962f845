/** What an exported page computes for itself from the vectors in it: neighbours and directions. */

/**
 * The answer to a request that is not baked.
 * @param {string} name @param {Record<string, any>} params @param {(name: string, params?: any) => Promise<any>} load
 * @returns {Promise<any> | undefined} undefined if the name is none that can be computed
 */
export function compute(name, params, load) {
  const source = { source: params.source ?? 0 };
  const plus = idList(params.plus);
  const minus = idList(params.minus);
  if (name === "along") return rowsOf(load, source).then((rows) => cosines(rows, plus, minus).buffer);
  if (name === "coordinates" && Number(params.count) > 3) return load("coordinates", { ...source, count: 3 });
  if (name !== "neighbors") return undefined;
  const topn = Number(params.topn ?? 20);
  return Promise.all([load("tokens", source), rowsOf(load, source).catch(() => null)]).then(([{ texts }, rows]) => {
    if (rows) return best(cosines(rows, plus, minus), topn, (id) => texts[id] !== "" && !plus.includes(id) && !minus.includes(id));
    if (plus.length === 1 && !minus.length) return load("nearest", source).then((kept) => fromNearest(kept, plus[0], texts.length).slice(0, topn));
    throw Object.assign(new Error("This file holds the neighbours of single tokens only; sums of tokens need the table: embedlayer explore DIR."), { name: "NotBaked" });
  });
}

/** @typedef {{count: number, width: number, numbers: Int8Array, norms: Float32Array}} Rows */

const opened = new Map();

/** The baked rows, with their lengths in units of their own scale. @returns {Promise<Rows>} */
function rowsOf(load, source) {
  if (!opened.has(source.source)) {
    opened.set(source.source, Promise.all([load("vectors", source), load("tokens", source)]).then(([buffer, { texts }]) => {
      const numbers = new Int8Array(buffer, 4 * texts.length);
      const width = numbers.length / texts.length;
      return { count: texts.length, width, numbers, norms: norms(numbers, texts.length, width) };
    }));
  }
  return opened.get(source.source);
}

function norms(numbers, count, width) {
  return Float32Array.from({ length: count }, (_, row) => {
    let sum = 0;
    for (let i = row * width; i < (row + 1) * width; i++) sum += numbers[i] * numbers[i];
    return Math.sqrt(sum);
  });
}

/**
 * Cosine of each row with the mean of `plus` unit rows and negated `minus` unit rows.
 * @param {Rows} rows @param {number[]} plus @param {number[]} minus
 */
export function cosines({ count, width, numbers, norms: lengths }, plus, minus) {
  const query = new Float64Array(width);
  for (const [ids, sign] of [[plus, 1], [minus, -1]]) {
    for (const id of ids) for (let i = 0; i < width; i++) query[i] += (sign * numbers[id * width + i]) / (lengths[id] || 1);
  }
  const length = Math.hypot(...query) || 1;
  return Float32Array.from({ length: count }, (_, row) => {
    let sum = 0;
    for (let i = 0, at = row * width; i < width; i++, at++) sum += query[i] * numbers[at];
    return sum / length / (lengths[row] || 1);
  });
}

/** The `topn` largest, as `[id, value]`, largest first. */
export function best(values, topn, counts) {
  const found = [];
  let least = -Infinity;
  for (let id = 0; id < values.length; id++) {
    if (!(values[id] > least) || !counts(id)) continue;
    let place = found.length;
    while (place > 0 && found[place - 1][1] < values[id]) place--;
    found.splice(place, 0, [id, values[id]]);
    if (found.length > topn) found.pop();
    if (found.length === topn) least = found[topn - 1][1];
  }
  return found;
}

function fromNearest(buffer, id, count) {
  const each = buffer.byteLength / 8 / count;
  const ids = new Uint32Array(buffer, 0, count * each);
  const scores = new Float32Array(buffer, 4 * count * each);
  return Array.from({ length: each }, (_, k) => [ids[id * each + k], scores[id * each + k]]).filter(([, score]) => score >= -1);
}

function idList(text) {
  return String(text ?? "").split(",").filter(Boolean).map(Number);
}
