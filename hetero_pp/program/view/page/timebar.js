// The slider that shows any moment of the run again.

import { attribute, cut, el, say, selection, svg } from "./dom.js";
import { duration, markForm } from "./words.js";

const TICK_MS = 250;
const SPEEDS = { 1: "1×", 4: "4×", 16: "16×", 64: "64×" };
const STEPS = 1000;

export class TimeBar {
  constructor(root, goTo) {
    this.goTo = goTo;
    this.play = el("button.play", { type: "button", on: { click: () => this.toggle() } }, "Play");
    const on = { input: () => this.onInput(), keydown: (event) => this.onKey(event) };
    this.slider = el("input", { type: "range", min: 0, max: STEPS, step: 1, "aria-label": "Moment of the run", on });
    this.marks = svg("svg.ticks", { "aria-hidden": "true", preserveAspectRatio: "none" });
    this.label = el("span.moment");
    this.speed = selection("Speed of the replay", SPEEDS, "4", () => {});
    this.live = el("button", { type: "button", on: { click: () => this.pause() || goTo(null) } }, "Live");
    root.append(this.play, el("div.track", this.marks, this.slider), this.label, this.speed, this.live);
  }

  update({ history, time, latest, isEmbedded }) {
    Object.assign(this, { latest, time });
    const goes = history.is_live && !isEmbedded;
    const shown = time ?? latest;
    if (document.activeElement !== this.slider || time === null || this.timer)
      this.slider.value = latest ? Math.round((shown / latest) * STEPS) : STEPS;
    const closed = history.rounds.filter((round) => round.closed <= shown).length;
    attribute(this.slider, "aria-valuetext", `${duration(shown)} of ${duration(latest)}, ${closed} rounds closed`);
    const last = `${goes ? "live" : "end"}, ${duration(latest)}`;
    say(this.label, time === null ? last : `${duration(shown)} of ${duration(latest)}`);
    say(this.live, goes ? "Live" : "End");
    attribute(this.live, "aria-label", goes ? "Back to live" : "To the end of the run");
    attribute(this.live, "aria-pressed", time === null);
    say(this.play, this.timer ? "Pause" : "Play");
    this.drawMarks(history.marks, latest);
  }

  drawMarks(marks, latest) {
    const key = `${marks.length} ${Math.round(latest)}`;
    if (key === this.marksKey || !latest) return;
    this.marksKey = key;
    const ticks = new Map(); // no more than pixels
    for (const mark of marks) {
      const { tone } = markForm(mark.kind);
      const at = Math.round((mark.time / latest) * 500) * 2;
      if (ticks.has(`${at} ${tone}`)) continue;
      const ends = { x1: at, x2: at, y1: tone === "bad" ? 0 : 5, y2: 10 };
      ticks.set(`${at} ${tone}`, svg(`line.stroke-${tone}`, ends, svg("title", cut(mark.text, 80))));
    }
    this.marks.setAttribute("viewBox", `0 0 ${STEPS} 10`);
    this.marks.replaceChildren(...ticks.values());
  }

  onInput() {
    this.pause();
    const value = Number(this.slider.value);
    this.goTo(value >= STEPS ? null : (value / STEPS) * this.latest);
  }

  // The steps of the slider are short; with Shift they are long.
  onKey(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !event.shiftKey) return;
    event.preventDefault();
    this.slider.value = Number(this.slider.value) + by * 50;
    this.onInput();
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.time === null) this.time = 0;
    this.timer = setInterval(() => this.step(), TICK_MS);
    this.goTo(this.time);
  }

  step() {
    const next = this.time + (TICK_MS / 1000) * Number(this.speed.value);
    if (next >= this.latest) this.pause();
    this.goTo(next >= this.latest ? null : next);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    say(this.play, "Play");
  }
}
