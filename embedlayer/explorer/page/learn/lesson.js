/** The list of the lessons' exercises, each with a link to the scene or the view in which it can be done. */

import { h } from "../dom.js";
import { changed, formatHash } from "../state.js";
import { LESSONS } from "./exercises.js";
import { SCENES } from "./scenes.js";

/** @import { ViewContext } from "../types" */
/** @import { Exercise, Lesson } from "./exercises.js" */

/** @param {boolean | null} holds */
function verdictOf(holds) {
  return h("small", { class: holds === null ? "learn-depends" : holds ? "learn-holds" : "learn-fails" },
    holds === null ? "it depends" : holds ? "holds" : "not so");
}

/** Name the scene or the view of an exercise. @param {Exercise} exercise */
function placeOf({ scene, view, place }) {
  const number = SCENES.findIndex(({ id }) => id === scene) + 1;
  return number ? `scene ${number}, ${SCENES[number - 1].name}` : `view ${view}, ${place}`;
}

/** Return the lessons with the link and the place of each exercise, as the course lists them. */
export function linkedLessons() {
  return LESSONS.map(({ parts, ...lesson }) => ({ ...lesson, parts: parts.map(([part, exercises]) => ({ part,
    exercises: exercises.map((exercise) => ({ ...exercise, link: hashOf(exercise, 0), place: placeOf(exercise) })),
  })) }));
}

/** Return the part of a URL that shows an exercise. @param {Exercise} exercise @param {number} source */
function hashOf({ scene, view, settings = {} }, source) {
  if (view) return formatHash(view, changed(settings, { source: source || null }));
  const own = Object.fromEntries(Object.entries(settings).map(([key, value]) => [`${scene}.${key}`, value]));
  return formatHash("learn", changed(own, { s: scene, source: source || null }));
}

/**
 * Create the list of the lessons' exercises, closed at first.
 * @param {ViewContext} context
 * @param {() => void} onReset
 * @param {(claim: string) => void} onOpen called with what the lesson says in the exercise that is opened
 */
export function lessonIndex({ source }, onReset, onOpen) {
  const lessons = LESSONS.map((lesson) => partsOf(lesson, source));
  const element = h("details", { class: "learn-index" },
    h("summary", null, "Find an exercise of the lesson"),
    h("p", { class: "note" }, "Five lessons on embeddings. Each link opens the scene with the lesson's settings. "
      + "Beside it: whether what the lesson says holds there."),
    searchField((text) => filter(lessons, text)),
    lessons,
    h("p", null, resetButton(onReset)));
  element.addEventListener("click", (event) => {
    const link = /** @type {HTMLElement} */ (event.target).closest("a");
    if (!link) return;
    element.open = false;
    onOpen(link.dataset.claim ?? "");
  });
  return element;
}

/**
 * Create the field that calls `find` with what is typed, and shows what it returns.
 * @param {(text: string) => string} find
 */
function searchField(find) {
  const found = h("span", { class: "note", role: "status" });
  const input = h("input", { type: "search", autocomplete: "off", placeholder: "such as padding, or GPT-2",
    onInput: () => (found.textContent = find(input.value)) });
  return h("label", { class: "field learn-find" }, h("span", null, "Search the list"), input, found);
}

/** Return a text as it is searched: without case, quotation marks and hyphens. @param {string} text */
function plain(text) {
  return text.toLowerCase().replace(/(?<=\d),(?=\d{3})/g, "").replace(/(?<=\d) ?[x×] ?(?=\d)/g, " × ")
    .replace(/["“”'‘’`]/g, "").replace(/ᵀ|\^\\top/g, "^t").replace(/[-‐–]/g, " ");
}

/**
 * Show the exercises that contain each word of a text, and open their lessons; say how many there are.
 * @param {HTMLDetailsElement[]} lessons
 * @param {string} text
 */
function filter(lessons, text) {
  const words = plain(text).split(/\s+/).filter(Boolean);
  /** Show an element if one of its parts is shown. @param {HTMLElement} element @param {string} parts */
  const follow = (element, parts) => (element.hidden = !element.querySelector(`${parts}:not([hidden])`));
  for (const lesson of lessons) {
    for (const link of lesson.querySelectorAll("a")) {
      const part = link.closest("section")?.firstChild?.textContent;
      const entry = `${part} ${link.textContent} ${link.dataset.claim} ${link.title}`;
      const said = plain(`${entry} ${entry.replaceAll("-", "")}`); // “lookup” finds “look-up”
      /** @type {HTMLElement} */ (link.parentElement).hidden = !words.every((word) => said.includes(word));
    }
    for (const part of lesson.querySelectorAll("section")) follow(part, "li");
    lesson.open = !follow(lesson, "section") && words.length > 0;
  }
  /** @param {string} item */
  const count = (item) => lessons.reduce((sum, lesson) => sum + lesson.querySelectorAll(item).length, 0);
  return words.length ? `${count("li:not([hidden])")} of ${count("li")} entries` : "";
}

/** Create the list of a lesson's exercises, closed at first. @param {Lesson} lesson @param {number} source */
function partsOf({ name, about, parts }, source) {
  return h("details", { class: "learn-lesson" },
    h("summary", null, name, h("small", null, about)),
    parts.map(([part, exercises]) => h("section", null, h("h3", null, part),
      h("ul", null, exercises.map((exercise) => h("li", null, linkTo(exercise, source)))))));
}

/** Create the button that calls `onReset` at the second click. @param {() => void} onReset */
function resetButton(onReset) {
  const text = "Reset all tasks and settings";
  const button = h("button", { type: "button", onClick: () => {
    const isSure = button.textContent !== text;
    button.textContent = isSure ? text : "Click again to reset all";
    if (isSure) onReset();
  } }, text);
  button.addEventListener("blur", () => (button.textContent = text));
  return button;
}

/** @param {Exercise} exercise @param {number} source */
function linkTo(exercise, source) {
  const title = exercise.said ? `“${exercise.said}”` : null;
  return h("a", { href: hashOf(exercise, source), "data-claim": exercise.claim ?? null, title },
    h("span", null, exercise.name),
    exercise.holds === undefined ? null : verdictOf(exercise.holds), h("small", null, placeOf(exercise)));
}
