// The picture of sites, groups, stages, links and the exchange, at one moment.

import { LineChart } from "./chart.js";
import { attribute, behind, cut, el, say, show, svg, table } from "./dom.js";
import { count, duration, loss, percent, rate } from "./format.js";
import { eventsList } from "./events.js";
import { place } from "./layout.js";
import { lanesLayer, linksLayer, toExchange } from "./links.js";
import { curves } from "./rounds.js";
import { button, fit, rect, text } from "./shapes.js";
import { MEMBER_STATES, REPLICA_STATES, icon, lookUp, path } from "./states.js";
import { withoutEmpty } from "./summary.js";
import { ZoomedPicture } from "./zoom.js";

const CARD_TEXT = { full: [19, 40], medium: [18, 37], small: [18, 18] }; // baselines of the name and of the state
const LATEST = 8; // events
const EMPTY_SHOWN = 2; // optional replicas without members; more of them share a box
const MIDDLE = 210; // the exchange's words stand at most this far down

export class TopologyView {
  constructor(root, choose, goTo) {
    Object.assign(this, { choose, goTo });
    this.events = el("div", { class: "box" });
    const label = "Training loss of each replica and synchronized validation loss; the view Rounds has a table of them";
    this.chart = new LineChart(label, "Loss", 220);
    this.holder = el("div", { class: "picture" });
    this.zoomed = new ZoomedPicture(this.holder, (item) => choose(item));
    this.membersTable = behind("Members as a table", () => membersTable(this.history, this.frame));
    this.linksTable = behind("Links as a table", () => linksTable(this.history, this.frame));
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Topology"), this.zoomed.buttons),
      this.holder,
      el(
        "div",
        { class: "beside" },
        this.chart.holder,
        this.events,
      ),
      legend(),
      this.membersTable.node,
      this.linksTable.node,
    );
    new ResizeObserver(() => this.resize()).observe(this.holder);
  }

  resize() {
    if (this.history && this.holder.clientWidth > 100 && Math.abs(this.holder.clientWidth - this.room) > 20)
      this.build();
  }

  update({ history, frame, select, time }) {
    const topology = withoutEmpty(history.topology, frame, EMPTY_SHOWN);
    if (topology.empty.length) topology.replicas.push({ id: "", kind: "empty", members: [] });
    const key = JSON.stringify({ ...topology, empty: topology.empty.length });
    const isSame = key === this.key;
    Object.assign(this, { history, frame, key, shown: { ...history, topology } });
    if (!isSame || !this.picture) this.build();
    this.draw();
    this.zoomed.mark(select);
    this.drawEvents(history.marks.filter((mark) => mark.time <= (time ?? Infinity)));
    this.drawLoss(history, time ?? Infinity);
    this.membersTable.refresh();
    this.linksTable.refresh();
  }

  drawEvents(marks) {
    const key = `${marks.length} ${marks.at(-1)?.text}`;
    if (key !== this.eventsKey)
      this.events.replaceChildren(el("h3", {}, "Latest events"), eventsList(marks, this.goTo, LATEST));
    this.eventsKey = key;
  }

  drawLoss(history, until) {
    const rounds = history.rounds.filter((round) => round.closed <= until);
    const lines = curves(history, rounds, until, "round");
    const key = `${lines.map(({ points }) => points.length)} ${rounds.length} ${document.documentElement.dataset.theme}`;
    if (key !== this.lossKey) this.chart.update(lines, "round");
    this.lossKey = key;
  }

  build() {
    const topology = this.shown.topology;
    this.room = this.holder.clientWidth > 100 ? this.holder.clientWidth : 900;
    this.picture = place(topology, this.room - 8, Math.max(480, window.innerHeight - 330));
    this.updates = [];
    const own = { ...this, history: this.shown };
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
  const hatch = svg(
    "pattern",
    { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2.5, height: 8, class: "hatch" }),
  );
  const arrow = svg(
    "marker",
    {
      id: "arrow",
      viewBox: "0 0 8 8",
      refX: 7,
      refY: 4,
      markerWidth: 8,
      markerHeight: 8,
      orient: "auto-start-reverse",
      markerUnits: "userSpaceOnUse",
    },
    svg("path", { d: "M0 .8 8 4 0 7.2z", class: "arrow" }),
  );
  return svg("defs", {}, hatch, arrow);
}

function sitesLayer({ picture, history, updates }) {
  const label = new Map(history.topology.sites.map((site) => [site.id, site.label]));
  return svg(
    "g",
    {},
    picture.sites.map((box) =>
      svg(
        "g",
        {},
        rect(box, "site"),
        siteName(box, `site ${label.get(box.site) ?? box.site}`, updates),
      ),
    ),
  );
}

function siteName(box, words, updates) {
  const node = text(box.x + 8, box.y + 13, "small muted");
  updates.push(() => fit(node, words, box.width - 12));
  return node;
}

function framesLayer({ picture, updates, history }) {
  const { name: size } = picture.size;
  const base = size === "small" ? 17 : 20;
  return svg(
    "g",
    {},
    picture.replicas.map((frame) => {
      const { replica } = frame;
      if (!replica.members.length) return emptyFrame(frame, size, updates);
      const kind = replica.kind === "datacenter" ? "datacenter" : `group of ${replica.members.length}`;
      const box = rect(frame, "frame", 12);
      const symbol = svg("path", {
        transform: `translate(${frame.x + 10} ${frame.y + base - 10}) scale(.72)`,
        "fill-rule": "evenodd",
      });
      const title = text(frame.x + 26, frame.y + base, "strong");
      const [name, nextTo] = [svg("tspan"), svg("tspan", { class: "muted plain", dx: 6 })];
      title.append(name, nextTo);
      const facts =
        size === "small"
          ? text(frame.x + frame.width - 8, frame.y + base, "small muted", "", "end")
          : text(frame.x + 26, frame.y + base + 16, "small muted");
      const outer =
        picture.isNarrow && size === "full"
          ? text(frame.x + frame.width - 10, frame.y + base, "small muted", "", "end")
          : null;
      const group = svg("g", button(`replica:${replica.id}`, ""), box, symbol, title, facts, outer);
      updates.push((now) => {
        const own = now?.replicas[replica.id] ?? {};
        const form = lookUp(REPLICA_STATES, own.state ?? "absent");
        const isBad = form.tone === "bad";
        attribute(box, "class", `frame${isBad ? " troubled" : ""}`);
        attribute(symbol, "d", path(form.icon));
        attribute(symbol, "class", `tone-${form.tone}`);
        const short = isBad ? form.word : own.loss == null ? "" : `loss ${own.loss.toFixed(3)}`;
        fit(facts, size === "small" ? short : replicaLine(form, own), frame.width - 36);
        if (outer) say(outer, isBad ? "" : toExchange(history, replica, now));
        const taken = size === "small" ? facts : outer;
        const room = frame.width - 42 - (taken?.getComputedTextLength() ?? 0);
        fit(name, replica.id, room);
        const left = room - name.getComputedTextLength();
        fit(nextTo, size === "small" ? "" : kind, Math.max(0, left));
        if (nextTo.textContent !== kind) say(nextTo, ""); // part of it says nothing
        attribute(
          group,
          "aria-label",
          `${replica.id}, ${kind}: ${form.word}, loss ${loss(own.loss)}, ${count(own.tokens_per_second)} tokens a second`,
        );
      });
      return group;
    }),
  );
}

// One box for all optional replicas in which nobody is.
function emptyFrame(frame, size, updates) {
  const [title, facts] = [18, 34].map((y, n) => text(frame.x + 14, frame.y + y, n ? "small muted" : "strong"));
  const names = svg("title");
  updates.push((_, { topology: { empty } }) => {
    const free = empty.filter(({ isFree }) => isFree).length;
    const states = [`${count(empty.length - free)} vacant`, `${count(free)} free`].filter((one) => !one.startsWith("0 "));
    fit(title, `${count(empty.length)} optional replicas`, frame.width - 28);
    if (size !== "small") fit(facts, states.join(", "), frame.width - 28);
    say(names, `Nobody is in ${empty.map(({ id }) => id).join(", ")}`);
  });
  return svg("g", { "data-empty": "" }, rect(frame, "frame empty", 12), title, facts, names);
}

function replicaLine(form, own) {
  if (form.tone === "bad") return form.word;
  const speed = own.tokens_per_second == null ? null : `${count(own.tokens_per_second)} tokens/s`;
  return [own.loss == null ? form.word : `loss ${loss(own.loss)}`, speed].filter(Boolean).join(" · ");
}

function hubLayer({ picture, updates }) {
  const { hub } = picture;
  const x = hub.x + hub.width / 2;
  const y = hub.y + Math.min(hub.height / 2, MIDDLE);
  const lines = [
    text(x, picture.isNarrow ? y - 8 : y - 14, "strong", "Exchange", "middle"),
    text(x, picture.isNarrow ? y + 9 : y + 6, "small muted", "", "middle"),
    text(x, picture.isNarrow ? y + 24 : y + 24, "small", "", "middle"),
  ];
  const node = svg("g", button("exchange:", "Exchange"), rect(hub, "hub", 12), lines);
  updates.push((now, history) => {
    const missing = now?.exchange?.missing ?? [];
    say(
      lines[1],
      now ? `round ${Math.min(now.rounds_closed + 1, history.rounds_planned)} of ${history.rounds_planned}` : "",
    );
    say(lines[2], missing.length ? `${missing.length} missing` : "");
    attribute(lines[2], "class", `small${missing.length ? " late" : ""}`);
    attribute(
      node,
      "aria-label",
      `Exchange: ${lines[1].textContent}${missing.length ? `, waits for ${cut(missing.join(", "), 120)}` : ""}`,
    );
  });
  return node;
}

function membersLayer({ picture, history, updates }) {
  return svg(
    "g",
    {},
    history.topology.members
      .filter(({ id }) => picture.members.has(id))
      .map((member) => card(member, picture, history, updates)),
  );
}

function card(member, picture, history, updates) {
  const box = picture.members.get(member.id);
  const size = picture.size.name;
  const [nameY, stateY] = CARD_TEXT[size];
  const outline = rect(box, "card", 7);
  const stripe = svg("rect", { x: box.x, y: box.y, width: size === "small" ? 4 : 5, height: box.height, rx: 2.5 });
  const symbol = svg("path", {
    transform: `translate(${box.x + 10} ${box.y + stateY - 10.5}) scale(.75)`,
    "fill-rule": "evenodd",
  });
  const shortName = size === "small" ? member.id.slice(member.replica.length) || member.id : member.id;
  const isOwn = history.own?.includes(member.id);
  const name = text(box.x + (size === "small" ? 26 : 11), box.y + nameY, "strong");
  const state = text(box.x + 27, box.y + stateY, "");
  const layers = text(box.x + 11, box.y + 60, "small muted");
  const usage = text(box.x + 11, box.y + 78, "small muted");
  const own = size === "full" ? [state, layers, usage] : size === "medium" ? [state] : [];
  const node = svg("g", button(`member:${member.id}`, ""), outline, stripe, symbol, name, own);
  const line = history.topology.lines.find(({ members }) => members.includes(member.id));
  updates.push((now) => {
    const facts = now?.members[member.id] ?? { state: "absent" };
    const form = lookUp(MEMBER_STATES, facts.state);
    attribute(node, "data-state", facts.state);
    attribute(outline, "class", `card${isOwn ? " own" : ""} is-${Object.hasOwn(MEMBER_STATES, facts.state) ? facts.state : "other"}`);
    attribute(stripe, "class", `tone-${form.tone}`);
    attribute(symbol, "class", `tone-${form.tone}`);
    attribute(symbol, "d", path(form.icon));
    fit(name, shortName, box.width - (size === "small" ? 30 : 18));
    fit(state, activity(form, facts, size), box.width - 34);
    const told = [isOwn ? "this host" : "", member.layers, facts.device].filter(Boolean).join(" · ");
    fit(layers, told, box.width - 18);
    const flow = line && now?.lines?.[line.id];
    fit(usage, flow ? `line ↑ ${percent(flow.up?.busy)}  ↓ ${percent(flow.down?.busy)}` : "", box.width - 18);
    attribute(node, "aria-label", `${member.id}${isOwn ? " (this host)" : ""}: ${form.word}${facts.detail ? `, ${facts.detail}` : ""}`);
  });
  return node;
}

// The detail already says what waits: "waits for home.2".
function activity(form, facts, size) {
  if (!facts.detail || facts.state !== "waiting") return form.word;
  return size === "full" ? facts.detail : facts.detail.replace(/^waits for/, "for"); // beside an hourglass
}

function legend() {
  const item = (form) => el("li", {}, icon(form), form.word);
  const ways =
    "A line is as thick as it is busy; the upper arrow points there, the lower one back. Awaited: share of its last " +
    "round in which the receiver waited for messages on this link, also while the sender computed.";
  return el(
    "details",
    { class: "legend" },
    el("summary", {}, "Symbols"),
    el("ul", { class: "symbols" }, Object.values(MEMBER_STATES).map(item)),
    el("p", {}, ways),
  );
}

function membersTable(history, frame) {
  const rows = history.topology.members.map((member) => {
    const facts = frame?.members[member.id] ?? {};
    const replica = frame?.replicas[member.replica] ?? {};
    return [
      member.id,
      member.replica,
      lookUp(MEMBER_STATES, facts.state ?? "absent").word,
      facts.detail,
      facts.device,
      loss(replica.loss),
      count(replica.tokens_per_second),
      facts.heard == null ? "–" : `${duration(Math.max(0, frame.time - facts.heard))} ago`,
    ];
  });
  return table(
    "Members",
    ["Member", "Replica", "State", "Detail", "Device", "Loss", "Tokens/s (replica)", "Last report"],
    rows,
  );
}

function linksTable(history, frame) {
  const rows = history.topology.links.map((link) => {
    const flow = frame?.links[link.id] ?? {};
    const way = (name) => [
      rate(flow[name]?.rate),
      link.bandwidth?.[name] == null ? "unlimited" : rate(link.bandwidth[name]),
      percent(flow[name]?.busy),
      percent(flow[name]?.awaited),
    ];
    return [`${link.source} – ${link.target}`, ...way("there"), ...way("back")];
  });
  return table(
    "Links",
    ["Link", ...["there", "back"].flatMap((way) => ["Rate", "Capacity", "Busy", "Awaited"].map((one) => `${one} ${way}`))],
    rows,
  );
}
