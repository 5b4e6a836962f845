/** Clusters of the neighbour layout: their names on the map, and their colours. */

/** @import { Cluster, Groups, Layout } from "../types" */
/** @import { Name, Style } from "./painting.js" */

const [PARTS_FROM, PARTS_TO] = [2.2, 14]; // zoom at which parts of clusters are named
const [MOST_WORDS, MOST_CHARACTERS] = [3, 26];

/** Return the most typical words of a cluster, as one name. @param {Cluster} cluster @param {string[]} texts */
function nameOf({ names }, texts) {
  /** @type {Map<string, string>} */
  const words = new Map();
  for (const id of names) {
    const word = texts[id].trim().replace(/^##(?=.)/, "");
    const length = [...words.values(), word].join(" · ").length;
    if (word && words.size < MOST_WORDS && (!words.size || length <= MOST_CHARACTERS)) {
      words.set(word.toLowerCase(), words.get(word.toLowerCase()) ?? word);
    }
  }
  return [...words.values()].join(" · ");
}

/**
 * Return the names of the clusters to draw at a zoom: large clusters first, parts of them after zooming in.
 * @param {Layout} layout
 * @param {string[]} texts
 * @param {number} zoom 1 where all points are shown
 * @returns {Name[]}
 */
export function clusterNames({ clusters }, texts, zoom) {
  if (zoom > PARTS_TO) return [];
  const level = zoom < PARTS_FROM ? 0 : 1;
  /** @type {Style} */
  const style = level ? "part" : "group";
  return clusters.filter((cluster) => cluster.level === level)
    .map((cluster) => ({ text: nameOf(cluster, texts), x: cluster.x, y: cluster.y, style }))
    .filter(({ text }) => text);
}

/**
 * Return the large clusters as a column to colour by.
 * @param {Layout} layout
 * @param {string[]} texts
 * @returns {Groups}
 */
export function clusterColumn({ clusters, of }, texts) {
  const large = clusters.filter(({ level }) => level === 0);
  const names = large.map((cluster) => nameOf(cluster, texts) || "unnamed");
  const rest = names.length;
  const groups = Uint8Array.from(of, (group) => (group < 0 ? rest : group));
  return { names: [...names, "no cluster"], of: groups, rest, colours: distantColours(large) };
}

/**
 * Return the number of a colour for each cluster: an unused hue, else another shade of that whose clusters are farthest
 * away. The shades of hue i are i, i + count, and so on.
 * @param {{x: number, y: number}[]} clusters
 * @param {number} [count] of hues
 */
export function distantColours(clusters, count = 8) {
  /** @type {number[]} */
  const chosen = [];
  for (const { x, y } of clusters) {
    const nearest = new Array(count).fill(Infinity);
    chosen.forEach((colour, i) => {
      const hue = colour % count;
      nearest[hue] = Math.min(nearest[hue], Math.hypot(clusters[i].x - x, clusters[i].y - y));
    });
    const hue = nearest.indexOf(Math.max(...nearest));
    chosen.push(hue + count * chosen.filter((colour) => colour % count === hue).length);
  }
  return chosen;
}
