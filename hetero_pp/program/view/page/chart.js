// Curves, drawn by uPlot in the colours of the page's theme.

import { attribute, el, say, show } from "./dom.js";
import { loss } from "./format.js";

const COLOURS = ["--forward", "--backward", "--outer", "--evaluating", "--bad", "--waiting"];
const DASHES = [[], [8, 4], [2, 3]];
const MANY = 10; // curves from which on a legend would be longer than the picture

// What uPlot.join makes of null: it stays, or also covers the places where only other curves have points.
const [KEPT, EXPANDED] = [1, 2];

const NOTE = "Point at a curve to see its name.";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The colour and the pattern of the n-th curve: no two of the first 18 are alike.
export const look = (n) => ({
  colour: COLOURS[n % COLOURS.length],
  dash: DASHES[Math.floor(n / COLOURS.length) % DASHES.length],
});

const SMOOTHED = { 0: "off", 0.6: "light", 0.9: "medium", 0.98: "strong" };
const STEP = 2; // of a zoom

// An exponential mean of the points so far, begun without a bias to zero. A break begins anew.
function smoothed(points, weight) {
  let [mean, sum] = [0, 0];
  return points.map(([x, y]) => {
    if (y === null) [mean, sum] = [0, 0];
    else [mean, sum] = [weight * mean + (1 - weight) * y, weight * sum + (1 - weight)];
    return [x, y === null ? null : mean / sum];
  });
}

export class LineChart {
  // `title` stands before the controls; `tall` is the height of the picture.
  constructor(label, title = "", tall = 320) {
    Object.assign(this, { label, tall, curves: [], weight: 0, logs: { x: false, y: false }, range: null });
    this.picture = el("div", { role: "img", "aria-label": label });
    this.picture.addEventListener("dblclick", () => this.zoom(0));
    this.note = el("p", { class: "note" });
    const smoothing = el(
      "select",
      { "aria-label": "Smoothing", on: { change: (event) => this.change({ weight: Number(event.target.value) }) } },
      Object.entries(SMOOTHED)
        .sort(([a], [b]) => a - b)
        .map(([weight, word]) => el("option", { value: weight }, `smoothing ${word}`)),
    );
    const log = (axis, title) =>
      el(
        "label",
        {},
        el("input", {
          type: "checkbox",
          on: { change: (event) => this.change({ logs: { ...this.logs, [axis]: event.target.checked } }) },
        }),
        el("span", {}, title),
      );
    const button = (text, title, press) =>
      el("button", { type: "button", title, "aria-label": title, on: { click: press } }, text);
    this.controls = el(
      "div",
      { class: "controls" },
      title ? el("h3", {}, title) : null,
      smoothing,
      log("y", "log loss"),
      log("x", "log x"),
      button("−", "Show more of the curves", () => this.zoom(1 / STEP)),
      button("+", "Show less of the curves, enlarged", () => this.zoom(STEP)),
      button("All", "Show the whole curves", () => this.zoom(0)),
      el("span", { class: "muted" }, "or drag over a part"),
    );
    this.holder = el("div", { class: "chart" }, this.controls, this.picture, this.note);
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.height() })).observe(this.holder);
  }

  width() {
    return Math.max(240, this.holder.clientWidth - 16);
  }

  height() {
    return this.holder.clientWidth < 500 ? Math.min(240, this.tall) : this.tall;
  }

  change(changes) {
    Object.assign(this, changes);
    this.update(this.curves, this.xLabel, this.yLabel);
  }

  // Shows a part of the x axis around its middle; factor 0 shows all of it.
  zoom(factor) {
    this.range = null;
    if (factor && this.plot) {
      const { min, max } = this.plot.scales.x;
      const [first, last] = [this.plot.data[0][0], this.plot.data[0].at(-1)];
      const half = (max - min) / (2 * factor);
      const middle = (min + max) / 2;
      if (2 * half < last - first) this.range = [Math.max(first, middle - half), Math.min(last, middle + half)];
    }
    this.change({});
  }

  // `curves` are {label, points: [[x, y], ...], colour, dash, width}, where x never falls.
  update(curves, xLabel, yLabel = "loss") {
    Object.assign(this, { curves, xLabel, yLabel });
    const fits = ([x, y]) => (!this.logs.x || x > 0) && (!this.logs.y || y === null || y > 0);
    const shown = curves
      .map((curve) => ({ ...curve, points: smoothed(curve.points.filter(fits), this.weight) }))
      .filter((curve) => curve.points.length);
    const data = shown.length
      ? window.uPlot.join(
          shown.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)]),
          shown.map(() => [KEPT, EXPANDED]),
        )
      : [[]];
    const key = JSON.stringify([
      shown.map(({ label, colour: name, dash }) => [label, name, dash]),
      xLabel,
      yLabel,
      this.logs,
      colour("--text"),
    ]);
    if (key !== this.key) {
      this.key = key;
      this.plot?.destroy();
      this.plot = new window.uPlot(this.options(shown, xLabel, yLabel), data, this.picture);
      show(this.note, shown.length > MANY);
      say(this.note, NOTE);
    } else this.plot.setData(data, !this.range);
    if (this.range) this.plot.setScale("x", { min: this.range[0], max: this.range[1] });
    this.describe();
  }

  // Says which part of the curves is shown, and how.
  describe() {
    const part = this.range?.map((end) => Number(end.toPrecision(3))).join(" to ");
    const how = [part && `${this.xLabel} ${part}`, this.weight && `smoothing ${SMOOTHED[this.weight]}`];
    const logs = Object.entries(this.logs).map(([axis, isLog]) => isLog && `logarithmic ${axis}`);
    attribute(this.picture, "aria-label", [this.label, ...how, ...logs].filter(Boolean).join("; "));
  }

  options(curves, xLabel, yLabel) {
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      labelSize: 22,
    };
    const many = curves.length > MANY;
    const distr = (axis) => (this.logs[axis] ? 3 : 1);
    return {
      width: this.width(),
      height: this.height(),
      scales: { x: { time: false, distr: distr("x") }, y: { distr: distr("y") } },
      axes: [
        { ...axis, label: xLabel },
        { ...axis, label: yLabel, size: 56 },
      ],
      cursor: { focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.35 },
      hooks: {
        setSeries: [(_, n) => many && say(this.note, n ? `nearest curve: ${curves[n - 1].label}` : NOTE)],
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width) this.range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
            this.describe();
          },
        ],
      },
      legend: { show: !many },
      series: [
        { label: xLabel, value: (_, x) => (x === null ? "–" : String(Number(x.toPrecision(6)))) },
        ...curves.map((curve) => ({
          label: curve.label,
          stroke: colour(curve.colour),
          width: curve.width ?? 1.5,
          dash: curve.dash,
          spanGaps: false, // a point with null breaks a curve; points that another curve has do not
          points: { show: curve.points.length < 40 && curve.width > 2 },
          value: (_, y) => loss(y),
        })),
      ],
    };
  }
}
