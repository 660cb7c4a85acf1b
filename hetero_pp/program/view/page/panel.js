// The side panel: facts and history of one member, replica, link, round, or of the exchange.

import { cut, el, facts, table } from "./dom.js";
import { bytes, count, duration, loss, percent, rate, seconds } from "./format.js";
import { told } from "./events.js";
import { CELL_STATES, MEMBER_STATES, REPLICA_STATES, icon, lookUp, markForm } from "./states.js";

const LAST_ROUNDS = 20;
const LAST_MARKS = 40;

// Returns {title, content} for an item such as "member:home.2", or null if there is none of that name.
export function describeItem(item, view, choose) {
  const [kind, ...rest] = (item ?? "").split(":");
  const builders = { member, replica, link, round, exchange };
  const build = Object.hasOwn(builders, kind) ? builders[kind] : null; // anybody may write a fragment
  return build ? build(rest.join(":"), view, choose) : null;
}

const state = (form, detail) =>
  el("p", { class: "state" }, icon(form, 18), el("strong", {}, form.word), detail ? ` ${detail}` : "");
const section = (title, ...content) => [el("h3", {}, title), ...content];

const itemOf = (end) => (end === "exchange" ? "exchange:" : `member:${end}`);

function jump(item, label, choose) {
  return el("button", { type: "button", class: "link", on: { click: () => choose(item) } }, label);
}

function member(id, { history, frame }, choose) {
  const { topology } = history;
  const own = topology.members.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.members[id] ?? { state: "absent" };
  const replica = frame?.replicas[own.replica] ?? {};
  const links = topology.links.filter((one) => one.source === id || one.target === id);
  const lines = topology.lines.filter((one) => one.members.includes(id));
  const site = topology.sites.find((one) => one.id === own.site);
  return {
    title: id,
    content: [
      state(lookUp(MEMBER_STATES, now.state), now.detail),
      facts([
        ["Replica", jump(`replica:${own.replica}`, own.replica, choose)],
        ["Stage", own.stage === null ? null : `${own.stage}`],
        ["Layers", own.layers],
        ["Device", now.device],
        ["Engine", own.engine],
        ["Site", site?.label],
        ["Round", now.round],
        ["In this state for", now.since == null || !frame ? null : duration(Math.max(0, frame.time - now.since))],
        ["Last report", now.heard == null ? null : `${duration(Math.max(0, frame.time - now.heard))} ago`],
        ["Starts", now.incarnation],
        ["Loss of the replica", replica.loss == null ? null : loss(replica.loss)],
        [
          "Speed of the replica",
          replica.tokens_per_second == null ? null : `${count(replica.tokens_per_second)} tokens/s`,
        ],
        ["Score of the replica", replica.score == null ? null : loss(replica.score)],
      ]),
      ...linksOf(links, id, frame, choose),
      ...linesOf(lines, frame),
      ...roundsOf(own.replica, history),
      ...marksOf(history, (mark) => mark.member === id),
    ],
  };
}

function replica(id, { history, frame }, choose) {
  const own = history.topology.replicas.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.replicas[id] ?? {};
  const members = own.members.map((one) => [
    jump(`member:${one}`, one, choose),
    lookUp(MEMBER_STATES, frame?.members[one]?.state ?? "absent").word,
    frame?.members[one]?.detail,
  ]);
  return {
    title: id,
    content: [
      state(lookUp(REPLICA_STATES, now.state ?? "absent")),
      facts([
        ["Kind", own.kind === "datacenter" ? "datacenter" : `group of ${own.members.length}`],
        ["Optional", own.optional ? "yes" : null],
        ["Boundary", own.boundary],
        ["Batch size", own.batch_size],
        ["Loss", now.loss == null ? null : loss(now.loss)],
        ["Validation loss", now.validation_loss == null ? null : loss(now.validation_loss)],
        ["Speed", now.tokens_per_second == null ? null : `${count(now.tokens_per_second)} tokens/s`],
        ["Tokens", now.tokens == null ? null : count(now.tokens)],
        ["Rounds included", now.included == null ? null : `${count(now.included)} of ${count(now.included + now.missed)}`],
        ["Steps", now.steps_done == null ? null : count(now.steps_done)],
        ["Score", now.score == null ? null : loss(now.score)],
        ["Excluded", now.excluded || null],
      ]),
      ...section("Members", table(`Members of ${cut(id, 40)}`, ["Member", "State", "Detail"], members)),
      ...roundsOf(id, history),
      ...marksOf(history, (mark) => mark.replica === id),
    ],
  };
}

function link(id, { history, frame }, choose) {
  const own = history.topology.links.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.links[id] ?? {};
  const ways = ["there", "back"];
  const row = (title, value) => [title, ...ways.map(value)];
  return {
    title: `${own.source} – ${own.target}`,
    content: [
      facts([
        ["From", jump(itemOf(own.source), own.source, choose)],
        ["To", jump(itemOf(own.target), own.target, choose)],
      ]),
      table(
        "Both ways",
        ["Way", `→ ${own.target}`, `→ ${own.source}`],
        [
          row("Rate", (way) => rate(now[way]?.rate)),
          row("Capacity", (way) => (own.bandwidth?.[way] == null ? "unlimited" : rate(own.bandwidth[way]))),
          row("Busy", (way) => percent(now[way]?.busy)),
          row("Awaited", (way) => percent(now[way]?.awaited)),
          row("Sent", (way) => bytes(now[way]?.bytes)),
          row("Latency", (way) => seconds(own.latency?.[way])),
        ],
      ),
      ...marksOf(history, (mark) => mark.member === own.source || mark.member === own.target),
    ],
  };
}

function round(id, { history }, choose) {
  const own = history.rounds.find((one) => String(one.round) === id);
  if (!own) return null;
  const rows = Object.entries(own.cells).map(([name, cell]) => [
    jump(`replica:${name}`, name, choose),
    lookUp(CELL_STATES, cell.state).word,
    cell.why,
    loss(cell.training_loss),
    loss(cell.validation_loss),
    bytes(cell.bytes),
    seconds(cell.compute_seconds),
    seconds(cell.wait_seconds),
    seconds(cell.outer_seconds),
    seconds(cell.blocked_seconds),
  ]);
  return {
    title: `Round ${id}`,
    content: [
      facts([
        ["Closed at", duration(own.closed)],
        ["Took", seconds(own.seconds)],
        ["Bytes", bytes(own.bytes)],
        ["Validation loss", loss(own.validation_loss)],
      ]),
      table(
        "Replicas",
        ["Replica", "State", "Why", "Training loss", "Validation loss", "Bytes", "Compute", "Waiting for links", "Outer round", "Waiting for the exchange"],
        rows,
      ),
      ...marksOf(history, (mark) => mark.round === own.round),
    ],
  };
}

function exchange(_, { history, frame }) {
  const now = frame?.exchange ?? {};
  const last = history.rounds.at(-1);
  return {
    title: "Exchange",
    content: [
      facts([
        ["Rounds closed", frame ? `${frame.rounds_closed} of ${history.rounds_planned}` : null],
        ["Missing", now.missing?.length ? now.missing.join(", ") : "nobody"],
        ["StoreError", now.store_error],
        ["Refused calls", now.refusals],
        ["Last round took", last ? seconds(last.seconds) : null],
        ["Bytes of the last round", last ? bytes(last.bytes) : null],
      ]),
      ...marksOf(history, (mark) => !mark.member && !mark.replica),
    ],
  };
}

function linksOf(links, id, frame, choose) {
  if (!links.length) return [];
  const rows = links.map((one) => {
    const now = frame?.links[one.id] ?? {};
    const [out, incoming] = one.source === id ? ["there", "back"] : ["back", "there"];
    return [
      jump(`link:${one.id}`, one.source === id ? one.target : one.source, choose),
      rate(now[out]?.rate),
      rate(now[incoming]?.rate),
      percent(Math.max(now[out]?.busy ?? 0, now[incoming]?.busy ?? 0)),
    ];
  });
  return section("Links", table("Links", ["With", "Sends", "Receives", "Busy"], rows));
}

function linesOf(lines, frame) {
  const rows = lines.flatMap((one) =>
    ["up", "down"].map((way) => {
      const now = frame?.lines?.[one.id]?.[way] ?? {};
      return [
        `${way === "up" ? "↑ up" : "↓ down"}`,
        rate(now.rate),
        one[way] == null ? "unlimited" : rate(one[way]),
        percent(now.busy),
        bytes(now.bytes),
      ];
    }),
  );
  return lines.length
    ? section("Internet line", table("Internet line", ["Way", "Rate", "Capacity", "Busy", "Total"], rows))
    : [];
}

function roundsOf(id, history) {
  const rounds = history.rounds
    .filter((one) => one.cells[id])
    .slice(-LAST_ROUNDS)
    .reverse();
  if (!rounds.length) return [];
  const rows = rounds.map((one) => {
    const cell = one.cells[id];
    const form = lookUp(CELL_STATES, cell.state);
    return [
      one.round,
      el("span", { class: "state" }, icon(form), form.word),
      loss(cell.validation_loss ?? cell.training_loss),
      seconds(cell.compute_seconds),
      seconds(cell.wait_seconds),
    ];
  });
  return section("Rounds", table("Last rounds", ["Round", "State", "Loss", "Compute", "Waiting"], rows));
}

function marksOf(history, concerns) {
  const marks = history.marks.filter(concerns).slice(-LAST_MARKS).reverse();
  if (!marks.length) return [];
  return section(
    "Events",
    el(
      "ul",
      { class: "marks", tabindex: 0, "aria-label": "Events" },
      marks.map((mark) =>
        el("li", {}, icon(markForm(mark.kind)), el("time", {}, duration(mark.time)), el("span", {}, told(mark))),
      ),
    ),
  );
}
