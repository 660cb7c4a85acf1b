// Curves, drawn by uPlot in the colours of the page's theme.

import { el } from "./dom.js";
import { loss } from "./format.js";

const COLOURS = ["--forward", "--backward", "--outer", "--evaluating", "--bad", "--waiting"];
const DASHES = [[], [8, 4], [2, 3]];
const MANY = 10; // curves from which on a legend would be longer than the picture

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The colour and the pattern of the n-th curve: no two of the first 18 are alike.
export const look = (n) => ({ colour: COLOURS[n % COLOURS.length], dash: DASHES[Math.floor(n / COLOURS.length) % DASHES.length] });

export class LineChart {
  constructor(label) {
    this.holder = el("div", { class: "chart", role: "img", "aria-label": label });
    new ResizeObserver(() => this.plot?.setSize({ width: this.holder.clientWidth, height: this.height() })).observe(this.holder);
  }

  height() {
    return this.holder.clientWidth < 500 ? 240 : 320;
  }

  // `curves` are {label, points: [[x, y], ...], colour, dash, width}, where x never falls.
  update(curves, xLabel, yLabel = "loss") {
    const shown = curves.filter((curve) => curve.points.length);
    const data = shown.length ? window.uPlot.join(shown.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)])) : [[]];
    const key = JSON.stringify([shown.map(({ label, colour: name, dash }) => [label, name, dash]), xLabel, yLabel, colour("--text")]);
    if (key === this.key) {
      this.plot.setData(data);
      return;
    }
    this.key = key;
    this.plot?.destroy();
    this.plot = new window.uPlot(this.options(shown, xLabel, yLabel), data, this.holder);
  }

  options(curves, xLabel, yLabel) {
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 22 };
    const many = curves.length > MANY;
    return {
      width: this.holder.clientWidth || 600,
      height: this.height(),
      scales: { x: { time: false } },
      axes: [{ ...axis, label: xLabel }, { ...axis, label: yLabel, size: 56 }],
      cursor: { focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.35 },
      legend: { show: !many },
      series: [
        { label: xLabel, value: (_, x) => (x === null ? "–" : String(Number(x.toPrecision(6)))) },
        ...curves.map((curve) => ({ label: curve.label, stroke: colour(curve.colour), width: curve.width ?? 1.5, dash: curve.dash, spanGaps: true, points: { show: curve.points.length < 40 && curve.width > 2 }, value: (_, y) => loss(y) })),
      ],
    };
  }
}
