// Runs over each other: curves, results, cost, and the settings that differ.

import { behind, cut, el, picker, show, table } from "./dom.js";
import { LineChart, ascending, look } from "./chart.js";
import { AXES, along } from "./rounds.js";
import { outcomeOf } from "./summary.js";
import { bytes, count, duration, loss, percent } from "./words.js";

const FIRST_SHOWN = 4;
const ALONE = "Only one run is open. Give several runs to the command, such as: hetero-pp view runs/one runs/two";

export class CompareView {
  constructor(root, load) {
    Object.assign(this, { load, axis: "round", histories: new Map() });
    this.choice = el("fieldset.runs");
    this.chart = new LineChart("Synchronized validation loss of each run; the table below has the values");
    this.lossTable = behind("Losses as a table", () => this.losses());
    this.tables = el("div.stack");
    this.alone = el("p.empty", ALONE);
    const axes = picker("compare-axis", "Along", AXES, "round", (axis) => this.draw({ axis }));
    const head = el("div.bar", el("h3", "Validation loss, synchronized"), axes);
    const body = el("div.stack", head, this.chart.holder, this.lossTable.node, this.tables);
    root.append(el("h2", "Comparison"), this.choice, this.alone, body);
  }

  update({ runs, history }) {
    const own = runs.filter((run) => run.kind === "run");
    show(this.alone, own.length < 2);
    show(this.choice, own.length > 1);
    if (this.choice.childElementCount !== own.length + 1) this.offer(own);
    if (this.histories.get(history.id) === history && this.theme === document.documentElement.dataset.theme) return;
    this.theme = document.documentElement.dataset.theme;
    this.histories.set(history.id, history);
    this.draw({});
  }

  offer(runs) {
    const box = (run, n) => {
      const on = { change: () => this.draw({}) };
      const input = el("input", { type: "checkbox", value: run.id, checked: n < FIRST_SHOWN, on });
      return el("label", input, el("span", cut(run.name, 60)));
    };
    this.choice.replaceChildren(el("legend", "Runs"), ...runs.map(box));
  }

  async draw(changes) {
    Object.assign(this, changes);
    const ids = [...this.choice.querySelectorAll("input:checked")].map((input) => input.value);
    for (const id of ids) if (!this.histories.has(id)) this.histories.set(id, await this.load(id));
    this.shown = ids.map((id) => this.histories.get(id)).filter(Boolean);
    const points = (run) =>
      run.rounds
        .filter((round) => round.validation_loss !== null)
        .map((round) => [along[this.axis](round), round.validation_loss]);
    const curve = (run, n) => ({ label: cut(run.name, 40), ...look(n), width: 2.5, points: ascending(points(run)) });
    this.chart.update(this.shown.map(curve), AXES[this.axis]);
    this.tables.replaceChildren(results(this.shown), differing(this.shown));
    this.lossTable.refresh();
  }

  losses() {
    const rounds = new Set(this.shown.flatMap((run) => run.rounds.map((round) => round.round)));
    const of = (run, number) => run.rounds.find((round) => round.round === number)?.validation_loss;
    const rows = [...rounds].sort((a, b) => a - b).map((at) => [at, ...this.shown.map((run) => loss(of(run, at)))]);
    return table("Validation loss", ["Round", ...this.shown.map((run) => run.name)], rows);
  }
}

// What a run has used and reached: a key of its cost, the words for it, and how it is written.
const COSTS = [
  ["tokens", "Tokens", count],
  ["training_seconds", "Time of training", duration],
  ["tokens_per_second", "Tokens per second", count],
  ["goodput", "Tokens per second that counted", count],
  ["goodput_share", "Share of tokens that counted", percent],
  ["contribution_bytes", "Bytes of contributions", bytes],
  ["wire_bytes", "Bytes on all links", bytes],
];

function results(runs) {
  const lines = [
    ["Outcome", (run) => outcomeOf(run) ?? "running"],
    ["Members", (run) => run.topology.members.length],
    ["Rounds", (run) => `${run.rounds.at(-1)?.round ?? 0} of ${run.rounds_planned}`],
    ["Validation loss", (run) => loss(run.rounds.findLast((round) => round.validation_loss !== null)?.validation_loss)],
    ...COSTS.map(([key, name, write]) => [name, (run) => (run.cost?.[key] == null ? "unknown" : write(run.cost[key]))]),
  ];
  const rows = lines.map(([name, of]) => [name, ...runs.map(of)]);
  return table("Results and cost", ["", ...runs.map((run) => run.name)], rows);
}

function differing(runs) {
  const value = (run, key) => (Object.hasOwn(run.settings, key) ? run.settings[key] : null);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const different = keys.filter((key) => new Set(runs.map((run) => JSON.stringify(value(run, key)))).size > 1);
  if (!different.length) return el("p.muted", runs.length > 1 ? "All settings of these runs are equal." : "");
  const written = (found) => (found === null ? "–" : typeof found === "object" ? JSON.stringify(found) : found);
  const rows = different.map((key) => [key, ...runs.map((run) => cut(String(written(value(run, key))), 120))]);
  return table("Settings that differ", ["Setting", ...runs.map((run) => run.name)], rows);
}
