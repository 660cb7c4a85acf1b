// The page: keeps what is shown, fetches it, and tells each part when it changed.

import { cut, el, say, show } from "./dom.js";
import { CompareView } from "./compare.js";
import { describeItem } from "./panel.js";
import { PHASES, icon, lookUp } from "./states.js";
import { PredictionView } from "./prediction.js";
import { RoundsView } from "./rounds.js";
import { TopologyView } from "./topology.js";
import { TimeBar } from "./timebar.js";
import { attentionTo, drawTiles } from "./summary.js";
import { merged, openSource } from "./source.js";
import { useTheme } from "./theme.js";

const VIEWS = ["topology", "rounds", "compare", "prediction"];
const byId = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.source = openSource();
    this.shown = {
      runs: [],
      run: null,
      history: null,
      frame: null,
      live: null,
      prediction: null,
      view: "topology",
      time: null,
      select: null,
      isConnected: true,
    };
    const choose = (item) => this.choose(item);
    const goTo = (time) => this.goTo(time);
    this.views = {
      topology: new TopologyView(byId("topology"), choose, goTo),
      rounds: new RoundsView(byId("rounds"), choose, goTo),
      compare: new CompareView(byId("compare"), (id) => this.source.history(id)),
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
    const { history, live } = await this.fetched(id);
    Object.assign(this.shown, { run: id, kind, history, live, frame: live, time: null, select: null });
    this.shown.prediction = undefined; // not asked for yet
    byId("run-select").value = id;
    say(byId("run-name"), byId("run-choice").hidden ? cut(history?.name ?? id, 60) : "");
    document.title = `${cut(history?.name ?? id, 60)} – hetero-pp`;
    show(byId("rehearsal"), Boolean(history?.rehearsal));
    show(byId("loading"), false);
    if (predicts && !wanted.get("view")) wanted.set("view", "prediction"); // it was asked for
    this.read(wanted);
    if (history?.is_live && !this.source.isEmbedded) this.follow(id);
  }

  async fetched(id) {
    const isRun = this.shown.runs.find((run) => run.id === id).kind !== "prediction";
    const [history, live] = await Promise.all(isRun ? [this.source.history(id), this.source.frame(id, null)] : [null, null]);
    return { history, live };
  }

  // Fetches the prediction, which the server makes when it is first asked, and what was measured up to now.
  async predict() {
    const { run } = this.shown;
    const prediction = await this.source.prediction(run).catch(() => null);
    if (run === this.shown.run) this.change({ prediction });
  }

  follow(id) {
    this.stop = this.source.follow(id, {
      connected: (isConnected) => {
        this.change({ isConnected });
        if (isConnected) this.reload(id).catch(() => this.change({ isConnected: false })); // events tell only what is new since then
      },
      frame: (live) => this.change(this.shown.time === null ? { live, frame: live } : { live }),
      history: (changes) => {
        this.missed?.push(changes);
        this.change({ history: merged(this.shown.history, changes) });
      },
      restarted: () => this.openRun(id, new URLSearchParams(location.hash.slice(1))),
    });
  }

  async reload(id) {
    this.missed = []; // what is told while the history is on its way
    const { history: got, live } = await this.fetched(id);
    const history = this.missed.reduce(merged, got);
    this.missed = null;
    if (id === this.shown.run && got)
      this.change(this.shown.time === null ? { history, live, frame: live } : { history, live });
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
    queueMicrotask(() => (select ? byId("panel").querySelector("h2") : this.before())?.focus?.()); // once it is drawn
  }

  // What had the focus before the panel was opened; a picture that changed its size has other nodes since.
  before() {
    return this.opener?.isConnected ? this.opener : this.views.topology.zoomed.item(this.opener?.dataset?.item);
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
    if (changes.view === "prediction") this.predict();
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
    const isRun = Boolean(shown.history) && shown.kind !== "prediction";
    for (const name of VIEWS) show(byId(name), name === shown.view);
    for (const link of byId("views").children) {
      show(link, isRun || link.dataset.view === "prediction");
      if (link.dataset.view === shown.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
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

  drawHeader({ frame, history, isConnected, time, live }) {
    const form = lookUp(PHASES, frame?.phase ?? (history?.outcome === "over" ? "over" : "waiting"));
    const word = time === null ? form.word : `${form.word} (replay)`;
    if (byId("phase").textContent !== word) byId("phase").replaceChildren(icon(form), word);
    say(byId("message"), frame?.phase === "joining" ? cut(frame.message, 200) : "");
    show(byId("phase"), this.shown.kind !== "prediction");
    show(byId("connection"), !isConnected);
    if (!isConnected && !byId("connection").childElementCount)
      byId("connection").replaceChildren(
        icon({ icon: "warn", tone: "bad" }),
        "no connection to the server; the page shows what it has and tries again",
      );
    const lost = isConnected ? "" : "The connection to the server is lost.";
    say(byId("status"), lost || (live ? `State of the run: ${lookUp(PHASES, live.phase).word}.` : ""));
  }

  drawPanel(view) {
    const panel = byId("panel");
    const found =
      view.history &&
      describeItem(view.select, { ...view, history: until(view.history, view.time) }, (item) => this.choose(item));
    show(panel, Boolean(found));
    if (!found) return;
    const key = `${view.select} ${view.frame?.time} ${view.history.rounds.length} ${view.history.marks.length}`;
    if (key === this.panelKey) return;
    const isSame = this.panelKey?.startsWith(`${view.select} `);
    this.panelKey = key;
    if (isSame && panel.querySelector(".panel-body").contains(document.activeElement)) return; // do not take away what has the focus
    const close = el(
      "button",
      { type: "button", "aria-label": "Close the details", on: { click: () => this.choose(null) } },
      "Close",
    );
    const top = panel.scrollTop;
    if (isSame) panel.querySelector(".panel-body").replaceChildren(...found.content);
    else
      panel.replaceChildren(
        el("div", { class: "panel-head" }, el("h2", { tabindex: -1 }, cut(found.title, 60)), close),
        el("div", { class: "panel-body" }, ...found.content),
      );
    panel.scrollTop = isSame ? top : 0;
  }

  writeFragment() {
    const { run, runs, view, time, select } = this.shown;
    const parts = {
      run: runs.length > 1 ? run : null,
      view,
      time: time === null ? null : Number(time.toFixed(2)),
      select,
    };
    const known = Object.entries(parts).filter(([, value]) => value !== null);
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
  };
}

new Page().start().catch((error) => {
  show(byId("loading"), true);
  say(byId("loading"), `The run cannot be shown: ${error.message}`);
});
