// One predicted step as a Gantt chart: what each member computes, and what each link carries. Below each member is its
// mean step as it was measured, if there was a run or a rehearsal.

import { attribute, behind, button, cut, el, say, show, svg, swatch, table } from "./dom.js";
import { count, number, percent, seconds, signed } from "./words.js";

const ROW = 30;
const NAMES = 150;
const PLAY_SECONDS = 8; // a whole step plays in this time
// Kind of a bar -> its words and its class.
const KINDS = {
  forward: ["forward", "forward"],
  backward: ["backward", "backward"],
  wait: ["waiting", "wait"],
  outer: ["outer round", "outer"],
  there: ["activations", "there"],
  back: ["gradients", "back"],
  computed: ["measured: computing", "computed"],
  waited: ["measured: waiting", "wait"],
};
const kindOf = (kind) => (Object.hasOwn(KINDS, kind) ? KINDS[kind] : [kind, "other"]);
const ABOUT =
  "A step as bars over time. Plus and minus zoom, arrow keys move, 0 shows the whole step, the space bar plays.";

export class PredictionView {
  constructor(root) {
    this.empty = el("p.empty");
    this.facts = el("p.lead");
    const on = { keydown: (event) => this.onKey(event), wheel: (event) => this.onWheel(event) };
    this.chart = el("div.gantt", { tabindex: 0, role: "group", "aria-label": ABOUT, on });
    this.playButton = button("Play", "Play the step", () => this.play());
    this.clock = el("span.muted.clock");
    const buttons = el(
      "div.buttons",
      this.clock,
      this.playButton,
      button("−", "Zoom out", () => this.zoom(1 / 1.5)),
      button("+", "Zoom in", () => this.zoom(1.5)),
      button("Fit", "Show the whole step", () => this.zoom(0)),
    );
    this.legend = el("ul.symbols");
    this.behind = behind("The step as a table", () => barsTable(this.prediction));
    this.values = el("div");
    const head = el("div.bar", el("h3", "A step"), buttons);
    this.body = el("div.stack", this.facts, head, this.legend, this.chart, this.behind.node, this.values);
    root.append(el("h2", "Prediction"), this.empty, this.body);
    new ResizeObserver(() => this.prediction && this.draw()).observe(this.chart);
  }

  update({ prediction }) {
    show(this.empty, !prediction);
    const none = "This run cannot be predicted: a rehearsal has the prediction of its run.";
    say(this.empty, prediction === undefined ? "A step is being predicted …" : none);
    show(this.body, Boolean(prediction));
    if (!prediction || prediction === this.prediction) return;
    this.prediction = prediction;
    const rows = [...prediction.members, ...prediction.links, ...(prediction.measured ?? [])];
    this.length = Math.max(1e-9, ...rows.flatMap((row) => row.bars.map((bar) => bar.end)));
    [this.from, this.to, this.at] = [0, this.length, null];
    say(
      this.facts,
      `A step takes ${seconds(prediction.step_seconds)}. Members compute for ${percent(prediction.utilization)} of a ` +
        `round. Even with free links, stages would wait for each other for ${percent(prediction.bubble)} of a step ` +
        `(the bubble).`,
    );
    const kinds = [...new Set(rows.flatMap((row) => row.bars.map((bar) => bar.kind)))].map(kindOf);
    this.legend.replaceChildren(...kinds.map(([word, name]) => el("li", swatch(`bar-${name}`), word)));
    const difference = ({ predicted, measured }) => (predicted && measured ? signed(predicted / measured - 1) : "–");
    const row = (one) => [one.name, inUnit(one.predicted, one.unit), inUnit(one.measured, one.unit), difference(one)];
    const columns = ["Value", "Predicted", "Measured", "Prediction is off by"];
    this.values.replaceChildren(table("Predicted and measured", columns, (prediction.values ?? []).map(row)));
    this.behind.refresh();
    this.draw();
  }

  zoom(factor) {
    const span = factor ? Math.min(this.length, (this.to - this.from) / factor) : this.length;
    this.move((this.from + this.to) / 2 - span / 2, span);
  }

  move(from, span = this.to - this.from) {
    this.from = Math.min(Math.max(0, from), this.length - span);
    this.to = this.from + span;
    this.draw();
  }

  onKey(event) {
    const span = this.to - this.from;
    const turns = {
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      0: () => this.zoom(0),
      ArrowLeft: () => this.move(this.from - span / 5),
      ArrowRight: () => this.move(this.from + span / 5),
      " ": () => this.play(),
    };
    if (!turns[event.key]) return;
    event.preventDefault();
    turns[event.key]();
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2);
  }

  play() {
    const isPlaying = Boolean(this.timer);
    cancelAnimationFrame(this.timer);
    if (!isPlaying && (this.at === null || this.at >= this.length)) this.at = 0;
    let before = null;
    const tick = (now) => {
      this.at = Math.min(this.length, this.at + ((now - (before ?? now)) / 1000) * (this.length / PLAY_SECONDS));
      before = now;
      this.timer = this.at < this.length && this.chart.isConnected ? requestAnimationFrame(tick) : null;
      if (this.at > this.to) this.move(this.at);
      this.drawCursor();
    };
    this.timer = isPlaying ? null : requestAnimationFrame(tick);
    this.drawCursor();
  }

  draw() {
    const width = Math.max(300, (this.chart.clientWidth || 900) - 24);
    const left = width < 600 ? 84 : NAMES;
    const rows = interleaved(this.prediction);
    const height = rows.length * ROW + 30;
    const x = (time) => left + ((time - this.from) / (this.to - this.from)) * (width - left - 6);
    this.place = x;
    const parts = width < 600 ? 2 : 5;
    const ticks = Array.from({ length: parts + 1 }, (_, n) => this.from + ((this.to - this.from) * n) / parts);
    const scale = ticks.map((time, n) => {
      const at = { x: x(time), y: 14, "text-anchor": n === parts ? "end" : "middle" };
      const line = svg("line.tick", { x1: x(time), x2: x(time), y1: 22, y2: height });
      return svg("g", line, svg("text.small.muted", at, seconds(time)));
    });
    const lines = rows.map((row, n) => {
      const y = 26 + n * ROW;
      const shown = row.bars.filter((bar) => bar.end > this.from && bar.start < this.to);
      const name = cut(row.label ?? row.id, left < NAMES ? 12 : 22);
      return svg(
        "g",
        svg(row.isLink ? "text.small.muted" : "text.strong", { x: 0, y: y + ROW / 2 + 2 }, name),
        svg("line.tick", { x1: left, x2: width, y1: y + ROW - 2, y2: y + ROW - 2 }),
        shown.map((bar) => barOf(bar, row, x, y, left, width)),
      );
    });
    this.cursor = svg("line.now", { y1: 18, y2: height });
    const about = { role: "img", "aria-label": "Bars of a predicted step; the table below has the values" };
    const size = { width, height, viewBox: `0 0 ${width} ${height}` };
    this.chart.replaceChildren(svg("svg", { ...size, ...about }, scale, lines, this.cursor));
    this.drawCursor();
  }

  drawCursor() {
    const isShown = this.at !== null && this.at >= this.from && this.at <= this.to;
    attribute(this.cursor, "visibility", isShown ? "visible" : "hidden");
    if (isShown) for (const end of ["x1", "x2"]) attribute(this.cursor, end, this.place(this.at).toFixed(1));
    say(this.clock, this.at === null ? "" : seconds(this.at));
    say(this.playButton, this.timer ? "Pause" : "Play");
    attribute(this.playButton, "aria-label", this.timer ? "Pause" : "Play the step");
  }
}

// Members in their order, each followed by what was measured of it and by the link to the next one.
function interleaved({ members, links, measured = [] }) {
  const rows = [];
  members.forEach((member, n) => {
    rows.push({ ...member, isLink: false });
    const own = measured.find(({ id }) => id === member.id);
    if (own) rows.push({ ...own, label: "measured", isLink: true });
    if (links[n]) rows.push({ ...links[n], isLink: true });
  });
  return [...rows, ...links.slice(members.length).map((link) => ({ ...link, isLink: true }))];
}

function barOf(bar, row, x, y, left, width) {
  const [start, end] = [Math.max(left, x(bar.start)), Math.min(width, x(bar.end))];
  const isLow = bar.kind === "backward" || bar.kind === "back"; // the place, not only the colour, tells the way
  const top = row.isLink ? y + (isLow ? 14 : 3) : y + (isLow ? 7 : 0);
  const [word, name] = kindOf(bar.kind);
  const batch = bar.micro_batch == null ? "" : `, micro-batch ${bar.micro_batch + 1}`;
  const hasLabel = end - start > 16 && bar.micro_batch != null && !row.isLink;
  const middle = { x: (start + end) / 2, y: top + 14, "text-anchor": "middle" };
  const box = { x: start, y: top, width: Math.max(0.8, end - start - 1), height: row.isLink ? 9 : 19, rx: 2 };
  return svg(
    "g",
    svg("title", `${row.id}: ${word}${batch}, ${seconds(bar.start)} to ${seconds(bar.end)}`),
    svg(`rect.bar-${name}`, box),
    hasLabel ? svg("text.bar-text", middle, bar.micro_batch + 1) : null,
  );
}

function barsTable({ members, links, measured = [] }) {
  const line = (row, { kind, micro_batch: batch, start, end }) =>
    [row.id, kindOf(kind)[0], batch == null ? null : batch + 1, seconds(start), seconds(end)];
  const rows = [...members, ...measured, ...links].flatMap((row) => row.bars.map((bar) => line(row, bar)));
  return table("Bars of the step", ["Member or link", "What", "Micro-batch", "From", "To"], rows);
}

function inUnit(value, unit) {
  if (value === null || unit === "s") return seconds(value);
  return Math.abs(value) < 1000 ? number(Number(value.toPrecision(4))) : count(value);
}

