// Runs over each other: curves, results, cost, and the settings that differ.

import { behind, cut, el, show, table } from "./dom.js";
import { LineChart, look } from "./chart.js";
import { bytes, count, duration, loss, percent } from "./format.js";
import { AXES, along, ascending, picker } from "./rounds.js";

const FIRST_SHOWN = 4;

export class CompareView {
  constructor(root, load) {
    Object.assign(this, { load, axis: "round", histories: new Map() });
    this.choice = el("fieldset", { class: "runs" });
    this.chart = new LineChart("Synchronized validation loss of each run; the table below has the values");
    this.lossTable = behind("Losses as a table", () => this.losses());
    this.tables = el("div", { class: "stack" });
    this.alone = el(
      "p",
      { class: "empty" },
      "Only one run is open. Give several runs to the command, such as: hetero-pp view runs/one runs/two",
    );
    this.body = el(
      "div",
      { class: "stack" },
      el(
        "div",
        { class: "bar" },
        el("h3", {}, "Validation loss, synchronized"),
        picker("compare-axis", "Along", AXES, "round", (axis) => this.draw({ axis })),
      ),
      this.chart.holder,
      this.lossTable.node,
      this.tables,
    );
    root.append(el("h2", {}, "Comparison"), this.choice, this.alone, this.body);
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
    const box = (run, n) =>
      el(
        "label",
        {},
        el("input", { type: "checkbox", value: run.id, checked: n < FIRST_SHOWN, on: { change: () => this.draw({}) } }),
        el("span", {}, cut(run.name, 60)),
      );
    this.choice.replaceChildren(el("legend", {}, "Runs"), ...runs.map(box));
  }

  async draw(changes) {
    Object.assign(this, changes);
    const ids = [...this.choice.querySelectorAll("input:checked")].map((input) => input.value);
    for (const id of ids) if (!this.histories.has(id)) this.histories.set(id, await this.load(id));
    this.shown = ids.map((id) => this.histories.get(id)).filter(Boolean);
    this.chart.update(
      this.shown.map((run, n) => ({
        label: cut(run.name, 40),
        ...look(n),
        width: 2.5,
        points: ascending(
          run.rounds
            .filter((round) => round.validation_loss !== null)
            .map((round) => [along[this.axis](round), round.validation_loss]),
        ),
      })),
      AXES[this.axis],
    );
    this.tables.replaceChildren(results(this.shown), differing(this.shown));
    this.lossTable.refresh();
  }

  losses() {
    const rounds = new Set(this.shown.flatMap((run) => run.rounds.map((round) => round.round)));
    const of = (run, number) => run.rounds.find((round) => round.round === number)?.validation_loss ?? null;
    return table(
      "Validation loss",
      ["Round", ...this.shown.map((run) => run.name)],
      [...rounds].sort((a, b) => a - b).map((at) => [at, ...this.shown.map((run) => loss(of(run, at)))]),
    );
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
    ["Outcome", (run) => (run.outcome === null ? "running" : run.outcome)],
    ["Members", (run) => run.topology.members.length],
    ["Rounds", (run) => `${run.rounds.at(-1)?.round ?? 0} of ${run.rounds_planned}`],
    ["Validation loss", (run) => loss(run.rounds.findLast((round) => round.validation_loss !== null)?.validation_loss)],
    ...COSTS.map(([key, name, write]) => [name, (run) => (run.cost?.[key] == null ? "unknown" : write(run.cost[key]))]),
  ];
  return table(
    "Results and cost",
    ["", ...runs.map((run) => run.name)],
    lines.map(([name, of]) => [name, ...runs.map(of)]),
  );
}

const value = (run, key) => (Object.hasOwn(run.settings ?? {}, key) ? run.settings[key] : null);

function differing(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings ?? {})))].sort();
  const different = keys.filter((key) => new Set(runs.map((run) => JSON.stringify(value(run, key)))).size > 1);
  if (!different.length)
    return el("p", { class: "muted" }, runs.length > 1 ? "All settings of these runs are equal." : "");
  const written = (found) => (found === null ? "–" : typeof found === "object" ? JSON.stringify(found) : found);
  return table(
    "Settings that differ",
    ["Setting", ...runs.map((run) => run.name)],
    different.map((key) => [key, ...runs.map((run) => cut(String(written(value(run, key))), 120))]),
  );
}
