// The page: keeps what is shown, fetches it, and tells each part when it changed.

import { attribute, byId, cut, el, say, show } from "./dom.js";
import { CompareView } from "./compare.js";
import { describeItem } from "./panel.js";
import { PredictionView } from "./prediction.js";
import { RoundsView } from "./rounds.js";
import { TopologyView } from "./topology.js";
import { TimeBar } from "./timebar.js";
import { attentionTo, drawTiles } from "./summary.js";
import { openSource } from "./source.js";
import { PHASES, icon, lookUp } from "./words.js";

const VIEWS = ["topology", "rounds", "compare", "prediction"];

class Page {
  constructor() {
    this.source = openSource();
    this.shown = { runs: [], run: null, history: null, frame: null, live: null, prediction: null, isConnected: true };
    Object.assign(this.shown, { view: "topology", time: null, select: null }); // null is the latest time
    const choose = (item) => this.choose(item);
    const goTo = (time) => this.goTo(time);
    this.views = {
      topology: new TopologyView(byId("topology"), choose, goTo),
      rounds: new RoundsView(byId("rounds"), choose, goTo),
      compare: new CompareView(byId("compare"), async (id) => (await this.source.whole(id)).history),
      prediction: new PredictionView(byId("prediction")),
    };
    this.bar = new TimeBar(byId("time"), goTo);
    useTheme(byId("theme"), () => this.render());
    byId("run-select").addEventListener("change", (event) => this.openRun(event.target.value));
    byId("views").addEventListener("click", (event) => this.onTab(event));
    window.addEventListener("hashchange", () => this.readFragment());
    window.addEventListener("keydown", (event) => event.key === "Escape" && this.shown.select && this.choose(null));
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the fragment is taken
      byId("main").focus();
    });
  }

  async start() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    this.shown.runs = await this.source.runs();
    if (!this.shown.runs.length) throw new Error("There is no run to show.");
    const { runs } = this.shown;
    byId("run-select").replaceChildren(...runs.map((run) => el("option", { value: run.id }, cut(run.name, 60))));
    show(byId("run-choice"), runs.length > 1);
    await this.openRun((runs.find((run) => run.id === wanted.get("run")) ?? runs[0]).id, wanted);
  }

  async openRun(id, wanted = new URLSearchParams()) {
    this.stop?.();
    const { kind, predicts } = this.shown.runs.find((run) => run.id === id);
    const { history, frame } = kind === "prediction" ? {} : await this.source.whole(id);
    Object.assign(this.shown, { run: id, kind, history: history ?? null, live: frame, frame, time: null, select: null });
    this.shown.prediction = undefined; // not asked for yet
    byId("run-select").value = id;
    say(byId("run-name"), byId("run-choice").hidden ? cut(history?.name ?? id, 60) : "");
    document.title = `${cut(history?.name ?? id, 60)} – hetero-pp`;
    show(byId("rehearsal"), Boolean(history?.rehearsal));
    show(byId("loading"), false);
    if (predicts && !wanted.get("view")) wanted.set("view", "prediction"); // it was asked for
    this.read(wanted);
    if (!history?.is_live || this.source.isEmbedded) return;
    this.stop = this.source.follow(id, {
      connected: (isConnected) => this.change({ isConnected }),
      told: (history, live) => this.change(this.shown.time === null ? { history, live, frame: live } : { history, live }),
    });
  }

  readFragment() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const run = wanted.get("run");
    if (run && run !== this.shown.run && this.shown.runs.some(({ id }) => id === run)) this.openRun(run, wanted);
    else this.read(wanted);
  }

  read(wanted) {
    const time = wanted.has("time") ? Number(wanted.get("time")) : null;
    const view = VIEWS.includes(wanted.get("view")) ? wanted.get("view") : "topology";
    this.change({ view, select: wanted.get("select") });
    if (time !== this.shown.time) this.goTo(Number.isFinite(time) ? time : null);
  }

  onTab(event) {
    const view = event.target.dataset?.view;
    if (!view || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.change({ view });
  }

  choose(select) {
    const before = this.shown.select;
    if (select && !before) this.opener = document.activeElement;
    this.change({ select });
    queueMicrotask(() => {
      // Once it is drawn. A picture that changed its size has other nodes since the panel was opened.
      const before = this.opener?.isConnected ? this.opener : this.views.topology.zoomed.item(this.opener?.dataset?.item);
      (select ? byId("panel").querySelector("h2") : before)?.focus?.();
    });
  }

  // Shows a moment; null is the latest. Moments that were asked for while one is fetched are dropped but for the last.
  async goTo(time) {
    const { run, live } = this.shown;
    this.change({ time, ...(time === null ? { frame: live } : {}) });
    if (time === null || this.isFetching) return;
    this.isFetching = true;
    try {
      let got = null;
      while (this.shown.time !== null && this.shown.time !== got && run === this.shown.run) {
        got = this.shown.time;
        const frame = await this.source.frame(run, got);
        if (this.shown.time !== null) this.change({ frame });
      }
    } catch {
      this.change({ isConnected: false }); // the server is gone: the page keeps what it has
    } finally {
      this.isFetching = false;
    }
  }

  change(changes) {
    Object.assign(this.shown, changes);
    const { run } = this.shown;
    if (changes.view === "prediction") {
      // The server makes it when it is first asked, and adds what was measured up to now.
      const told = (prediction) => run === this.shown.run && this.change({ prediction });
      this.source.prediction(run).then(told, () => told(null));
    }
    if (this.isDue) return;
    this.isDue = true;
    queueMicrotask(() => {
      this.isDue = false;
      this.render();
    });
  }

  render() {
    const { shown } = this;
    if (!shown.run) return;
    this.writeFragment();
    const view = { ...shown, latest: shown.live?.time ?? shown.history?.span ?? 0, isEmbedded: this.source.isEmbedded };
    view.until = shown.history && until(shown.history, shown.time);
    const isRun = Boolean(shown.history) && shown.kind !== "prediction";
    for (const name of VIEWS) show(byId(name), name === shown.view);
    for (const tab of byId("views").children) {
      show(tab, isRun || tab.dataset.view === "prediction");
      if (tab.dataset.view === shown.view) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    show(byId("time"), isRun);
    show(byId("tiles"), isRun);
    if (isRun) {
      drawTiles(byId("tiles"), view);
      attentionTo(byId("attention"), view, (item) => this.choose(item));
      this.bar.update(view);
    }
    if (isRun || shown.view === "prediction") this.views[shown.view].update(view);
    this.drawHeader(view);
    this.drawPanel(view);
  }

  drawHeader({ frame, history, isConnected, time, live, kind }) {
    const form = lookUp(PHASES, frame?.phase ?? (history?.outcome === "over" ? "over" : "waiting"));
    const word = time === null ? form.word : `${form.word} (replay)`;
    if (byId("phase").textContent !== word) byId("phase").replaceChildren(icon(form), word);
    say(byId("message"), frame?.phase === "joining" ? cut(frame.message, 200) : "");
    show(byId("phase"), kind !== "prediction");
    show(byId("connection"), !isConnected);
    const lost = "no connection to the server; the page shows what it has and tries again";
    if (!isConnected && !byId("connection").childElementCount)
      byId("connection").replaceChildren(icon({ icon: "warn", tone: "bad" }), lost);
    const state = live ? `State of the run: ${lookUp(PHASES, live.phase).word}.` : "";
    say(byId("status"), isConnected ? state : "The connection to the server is lost.");
  }

  drawPanel(view) {
    const panel = byId("panel");
    const found = view.until && describeItem(view.select, view, (item) => this.choose(item));
    show(panel, Boolean(found));
    if (!found) return;
    const key = `${view.select} ${view.frame?.time} ${view.history.rounds.length} ${view.history.marks.length}`;
    if (key === this.panelKey) return;
    const isSame = this.panelKey?.startsWith(`${view.select} `);
    this.panelKey = key;
    const body = panel.querySelector(".panel-body");
    if (isSame && body.contains(document.activeElement)) return; // do not take away what has the focus
    const top = panel.scrollTop;
    if (isSame) body.replaceChildren(...found.content);
    else {
      const on = { click: () => this.choose(null) };
      const close = el("button", { type: "button", "aria-label": "Close the details", on }, "Close");
      const head = el("div.panel-head", el("h2", { tabindex: -1 }, cut(found.title, 60)), close);
      panel.replaceChildren(head, el("div.panel-body", found.content));
    }
    panel.scrollTop = isSame ? top : 0;
  }

  writeFragment() {
    const { run, runs, view, time, select } = this.shown;
    const at = time === null ? null : Number(time.toFixed(2));
    const parts = Object.entries({ run: runs.length > 1 ? run : null, view, time: at, select });
    const known = parts.filter(([, value]) => value !== null);
    const fragment = `#${known.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
    if (location.hash !== fragment && fragment.length < 2000) history.replaceState(null, "", fragment);
  }
}

// What had happened by a moment; null is now.
function until(history, time) {
  if (time === null) return history;
  return {
    ...history,
    rounds: history.rounds.filter((round) => round.closed <= time),
    marks: history.marks.filter((mark) => mark.time <= time),
    steps: Object.fromEntries(
      Object.entries(history.steps).map(([id, points]) => [id, points.filter(([at]) => at <= time)]),
    ),
  };
}

// Light or dark: as the system says, until the reader chooses.
function useTheme(button, changed) {
  const key = "hetero-pp theme";
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = attempt(() => localStorage.getItem(key));
  const apply = () => {
    const theme = chosen ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    say(button, theme === "dark" ? "Light" : "Dark");
    attribute(button, "aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
    changed();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    attempt(() => localStorage.setItem(key, chosen)); // else the choice holds until the page is closed
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

// Browsers may refuse storage, such as for a file from disk.
function attempt(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

new Page().start().catch((error) => {
  show(byId("loading"), true);
  say(byId("loading"), `The run cannot be shown: ${error.message}`);
});
