/** Moving, zooming and choosing on a canvas: mouse, pen, fingers and keys. */

/**
 * @typedef {[number, number]} Place in CSS pixels from the canvas' corner
 * @typedef {object} Handlers
 * @property {(at: Place | null) => void} hover null where the pointer left
 * @property {(dx: number, dy: number) => void} pan
 * @property {(factor: number, x?: number, y?: number) => void} zoom about a place; about the middle without one
 * @property {() => void} home show all
 * @property {(at: Place, how: {touch: boolean, more: boolean}) => void} pick
 * @property {() => void} [enter] choose what is in the middle
 * @property {() => void} [escape]
 * @property {() => void} [focus] the canvas has or loses the focus
 * @property {() => boolean} [lasso] whether a drag draws a line
 * @property {(line: Place[] | null) => void} [draw] the line so far
 * @property {() => void} [drawn] it is finished
 */

const STEP = 60; // pixels an arrow key moves
const STILL = 5; // pixels a click may wander

/**
 * Listen on `canvas`; returns how to stop.
 * @param {HTMLCanvasElement} canvas @param {Handlers} on
 */
export function gestures(canvas, on) {
  /** @type {Map<number, Place>} */
  const pointers = new Map();
  let moved = 0;
  let line = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

  const listeners = {
    pointerdown(event) {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, place(event));
      moved = 0;
      line = pointers.size === 1 && on.lasso?.() ? [place(event)] : null;
      canvas.classList.add("is-moving");
    },
    pointermove(event) {
      const now = place(event);
      const before = pointers.get(event.pointerId);
      if (!before) return on.hover(now);
      on.hover(null);
      const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
      moved += Math.hypot(dx, dy);
      pointers.set(event.pointerId, now);
      if (line) { line.push(now); on.draw(line); }
      else if (pointers.size === 1) on.pan(dx, dy);
      else pinch(event.pointerId, before, now);
    },
    pointerup(event) {
      const last = pointers.size === 1;
      release(event);
      if (line) { line = null; on.drawn(); }
      else if (last && moved < STILL) on.pick(place(event), { touch: event.pointerType === "touch", more: event.shiftKey });
    },
    pointercancel(event) {
      release(event);
      if (line) { line = null; on.draw(null); }
    },
    pointerleave: () => on.hover(null),
    wheel(event) {
      event.preventDefault();
      const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1);
      on.zoom(Math.exp(-pixels * (event.ctrlKey ? 0.01 : 0.0016)), ...place(event));
    },
    dblclick: (event) => on.zoom(2, ...place(event)),
    keydown(event) {
      const act = {
        ArrowLeft: () => on.pan(STEP, 0), ArrowRight: () => on.pan(-STEP, 0), ArrowUp: () => on.pan(0, STEP), ArrowDown: () => on.pan(0, -STEP),
        "+": () => on.zoom(1.3), "=": () => on.zoom(1.3), "-": () => on.zoom(1 / 1.3), "_": () => on.zoom(1 / 1.3), 0: on.home, Enter: on.enter, Escape: on.escape,
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    },
    focus: () => on.focus?.(),
    blur: () => on.focus?.(),
  };

  function pinch(moving, before, now) {
    const other = [...pointers].find(([id]) => id !== moving)[1];
    const apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
    on.pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
    on.zoom(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  }

  function release(event) {
    pointers.delete(event.pointerId);
    if (!pointers.size) canvas.classList.remove("is-moving");
  }

  for (const [name, listener] of Object.entries(listeners)) canvas.addEventListener(name, listener, name === "wheel" ? { passive: false } : undefined);
  return () => { for (const [name, listener] of Object.entries(listeners)) canvas.removeEventListener(name, listener); };
}
