/** The view Learn: a guided story in short scenes, each with a task that the page checks. */

import { h, nodesOf, onResize } from "../dom.js";
import { lessonOf } from "../learn/course.js";
import { lessonIndex } from "../learn/lesson.js";
import { Progress } from "../learn/progress.js";
import { SCENES } from "../learn/scenes.js";
import { Stage } from "../learn/stage.js";
import { definitionBox, termLine, withTerms } from "../learn/terms.js";

/** @import { Child, View, ViewContext } from "../types" */

/** @type {View} */
export const view = {
  id: "learn",
  title: "Learn",
  sentence: "What is an embedding? A story in short scenes. Each one has a picture that you can change and one task.",
  link: () => h("span", { class: "view-link" }, "You know embeddings? ", h("a", { href: "#map" }, "Go to the Map")),
  needs: [],
  keys: [
    ["← →", "previous or next scene of the story (outside of controls)"],
    ["Enter", "next scene: at a question whose task is done, and at each after Next; in a field with the right answer "
      + "it moves to Next"],
  ],
  open,
};

/** Elements that use the arrow keys themselves. */
const USES_ARROWS = "input, select, textarea, canvas, [role=tab]";
/** Fields of a picture in which Enter does nothing else. */
const ANSWERS = ".learn-picture :is(input[type=text], input[type=range], input[type=number])";
/** Events by which a reader changes a picture. */
const ACTIONS = ["pointerdown", "keydown", "input", "click"];

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const story = new LearnView(element, context);
  await story.show();
  return story;
}

class LearnView {
  /** @type {Stage | null} */ #stage = null;
  #shown = "";
  /** ID of the scene whose picture is shown. */ #drawn = "";
  /** What the exercise says that was opened last: its verdict is marked. */ #claim = "";
  /** Whether the reader changed the picture since it was drawn. */ #hasActed = false;
  /** Whether the picture shows the task done. */ #isRight = false;
  /** Whether the reader goes from scene to scene with Next. */ #usesNext = false;
  /** @type {() => void} */ #stopWatching;

  /** @param {HTMLElement} element @param {ViewContext} context */
  constructor(element, context) {
    this.progress = new Progress(context);
    this.context = { ...context, state: this.progress.state };
    this.definitions = definitionBox(element);
    this.rail = SCENES.map((scene, i) => h("button", {
      type: "button", title: scene.name, onClick: () => this.#go(i),
    }, h("b", null, String(i + 1)), " ", h("span", null, scene.name)));
    this.name = h("p", { class: "note learn-name" });
    this.question = h("h2", { tabIndex: -1 });
    this.sentences = h("div", { class: "learn-sentences" });
    this.picture = h("section", { class: "panel learn-picture", "aria-label": "Picture" });
    this.claims = h("div", { class: "panel learn-often" });
    this.task = h("p", { class: "learn-task" });
    this.verdict = h("p", { class: "learn-verdict", role: "status", "aria-live": "polite" });
    this.back = h("button", { type: "button", onClick: () => this.#go(this.#index() - 1) }, "Back");
    const goOn = () => {
      this.#usesNext = true;
      this.#go(this.#nextIndex());
    };
    const shortcut = { "aria-keyshortcuts": "Enter" };
    this.next = h("button", { type: "button", class: "learn-next", onClick: goOn, ...shortcut }, "Next");
    this.count = h("span", { class: "note" });
    this.lesson = h("p", { class: "note learn-lesson-of" });
    element.replaceChildren(
      h("nav", { class: "learn-rail", "aria-label": "Scenes" },
        h("ol", null, this.rail.map((each) => h("li", null, each)))),
      h("div", { class: "learn" },
        h("div", { class: "learn-text" }, this.name, this.question, this.sentences),
        h("div", { class: "learn-main" }, this.picture, this.claims),
        h("section", { class: "learn-foot", "aria-label": "Task" }, this.task, this.verdict,
          h("div", { class: "learn-moves" }, this.back, this.count, this.next)),
        this.lesson,
        lessonIndex(context, () => this.#reset(), (claim) => this.#markClaim(claim))),
      this.definitions.element);
    for (const action of ACTIONS) this.picture.addEventListener(action, () => (this.#hasActed = true), true);
    this.#stopWatching = onResize(this.picture, () => sayWhatScrolls(this.picture));
    document.addEventListener("keydown", this.#onKey);
  }

  close() {
    this.#stage?.close();
    this.#stopWatching();
    this.definitions.close();
    document.removeEventListener("keydown", this.#onKey);
  }

  stateChanged() {
    this.show();
    this.#reveal();
  }

  /** Draw the scene about the real table again, if it shows another token. @param {number | null} id */
  tokenChosen(id) {
    const { state } = this.context;
    const shown = SCENES[this.#index()].id === "real" ? state.get("real.id") : undefined;
    if (id !== null && shown !== undefined && shown !== String(id)) this.show();
  }

  /** Draw the scene of the URL. */
  async show() {
    this.progress.restore();
    const index = this.#index();
    const scene = SCENES[index];
    this.#stage?.close();
    this.definitions.hide();
    const seen = this.#showText(index);
    const stage = new Stage(scene.id, this.context, (isDone, ...text) => {
      if (!stage.isClosed) this.#judge(isDone, text);
    }, seen);
    [this.#stage, this.#shown, this.#hasActed, this.#isRight] = [stage, "", false, false];
    this.picture.setAttribute("aria-busy", "true");
    if (scene.id !== this.#drawn) {
      this.picture.replaceChildren(h("p", { class: "note" }, "Loading …"));
      this.claims.replaceChildren();
    }
    this.#drawn = scene.id;
    this.#showProgress();
    try {
      const parts = nodesOf(await scene.draw(stage));
      if (stage.isClosed) return;
      const isClaims = (/** @type {Node | string} */ part) => part instanceof Element && part.matches(".learn-claims");
      this.picture.replaceChildren(...parts.filter((part) => !isClaims(part)));
      this.claims.replaceChildren(...parts.filter(isClaims)); // on a phone the sentences are before them
    } catch (error) {
      const { message } = /** @type {Error} */ (error);
      if (!stage.isClosed) this.picture.replaceChildren(h("p", { class: "note" }, message));
    }
    this.picture.removeAttribute("aria-busy");
    this.#markClaim(this.#claim);
    this.#claim = "";
    this.#showProgress();
  }

  /** Show the text of a scene; return the special words in it. @param {number} index */
  #showText(index) {
    const { name, question, sentences, task, words = [] } = SCENES[index];
    const seen = /** @type {Set<string>} */ (new Set());
    this.name.textContent = `Scene ${index + 1} of ${SCENES.length}: ${name}`;
    this.question.textContent = question;
    this.sentences.replaceChildren(...sentences.map((sentence) => h("p", null, withTerms(sentence, seen))));
    this.task.replaceChildren(...nodesOf([h("b", null, "Your task. "), withTerms(task, seen)]));
    const line = termLine(words, seen);
    if (line) this.sentences.append(line);
    this.verdict.replaceChildren();
    this.back.disabled = index === 0;
    this.lesson.replaceChildren(...nodesOf(lessonOf(SCENES[index].id, this.context.course)));
    return seen;
  }

  /** Mark and show the verdict about a claim in this scene, and in the next one that is drawn. @param {string} claim */
  #markClaim(claim) {
    this.#claim = claim;
    for (const item of document.querySelectorAll("#view-learn .learn-claims li")) {
      const quote = item.querySelector("q")?.textContent ?? "";
      const isAsked = item.classList.toggle("learn-asked", claim !== "" && quote.startsWith(claim));
      const reveal = () => item.scrollIntoView({ block: "nearest" });
      if (isAsked) requestAnimationFrame(() => requestAnimationFrame(reveal)); // charts have their heights then
    }
  }

  #index() {
    return Math.max(0, SCENES.findIndex(({ id }) => id === this.context.state.get("s")));
  }

  /** @param {number} index */
  #go(index) {
    if (index < 0 || index >= SCENES.length) return;
    this.context.state.push({ s: index ? SCENES[index].id : null });
    this.show();
    this.#reveal();
  }

  /** Scroll to the scene and focus its heading. */
  #reveal() {
    this.question.focus({ preventScroll: true });
    document.querySelector(".learn-rail")?.scrollIntoView({ block: "nearest" });
  }

  /** Return the scene after this one; after the last one, the first whose task is open, or -1. */
  #nextIndex() {
    const index = this.#index();
    if (index < SCENES.length - 1) return index + 1;
    const done = this.progress.done();
    return SCENES.findIndex(({ id }, i) => i !== index && !done.includes(id));
  }

  #reset() {
    this.progress.clear();
    this.show();
    this.#reveal();
  }

  /**
   * Show whether the task is done. What was done once stays done; what a link shows counts once the reader changes it.
   * @param {boolean} isRight
   * @param {Child[]} text
   */
  #judge(isRight, text) {
    const { id } = SCENES[this.#index()];
    if (isRight && this.#hasActed && !this.progress.done().includes(id)) this.progress.addDone(id);
    const wasDone = this.progress.done().includes(id);
    const isDone = isRight && wasDone;
    this.#isRight = isDone;
    const state = isDone ? "Done. " : wasDone ? "Done before. " : isRight ? "The link shows a solution. " : "Not yet. ";
    const content = h("span", null, h("b", null, state), text);
    const said = content.textContent ?? "";
    if (said === this.#shown) return;
    this.#shown = said;
    this.verdict.replaceChildren(content);
    this.verdict.classList.toggle("learn-right", isDone);
    this.#showProgress();
  }

  #showProgress() {
    const [index, done, next] = [this.#index(), this.progress.done(), this.#nextIndex()];
    this.rail.forEach((button, i) => {
      const isDone = done.includes(SCENES[i].id);
      button.classList.toggle("learn-done", isDone);
      button.setAttribute("aria-label", `${i + 1} ${SCENES[i].name}${isDone ? ", done" : ""}`);
      if (i === index) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    this.next.disabled = next < 0;
    this.next.textContent = next < 0 || next > index ? "Next" : `To task ${next + 1}`;
    this.next.classList.toggle("learn-ready", done.includes(SCENES[index].id));
    this.count.textContent = `${done.length} of ${SCENES.length} tasks done`;
  }

  /**
   * Go on to the next scene from its question; from a field with the right answer to the button Next, beside which the
   * verdict says why it is right. Return whether Enter does either.
   * @param {HTMLElement} target
   */
  #onEnter(target) {
    if (target === this.question || target === document.body) {
      const goesOn = this.#usesNext || this.progress.done().includes(SCENES[this.#index()].id);
      if (goesOn) this.next.click();
      return goesOn;
    }
    const isAnswer = this.#isRight && target.matches(ANSWERS);
    if (isAnswer) this.next.focus();
    return isAnswer;
  }

  #onKey = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "Enter" && !event.repeat && this.#onEnter(target)) return event.preventDefault();
    const hasModifier = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
    if (!step || hasModifier || target.closest?.(USES_ARROWS)) return;
    event.preventDefault();
    this.#go(this.#index() + step);
  };
}

/** Say above each part of a picture that is wider than its place that it scrolls. @param {HTMLElement} picture */
function sayWhatScrolls(picture) {
  for (const hint of picture.querySelectorAll(".learn-scrolls")) hint.remove();
  for (const part of picture.querySelectorAll(".scroll, .learn-equation")) {
    if (part.scrollWidth <= part.clientWidth + 1) continue;
    part.before(h("p", { class: "note learn-scrolls" }, "Scroll sideways →"));
  }
}
