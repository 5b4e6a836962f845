/** Lists of tokens as files. */

/** @import { Columns } from "./columns.js" */

/** Return a value as a field of a TSV file. @param {string | number} value */
function field(value) {
  const text = String(value);
  return /[\t\n\r"]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * Return tokens as the text of a TSV file that `embedlayer explore --columns` reads again.
 * @param {Iterable<number>} ids
 * @param {string[]} texts
 * @param {Columns} columns
 * @param {Map<number, number>} cosines of some tokens with the selection
 */
export function toTsv(ids, texts, columns, cosines) {
  const frequency = columns.frequency();
  const names = ["id", "token", "norm", ...(frequency ? ["frequency"] : []), ...(cosines.size ? ["cosine"] : [])];
  const lines = Array.from(ids, (id) => [
    id, texts[id], columns.norms.values[id].toPrecision(6),
    ...(frequency ? [Math.round(10 ** frequency.values[id] - 1)] : []),
    ...(cosines.size ? [cosines.get(id) ?? ""] : []),
  ].map(field).join("\t"));
  return [names.join("\t"), ...lines, ""].join("\n");
}

/** Let the browser store a text as a file. @param {string} text @param {string} name */
export function download(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/tab-separated-values" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
