// Rounds: which replica took part, losses, and where the seconds and bytes of a round went.

import { behind, cut, el, show, svg, table } from "./dom.js";
import { LineChart, look } from "./chart.js";
import { eventsList } from "./events.js";
import { bytes, count, duration, loss, seconds } from "./format.js";
import { CELL_STATES, icon, lookUp, markForm } from "./states.js";

const CELL = 28; // pixels of the narrowest column
const WIDEST = 56;
const names = (room) => (room < 500 ? 88 : 136); // pixels of the replicas' names
const PARTS = [
  [(cell) => cell.compute_seconds, "compute", "part-compute"],
  [(cell) => cell.wait_seconds, "waiting for links", "part-wait"],
  [(cell) => cell.outer_seconds, "outer round", "part-outer"],
  [(cell) => cell.blocked_seconds, "waiting for the exchange", "part-blocked"],
  [(cell) => cell.evaluation_seconds, "evaluation", "part-evaluation"],
];
const BARS = 150; // pixels of the tallest bar of seconds
const BYTES = 56;

export const AXES = { round: "round", time: "seconds", tokens: "tokens" };

// A row of radio buttons; `pick` is told the value.
export function picker(name, title, choices, chosen, pick) {
  return el(
    "fieldset",
    { class: "picker" },
    el("legend", {}, title),
    Object.entries(choices).map(([value, label]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name, value, checked: value === chosen, on: { change: () => pick(value) } }),
        el("span", {}, label),
      ),
    ),
  );
}

export class RoundsView {
  constructor(root, choose, goTo) {
    Object.assign(this, { choose, goTo, axis: "round", replica: "", last: null });
    this.grid = el("div", { class: "scroll" });
    this.bars = el("div");
    this.barsReplica = el("select", {
      "aria-label": "Replica whose seconds are shown",
      on: { change: (event) => this.draw({ replica: event.target.value }) },
    });
    this.range = el("span", { class: "muted" });
    this.earlier = el("button", { type: "button", on: { click: () => this.turn(-1) } }, "Earlier");
    this.later = el("button", { type: "button", on: { click: () => this.turn(1) } }, "Later");
    this.chart = new LineChart(
      "Training loss of each replica and synchronized validation loss; the table below has the values",
    );
    this.lossTable = behind("Losses as a table", () => lossTable(this.rounds, this.history));
    this.barsTable = behind("Seconds and bytes as a table", () => barsTable(this.rounds, this.replica));
    this.events = el("div", { class: "box" });
    const axes = picker("loss-axis", "Along", AXES, "round", (axis) => this.draw({ axis }));
    const symbols = el(
      "ul",
      { class: "symbols" },
      Object.values(CELL_STATES).map((form) => el("li", {}, icon(form), form.word)),
    );
    root.append(
      el(
        "div",
        { class: "bar" },
        el("h2", {}, "Rounds"),
        el("div", { class: "buttons" }, this.range, this.earlier, this.later),
      ),
      symbols,
      this.grid,
      el("div", { class: "bar" }, el("h2", {}, "Loss"), axes),
      this.chart.holder,
      this.lossTable.node,
      el("div", { class: "bar" }, el("h2", {}, "Seconds and bytes of a round"), this.barsReplica),
      el(
        "ul",
        { class: "symbols" },
        el("li", {}, "from below:"),
        PARTS.map(([, label, name]) =>
          el(
            "li",
            {},
            svg(
              "svg",
              { width: 14, height: 14, "aria-hidden": "true" },
              svg("rect", { width: 14, height: 14, class: name }),
            ),
            label,
          ),
        ),
      ),
      this.bars,
      this.barsTable.node,
      el("h2", {}, "Events"),
      this.events,
    );
    new ResizeObserver(() => this.history && this.draw({})).observe(this.grid);
  }

  update({ history, time }) {
    const key = [
      history,
      time === null ? null : history.rounds.filter((round) => round.closed <= time).length,
      history.marks.length,
      time === null ? null : history.marks.filter((mark) => mark.time <= time).length,
      document.documentElement.dataset.theme,
    ]
      .map(String)
      .join();
    if (key === this.drawn && history === this.history) return;
    this.drawn = key;
    this.history = history;
    this.time = time;
    this.until = time ?? Infinity;
    this.rounds = history.rounds.filter((round) => round.closed <= this.until);
    this.draw({});
  }

  turn(by) {
    const last = Math.min(
      this.rounds.length,
      Math.max(this.columns, (this.last ?? this.rounds.length) + by * this.columns),
    );
    this.draw({ last: last === this.rounds.length ? null : last });
  }

  draw(changes) {
    Object.assign(this, changes);
    const { history, rounds } = this;
    const room = this.grid.clientWidth || 900;
    this.columns = Math.max(4, Math.floor((room - names(room)) / CELL));
    const end = Math.min(this.last ?? rounds.length, rounds.length);
    const window = rounds.slice(Math.max(0, end - this.columns), end);
    const marks = history.marks
      .filter((mark) => mark.time <= this.until)
      .map((mark) => ({ ...mark, round: mark.round ?? roundAt(history, mark.time) }));
    this.range.textContent = window.length
      ? `${window[0].round}–${window.at(-1).round} of ${history.rounds_planned}`
      : "No round has closed yet.";
    this.earlier.disabled = end <= this.columns;
    this.later.disabled = end >= rounds.length;
    show(this.earlier, rounds.length > this.columns);
    show(this.later, rounds.length > this.columns);
    const step = window.length ? Math.min(WIDEST, (room - names(room)) / window.length) : CELL;
    this.grid.replaceChildren(grid(history, window, marks, this.choose, this.goTo, [names(room), step]));
    this.chart.update(curves(history, rounds, this.until, this.axis), AXES[this.axis]);
    this.fillReplicas();
    this.bars.replaceChildren(bars(window, this.replica, names(room), step));
    this.events.replaceChildren(eventsList(marks, this.goTo));
    this.lossTable.refresh();
    this.barsTable.refresh();
  }

  fillReplicas() {
    const names = this.history.topology.replicas.map(({ id }) => id);
    if (this.barsReplica.options.length === names.length + 1) return;
    this.barsReplica.replaceChildren(
      el("option", { value: "" }, "mean of all replicas"),
      ...names.map((name) => el("option", { value: name }, cut(name, 40))),
    );
    this.barsReplica.value = this.replica;
  }
}

// Some events belong to no round; they are shown in the one that was open.
function roundAt(history, time) {
  return history.rounds.find((round) => round.closed >= time)?.round ?? null;
}

function grid(history, rounds, marks, choose, goTo, [named, step]) {
  const own = new Map();
  for (const mark of marks) {
    const key = `${mark.round} ${mark.replica ?? ""}`;
    own.set(key, [...(own.get(key) ?? []), mark]);
  }
  const head = rounds.map((round) =>
    el(
      "th",
      { scope: "col" },
      el(
        "button",
        {
          type: "button",
          class: "link",
          "aria-label": `Round ${round.round}`,
          on: { click: () => choose(`round:${round.round}`) },
        },
        round.round,
      ),
    ),
  );
  const hasCells = new Set(history.rounds.flatMap((round) => Object.keys(round.cells)));
  const shown = history.topology.replicas.filter(({ id, optional }) => !optional || hasCells.has(id));
  const rows = shown.map(({ id }) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("button", { type: "button", class: "link", on: { click: () => choose(`replica:${id}`) } }, cut(id, 18)),
      ),
      rounds.map((round) => cell(round, id, own.get(`${round.round} ${id}`) ?? [], choose)),
    ),
  );
  const noted = rounds.map((round) => {
    const here = marks.filter((mark) => mark.round === round.round);
    const latest = here.at(-1);
    return el(
      "td",
      {},
      latest
        ? el(
            "button",
            {
              type: "button",
              class: "mark",
              title: `${duration(latest.time)} ${cut(latest.text, 80)}`,
              "aria-label": `${here.length} events in round ${round.round}, show the last`,
              on: { click: () => goTo(latest.time) },
            },
            here.length > 1 ? here.length : icon(markForm(latest.kind), 12),
          )
        : "",
    );
  });
  const made = el(
    "table",
    { class: "grid" },
    el("caption", { class: "hidden" }, "What became of the contribution of each replica in each round"),
    el(
      "colgroup",
      {},
      el("col"),
      rounds.map(() => el("col")),
    ),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Round"), head)),
    el("tbody", {}, rows, el("tr", {}, el("th", { scope: "row" }, "events"), noted)),
  );
  made.querySelectorAll("col").forEach((column, n) => (column.style.width = `${n ? step : named}px`));
  made.style.width = `${named + step * rounds.length}px`;
  return made;
}

function cell(round, replica, marks, choose) {
  const found = round.cells[replica];
  const form = lookUp(CELL_STATES, found?.state ?? "absent");
  const notes = marks.map((mark) => mark.text);
  const title = [
    `${replica}, round ${round.round}: ${form.word}`,
    found?.why,
    found?.validation_loss == null ? null : `validation loss ${loss(found.validation_loss)}`,
    ...notes,
  ]
    .filter(Boolean)
    .join("; ");
  const bad =
    marks.find((mark) => markForm(mark.kind).tone === "bad") ??
    marks.find((mark) => mark.kind === "joined");
  return el(
    "td",
    { title, class: `cell cell-${form.tone}`, on: { click: () => choose(`round:${round.round}`) } },
    icon(form),
    bad ? el("span", { class: "corner" }, icon(markForm(bad.kind), 10)) : null,
    el("span", { class: "hidden" }, [form.word, ...marks.map((mark) => markForm(mark.kind).word)].join(", ")),
  );
}

// Where a round lies along an axis.
export const along = { round: (round) => round.round, time: (round) => round.closed, tokens: (round) => round.tokens };

// Training loss of each replica, and the synchronized validation loss, up to a moment.
export function curves(history, rounds, until, axis) {
  const perRound = history.inner_steps;
  const byTokens = new Map(rounds.map((round) => [round.round, round.tokens]));
  const x = (time, step) => {
    if (axis === "time") return time;
    const at = perRound ? step / perRound : rounds.findIndex((round) => round.closed >= time) + 1 || rounds.length + 1;
    if (axis === "round") return at;
    const [low, high] = [byTokens.get(Math.floor(at)) ?? 0, byTokens.get(Math.ceil(at))];
    return high == null ? null : low + (high - low) * (at % 1 || 1);
  };
  const found = history.topology.replicas.map(({ id }, n) => ({
    label: cut(id, 24),
    ...look(n),
    points: ascending(
      broken(
        (history.steps?.[id] ?? []).filter(([time]) => time <= until),
        2 * perRound,
      ).map(([time, step, value]) => [x(time, step), value]),
    ),
  }));
  const mean = rounds
    .filter((round) => round.validation_loss !== null)
    .map((round) => [along[axis](round), round.validation_loss]);
  return [
    ...found,
    { label: "validation, synchronized", colour: "--text", dash: [], width: 2.5, points: ascending(mean) },
  ];
}

// Points with a break, whose value is null, wherever a replica has trained nothing for `steps`.
function broken(points, steps) {
  if (!steps) return points;
  const apart = points.slice(1).map((point, n) => point[1] - points[n][1]);
  const most = steps + Math.min(...apart, steps);
  return points.flatMap((point, n) => (apart[n] > most ? [point, [point[0] + 0.001, point[1] + 0.5, null]] : [point]));
}

// uPlot needs values of x that rise. A replica that repeats steps after a kill keeps its last try.
export function ascending(points) {
  const kept = new Map();
  for (const [x, y] of points) if (x !== null && x !== undefined) kept.set(x, y);
  return [...kept].sort((a, b) => a[0] - b[0]);
}

// The seconds of each part, for one replica or in the mean of those that know them.
function split(round, replica) {
  const cells = replica ? [round.cells[replica]].filter(Boolean) : Object.values(round.cells);
  return PARTS.map(([of]) => {
    const known = cells.map(of).filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : 0;
  });
}

const bytesOf = (round, replica) => (replica ? (round.cells[replica]?.bytes ?? 0) : (round.bytes ?? 0));

function bars(rounds, replica, left, step) {
  if (!rounds.length) return el("p", { class: "muted" }, "No round has closed yet.");
  const width = left + step * rounds.length;
  const splits = rounds.map((round) => split(round, replica));
  const tallest = Math.max(
    ...splits.map((parts) => parts.reduce((sum, part) => sum + part, 0)),
    ...rounds.map((round) => round.seconds ?? 0),
    1e-9,
  );
  const most = Math.max(...rounds.map((round) => bytesOf(round, replica)), 1);
  const label = (y, words) => svg("text", { x: left - 8, y, "text-anchor": "end", class: "small muted" }, words);
  const every = Math.ceil(30 / step);
  const columns = rounds.map((round, n) => {
    const x = left + n * step;
    let y = BARS + 10;
    const pieces = splits[n].map((part, which) => {
      const height = (part / tallest) * BARS;
      y -= height;
      return svg("rect", { x: x + 1, y, width: Math.max(1, step - 3), height, class: PARTS[which][2] });
    });
    const sent = (bytesOf(round, replica) / most) * BYTES;
    const told = `round ${round.round}: ${PARTS.map(([, word], which) => `${word} ${seconds(splits[n][which])}`).join(", ")}, ${bytes(bytesOf(round, replica))}`;
    const name =
      n % every
        ? null
        : svg("text", { x: x + step / 2, y: BARS + 26, "text-anchor": "middle", class: "small muted" }, round.round);
    return svg(
      "g",
      {},
      svg("title", {}, told),
      pieces,
      svg("rect", {
        x: x + 1,
        y: BARS + 40 + BYTES - sent,
        width: Math.max(1, step - 3),
        height: sent,
        class: "part-bytes",
      }),
      name,
    );
  });
  const height = BARS + BYTES + 44;
  const axis = svg("path", {
    d: `M${left} 10V${BARS + 10}H${width}M${left} ${BARS + 40}V${BARS + 40 + BYTES}H${width}`,
    class: "axis",
  });
  return svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": "Seconds and bytes of each round; the table below has the values",
    },
    axis,
    label(18, seconds(tallest)),
    label(BARS + 10, "0 s"),
    label(BARS + 50, bytes(most)),
    label(BARS + 40 + BYTES, "0 B"),
    columns,
  );
}

function barsTable(rounds, replica) {
  return table(
    "Seconds and bytes",
    ["Round", "Seconds", ...PARTS.map(([, word]) => word), "Bytes"],
    rounds.map((round) => [
      round.round,
      seconds(round.seconds),
      ...split(round, replica).map((part) => seconds(part)),
      bytes(bytesOf(round, replica)),
    ]),
  );
}

function lossTable(rounds, history) {
  const names = history.topology.replicas.map(({ id }) => id);
  return table(
    "Losses",
    ["Round", "Tokens", "Validation, synchronized", ...names.map((name) => `${cut(name, 24)}, training`)],
    rounds.map((round) => [
      round.round,
      count(round.tokens),
      loss(round.validation_loss),
      ...names.map((name) => loss(round.cells[name]?.training_loss)),
    ]),
  );
}
