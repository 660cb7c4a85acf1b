// Rounds: which replica took part, losses, and where the seconds and bytes of a round went.

import { behind, cut, el, picker, show, svg, swatch, table, textButton } from "./dom.js";
import { LineChart, ascending, look } from "./chart.js";
import { CELL_STATES, bytes, count, duration, eventsList, icon, lookUp, loss, markForm, seconds, symbols } from "./words.js";

const CELL = 28; // pixels of the narrowest column
const WIDEST = 56;
const names = (room) => (room < 500 ? 88 : 136); // pixels of the replicas' names
const PARTS = {
  compute: "compute",
  wait: "waiting for links",
  outer: "outer round",
  blocked: "waiting for the exchange",
  evaluation: "evaluation",
};
const BARS = 150; // pixels of the tallest bar of seconds
const BYTES = 56;

export const AXES = { round: "round", time: "seconds", tokens: "tokens" };

// Where a round lies along an axis.
export const along = { round: (round) => round.round, time: (round) => round.closed, tokens: (round) => round.tokens };

export class RoundsView {
  constructor(root, choose, goTo) {
    Object.assign(this, { choose, goTo, axis: "round", replica: "", last: null });
    this.grid = el("div.scroll");
    this.bars = el("div");
    this.barsReplica = el("select", {
      "aria-label": "Replica whose seconds are shown",
      on: { change: (event) => this.draw({ replica: event.target.value }) },
    });
    this.range = el("span.muted");
    this.earlier = el("button", { type: "button", on: { click: () => this.turn(-1) } }, "Earlier");
    this.later = el("button", { type: "button", on: { click: () => this.turn(1) } }, "Later");
    const label = "Training loss of each replica and synchronized validation loss; the table below has the values";
    this.chart = new LineChart(label);
    this.lossTable = behind("Losses as a table", () => lossTable(this.rounds, this.history));
    this.barsTable = behind("Seconds and bytes as a table", () => barsTable(this.rounds, this.replica));
    this.events = el("div.box");
    const parts = Object.entries(PARTS).map(([part, word]) => el("li", swatch(`part-${part}`), word));
    root.append(
      el("div.bar", el("h2", "Rounds"), el("div.buttons", this.range, this.earlier, this.later)),
      symbols(CELL_STATES),
      this.grid,
      el("div.bar", el("h2", "Loss"), picker("loss-axis", "Along", AXES, "round", (axis) => this.draw({ axis }))),
      this.chart.holder,
      this.lossTable.node,
      el("div.bar", el("h2", "Seconds and bytes of a round"), this.barsReplica),
      el("ul.symbols", el("li", "from below:"), parts),
      this.bars,
      this.barsTable.node,
      el("h2", "Events"),
      this.events,
    );
    new ResizeObserver(() => this.history && this.draw({})).observe(this.grid);
  }

  update({ history, until, time }) {
    const { rounds, marks } = until;
    const key = [time === null, rounds.length, marks.length, document.documentElement.dataset.theme].join();
    if (key === this.drawn && history === this.all) return;
    Object.assign(this, { drawn: key, all: history, history: until, rounds });
    this.draw({});
  }

  turn(by) {
    const last = (this.last ?? this.rounds.length) + by * this.columns;
    const kept = Math.min(this.rounds.length, Math.max(this.columns, last));
    this.draw({ last: kept === this.rounds.length ? null : kept });
  }

  draw(changes) {
    Object.assign(this, changes);
    const { history, rounds } = this;
    const room = this.grid.clientWidth || 900;
    this.columns = Math.max(4, Math.floor((room - names(room)) / CELL));
    const end = Math.min(this.last ?? rounds.length, rounds.length);
    const window = rounds.slice(Math.max(0, end - this.columns), end);
    // Some events belong to no round; they are shown in the one that was open.
    const openAt = (time) => rounds.find((round) => round.closed >= time)?.round ?? null;
    const marks = history.marks.map((mark) => ({ ...mark, round: mark.round ?? openAt(mark.time) }));
    const shown = `${window[0]?.round}–${window.at(-1)?.round} of ${history.rounds_planned}`;
    this.range.textContent = window.length ? shown : "No round has closed yet.";
    this.earlier.disabled = end <= this.columns;
    this.later.disabled = end >= rounds.length;
    for (const turn of [this.earlier, this.later]) show(turn, rounds.length > this.columns);
    const step = window.length ? Math.min(WIDEST, (room - names(room)) / window.length) : CELL;
    this.grid.replaceChildren(grid(history, this.all.rounds, window, marks, this.choose, this.goTo, [names(room), step]));
    this.chart.update(curves(history, this.axis), AXES[this.axis]);
    const all = history.topology.replicas.map(({ id }) => id);
    if (this.barsReplica.options.length !== all.length + 1) {
      const options = all.map((name) => el("option", { value: name }, cut(name, 40)));
      this.barsReplica.replaceChildren(el("option", { value: "" }, "mean of all replicas"), ...options);
      this.barsReplica.value = this.replica;
    }
    this.bars.replaceChildren(bars(window, this.replica, names(room), step));
    this.events.replaceChildren(eventsList(marks, this.goTo));
    this.lossTable.refresh();
    this.barsTable.refresh();
  }
}

// What became of the contribution of each replica in each round, with the events of a round below.
function grid(history, all, rounds, marks, choose, goTo, [named, step]) {
  const own = Map.groupBy(marks, (mark) => `${mark.round} ${mark.replica ?? ""}`);
  const head = rounds.map(({ round }) => {
    const label = { "aria-label": `Round ${round}` };
    return el("th", { scope: "col" }, textButton(round, () => choose(`round:${round}`), label));
  });
  const hasCells = new Set(all.flatMap((round) => Object.keys(round.cells)));
  const shown = history.topology.replicas.filter(({ id, optional }) => !optional || hasCells.has(id));
  const rows = shown.map(({ id }) => {
    const name = el("th", { scope: "row" }, textButton(cut(id, 18), () => choose(`replica:${id}`)));
    return el("tr", name, rounds.map((round) => cell(round, id, own.get(`${round.round} ${id}`) ?? [], choose)));
  });
  const noted = rounds.map(({ round }) => {
    const here = marks.filter((mark) => mark.round === round);
    const latest = here.at(-1);
    if (!latest) return el("td");
    const about = {
      type: "button",
      title: `${duration(latest.time)} ${cut(latest.text, 80)}`,
      "aria-label": `${here.length} events in round ${round}, show the last`,
      on: { click: () => goTo(latest.time) },
    };
    return el("td", el("button.mark", about, here.length > 1 ? here.length : icon(markForm(latest.kind), 12)));
  });
  const made = el(
    "table.grid",
    el("caption.hidden", "What became of the contribution of each replica in each round"),
    el("colgroup", el("col"), rounds.map(() => el("col"))),
    el("thead", el("tr", el("th", { scope: "col" }, "Round"), head)),
    el("tbody", rows, el("tr", el("th", { scope: "row" }, "events"), noted)),
  );
  made.querySelectorAll("col").forEach((column, n) => (column.style.width = `${n ? step : named}px`));
  made.style.width = `${named + step * rounds.length}px`;
  return made;
}

function cell(round, replica, marks, choose) {
  const found = round.cells[replica];
  const form = lookUp(CELL_STATES, found?.state ?? "absent");
  const validation = found?.validation_loss == null ? null : `validation loss ${loss(found.validation_loss)}`;
  const head = `${replica}, round ${round.round}: ${form.word}`;
  const title = [head, found?.why, validation, ...marks.map((mark) => mark.text)].filter(Boolean).join("; ");
  const bad = marks.find(({ kind }) => markForm(kind).tone === "bad") ?? marks.find(({ kind }) => kind === "joined");
  return el(
    `td.cell.cell-${form.tone}`,
    { title, on: { click: () => choose(`round:${round.round}`) } },
    icon(form),
    bad ? el("span.corner", icon(markForm(bad.kind), 10)) : null,
    el("span.hidden", [form.word, ...marks.map((mark) => markForm(mark.kind).word)].join(", ")),
  );
}

// Training loss of each replica, and the synchronized validation loss.
export function curves(history, axis) {
  const { rounds, inner_steps: perRound } = history;
  const byTokens = new Map(rounds.map((round) => [round.round, round.tokens]));
  const x = (time, step) => {
    if (axis === "time") return time;
    const at = perRound ? step / perRound : rounds.findIndex((round) => round.closed >= time) + 1 || rounds.length + 1;
    if (axis === "round") return at;
    const [low, high] = [byTokens.get(Math.floor(at)) ?? 0, byTokens.get(Math.ceil(at))];
    return high == null ? null : low + (high - low) * (at % 1 || 1);
  };
  const found = history.topology.replicas.map(({ id }, n) => {
    const points = broken(history.steps?.[id] ?? [], 2 * perRound).map(([time, step, value]) => [x(time, step), value]);
    return { label: cut(id, 24), ...look(n), points: ascending(points) };
  });
  const mean = rounds
    .filter((round) => round.validation_loss !== null)
    .map((round) => [along[axis](round), round.validation_loss]);
  const label = "validation, synchronized";
  return [...found, { label, colour: "--text", dash: [], width: 2.5, points: ascending(mean) }];
}

// Points with a break, whose value is null, wherever a replica has trained nothing for `steps`.
function broken(points, steps) {
  if (!steps) return points;
  const apart = points.slice(1).map((point, n) => point[1] - points[n][1]);
  const most = steps + Math.min(...apart, steps);
  return points.flatMap((point, n) => (apart[n] > most ? [point, [point[0] + 0.001, point[1] + 0.5, null]] : [point]));
}

// The seconds of each part, for one replica or in the mean of those that know them.
function split(round, replica) {
  const cells = replica ? [round.cells[replica]].filter(Boolean) : Object.values(round.cells);
  return Object.keys(PARTS).map((part) => {
    const known = cells.map((one) => one[`${part}_seconds`]).filter((value) => value !== null && value !== undefined);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : 0;
  });
}

const bytesOf = (round, replica) => (replica ? (round.cells[replica]?.bytes ?? 0) : (round.bytes ?? 0));

function bars(rounds, replica, left, step) {
  if (!rounds.length) return el("p.muted", "No round has closed yet.");
  const [parts, words] = [Object.keys(PARTS), Object.values(PARTS)];
  const [width, height, thick] = [left + step * rounds.length, BARS + BYTES + 44, Math.max(1, step - 3)];
  const splits = rounds.map((round) => split(round, replica));
  const sums = splits.map((own) => own.reduce((sum, part) => sum + part, 0));
  const tallest = Math.max(...sums, ...rounds.map((round) => round.seconds ?? 0), 1e-9);
  const most = Math.max(...rounds.map((round) => bytesOf(round, replica)), 1);
  const label = (y, text) => svg("text.small.muted", { x: left - 8, y, "text-anchor": "end" }, text);
  const every = Math.ceil(30 / step);
  const columns = rounds.map((round, n) => {
    const x = left + n * step;
    let y = BARS + 10;
    const pieces = splits[n].map((part, which) => {
      const tall = (part / tallest) * BARS;
      y -= tall;
      return svg(`rect.part-${parts[which]}`, { x: x + 1, y, width: thick, height: tall });
    });
    const sent = (bytesOf(round, replica) / most) * BYTES;
    const told = words.map((word, which) => `${word} ${seconds(splits[n][which])}`).join(", ");
    const middle = { x: x + step / 2, y: BARS + 26, "text-anchor": "middle" };
    return svg(
      "g",
      svg("title", `round ${round.round}: ${told}, ${bytes(bytesOf(round, replica))}`),
      pieces,
      svg("rect.part-bytes", { x: x + 1, y: BARS + 40 + BYTES - sent, width: thick, height: sent }),
      n % every ? null : svg("text.small.muted", middle, round.round),
    );
  });
  const about = "Seconds and bytes of each round; the table below has the values";
  const axis = `M${left} 10V${BARS + 10}H${width}M${left} ${BARS + 40}V${BARS + 40 + BYTES}H${width}`;
  return svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": about },
    svg("path.axis", { d: axis }),
    label(18, seconds(tallest)),
    label(BARS + 10, "0 s"),
    label(BARS + 50, bytes(most)),
    label(BARS + 40 + BYTES, "0 B"),
    columns,
  );
}

function barsTable(rounds, replica) {
  const row = (round) => {
    const parts = split(round, replica).map((part) => seconds(part));
    return [round.round, seconds(round.seconds), ...parts, bytes(bytesOf(round, replica))];
  };
  return table("Seconds and bytes", ["Round", "Seconds", ...Object.values(PARTS), "Bytes"], rounds.map(row));
}

function lossTable(rounds, history) {
  const all = history.topology.replicas.map(({ id }) => id);
  const row = (round) => {
    const training = all.map((name) => loss(round.cells[name]?.training_loss));
    return [round.round, count(round.tokens), loss(round.validation_loss), ...training];
  };
  const columns = ["Round", "Tokens", "Validation, synchronized", ...all.map((name) => `${cut(name, 24)}, training`)];
  return table("Losses", columns, rounds.map(row));
}
