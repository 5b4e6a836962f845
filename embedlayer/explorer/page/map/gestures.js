/**
 * Moving, zooming and choosing on a canvas by mouse, pen, fingers and keys.
 *
 * One finger scrolls the page, as everywhere else, until the canvas is tapped twice; from then on it moves the picture,
 * until something else is tapped. Two fingers always move and zoom the picture.
 */

/** @import { Point } from "../types" */

/**
 * @typedef {object} Handlers places are CSS pixels from the canvas' corner
 * @property {(at: Point | null) => void} hover null when the pointer leaves
 * @property {(dx: number, dy: number) => void} pan
 * @property {(factor: number, x?: number, y?: number) => void} zoom around a place, or around the middle
 * @property {() => void} home show all
 * @property {(at: Point, how: {touch: boolean, more: boolean}) => void} pick
 * @property {() => void} [enter] choose the point in the middle
 * @property {() => void} [escape]
 * @property {() => void} [focus] the canvas gets or loses the focus
 * @property {() => boolean} [lasso] whether a drag draws a line
 * @property {(line: Point[] | null) => void} [draw] the line so far
 * @property {() => void} [drawn] the line is finished
 * @property {() => void} [scrolled] a finger that the canvas did not listen to has moved over it
 */

const STEP = 60; // pixels of an arrow key
const STILL = 5; // pixels that a click may move
const TWICE = 350; // milliseconds between two taps
const NEAR = 40; // pixels between two taps

/** @type {Record<string, (on: Handlers) => void>} */
const KEYS = {
  ArrowLeft: (on) => on.pan(STEP, 0),
  ArrowRight: (on) => on.pan(-STEP, 0),
  ArrowUp: (on) => on.pan(0, STEP),
  ArrowDown: (on) => on.pan(0, -STEP),
  "+": (on) => on.zoom(1.3),
  "=": (on) => on.zoom(1.3),
  "-": (on) => on.zoom(1 / 1.3),
  "_": (on) => on.zoom(1 / 1.3),
  0: (on) => on.home(),
  Enter: (on) => on.enter?.(),
  Escape: (on) => on.escape?.(),
};

/** Listens on a canvas and calls handlers. */
export class Gestures {
  /** @type {Map<number, Point>} */ #pointers = new Map();
  /** @type {Point[] | null} */ #line = null;
  #moved = 0;
  #isActive = false; // one finger moves the picture
  #tapped = { time: -Infinity, at: /** @type {Point} */ ([0, 0]) }; // the last tap
  #activated = -Infinity; // when the picture became active
  #controller = new AbortController();

  /** @param {HTMLCanvasElement} canvas @param {Handlers} on */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on;
    const { signal } = this.#controller;
    canvas.addEventListener("pointerdown", (event) => this.#down(event), { signal });
    canvas.addEventListener("pointermove", (event) => this.#move(event), { signal });
    canvas.addEventListener("pointerup", (event) => this.#up(event), { signal });
    canvas.addEventListener("pointercancel", (event) => this.#cancel(event), { signal });
    canvas.addEventListener("pointerleave", () => on.hover(null), { signal });
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { signal, passive: false });
    canvas.addEventListener("dblclick", (event) => this.#double(event), { signal });
    document.addEventListener("pointerdown", (event) => this.#outside(event), { signal });
    canvas.addEventListener("keydown", (event) => this.#key(event), { signal });
    canvas.addEventListener("focus", () => on.focus?.(), { signal });
    canvas.addEventListener("blur", () => on.focus?.(), { signal });
  }

  close() {
    this.#controller.abort();
  }

  /** @param {MouseEvent} event @returns {Point} */
  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** @param {PointerEvent} event */
  #down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, this.#place(event));
    this.#moved = 0;
    this.#line = this.#pointers.size === 1 && this.on.lasso?.() ? [this.#place(event)] : null;
    this.canvas.classList.add("is-moving");
  }

  /** @param {PointerEvent} event */
  #move(event) {
    const now = this.#place(event);
    const before = this.#pointers.get(event.pointerId);
    if (!before) return this.on.hover(now);
    this.on.hover(null);
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    this.#moved += Math.hypot(dx, dy);
    this.#pointers.set(event.pointerId, now);
    if (this.#line) {
      this.#line.push(now);
      this.on.draw?.(this.#line);
    } else if (this.#pointers.size > 1) this.#pinch(event.pointerId, before, now);
    else if (event.pointerType !== "touch" || this.#isActive) this.on.pan(dx, dy);
    else if (this.#moved > NEAR) this.on.scrolled?.();
  }

  /** @param {PointerEvent} event */
  #up(event) {
    const isLast = this.#pointers.size === 1;
    this.#release(event);
    if (this.#line) {
      this.#line = null;
      this.on.drawn?.();
    } else if (isLast && this.#moved < STILL) {
      const touch = event.pointerType === "touch";
      if (touch) this.#tap(event);
      this.on.pick(this.#place(event), { touch, more: event.shiftKey });
    }
  }

  /** The second of two taps makes the picture active. @param {PointerEvent} event */
  #tap(event) {
    const at = this.#place(event);
    const { time, at: before } = this.#tapped;
    const isSecond = event.timeStamp - time < TWICE && Math.hypot(at[0] - before[0], at[1] - before[1]) < NEAR;
    this.#tapped = { time: event.timeStamp, at };
    if (!isSecond || this.#isActive) return;
    this.#activated = event.timeStamp;
    this.#setActive(true);
  }

  /** @param {boolean} isActive */
  #setActive(isActive) {
    this.#isActive = isActive;
    this.canvas.classList.toggle("is-active", isActive);
  }

  /** @param {PointerEvent} event */
  #outside(event) {
    if (this.#isActive && event.target !== this.canvas) this.#setActive(false);
  }

  /** @param {MouseEvent} event */
  #double(event) {
    if (event.timeStamp - this.#activated > TWICE) this.on.zoom(2, ...this.#place(event));
  }

  /** @param {PointerEvent} event */
  #cancel(event) {
    this.#release(event);
    if (event.pointerType === "touch" && !this.#isActive) this.on.scrolled?.();
    if (!this.#line) return;
    this.#line = null;
    this.on.draw?.(null);
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1);
    this.on.zoom(Math.exp(-pixels * (event.ctrlKey ? 0.01 : 0.0016)), ...this.#place(event));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(this.on);
  }

  /** @param {number} moving @param {Point} before @param {Point} now */
  #pinch(moving, before, now) {
    const other = [...this.#pointers].find(([id]) => id !== moving)?.[1];
    if (!other) return;
    /** @param {Point} at */
    const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
    this.on.pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
    this.on.zoom(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  }

  /** @param {PointerEvent} event */
  #release(event) {
    this.#pointers.delete(event.pointerId);
    if (!this.#pointers.size) this.canvas.classList.remove("is-moving");
  }
}
