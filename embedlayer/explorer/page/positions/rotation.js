/** Panels for schemes that rotate queries and keys. */

import { Curves } from "../charts/curves.js";
import { COUNT, shown } from "../charts/numbers.js";
import { h, select } from "../dom.js";
import { cosine, dot, fromRows, matrix, row, unpackMatrix } from "../math.js";
import { score } from "../schemes.js";
import { curvesPanel, distinctFact } from "./panels.js";
import {
  MOST_COMPARED, chooseHead, mapPanel, panel, positionSliders, setPositions, squareMap, tiles, tokenChoice,
  vectorStrips, vectorsOf,
} from "./scene.js";

/** @import { Scene } from "./scene.js" */

const FARTHEST = 256; // distance

/** @param {Scene} scene */
export function rotationPanels(scene) {
  const { scheme, length } = scene;
  const rows = vectorsOf(scheme, length);
  const cosines = matrix(length, scheme.pairs, (p, i) => rows.data[p * rows.cols + 2 * i]);
  const sentence = "Cosine of each pair's angle: the pairs on the left rotate fastest, those on the right hardly "
    + "rotate over the positions shown.";
  const map = mapPanel(scene, "All positions", sentence, cosines, {
    row: "position", column: "pair", unit: "cosine of the angle", limit: 1,
    onPick: (p) => setPositions(scene, p, scene.b),
  });
  return [map, queryAndKeyPanel(scene), allPairs(scene), curvesPanel(scene, rows)];
}

/** Whether the source has queries and keys that this scheme rotates. @param {Scene} scene */
export function hasOwnQueries({ data, scheme }) {
  return data.queries !== undefined && data.queries.shape[2] === scheme.width && scheme.name === data.schemes[0].name;
}

/**
 * Return the first `width` numbers of a token's vector, repeated where it is narrower.
 * @param {Scene} scene
 * @param {number} token
 * @param {number} width
 */
export function firstNumbers({ vectors }, token, width) {
  return Float64Array.from({ length: width }, (_, d) => vectors.data[token * vectors.cols + (d % vectors.cols)]);
}

/**
 * Return the query and the key of two tokens: the model's own where it has them, else the first numbers of their
 * vectors.
 * @param {Scene} scene
 * @param {number} queryToken
 * @param {number} keyToken
 * @param {number} head
 */
export function queryAndKey(scene, queryToken, keyToken, head) {
  const { queries, keys } = scene.data;
  if (!queries || !keys || !hasOwnQueries(scene)) {
    const { width } = scene.scheme;
    return { query: firstNumbers(scene, queryToken, width), key: firstNumbers(scene, keyToken, width) };
  }
  const [heads, keyHeads] = [queries.shape[0], keys.shape[0]];
  const own = Math.min(head, heads - 1);
  return {
    query: Float64Array.from(row(unpackMatrix(queries, own), queryToken)),
    key: Float64Array.from(row(unpackMatrix(keys, Math.floor((own * keyHeads) / heads)), keyToken)),
  };
}

/** @param {Scene} scene */
function chosenQueryAndKey(scene) {
  return queryAndKey(scene, scene.token, scene.key, scene.head);
}

/** Draw a query at one position and a key at another. @param {Scene} scene */
function queryAndKeyPanel(scene) {
  const { scheme } = scene;
  const numbers = h("div");
  const names = () => ["query", `at ${scene.a}`, "key", `at ${scene.b}`];
  const strips = vectorStrips("Query and key", (r) => names()[r], "channel", 24);
  const chart = new Curves({
    label: "Score over the distance", axes: ["b − a", "score"], height: 150, xName: (d) => `distance ${d}`,
    legend: false,
  });
  const { applyToQuery = scheme.apply } = scheme;
  scene.onChange(() => {
    const { query, key } = chosenQueryAndKey(scene);
    strips.show(fromRows([query, applyToQuery(query, scene.a), key, scheme.apply(key, scene.b)]));
    numbers.replaceChildren(scoreTiles(scene, query, key));
    showScores(scene, chart, query, key);
  });
  const note = hasOwnQueries(scene) ? "Query and key are the model's own, of one head of its first block."
    : `This source has no query of this width: the first ${scheme.width} numbers of the tokens' vectors are used as `
      + "query and key.";
  return panel("A query and a key",
    "Both are rotated by their position. Move both together: the score depends on their distance only.",
    h("div", { class: "toolbar" }, tokenChoice(scene, "Query of", "token"), tokenChoice(scene, "Key of", "key"),
      headSelect(scene)),
    positionSliders(scene, ["Query at a", "Key at b"]), numbers, scene.keep(strips), scene.keep(chart),
    h("p", { class: "note" }, note));
}

/** @param {number} distance */
function signed(distance) {
  return distance < 0 ? `−${-distance}` : String(distance);
}

/** @param {Scene} scene @param {Float64Array} query @param {Float64Array} key */
function scoreTiles({ scheme, a, b }, query, key) {
  return tiles([
    ["q · k / √K", shown(score(scheme, query, key, a, b)), "score"],
    ["distance b − a", signed(b - a)],
    ["without rotation: q · k / √K", shown(dot(query, key) / Math.sqrt(query.length))],
    ["the query at a and at b: cosine", shown(cosine(scheme.apply(query, a), scheme.apply(query, b))), "token-cosine"],
  ]);
}

/** @param {Scene} scene @param {Curves} chart @param {Float64Array} query @param {Float64Array} key */
function showScores({ scheme, a, b, last }, chart, query, key) {
  const reach = Math.min(last, FARTHEST);
  const values = Array.from({ length: 2 * reach + 1 }, (_, i) =>
    score(scheme, query, key, Math.max(0, reach - i), Math.max(0, i - reach)));
  chart.show([{ name: "score", colour: 0, values }], {
    start: -reach, marks: [{ at: b - a + reach, text: `b − a = ${signed(b - a)}` }],
  });
}

/** @param {Scene} scene */
function headSelect(scene) {
  const heads = hasOwnQueries(scene) ? scene.data.queries?.shape[0] ?? 1 : 1;
  if (heads < 2) return null;
  return select({
    label: "Head", value: String(Math.min(scene.head, heads - 1)),
    options: Array.from({ length: heads }, (_, i) => [String(i), String(i)]),
    onChange: (value) => chooseHead(scene, Number(value)),
  });
}

/** Draw the score of the query and the key at all pairs of positions. @param {Scene} scene */
function allPairs(scene) {
  const { scheme } = scene;
  const { applyToQuery = scheme.apply } = scheme;
  const count = Math.min(MOST_COMPARED, scene.last + 1);
  const map = squareMap(scene, {
    label: "Scores of all positions", unit: "q · k / √K", axes: ["key at b", "query at a"],
    names: ["query at", "key at"],
  }, () => {
    const { query, key } = chosenQueryAndKey(scene);
    const queries = Array.from({ length: count }, (_, p) => applyToQuery(query, p));
    const keys = Array.from({ length: count }, (_, p) => scheme.apply(key, p));
    return [matrix(count, count, (a, b) => dot(queries[a], keys[b]) / Math.sqrt(query.length)), {}];
  }, ["all", "tokens"]);
  const sentence = `The score of this query and key at the first ${COUNT.format(count)} positions: constant along each `
    + "diagonal.";
  return panel("All pairs of positions", sentence, map, distinctFact(scene, vectorsOf(scheme, count)));
}
