// One predicted step as a Gantt chart: what each member computes, and what each link carries. Below each member is its
// mean step as it was measured, if there was a run or a rehearsal.

import { attribute, behind, cut, el, say, show, svg, table } from "./dom.js";
import { bytes, count, number, percent, seconds, signed } from "./format.js";

const ROW = 30;
const NAMES = 150;
const PLAY_SECONDS = 8; // a whole step plays in this time
const WORDS = {
  forward: "forward",
  backward: "backward",
  wait: "waiting",
  outer: "outer round",
  there: "activations",
  back: "gradients",
  computed: "measured: computing",
  waited: "measured: waiting",
};
const CLASSES = {
  forward: "bar-forward",
  backward: "bar-backward",
  wait: "bar-wait",
  outer: "bar-outer",
  there: "bar-there",
  back: "bar-back",
  computed: "bar-computed",
  waited: "bar-wait",
};

const classOf = (kind) => (Object.hasOwn(CLASSES, kind) ? CLASSES[kind] : "bar-other");

export class PredictionView {
  constructor(root) {
    this.empty = el("p", { class: "empty" });
    this.facts = el("p", { class: "lead" });
    this.chart = el("div", {
      class: "gantt",
      tabindex: 0,
      role: "group",
      "aria-label":
        "A step as bars over time. Plus and minus zoom, arrow keys move, 0 shows the whole step, the space bar plays.",
      on: { keydown: (event) => this.onKey(event), wheel: (event) => this.onWheel(event) },
    });
    const button = (label, title, press) =>
      el("button", { type: "button", title, "aria-label": title, on: { click: press } }, label);
    this.playButton = button("Play", "Play the step", () => this.play());
    this.clock = el("span", { class: "muted clock" });
    const buttons = el(
      "div",
      { class: "buttons" },
      this.clock,
      this.playButton,
      button("−", "Zoom out", () => this.zoom(1 / 1.5)),
      button("+", "Zoom in", () => this.zoom(1.5)),
      button("Fit", "Show the whole step", () => this.zoom(0)),
    );
    this.legend = el("ul", { class: "symbols" });
    this.behind = behind("The step as a table", () => barsTable(this.prediction));
    this.values = el("div");
    this.body = el(
      "div",
      { class: "stack" },
      this.facts,
      el("div", { class: "bar" }, el("h3", {}, "A step"), buttons),
      this.legend,
      this.chart,
      this.behind.node,
      this.values,
    );
    root.append(el("h2", {}, "Prediction"), this.empty, this.body);
    new ResizeObserver(() => this.prediction && this.draw()).observe(this.chart);
  }

  update({ prediction }) {
    show(this.empty, !prediction);
    say(this.empty, prediction === undefined ? "A step is being predicted …" : "This run cannot be predicted: a rehearsal has the prediction of its run.");
    show(this.body, Boolean(prediction));
    if (!prediction || prediction === this.prediction) return;
    this.prediction = prediction;
    const rows = [...prediction.members, ...prediction.links, ...(prediction.measured ?? [])];
    this.length = Math.max(1e-9, ...rows.flatMap((row) => row.bars.map((bar) => bar.end)));
    [this.from, this.to, this.at] = [0, this.length, null];
    say(
      this.facts,
      `A step takes ${seconds(prediction.step_seconds)}. Members compute for ${percent(prediction.utilization)} of a round. Even with free links, stages would wait for each other for ${percent(prediction.bubble)} of a step (the bubble).`,
    );
    const kinds = [...new Set(rows.flatMap((row) => row.bars.map((bar) => bar.kind)))];
    this.legend.replaceChildren(
      ...kinds.map((kind) =>
        el(
          "li",
          {},
          svg(
            "svg",
            { width: 14, height: 14, "aria-hidden": "true" },
            svg("rect", { width: 14, height: 14, class: classOf(kind) }),
          ),
          WORDS[kind] ?? kind,
        ),
      ),
    );
    this.values.replaceChildren(valuesTable(prediction.values ?? []));
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
    if (this.timer) {
      cancelAnimationFrame(this.timer);
      this.timer = null;
    } else {
      if (this.at === null || this.at >= this.length) this.at = 0;
      let before = null;
      const tick = (now) => {
        this.at = Math.min(
          this.length,
          this.at + (before === null ? 0 : ((now - before) / 1000) * (this.length / PLAY_SECONDS)),
        );
        before = now;
        this.timer = this.at < this.length && this.chart.isConnected ? requestAnimationFrame(tick) : null;
        if (this.at > this.to) this.move(this.at);
        this.drawCursor();
      };
      this.timer = requestAnimationFrame(tick);
    }
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
    const scale = ticks.map((time, n) =>
      svg(
        "g",
        {},
        svg("line", { x1: x(time), x2: x(time), y1: 22, y2: height, class: "tick" }),
        svg(
          "text",
          { x: x(time), y: 14, class: "small muted", "text-anchor": n === ticks.length - 1 ? "end" : "middle" },
          seconds(time),
        ),
      ),
    );
    const lines = rows.map((row, n) => {
      const y = 26 + n * ROW;
      const bars = row.bars
        .filter((bar) => bar.end > this.from && bar.start < this.to)
        .map((bar) => barOf(bar, row, x, y, left, width));
      const name = svg(
        "text",
        { x: 0, y: y + ROW / 2 + 2, class: row.isLink ? "small muted" : "strong" },
        cut(row.label ?? row.id, left < NAMES ? 12 : 22),
      );
      return svg(
        "g",
        {},
        name,
        svg("line", { x1: left, x2: width, y1: y + ROW - 2, y2: y + ROW - 2, class: "tick" }),
        bars,
      );
    });
    this.cursor = svg("line", { y1: 18, y2: height, class: "now" });
    this.chart.replaceChildren(
      svg(
        "svg",
        {
          width,
          height,
          viewBox: `0 0 ${width} ${height}`,
          role: "img",
          "aria-label": "Bars of a predicted step; the table below has the values",
        },
        scale,
        lines,
        this.cursor,
      ),
    );
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
  const tall = row.isLink ? 9 : 19;
  const isLow = bar.kind === "backward" || bar.kind === "back"; // the place, not only the colour, tells the way
  const top = row.isLink ? y + (isLow ? 14 : 3) : y + (isLow ? 7 : 0);
  const batch = bar.micro_batch == null ? "" : `, micro-batch ${bar.micro_batch + 1}`;
  const told = `${row.id}: ${WORDS[bar.kind] ?? bar.kind}${batch}, ${seconds(bar.start)} to ${seconds(bar.end)}`;
  const label =
    end - start > 16 && bar.micro_batch != null && !row.isLink
      ? svg(
          "text",
          { x: (start + end) / 2, y: top + 14, "text-anchor": "middle", class: "bar-text" },
          bar.micro_batch + 1,
        )
      : null;
  return svg(
    "g",
    {},
    svg("title", {}, told),
    svg("rect", {
      x: start,
      y: top,
      width: Math.max(0.8, end - start - 1),
      height: tall,
      rx: 2,
      class: classOf(bar.kind),
    }),
    label,
  );
}

function barsTable({ members, links, measured = [] }) {
  const rows = [...members, ...measured, ...links].flatMap((row) =>
    row.bars.map((bar) => [
      row.id,
      WORDS[bar.kind] ?? bar.kind,
      bar.micro_batch == null ? null : bar.micro_batch + 1,
      seconds(bar.start),
      seconds(bar.end),
    ]),
  );
  return table("Bars of the step", ["Member or link", "What", "Micro-batch", "From", "To"], rows);
}

function inUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "s") return seconds(value);
  if (unit === "B") return bytes(value);
  return `${Math.abs(value) < 1000 ? number(Number(value.toPrecision(4))) : count(value)}${unit ? ` ${unit}` : ""}`;
}

function valuesTable(values) {
  const difference = ({ predicted, measured }) => (predicted && measured ? signed(predicted / measured - 1) : "–");
  return table(
    "Predicted and measured",
    ["Value", "Predicted", "Measured", "Prediction is off by"],
    values.map((one) => [one.name, inUnit(one.predicted, one.unit), inUnit(one.measured, one.unit), difference(one)]),
  );
}
