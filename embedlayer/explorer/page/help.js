/** The page's help: what each view shows, where to learn more, and the keys. */

import { definitions, h } from "./dom.js";

/** @import { View } from "./types" */

const COURSE_FILE = "docs/course/index.md";

/**
 * Fill the dialog and open it.
 * @param {HTMLDialogElement} dialog
 * @param {{views: View[], keys: [string, string][], course: string, go: (view: string) => void}} about `course`: its
 *   address, or ""
 */
export function showHelp(dialog, { views, keys, course, go }) {
  /** @param {string} id @param {string} text */
  const link = (id, text) => h("a", {
    href: `#${id}`, onClick: (/** @type {MouseEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      dialog.close();
      go(id);
    },
  }, text);
  const lessons = course ? h("a", { href: course, target: "_blank", rel: "noreferrer" }, "The course")
    : ["The course (", h("code", null, COURSE_FILE), " in the source of embedlayer)"];
  dialog.replaceChildren(
    h("form", { method: "dialog" }, h("h2", { id: "help-title" }, "Help"), h("button", { autofocus: true }, "Close")),
    definitions("views", views.map((view) => [link(view.id, view.title), view.sentence])),
    h("p", null, "New to embeddings? ", link("learn", "The story"),
      " explains them in short scenes with pictures and tasks. ", lessons, " explains the same with code."),
    h("h3", null, "Keyboard shortcuts"),
    definitions("keys", keys));
  dialog.showModal();
}
