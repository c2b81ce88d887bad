// The keyboard, as the page's own list of keys says it.

import { FILTERS } from "./explorer.js";

export function listen(page) {
  const dialog = document.getElementById("keys");
  const actions = {
    j: () => page.explorer?.step(1),
    k: () => page.explorer?.step(-1),
    ArrowDown: () => page.explorer?.step(1),
    ArrowUp: () => page.explorer?.step(-1),
    "/": () => page.explorer?.input.focus(),
    "[": () => page.turn(-1),
    "]": () => page.turn(1),
    c: () => navigator.clipboard?.writeText(location.href),
    t: () => page.theme(),
    "?": () => dialog.showModal(),
    Escape: () => page.navigate({ sample: null, pass: null }),
    ...Object.fromEntries(Object.keys(FILTERS).map((show, i) => [String(i + 1), () => page.navigate({ show })])),
  };
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.target.matches("input")) {
      if (event.key === "Escape" || event.key === "Enter") event.target.blur();
      return;
    }
    const arrow = event.key.startsWith("Arrow");
    const inList = page.explorer?.list.contains(event.target) || page.explorer?.open;
    const action = Object.hasOwn(actions, event.key) ? actions[event.key] : null;
    if (!action || (arrow && !inList)) return;
    event.preventDefault();
    action();
  });
}
