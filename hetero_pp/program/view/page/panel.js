// The side panel: facts and history of one member, replica, link, round, or of the exchange.

import { cut, el, facts, table, textButton } from "./dom.js";
import { CELL_STATES, MEMBER_STATES, REPLICA_STATES, icon, lookUp, marksList } from "./words.js";
import { bytes, capacity, count, duration, loss, percent, rate, seconds } from "./words.js";

const LAST_ROUNDS = 20;
const LAST_MARKS = 40;

// Returns {title, content} for an item such as "member:home.2", or null if there is none of that name.
export function describeItem(item, { until: history, frame }, choose) {
  const [kind, ...rest] = (item ?? "").split(":");
  const builders = { member, replica, link, round, exchange };
  const build = Object.hasOwn(builders, kind) ? builders[kind] : null; // anybody may write a fragment
  const to = (label, item) => textButton(label, () => choose(item));
  return build ? build(rest.join(":"), { history, frame }, to) : null;
}

const state = (form, detail) => el("p.state", icon(form, 18), el("strong", form.word), detail ? ` ${detail}` : "");
const section = (title, ...content) => [el("h3", title), ...content];
const tableOf = (title, columns, rows, caption = title) => (rows.length ? section(title, table(caption, columns, rows)) : []);
const itemOf = (end) => (end === "exchange" ? "exchange:" : `member:${end}`);
const ago = (frame, time) => duration(Math.max(0, frame.time - time));
const speed = (replica) => (replica.tokens_per_second == null ? null : `${count(replica.tokens_per_second)} tokens/s`);
const ifKnown = (value, write) => (value == null ? null : write(value));

function member(id, { history, frame }, to) {
  const { topology } = history;
  const own = topology.members.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.members[id] ?? { state: "absent" };
  const replica = frame?.replicas[own.replica] ?? {};
  return {
    title: id,
    content: [
      state(lookUp(MEMBER_STATES, now.state), now.detail),
      facts([
        ["Replica", to(own.replica, `replica:${own.replica}`)],
        ["Stage", ifKnown(own.stage, String)],
        ["Layers", own.layers],
        ["Device", now.device],
        ["Engine", own.engine],
        ["Site", own.site],
        ["Round", now.round],
        ["In this state for", ifKnown(frame && now.since, (since) => ago(frame, since))],
        ["Last report", ifKnown(now.heard, (heard) => `${ago(frame, heard)} ago`)],
        ["Starts", now.incarnation],
        ["Loss of the replica", ifKnown(replica.loss, loss)],
        ["Speed of the replica", speed(replica)],
        ["Score of the replica", ifKnown(replica.score, loss)],
      ]),
      ...linksOf(topology.links.filter((one) => one.source === id || one.target === id), id, frame, to),
      ...linesOf(topology.lines.filter((one) => one.members.includes(id)), frame),
      ...roundsOf(own.replica, history),
      ...marksOf(history, (mark) => mark.member === id),
    ],
  };
}

function replica(id, { history, frame }, to) {
  const own = history.topology.replicas.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.replicas[id] ?? {};
  const members = own.members.map((one) => {
    const found = frame?.members[one];
    return [to(one, `member:${one}`), lookUp(MEMBER_STATES, found?.state ?? "absent").word, found?.detail];
  });
  return {
    title: id,
    content: [
      state(lookUp(REPLICA_STATES, now.state ?? "absent")),
      facts([
        ["Kind", own.kind === "datacenter" ? "datacenter" : `group of ${own.members.length}`],
        ["Optional", own.optional ? "yes" : null],
        ["Boundary", own.boundary],
        ["Batch size", own.batch_size],
        ["Loss", ifKnown(now.loss, loss)],
        ["Validation loss", ifKnown(now.validation_loss, loss)],
        ["Speed", speed(now)],
        ["Tokens", ifKnown(now.tokens, count)],
        ["Rounds included", ifKnown(now.included, (n) => `${count(n)} of ${count(n + now.missed)}`)],
        ["Steps", ifKnown(now.steps_done, count)],
        ["Score", ifKnown(now.score, loss)],
        ["Excluded", now.excluded || null],
      ]),
      ...section("Members", table(`Members of ${cut(id, 40)}`, ["Member", "State", "Detail"], members)),
      ...roundsOf(id, history),
      ...marksOf(history, (mark) => mark.replica === id),
    ],
  };
}

function link(id, { history, frame }, to) {
  const own = history.topology.links.find((one) => one.id === id);
  if (!own) return null;
  const now = frame?.links[id] ?? {};
  const row = (title, value) => [title, value("there"), value("back")];
  return {
    title: `${own.source} – ${own.target}`,
    content: [
      facts([
        ["From", to(own.source, itemOf(own.source))],
        ["To", to(own.target, itemOf(own.target))],
      ]),
      table(
        "Both ways",
        ["Way", `→ ${own.target}`, `→ ${own.source}`],
        [
          row("Rate", (way) => rate(now[way]?.rate)),
          row("Capacity", (way) => capacity(own.bandwidth?.[way])),
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

function round(id, { history }, to) {
  const own = history.rounds.find((one) => String(one.round) === id);
  if (!own) return null;
  const columns = {
    Replica: ([name]) => to(name, `replica:${name}`),
    State: ([, cell]) => lookUp(CELL_STATES, cell.state).word,
    Why: ([, cell]) => cell.why,
    "Training loss": ([, cell]) => loss(cell.training_loss),
    "Validation loss": ([, cell]) => loss(cell.validation_loss),
    Bytes: ([, cell]) => bytes(cell.bytes),
    Compute: ([, cell]) => seconds(cell.compute_seconds),
    "Waiting for links": ([, cell]) => seconds(cell.wait_seconds),
    "Outer round": ([, cell]) => seconds(cell.outer_seconds),
    "Waiting for the exchange": ([, cell]) => seconds(cell.blocked_seconds),
  };
  const rows = Object.entries(own.cells).map((one) => Object.values(columns).map((write) => write(one)));
  return {
    title: `Round ${id}`,
    content: [
      facts([
        ["Synchronises", own.fragment],
        ["Closed at", duration(own.closed)],
        ["Took", seconds(own.seconds)],
        ["Bytes", bytes(own.bytes)],
        ["Validation loss", loss(own.validation_loss)],
      ]),
      table("Replicas", Object.keys(columns), rows),
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
        ["Store error", now.store_error],
        ["Refused calls", now.refusals],
        ["Last round took", last ? seconds(last.seconds) : null],
        ["Bytes of the last round", last ? bytes(last.bytes) : null],
      ]),
      ...marksOf(history, (mark) => !mark.member && !mark.replica),
    ],
  };
}

function linksOf(links, id, frame, to) {
  const rows = links.map((one) => {
    const now = frame?.links[one.id] ?? {};
    const [out, incoming] = one.source === id ? ["there", "back"] : ["back", "there"];
    const busy = percent(Math.max(now[out]?.busy ?? 0, now[incoming]?.busy ?? 0));
    const other = one.source === id ? one.target : one.source;
    return [to(other, `link:${one.id}`), rate(now[out]?.rate), rate(now[incoming]?.rate), busy];
  });
  return tableOf("Links", ["With", "Sends", "Receives", "Busy"], rows);
}

function linesOf(lines, frame) {
  const row = (one, way, name) => {
    const now = frame?.lines?.[one.id]?.[way] ?? {};
    return [name, rate(now.rate), capacity(one[way]), percent(now.busy), bytes(now.bytes)];
  };
  const rows = lines.flatMap((one) => [row(one, "up", "↑ up"), row(one, "down", "↓ down")]);
  return tableOf("Internet line", ["Way", "Rate", "Capacity", "Busy", "Total"], rows);
}

function roundsOf(id, history) {
  const rounds = history.rounds.filter((one) => one.cells[id]).slice(-LAST_ROUNDS).reverse();
  const rows = rounds.map((one) => {
    const cell = one.cells[id];
    const form = lookUp(CELL_STATES, cell.state);
    const known = loss(cell.validation_loss ?? cell.training_loss);
    const shown = el("span.state", icon(form), form.word);
    return [one.round, shown, known, seconds(cell.compute_seconds), seconds(cell.wait_seconds)];
  });
  return tableOf("Rounds", ["Round", "State", "Loss", "Compute", "Waiting"], rows, "Last rounds");
}

function marksOf(history, concerns) {
  const marks = history.marks.filter(concerns).slice(-LAST_MARKS);
  const about = { tabindex: 0, "aria-label": "Events" };
  return marks.length ? section("Events", marksList(marks, ({ time }) => el("time", duration(time)), about)) : [];
}
