/** The view Learn: a guided story in short scenes, each with a task that the page checks. */

import { h } from "../dom.js";
import { SCENES } from "../learn/scenes.js";
import { Stage } from "../learn/stage.js";

/** @import { Child, View, ViewContext } from "../types" */

/** @type {View} */
export const view = {
  id: "learn",
  title: "Learn",
  sentence: "What is an embedding? A story in short scenes. Each one has a picture that you can change and one task.",
  needs: [],
  keys: [["← →", "previous or next scene of the story (outside of controls)"]],
  open,
};

/** Elements that use the arrow keys themselves. */
const USES_ARROWS = "input, select, textarea, canvas, [role=tab], dialog[open]";

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const story = new LearnView(element, context);
  await story.show();
  return story;
}

class LearnView {
  /** @type {Stage | null} */ #stage = null;
  #shown = "";

  /** @param {HTMLElement} element @param {ViewContext} context */
  constructor(element, context) {
    this.context = context;
    this.rail = SCENES.map((scene, i) => h("button", {
      type: "button", title: scene.name, onClick: () => this.#go(i),
    }, h("b", null, String(i + 1)), " ", h("span", null, scene.name)));
    this.question = h("h2", { tabIndex: -1 });
    this.sentences = h("div", { class: "learn-sentences" });
    this.picture = h("section", { class: "panel learn-picture", "aria-label": "Picture" });
    this.task = h("p", { class: "learn-task" });
    this.verdict = h("p", { class: "learn-verdict", role: "status", "aria-live": "polite" });
    this.back = h("button", { type: "button", onClick: () => this.#go(this.#index() - 1) }, "Back");
    const goOn = () => this.#go(this.#index() + 1);
    this.next = h("button", { type: "button", class: "learn-next", onClick: goOn }, "Next");
    this.count = h("span", { class: "note" });
    element.replaceChildren(
      h("nav", { class: "learn-rail", "aria-label": "Scenes" },
        h("ol", null, this.rail.map((each) => h("li", null, each)))),
      h("div", { class: "learn" },
        h("div", { class: "learn-text" }, this.question, this.sentences), this.picture,
        h("section", { class: "learn-foot", "aria-label": "Task" }, this.task, this.verdict,
          h("div", { class: "learn-moves" }, this.back, this.count, this.next))));
    document.addEventListener("keydown", this.#onKey);
  }

  close() {
    this.#stage?.close();
    document.removeEventListener("keydown", this.#onKey);
  }

  stateChanged() {
    this.show();
  }

  /** Draw the scene about the real table again, if it shows another token. @param {number | null} id */
  tokenChosen(id) {
    const { state } = this.context;
    const shown = SCENES[this.#index()].id === "real" ? state.get("real.id") : undefined;
    if (id !== null && shown !== undefined && shown !== String(id)) this.show();
  }

  /** Draw the scene of the URL. */
  async show() {
    const index = this.#index();
    const scene = SCENES[index];
    this.#stage?.close();
    const stage = new Stage(scene.id, this.context, (isDone, ...text) => {
      if (!stage.isClosed) this.#judge(isDone, text);
    });
    this.#stage = stage;
    this.#shown = "";
    this.question.textContent = scene.question;
    this.sentences.replaceChildren(...scene.sentences.map((sentence) => h("p", null, sentence)));
    this.task.replaceChildren(h("b", null, "Your task. "), scene.task);
    this.verdict.replaceChildren();
    this.back.disabled = index === 0;
    this.next.disabled = index === SCENES.length - 1;
    this.picture.setAttribute("aria-busy", "true");
    try {
      const parts = await scene.draw(stage);
      if (stage.isClosed) return;
      this.picture.replaceChildren(...h("div", null, ...parts).childNodes);
    } catch (error) {
      const { message } = /** @type {Error} */ (error);
      if (!stage.isClosed) this.picture.replaceChildren(h("p", { class: "note" }, message));
    }
    this.picture.removeAttribute("aria-busy");
    this.#showProgress();
  }

  #index() {
    return Math.max(0, SCENES.findIndex(({ id }) => id === this.context.state.get("s")));
  }

  /** @param {number} index */
  #go(index) {
    if (index < 0 || index >= SCENES.length) return;
    this.context.state.set({ s: index ? SCENES[index].id : null });
    this.show();
    this.question.focus({ preventScroll: true });
    document.querySelector(".learn-rail")?.scrollIntoView({ block: "nearest" });
  }

  /** Return the IDs of the scenes whose tasks are done, in the order of the story. */
  #done() {
    const done = this.context.state.get("done", "").split(".");
    return SCENES.map(({ id }) => id).filter((id) => done.includes(id));
  }

  /** Show whether the task is done; what was done once stays done. @param {boolean} isDone @param {Child[]} text */
  #judge(isDone, text) {
    const { id } = SCENES[this.#index()];
    const done = this.#done();
    if (isDone && !done.includes(id)) this.context.state.set({ done: [...done, id].join(".") });
    const state = isDone ? "Done. " : done.includes(id) ? "Done before. " : "Not yet. ";
    const content = h("span", null, h("b", null, state), text);
    const said = content.textContent ?? "";
    if (said === this.#shown) return;
    this.#shown = said;
    this.verdict.replaceChildren(content);
    this.verdict.classList.toggle("learn-right", isDone);
    this.#showProgress();
  }

  #showProgress() {
    const [index, done] = [this.#index(), this.#done()];
    this.rail.forEach((button, i) => {
      const isDone = done.includes(SCENES[i].id);
      button.classList.toggle("learn-done", isDone);
      button.setAttribute("aria-label", `${i + 1} ${SCENES[i].name}${isDone ? ", done" : ""}`);
      if (i === index) button.setAttribute("aria-current", "step");
      else button.removeAttribute("aria-current");
    });
    this.next.classList.toggle("learn-ready", done.includes(SCENES[index].id));
    this.count.textContent = `${done.length} of ${SCENES.length} tasks done`;
  }

  #onKey = (/** @type {KeyboardEvent} */ event) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const target = /** @type {HTMLElement} */ (event.target);
    if (!step || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.defaultPrevented || target.closest?.(USES_ARROWS) || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    this.#go(this.#index() + step);
  };
}

