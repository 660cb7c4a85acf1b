// What happened, as the launcher prints it, newest first.

import { cut, el } from "./dom.js";
import { duration, number } from "./format.js";
import { icon, markForm } from "./states.js";

const MOST_EVENTS = 200;

// A line of the launcher, with the name of the member or replica in front unless the line has it.
export function told(mark) {
  const name = mark.member ?? mark.replica;
  return name && !mark.text.includes(name) ? `${cut(name, 60)}: ${cut(mark.text, 200)}` : cut(mark.text, 200);
}

export function eventsList(marks, goTo, most = MOST_EVENTS) {
  if (!marks.length) return el("p", { class: "muted" }, "Nothing has happened yet.");
  const shown = marks.slice(-most).reverse();
  const rest =
    marks.length > most
      ? el("p", { class: "muted" }, `${number(marks.length - most)} earlier events are not listed.`)
      : null;
  return el(
    "div",
    {},
    el(
      "ul",
      { class: "marks" },
      shown.map((mark) =>
        el(
          "li",
          {},
          icon(markForm(mark.kind)),
          el(
            "button",
            { type: "button", class: "link", title: "Show this moment", on: { click: () => goTo(mark.time) } },
            duration(mark.time),
          ),
          el("span", {}, told(mark)),
        ),
      ),
    ),
    rest,
  );
}
