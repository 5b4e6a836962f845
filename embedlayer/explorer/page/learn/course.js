/** The lessons of the course, and the link from each scene of the story to the lesson that has the same as code. */

import { h } from "../dom.js";

/** @type {[file: string, title: string, scenes: string][]} with the IDs of the scenes that the lesson links to */
export const LESSONS = [
  ["01-text-to-vectors", "From text to vectors", "ids pieces batch"],
  ["02-look-up", "A look-up is a matrix product", "onehot lookup back"],
  ["03-gradients", "Gradients and updates", "gradient training"],
  ["04-order", "Order", "order twice broadcast sizes"],
  ["05-scale", "Scale and initialisation", "sum width"],
  ["06-positions", "Sinusoidal, rotary, ALiBi", "waves learned rotary"],
  ["07-tying-and-memory", "Tying and memory", "memory inside"],
  ["08-trained-table", "A trained table", "real similar"],
];

/**
 * Return the sentence that names the lesson of a scene, as a link if the course has an address.
 * @param {string} scene
 * @param {string} course address of the first page of the course, or ""
 */
export function lessonOf(scene, course) {
  const index = LESSONS.findIndex(([, , scenes]) => scenes.split(" ").includes(scene));
  const [file, title] = LESSONS[index];
  const name = `lesson ${index + 1}, ${title}`;
  if (!course) return ["The same as code: ", name, " (", h("code", null, `docs/course/${file}.md`), ")."];
  const href = course.replace(/[^/]*?(\.\w+)?$/, `${file}$1`);
  return ["The same as code: ", h("a", { href, target: "_blank", rel: "noreferrer" }, name), "."];
}
