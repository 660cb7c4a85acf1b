// How numbers, states and events are written: null is unknown and becomes a dash.

import { cut, el, svg, textButton } from "./dom.js";

const STEPS = ["", "k", "M", "G", "T"];

function scaled(value, unit, digits = 3) {
  let step = 0;
  while (value >= 999.5 && step < STEPS.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${Number(value.toPrecision(digits))} ${STEPS[step]}${unit}`;
}

const known =
  (write) =>
  (value, ...rest) =>
    value === null || value === undefined || Number.isNaN(value) ? "–" : write(value, ...rest);

export const bytes = known((value) => scaled(value, "B"));
export const rate = known((value) => scaled(value * 8, "bit/s")); // bytes a second come in, lines are sold in bits
export const capacity = (value) => (value == null ? "unlimited" : rate(value));
export const percent = known((share) => `${Math.round(100 * share)} %`);
export const signed = known((share) => `${share < -0.005 ? "−" : share > 0.005 ? "+" : ""}${percent(Math.abs(share))}`);
export const loss = known((value) => value.toFixed(4));
export const count = known((value) => Math.round(value).toLocaleString("en"));

export const seconds = known((value) => {
  if (value < 0.1) return `${Number((1000 * value).toPrecision(2))} ms`;
  return value < 100 ? `${Number(value.toPrecision(3))} s` : duration(value);
});

// Minutes and seconds, or hours and minutes: 0:07, 12:30, 3 h 05 min.
export const duration = known((value) => {
  const whole = Math.max(0, Math.round(value));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)}`;
  const hours = Math.floor(whole / 3600);
  if (hours < 48) return `${hours} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
});

export const number = known((value) =>
  typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value),
);

// ---- symbols: the words and tones of what members do, of what became of a contribution, and of events ----

const PATHS = {
  right: "M4 2.5v11l9-5.5z",
  left: "M12 2.5v11L3 8z",
  disc: "M8 3a5 5 0 1 0 .01 0z",
  glass: "M3.5 2h9v1.8L9.2 8l3.3 4.2V14h-9v-1.8L6.8 8 3.5 3.8z",
  swap: "M4 14V6H1.5L5 2l3.5 4H6v8zM10 2v8H7.5L11 14l3.5-4H12V2z",
  bars: "M2 14V9h3v5zM6.5 14V5h3v9zM11 14V2h3v12z",
  lines: "M2 3h12v2H2zm0 4h12v2H2zm0 4h8v2H2z",
  cross: "M3 4.5 4.5 3 8 6.5 11.5 3 13 4.5 9.5 8 13 11.5 11.5 13 8 9.5 4.5 13 3 11.5 6.5 8z",
  pause: "M4 2.5h3v11H4zm5 0h3v11H9z",
  ring: "M8 2a6 6 0 1 0 .01 0zm0 2a4 4 0 1 1-.01 0z",
  minus: "M3 7h10v2H3z",
  check: "M6.2 13 1.8 8.6l1.6-1.6 2.8 2.8 6.4-6.4 1.6 1.6z",
  square: "M3 3h10v10H3z",
  plus: "M7 3h2v4h4v2H9v4H7V9H3V7h4z",
  clock: "M8 1.5a6.5 6.5 0 1 0 .01 0zm0 1.8a4.7 4.7 0 1 1-.01 0zM7.2 4.8h1.6v2.9l2 1.2-.8 1.4-2.8-1.7z",
  ban: "M8 1.5a6.5 6.5 0 1 0 .01 0zm-3.5 5.6h7v1.8h-7z",
  warn: "M8 1.5 15 14H1zM7.2 6v4h1.6V6zm0 5v1.6h1.6V11z",
  dot: "M8 6a2 2 0 1 0 .01 0z",
  back: "M2 8l5-5v3h3a4 4 0 0 1 0 8H6v-2h4a2 2 0 0 0 0-4H7v3z",
};

const form = (word, icon, tone) => ({ word, icon, tone });

export const MEMBER_STATES = {
  absent: form("free", "minus", "quiet"),
  reading: form("reading text", "lines", "quiet"),
  forward: form("forward", "right", "forward"),
  backward: form("backward", "left", "backward"),
  computing: form("computing", "disc", "forward"),
  waiting: form("waiting", "glass", "waiting"),
  outer: form("outer round", "swap", "outer"),
  evaluating: form("evaluating", "bars", "evaluating"),
  vacant: form("vacant", "ring", "bad"),
  suspended: form("suspended", "pause", "bad"),
  finished: form("finished", "check", "good"),
  given_up: form("given up", "square", "bad"),
};

export const REPLICA_STATES = {
  training: form("training", "right", "forward"),
  suspended: form("suspended", "pause", "bad"),
  absent: form("free", "minus", "quiet"),
  left: form("vacant", "ring", "quiet"),
  barred: form("barred", "ban", "bad"),
  finished: form("finished", "check", "good"),
};

export const CELL_STATES = {
  included: form("included", "check", "good"),
  late: form("late", "clock", "backward"),
  lost: form("lost", "cross", "bad"),
  rejected: form("rejected", "ban", "evaluating"),
  absent: form("absent", "minus", "quiet"),
};

export const PHASES = {
  joining: form("joining", "plus", "forward"),
  training: form("training", "right", "forward"),
  waiting: form("waiting", "glass", "waiting"),
  paused: form("paused", "pause", "waiting"),
  over: form("over", "check", "good"),
  failed: form("failed", "warn", "bad"),
};

const MARKS = {
  joined: form("joined", "plus", "good"),
  incarnation_over: form("lost", "cross", "bad"),
  restarted: form("restarted", "back", "forward"),
  suspended: form("suspended", "pause", "bad"),
  healed: form("recovered", "back", "good"),
  paused: form("paused", "pause", "waiting"),
  went_on: form("resumed", "right", "forward"),
  resumed: form("resumed", "right", "forward"),
  audited: form("audited", "right", "forward"),
  begun: form("resumed", "right", "forward"),
  late: form("late", "clock", "backward"),
  left_out: form("rejected", "ban", "evaluating"),
  excluded: form("barred", "ban", "bad"),
  silent: form("silent", "minus", "bad"),
  left: form("left", "minus", "quiet"),
  given_up: form("given up", "square", "bad"),
  injected: form("fault", "warn", "bad"),
  scaled: form("scaled", "bars", "evaluating"),
  not_awaited: form("not awaited", "minus", "quiet"),
  waiting: form("waiting", "glass", "waiting"),
  failure: form("failed", "warn", "bad"),
  unaudited: form("unaudited", "warn", "bad"),
};

// A state that this page does not know is shown by its own word.
export const lookUp = (forms, name) =>
  Object.hasOwn(forms, name) ? forms[name] : form(String(name ?? "unknown").replaceAll("_", " "), "dot", "quiet");
export const markForm = (kind) => lookUp(MARKS, kind);

export const path = (icon) => PATHS[icon] ?? PATHS.dot;

export const icon = ({ icon: name, tone }, size = 14) =>
  svg(
    `svg.icon.tone-${tone}`,
    { viewBox: "0 0 16 16", width: size, height: size, "aria-hidden": "true" },
    svg("path", { d: path(name), "fill-rule": "evenodd" }),
  );

// Symbols with their words, in a row.
export const symbols = (forms) => el("ul.symbols", Object.values(forms).map((form) => el("li", icon(form), form.word)));

// ---- events, as the launcher prints them ----

const MOST_EVENTS = 200;

// The newest events first. Each shows its moment.
export function eventsList(marks, goTo, most = MOST_EVENTS) {
  if (!marks.length) return el("p.muted", "Nothing has happened yet.");
  const moment = ({ time }) => textButton(duration(time), () => goTo(time), { title: "Show this moment" });
  const rest = Math.max(0, marks.length - most);
  const told = rest ? el("p.muted", `${number(rest)} earlier events are not listed.`) : null;
  return el("div", marksList(marks.slice(-most), moment), told);
}

// Events with their words, the newest first.
export const marksList = (marks, moment, about = {}) => {
  const line = (mark) => el("li", icon(markForm(mark.kind)), moment(mark), el("span", cut(mark.text, 200)));
  return el("ul.marks", about, [...marks].reverse().map(line));
};
