// Curves, drawn by uPlot in the colours of the page's theme.

import { attribute, button, el, say, selection, show } from "./dom.js";
import { loss } from "./words.js";

const COLOURS = ["--forward", "--backward", "--outer", "--evaluating", "--bad", "--waiting"];
const DASHES = [[], [8, 4], [2, 3]];
const MANY = 10; // curves from which on a legend would be longer than the picture
const [KEPT, EXPANDED] = [1, 2]; // what uPlot.join makes of null: it stays, or covers the places of other curves, too
const NOTE = "Point at a curve to see its name.";
const SMOOTHED = { 0: "off", 0.6: "light", 0.9: "medium", 0.98: "strong" };
const STEP = 2; // of a zoom

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The colour and the pattern of the n-th curve: no two of the first 18 are alike.
export const look = (n) => ({
  colour: COLOURS[n % COLOURS.length],
  dash: DASHES[Math.floor(n / COLOURS.length) % DASHES.length],
});

// uPlot needs values of x that rise. A replica that repeats steps after a kill keeps its last try.
export function ascending(points) {
  const kept = new Map();
  for (const [x, y] of points) if (x !== null && x !== undefined) kept.set(x, y);
  return [...kept].sort((a, b) => a[0] - b[0]);
}

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
    this.picture = el("div", { role: "img", "aria-label": label, on: { dblclick: () => this.zoom(0) } });
    this.note = el("p.note");
    const words = Object.fromEntries(Object.entries(SMOOTHED).map(([weight, word]) => [weight, `smoothing ${word}`]));
    const log = (axis, title) => {
      const on = { change: (event) => this.change({ logs: { ...this.logs, [axis]: event.target.checked } }) };
      return el("label", el("input", { type: "checkbox", on }), el("span", title));
    };
    const controls = el(
      "div.controls",
      title ? el("h3", title) : null,
      selection("Smoothing", words, "0", (weight) => this.change({ weight: Number(weight) })),
      log("y", "log loss"),
      log("x", "log x"),
      button("−", "Show more of the curves", () => this.zoom(1 / STEP)),
      button("+", "Show less of the curves, enlarged", () => this.zoom(STEP)),
      button("All", "Show the whole curves", () => this.zoom(0)),
      el("span.muted", "or drag over a part"),
    );
    this.holder = el("div.chart", controls, this.picture, this.note);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.holder);
  }

  size() {
    const room = this.holder.clientWidth;
    return { width: Math.max(240, room - 16), height: room < 500 ? Math.min(240, this.tall) : this.tall };
  }

  change(changes) {
    Object.assign(this, changes);
    this.update(this.curves, this.xLabel);
  }

  // Shows a part of the x axis around its middle; factor 0 shows all of it.
  zoom(factor) {
    this.range = null;
    if (factor && this.plot) {
      const { min, max } = this.plot.scales.x;
      const [first, last] = [this.plot.data[0][0], this.plot.data[0].at(-1)];
      const [half, middle] = [(max - min) / (2 * factor), (min + max) / 2];
      if (2 * half < last - first) this.range = [Math.max(first, middle - half), Math.min(last, middle + half)];
    }
    this.change({});
  }

  // `curves` are {label, points: [[x, y], ...], colour, dash, width}, where x never falls.
  update(curves, xLabel) {
    Object.assign(this, { curves, xLabel });
    const fits = ([x, y]) => (!this.logs.x || x > 0) && (!this.logs.y || y === null || y > 0);
    const shown = curves
      .map((curve) => ({ ...curve, points: smoothed(curve.points.filter(fits), this.weight) }))
      .filter((curve) => curve.points.length);
    const columns = shown.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)]);
    const data = shown.length ? window.uPlot.join(columns, shown.map(() => [KEPT, EXPANDED])) : [[]];
    const looks = shown.map(({ label, colour: name, dash }) => [label, name, dash]);
    const key = JSON.stringify([looks, xLabel, this.logs, colour("--text")]);
    if (key !== this.key) {
      this.key = key;
      this.plot?.destroy();
      this.plot = new window.uPlot(this.options(shown, xLabel), data, this.picture);
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

  options(curves, xLabel) {
    const many = curves.length > MANY;
    const distr = (axis) => (this.logs[axis] ? 3 : 1);
    const line = { stroke: colour("--line"), width: 1 };
    const [font, labelFont] = ["12px system-ui, sans-serif", "12px system-ui, sans-serif"];
    const axis = { stroke: colour("--muted"), grid: line, ticks: line, font, labelFont, labelSize: 22 };
    const select = (plot) => {
      const { left, width } = plot.select;
      if (width) this.range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
      this.describe();
    };
    return {
      ...this.size(),
      scales: { x: { time: false, distr: distr("x") }, y: { distr: distr("y") } },
      axes: [
        { ...axis, label: xLabel },
        { ...axis, label: "loss", size: 56 },
      ],
      cursor: { focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.35 },
      hooks: {
        setSeries: [(_, n) => many && say(this.note, n ? `nearest curve: ${curves[n - 1].label}` : NOTE)],
        setSelect: [select],
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
