// The picture of sites, groups, stages, links and the exchange, at one moment.

import { LineChart } from "./chart.js";
import { attribute, behind, cut, el, say, svg, table } from "./dom.js";
import { between, place } from "./layout.js";
import { curves } from "./rounds.js";
import { withoutEmpty } from "./summary.js";
import { MEMBER_STATES, REPLICA_STATES, capacity, count, duration, eventsList, lookUp } from "./words.js";
import { loss, path, percent, rate, symbols } from "./words.js";
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
    this.membersTable.refresh();
    this.linksTable.refresh();
    const { marks, rounds } = until;
    const eventsKey = `${marks.length} ${marks.at(-1)?.text}`;
    if (eventsKey !== this.eventsKey)
      this.events.replaceChildren(el("h3", "Latest events"), eventsList(marks, this.goTo, LATEST));
    const lines = curves(until, "round");
    const { theme } = document.documentElement.dataset;
    const lossKey = `${lines.map(({ points }) => points.length)} ${rounds.length} ${theme}`;
    if (lossKey !== this.lossKey) this.chart.update(lines, "round");
    Object.assign(this, { eventsKey, lossKey });
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

function sitesLayer({ picture, updates }) {
  const sites = picture.sites.map((box) => {
    const name = text(box.x + 8, box.y + 13, "small muted");
    updates.push(() => fit(name, `site ${box.site}`, box.width - 12));
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
    const tokens = own.tokens_per_second == null ? null : `${count(own.tokens_per_second)} tokens/s`;
    const long = [own.loss == null ? form.word : `loss ${loss(own.loss)}`, tokens].filter(Boolean).join(" · ");
    fit(facts, isSmall || isBad ? short : long, width - 36);
    if (outer) {
      const [up, down] = flowsOf(history, replica, now);
      const told = (way) => (way?.busy == null ? rate(way?.rate) : percent(way.busy));
      say(outer, !isBad && (up || down) ? `exchange ↑ ${told(up)} ↓ ${told(down)}` : "");
    }
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

const membersLayer = (own) =>
  svg("g", own.history.topology.members.filter(({ id }) => own.picture.members.has(id)).map((one) => card(one, own)));

function card(member, { picture, history, updates }) {
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
    // The detail already says what waits: "waits for home.2". Beside an hourglass less is enough.
    const awaited = size === "full" ? facts.detail : facts.detail?.replace(/^waits for/, "for");
    fit(state, facts.state === "waiting" && awaited ? awaited : form.word, width - 34);
    fit(layers, [isOwn ? "this host" : "", member.layers, facts.device].filter(Boolean).join(" · "), width - 18);
    const flow = line && now?.lines?.[line.id];
    fit(usage, flow ? `line ↑ ${percent(flow.up?.busy)}  ↓ ${percent(flow.down?.busy)}` : "", width - 18);
    const detail = facts.detail ? `, ${facts.detail}` : "";
    attribute(node, "aria-label", `${member.id}${isOwn ? " (this host)" : ""}: ${form.word}${detail}`);
  });
  return node;
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

// ---- shapes of the picture ----

const rect = (box, name, rx = 8) => svg(`rect.${name}`, { x: box.x, y: box.y, width: box.width, height: box.height, rx });
const text = (x, y, name, words = "", anchor = "start") =>
  svg(["text", ...name.split(" ")].filter(Boolean).join("."), { x, y, "text-anchor": anchor }, words);

// An item that is reached with the arrow keys.
const itemButton = (item, label) => ({ role: "button", tabindex: -1, "data-item": item, "aria-label": label });

// Writes words into a text of the picture, cut to `room`. A text that is not shown yet is measured when it is written
// again.
function fit(node, words, room) {
  const whole = cut(words);
  if (node.whole === whole && node.room === room) return;
  node.textContent = whole;
  const length = whole ? node.getComputedTextLength() : room;
  if (!length) return;
  Object.assign(node, { whole, room });
  for (let kept = whole.length - 1; kept > 0 && node.getComputedTextLength() > room; kept -= 1)
    node.textContent = `${whole.slice(0, kept).trimEnd()}…`;
}

// ---- links ----

// Width of a line that is busy for this share of the time.
const stroke = (busy, size) => (size === "small" ? 1 : 1.5) + (size === "small" ? 2.5 : 5) * Math.min(1, busy ?? 0);

// Draws both ways of a connection and three lines of words for each; returns [node, update(ways, label)].
function connection({ x1, y1, x2, y2, isHorizontal }, size, item, limits) {
  const off = size === "full" ? 6 : size === "medium" ? 5 : 3;
  const [dx, dy] = isHorizontal ? [0, off] : [off, 0];
  const arrow = { "marker-end": "url(#arrow)" };
  const there = svg("line.way", { x1: x1 - dx, y1: y1 - dy, x2: x2 - dx, y2: y2 - dy, ...arrow });
  const back = svg("line.way", { x1: x2 + dx, y1: y2 + dy, x2: x1 + dx, y2: y1 + dy, ...arrow });
  const [x, y] = [(x1 + x2) / 2, (y1 + y2) / 2];
  const room = Math.hypot(x2 - x1, y2 - y1);
  const lines = room > 100 ? 2 : room > 30 ? 1 : 0;
  let words = [];
  if (isHorizontal) words = [-13, -26, -39, 22, 35, 48].map((down) => text(x, y + down, "small halo", "", "middle"));
  else if (size !== "small") {
    const beside = (at, anchor) => [-10, 4, 18].map((down) => text(at, y + down, "small halo", "", anchor));
    words = [...beside(x - 14, "end"), ...beside(x + 14, "start")];
  }
  const tip = svg("title");
  const node = svg("g.item", itemButton(item, ""), tip, svg("line.hit", { x1, y1, x2, y2 }), there, back, words);
  const update = (ways, label) => {
    [there, back].forEach((line, n) => {
      attribute(line, "stroke-width", stroke(ways[n]?.busy, size).toFixed(1));
      const share = ways[n]?.busy == null ? "" : percent(ways[n].busy);
      const speed = [ways[n]?.rate == null ? "" : rate(ways[n].rate), share].filter(Boolean).join(" · ");
      const capacity = limits[n] == null ? "" : `of ${rate(limits[n])}`;
      const late = ways[n]?.awaited == null ? "" : `awaited ${percent(ways[n].awaited)}`;
      const own = words.slice(3 * n, 3 * n + 3);
      if (!own.length) return;
      if (!isHorizontal || lines === 2) {
        const told = [speed, capacity, late].filter(Boolean);
        if (isHorizontal && !n) told.reverse(); // above the line the first words stand next to it, too
        own.forEach((line, at) => {
          say(line, told[at] ?? "");
          attribute(line, "class", `small halo${told[at] === speed ? "" : " muted"}`);
        });
      } else if (lines === 1) say(own[0], share);
    });
    attribute(node, "aria-label", label);
    say(tip, label);
  };
  return [node, update];
}

function linksLayer({ picture, history, updates }) {
  const { members, size } = picture;
  const links = history.topology.links.filter((link) => members.has(link.source) && members.has(link.target));
  const drawn = links.map((link) => {
    const ends = between(members.get(link.source), members.get(link.target));
    const limits = [link.bandwidth?.there, link.bandwidth?.back];
    const [node, update] = connection(ends, size.name, `link:${link.id}`, limits);
    updates.push((now) => {
      const flow = now?.links[link.id];
      const [there, back] = ["there", "back"].map(
        (way) =>
          `${way} ${rate(flow?.[way]?.rate)} of ${capacity(link.bandwidth?.[way])}, ` +
          `awaited ${percent(flow?.[way]?.awaited)} of the last round`,
      );
      update([flow?.there, flow?.back], `link ${link.source} to ${link.target}: ${there}; ${back}`);
    });
    return node;
  });
  return svg("g", drawn);
}

// What flows from a replica to the exchange, and back, over all its links: rates are added, and the busiest and the most
// awaited link count.
function flowsOf(history, replica, now) {
  const flows = history.topology.links.flatMap(({ id, source, target }) => {
    const flow = now?.links[id];
    if (target === "exchange" && replica.members.includes(source)) return [[flow?.there, flow?.back]];
    return source === "exchange" && replica.members.includes(target) ? [[flow?.back, flow?.there]] : [];
  });
  return [0, 1].map((way) => {
    const known = flows.map((flow) => flow[way]).filter((flow) => flow?.rate != null);
    if (!known.length) return null;
    const most = (name) => {
      const shares = known.map((flow) => flow[name]).filter((share) => share != null);
      return shares.length ? Math.max(...shares) : null;
    };
    return { rate: known.reduce((sum, flow) => sum + flow.rate, 0), busy: most("busy"), awaited: most("awaited") };
  });
}

// All links of a replica to the exchange are drawn as one.
function lanesLayer({ picture, history, updates }) {
  const { hub, isNarrow } = picture;
  const bottom = picture.replicas.at(-1)?.y + 22;
  const bus = isNarrow ? svg("line.bus", { x1: 7, y1: hub.height, x2: 7, y2: bottom }) : null;
  const lanes = picture.replicas
    .filter(({ replica }) => replica.members.length)
    .map((frame) => {
      const y = isNarrow ? frame.y + 22 : frame.y + frame.height / 2;
      const [x1, x2] = frame.x < hub.x ? [frame.x + frame.width, hub.x] : [frame.x, hub.x + hub.width];
      const ends = { ...(isNarrow ? { x1: frame.x, x2: 7 } : { x1, x2 }), y1: y, y2: y, isHorizontal: true };
      const [node, update] = connection(ends, isNarrow ? "small" : picture.size.name, `replica:${frame.id}`, []);
      node.removeAttribute("role"); // the frame is the button, this line belongs to it
      node.removeAttribute("aria-label");
      node.classList.replace("item", "lane");
      node.setAttribute("aria-hidden", "true");
      updates.push((now) => update(flowsOf(history, frame.replica, now), ""));
      return node;
    });
  return svg("g", bus, lanes);
}

function linksTable(history, frame) {
  const rows = history.topology.links.map((link) => {
    const way = (name) => {
      const flow = frame?.links[link.id]?.[name] ?? {};
      return [rate(flow.rate), capacity(link.bandwidth?.[name]), percent(flow.busy), percent(flow.awaited)];
    };
    return [`${link.source} – ${link.target}`, ...way("there"), ...way("back")];
  });
  const ways = ["there", "back"].flatMap((way) => ["Rate", "Capacity", "Busy", "Awaited"].map((one) => `${one} ${way}`));
  return table("Links", ["Link", ...ways], rows);
}
