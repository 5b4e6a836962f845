"""Laws of all controls and pictures of the explorer's page, and waiting for it."""

from typing import Any

FAULTS = """async ([roots, except, keeps]) => {
    const parts = () => [...document.querySelectorAll(roots)];
    const within = (selector) => parts().flatMap((part) => [...part.querySelectorAll(selector)])
        .filter((each) => each.offsetParent && !each.disabled && !each.closest("details:not([open])"));
    const text = () => parts().map((part) => {
        const copy = part.cloneNode(true);
        copy.querySelectorAll(".field, .check, canvas, .learn-scrolls").forEach((each) => each.remove());
        return copy.innerHTML;
    }).join();
    const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const pixels = (canvas) => {
        const { width, height } = canvas;
        if (!width || !height) return 0;
        if (scratch.canvas.width < width || scratch.canvas.height < height) {
            [scratch.canvas.width, scratch.canvas.height] = [Math.max(width, 2048), Math.max(height, 1024)];
        }
        scratch.clearRect(0, 0, width, height);
        scratch.drawImage(canvas, 0, 0);
        let sum = 0;
        for (const each of new Uint32Array(scratch.getImageData(0, 0, width, height).data.buffer)) {
            sum = (Math.imul(sum, 31) + each) | 0;
        }
        return sum;
    };
    const canvases = () => parts().flatMap((part) => [...part.querySelectorAll("canvas")]).map(pixels).join();
    const until = async (isSo) => {
        for (let i = 0; i < 600 && !isSo(); i++) await new Promise(requestAnimationFrame);
        return isSo();
    };
    const frames = (count) => until(() => count-- <= 0);
    const fill = (control, value) => {
        control.value = value;
        control.dispatchEvent(new Event(control.matches("select") ? "change" : "input", { bubbles: true }));
    };
    const ways = (control) => {
        const { value, max, min, parentElement: group } = control;
        if (control.matches("button")) {
            const now = [...group.children].indexOf(control);
            const before = [...group.children].findIndex((each) => each.ariaPressed === "true");
            return [now, before < 0 ? now : before].map((at) => () => group.children[at].click());
        }
        if (control.matches("[type=checkbox]")) return [() => control.click(), () => control.click()];
        const values = control.matches("select") ? [...control.options].filter((each) => !each.disabled)
            .map((each) => each.value) : [max, min];
        return [values.find((each) => each !== value), value].map((each) => () => fill(control, each));
    };
    const nameOf = (control) => control.ariaLabel
        ?? (control.matches("button") ? control : control.closest("label")).textContent;
    const controls = () => within(
        "select, .segments button[aria-pressed=false], input:is([type=range], [type=checkbox])");
    const found = [];
    let [picture, equal] = ["", 0];
    await until(() => { // a chart is drawn when it has its width
        const now = text() + canvases();
        equal = now === picture ? equal + 1 : 0;
        picture = now;
        return equal > 3;
    });
    for (let number = 0; number < controls().length; number++) {
        const control = controls()[number];
        const name = nameOf(control);
        if (except.some((each) => name.startsWith(each))) continue;
        await frames(2);
        const [before, drawn] = [text(), canvases()];
        const [there, back] = ways(control);
        there();
        if (!await until(() => text() !== before || canvases() !== drawn)) found.push(`${name}: changes nothing`);
        back();
        const isBack = () => text() === before && canvases() === drawn;
        if (!await until(isBack)) found.push(`${name}: set back, another picture`);
    }
    for (const canvas of within("figure canvas[role=img], .chart canvas")) {
        if (except.includes(canvas.ariaLabel)) continue;
        const said = () => canvas.closest("figure, .chart").textContent;
        const { left, top, width, height } = canvas.getBoundingClientRect();
        const send = (name, x, y) => canvas.dispatchEvent(new PointerEvent(name, { pointerType: "touch", bubbles: true,
            clientX: left + x * width, clientY: top + y * height }));
        const [before, drawn] = [said(), pixels(canvas)];
        send("pointerdown", 0.3, 0.4);
        const [first, marked] = [said(), pixels(canvas)];
        send("pointermove", 0.9, 0.9);
        if (first === before || marked === drawn) found.push(`${canvas.ariaLabel}: a touch shows nothing`);
        if (said() === first) found.push(`${canvas.ariaLabel}: the pointer shows nothing`);
        send("pointerleave", -1, -1);
        if (canvas.tabIndex === 0) {
            canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
            if (said() === before || pixels(canvas) === drawn) found.push(`${canvas.ariaLabel}: keys show nothing`);
            canvas.dispatchEvent(new Event("blur"));
        }
        if (said() !== before || pixels(canvas) !== drawn) found.push(`${canvas.ariaLabel}: shown after it left`);
    }
    const values = () => within("input, select").map((each) => (each.type === "checkbox" ? each.checked : each.value));
    for (let number = 0; number < controls().length; number++) {
        const control = controls()[number];
        if (!except.some((each) => nameOf(control).startsWith(each))) ways(control)[0]();
        await frames(2);
    }
    const [before, drawn, set, address] = [text(), canvases(), String(values()), location.hash];
    location.hash = "#training";
    await until(() => document.querySelector("#view-training > :not(.loading)"));
    location.hash = address;
    const isSame = () => parts().length && String(values()) === set && text() === before && canvases() === drawn;
    if (!await until(keeps ? isSame : () => parts().length)) found.push("its address shows another picture");
    await frames(5);
    return found;
}"""


def faults(page: Any, roots: str, *, besides: tuple[str, ...] = (), keeps: bool = True) -> list[str]:
    """Set each control below `roots` to another value and back, touch each chart, and return what broke a law.

    Each control changes the picture, and set back it shows what was there before. Each chart says what is at a finger,
    at the pointer and at the keys' cursor, and nothing when they leave. With `keeps`, the address of the view with
    other values shows their picture again.
    """
    return page.evaluate(FAULTS, [roots, list(besides), keeps])


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true; playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(3000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"never true: {expression}")
