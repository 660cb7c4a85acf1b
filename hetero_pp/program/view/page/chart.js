// Curves, drawn by uPlot in the colours of the page's theme.

import { el, say, show } from "./dom.js";
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

export class LineChart {
  constructor(label) {
    this.picture = el("div", { role: "img", "aria-label": label });
    this.note = el("p", { class: "note" });
    this.holder = el("div", { class: "chart" }, this.picture, this.note);
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: this.height() })).observe(this.holder);
  }

  width() {
    return Math.max(240, this.holder.clientWidth - 16);
  }

  height() {
    return this.holder.clientWidth < 500 ? 240 : 320;
  }

  // `curves` are {label, points: [[x, y], ...], colour, dash, width}, where x never falls.
  update(curves, xLabel, yLabel = "loss") {
    const shown = curves.filter((curve) => curve.points.length);
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
      colour("--text"),
    ]);
    if (key === this.key) {
      this.plot.setData(data);
      return;
    }
    this.key = key;
    this.plot?.destroy();
    this.plot = new window.uPlot(this.options(shown, xLabel, yLabel), data, this.picture);
    show(this.note, shown.length > MANY);
    say(this.note, NOTE);
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
    return {
      width: this.width(),
      height: this.height(),
      scales: { x: { time: false } },
      axes: [
        { ...axis, label: xLabel },
        { ...axis, label: yLabel, size: 56 },
      ],
      cursor: { focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.35 },
      hooks: { setSeries: [(_, n) => many && say(this.note, n ? `nearest curve: ${curves[n - 1].label}` : NOTE)] },
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
