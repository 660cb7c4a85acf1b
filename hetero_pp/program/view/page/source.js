// Where runs come from: the server that sent this page, or the data inside an exported page.

const RETRY_MS = 2000;

export function openSource() {
  const embedded = document.getElementById("data");
  return embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new ServerSource();
}

class EmbeddedSource {
  constructor(data) {
    this.data = data;
    this.isEmbedded = true;
  }

  async runs() {
    return this.data.runs;
  }

  async whole(id) {
    return { history: { ...this.data.histories[id], is_live: false }, frame: this.data.frames[id]?.at(-1) ?? null };
  }

  // Returns the last key frame that is not later than `time`.
  async frame(id, time) {
    const frames = this.data.frames[id] ?? [];
    const later = frames.findIndex((frame) => frame.time > time);
    return frames[later < 0 ? frames.length - 1 : Math.max(0, later - 1)] ?? null;
  }

  async prediction(id) {
    return this.data.predictions?.[id] ?? null;
  }
}

async function get(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`${path}: the server answered ${response.status}`);
  return response.json();
}

class ServerSource {
  async runs() {
    return (await get("api/runs"))?.runs ?? [];
  }

  async whole(id) {
    return (await get(`api/runs/${encodeURIComponent(id)}`)) ?? {};
  }

  frame(id, time) {
    return get(`api/runs/${encodeURIComponent(id)}/frame?time=${time}`);
  }

  prediction(id) {
    return get(`api/runs/${encodeURIComponent(id)}/prediction`);
  }

  // Calls `connected(bool)` and `told(history, frame)` until the returned function is called. The server sends the
  // whole first, and again when all times are others: the run began anew, or it became known that it had paused.
  follow(id, { connected, told }) {
    let events = null;
    let timer = null;
    let history = null;
    const open = () => {
      events = new EventSource(`api/runs/${encodeURIComponent(id)}/live`);
      events.addEventListener("open", () => connected(true));
      const take = (event, before) => {
        const found = JSON.parse(event.data);
        history = before ? merged(before, found.history) : found.history;
        told(history, found.frame);
      };
      events.addEventListener("whole", (event) => take(event, null));
      events.addEventListener("change", (event) => take(event, history));
      events.addEventListener("end", () => events.close()); // the last changes were told before
      events.addEventListener("error", () => {
        connected(false);
        if (events.readyState === EventSource.CLOSED) timer = setTimeout(open, RETRY_MS); // the browser gave up, we do not
      });
    };
    open();
    return () => {
      clearTimeout(timer);
      events.close();
    };
  }
}

// Adds what changed to a history: rounds by number, marks by id, steps behind those that were not repeated, and everything
// else as a whole. Adding the same twice changes nothing.
function merged(history, changes) {
  const next = { ...history, ...changes };
  if (changes.rounds) {
    const rounds = new Map([...history.rounds, ...changes.rounds].map((round) => [round.round, round]));
    next.rounds = [...rounds.values()].sort((a, b) => a.round - b.round);
  }
  if (changes.marks) {
    const marks = new Map([...history.marks, ...changes.marks].map((mark) => [mark.id, mark]));
    next.marks = [...marks.values()].sort((a, b) => a.time - b.time);
  }
  if (changes.steps) {
    next.steps = { ...history.steps };
    for (const [replica, points] of Object.entries(changes.steps))
      next.steps[replica] = [...(next.steps[replica] ?? []).filter(([, step]) => step < points[0][1]), ...points];
  }
  return next;
}
