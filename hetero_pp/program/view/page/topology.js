// The picture of sites, groups, stages, links and the exchange, at one moment.

import { LineChart } from "./chart.js";
import { attribute, behind, cut, el, say, svg, table } from "./dom.js";
import { place } from "./layout.js";
import { fit, itemButton, lanesLayer, linksLayer, linksTable, rect, text, toExchange } from "./links.js";
import { curves } from "./rounds.js";
import { withoutEmpty } from "./summary.js";
import { MEMBER_STATES, REPLICA_STATES, count, duration, eventsList, lookUp, loss, path, percent, symbols } from "./words.js";
import { ZoomedPicture } from "./zoom.js";

const CARD_TEXT = { full: [19, 40], medium: [18, 37], small: [18, 18] }; // baselines of the name and of the state
const LATEST = 8; // events
const EMPTY_SHOWN = 2; // optional replicas without members; more of them share a box
const MIDDLE = 210; // the exchange's words stand at most this far down
const WAYS =
  "A line is as thick as it is busy; the upper arrow points there, the lower one back. Awaited: share of its last " +
  "round in which the receiver waited for messages on this link, also while the sender computed.";

export class TopologyView {
  constructor(root, choose, goTo) {
    this.goTo = goTo;
    this.events = el("div.box");
    const label = "Training loss of each replica and synchronized validation loss; the view Rounds has a table of them";
    this.chart = new LineChart(label, "Loss", 220);
    this.holder = el("div.picture");
    this.zoomed = new ZoomedPicture(this.holder, choose);
    this.membersTable = behind("Members as a table", () => membersTable(this.history, this.frame));
    this.linksTable = behind("Links as a table", () => linksTable(this.history, this.frame));
    root.append(
      el("div.bar", el("h2", "Topology"), this.zoomed.buttons),
      this.holder,
      el("div.beside", this.chart.holder, this.events),
      el("details.legend", el("summary", "Symbols"), symbols(MEMBER_STATES), el("p", WAYS)),
      this.membersTable.node,
      this.linksTable.node,
    );
    new ResizeObserver(() => {
      const room = this.holder.clientWidth;
      if (this.history && room > 100 && Math.abs(room - this.room) > 20) this.build();
    }).observe(this.holder);
  }

  update({ history, until, frame, select }) {
    const topology = withoutEmpty(history.topology, frame, EMPTY_SHOWN);
    if (topology.empty.length) topology.replicas.push({ id: "", kind: "empty", members: [] });
    const key = JSON.stringify({ ...topology, empty: topology.empty.length });
    const isSame = key === this.key;
    Object.assign(this, { history, frame, key, shown: { ...history, topology } });
    if (!isSame || !this.picture) this.build();
    this.draw();
    this.zoomed.mark(select);
    this.drawEvents(until.marks);
    this.drawLoss(until);
    this.membersTable.refresh();
    this.linksTable.refresh();
  }

  drawEvents(marks) {
    const key = `${marks.length} ${marks.at(-1)?.text}`;
    if (key !== this.eventsKey)
      this.events.replaceChildren(el("h3", "Latest events"), eventsList(marks, this.goTo, LATEST));
    this.eventsKey = key;
  }

  drawLoss(until) {
    const lines = curves(until, "round");
    const key = `${lines.map(({ points }) => points.length)} ${until.rounds.length} ${document.documentElement.dataset.theme}`;
    if (key !== this.lossKey) this.chart.update(lines, "round");
    this.lossKey = key;
  }

  build() {
    this.room = this.holder.clientWidth > 100 ? this.holder.clientWidth : 900;
    this.picture = place(this.shown.topology, this.room - 8, Math.max(480, window.innerHeight - 330));
    this.updates = []; // functions of the frame and the history, which fill what was drawn
    const own = { picture: this.picture, updates: this.updates, history: this.shown };
    const layers = [framesLayer, sitesLayer, lanesLayer, linksLayer, hubLayer, membersLayer].map((layer) => layer(own));
    this.zoomed.show(this.picture.width, this.picture.height, [patterns(), ...layers]);
    if (this.frame) this.draw();
  }

  draw() {
    for (const update of this.updates) update(this.frame, this.shown);
    if (this.frame) this.holder.dataset.time = this.frame.time; // the moment that is drawn
  }
}

function patterns() {
  const units = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const lines = svg("rect.hatch", { width: 2.5, height: 8 });
  const size = { viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8 };
  const turned = { orient: "auto-start-reverse", markerUnits: "userSpaceOnUse" };
  return svg(
    "defs",
    svg("pattern", { id: "hatch", width: 8, height: 8, ...units }, lines),
    svg("marker", { id: "arrow", ...size, ...turned }, svg("path.arrow", { d: "M0 .8 8 4 0 7.2z" })),
  );
}

function sitesLayer({ picture, history, updates }) {
  const label = new Map(history.topology.sites.map((site) => [site.id, site.label]));
  const sites = picture.sites.map((box) => {
    const name = text(box.x + 8, box.y + 13, "small muted");
    updates.push(() => fit(name, `site ${label.get(box.site) ?? box.site}`, box.width - 12));
    return svg("g", rect(box, "site"), name);
  });
  return svg("g", sites);
}

const framesLayer = (own) =>
  svg("g", own.picture.replicas.map((frame) => (frame.replica.members.length ? frameOf : emptyFrame)(frame, own)));

function frameOf(frame, { picture, updates, history }) {
  const { replica, x, y, width } = frame;
  const isSmall = picture.size.name === "small";
  const base = y + (isSmall ? 17 : 20);
  const kind = replica.kind === "datacenter" ? "datacenter" : `group of ${replica.members.length}`;
  const box = rect(frame, "frame", 12);
  const symbol = svg("path", { transform: `translate(${x + 10} ${base - 10}) scale(.72)`, "fill-rule": "evenodd" });
  const [name, nextTo] = [svg("tspan"), svg("tspan.muted.plain", { dx: 6 })];
  const title = text(x + 26, base, "strong");
  title.append(name, nextTo);
  const facts = isSmall
    ? text(x + width - 8, base, "small muted", "", "end")
    : text(x + 26, base + 16, "small muted");
  const hasOuter = picture.isNarrow && picture.size.name === "full";
  const outer = hasOuter ? text(x + width - 10, base, "small muted", "", "end") : null;
  const group = svg("g.item", itemButton(`replica:${replica.id}`, ""), box, symbol, title, facts, outer);
  updates.push((now) => {
    const own = now?.replicas[replica.id] ?? {};
    const form = lookUp(REPLICA_STATES, own.state ?? "absent");
    const isBad = form.tone === "bad";
    attribute(box, "class", `frame${isBad ? " troubled" : ""}`);
    attribute(symbol, "d", path(form.icon));
    attribute(symbol, "class", `tone-${form.tone}`);
    const short = isBad ? form.word : own.loss == null ? "" : `loss ${own.loss.toFixed(3)}`;
    fit(facts, isSmall ? short : replicaLine(form, own), width - 36);
    if (outer) say(outer, isBad ? "" : toExchange(history, replica, now));
    const room = width - 42 - ((isSmall ? facts : outer)?.getComputedTextLength() ?? 0);
    fit(name, replica.id, room);
    fit(nextTo, isSmall ? "" : kind, Math.max(0, room - name.getComputedTextLength()));
    if (nextTo.textContent !== kind) say(nextTo, ""); // part of it says nothing
    const speed = `${count(own.tokens_per_second)} tokens a second`;
    attribute(group, "aria-label", `${replica.id}, ${kind}: ${form.word}, loss ${loss(own.loss)}, ${speed}`);
  });
  return group;
}

// One box for all optional replicas in which nobody is.
function emptyFrame(frame, { picture, updates }) {
  const [title, facts] = [18, 34].map((y, n) => text(frame.x + 14, frame.y + y, n ? "small muted" : "strong"));
  const names = svg("title");
  updates.push((_, { topology: { empty } }) => {
    const free = empty.filter(({ isFree }) => isFree).length;
    const states = [`${count(empty.length - free)} vacant`, `${count(free)} free`].filter((one) => !one.startsWith("0 "));
    fit(title, `${count(empty.length)} optional replicas`, frame.width - 28);
    if (picture.size.name !== "small") fit(facts, states.join(", "), frame.width - 28);
    say(names, `Nobody is in ${empty.map(({ id }) => id).join(", ")}`);
  });
  return svg("g", { "data-empty": "" }, rect(frame, "frame.empty", 12), title, facts, names);
}

function replicaLine(form, own) {
  if (form.tone === "bad") return form.word;
  const speed = own.tokens_per_second == null ? null : `${count(own.tokens_per_second)} tokens/s`;
  return [own.loss == null ? form.word : `loss ${loss(own.loss)}`, speed].filter(Boolean).join(" · ");
}

function hubLayer({ picture, updates }) {
  const { hub, isNarrow } = picture;
  const x = hub.x + hub.width / 2;
  const y = hub.y + Math.min(hub.height / 2, MIDDLE);
  const title = text(x, isNarrow ? y - 8 : y - 14, "strong", "Exchange", "middle");
  const progress = text(x, isNarrow ? y + 9 : y + 6, "small muted", "", "middle");
  const waits = text(x, y + 24, "small", "", "middle");
  const node = svg("g.item", itemButton("exchange:", "Exchange"), rect(hub, "hub", 12), title, progress, waits);
  updates.push((now, { rounds_planned: planned }) => {
    const missing = now?.exchange?.missing ?? [];
    say(progress, now ? `round ${Math.min(now.rounds_closed + 1, planned)} of ${planned}` : "");
    say(waits, missing.length ? `${missing.length} missing` : "");
    attribute(waits, "class", `small${missing.length ? " late" : ""}`);
    const awaited = missing.length ? `, waits for ${cut(missing.join(", "), 120)}` : "";
    attribute(node, "aria-label", `Exchange: ${progress.textContent}${awaited}`);
  });
  return node;
}

function membersLayer({ picture, history, updates }) {
  const shown = history.topology.members.filter(({ id }) => picture.members.has(id));
  return svg("g", shown.map((member) => card(member, picture, history, updates)));
}

function card(member, picture, history, updates) {
  const box = picture.members.get(member.id);
  const { x, y, width, height } = box;
  const size = picture.size.name;
  const isSmall = size === "small";
  const [nameY, stateY] = CARD_TEXT[size];
  const isOwn = history.own?.includes(member.id);
  const outline = rect(box, "card", 7);
  const stripe = svg("rect", { x, y, width: isSmall ? 4 : 5, height, rx: 2.5 });
  const at = `translate(${x + 10} ${y + stateY - 10.5}) scale(.75)`;
  const symbol = svg("path", { transform: at, "fill-rule": "evenodd" });
  const shortName = isSmall ? member.id.slice(member.replica.length) || member.id : member.id;
  const name = text(x + (isSmall ? 26 : 11), y + nameY, "strong");
  const state = text(x + 27, y + stateY, "");
  const layers = text(x + 11, y + 60, "small muted");
  const usage = text(x + 11, y + 78, "small muted");
  const own = size === "full" ? [state, layers, usage] : isSmall ? [] : [state];
  const node = svg("g.item", itemButton(`member:${member.id}`, ""), outline, stripe, symbol, name, own);
  const line = history.topology.lines.find(({ members }) => members.includes(member.id));
  updates.push((now) => {
    const facts = now?.members[member.id] ?? { state: "absent" };
    const form = lookUp(MEMBER_STATES, facts.state);
    const known = Object.hasOwn(MEMBER_STATES, facts.state) ? facts.state : "other";
    attribute(node, "data-state", facts.state);
    attribute(outline, "class", `card${isOwn ? " own" : ""} is-${known}`);
    attribute(stripe, "class", `tone-${form.tone}`);
    attribute(symbol, "class", `tone-${form.tone}`);
    attribute(symbol, "d", path(form.icon));
    fit(name, shortName, width - (isSmall ? 30 : 18));
    fit(state, activity(form, facts, size), width - 34);
    fit(layers, [isOwn ? "this host" : "", member.layers, facts.device].filter(Boolean).join(" · "), width - 18);
    const flow = line && now?.lines?.[line.id];
    fit(usage, flow ? `line ↑ ${percent(flow.up?.busy)}  ↓ ${percent(flow.down?.busy)}` : "", width - 18);
    const detail = facts.detail ? `, ${facts.detail}` : "";
    attribute(node, "aria-label", `${member.id}${isOwn ? " (this host)" : ""}: ${form.word}${detail}`);
  });
  return node;
}

// The detail already says what waits: "waits for home.2".
function activity(form, facts, size) {
  if (!facts.detail || facts.state !== "waiting") return form.word;
  return size === "full" ? facts.detail : facts.detail.replace(/^waits for/, "for"); // beside an hourglass
}

function membersTable(history, frame) {
  const row = ({ id, replica }) => {
    const facts = frame?.members[id] ?? {};
    const own = frame?.replicas[replica] ?? {};
    const heard = facts.heard == null ? "–" : `${duration(Math.max(0, frame.time - facts.heard))} ago`;
    const word = lookUp(MEMBER_STATES, facts.state ?? "absent").word;
    return [id, replica, word, facts.detail, facts.device, loss(own.loss), count(own.tokens_per_second), heard];
  };
  const columns = ["Member", "Replica", "State", "Detail", "Device", "Loss", "Tokens/s (replica)", "Last report"];
  return table("Members", columns, history.topology.members.map(row));
}
