// Where runs come from: the server that sent this page, or the data inside an exported page.

const RETRY_MS = 2000;

export function openSource() {
  const embedded = document.getElementById("data");
  return embedded ? fromData(JSON.parse(embedded.textContent)) : fromServer;
}

const fromData = (data) => ({
  isEmbedded: true,
  runs: async () => data.runs,
  prediction: async (id) => data.predictions?.[id] ?? null,
  whole: async (id) => ({ history: { ...data.histories[id], is_live: false }, frame: data.frames[id]?.at(-1) ?? null }),
  // The last key frame that is not later than `time`.
  async frame(id, time) {
    const frames = data.frames[id] ?? [];
    return frames.findLast((frame) => frame.time <= time) ?? frames[0] ?? null;
  },
});

async function get(path) {
  const response = await fetch(path, { headers: { accept: "application/json" } });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`${path}: the server answered ${response.status}`);
  return response.json();
}

const pathOf = (id) => `api/runs/${encodeURIComponent(id)}`;

const fromServer = {
  runs: async () => (await get("api/runs"))?.runs ?? [],
  whole: async (id) => (await get(pathOf(id))) ?? {},
  frame: (id, time) => get(`${pathOf(id)}/frame?time=${time}`),
  prediction: (id) => get(`${pathOf(id)}/prediction`),

  // Calls `connected(bool)` and `told(history, frame)` until the returned function is called. The server sends the
  // whole first, and again when all times are others: the run began anew, or it became known that it had paused.
  follow(id, { connected, told }) {
    let events = null;
    let timer = null;
    let history = null;
    const open = () => {
      events = new EventSource(`${pathOf(id)}/live`);
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
  },
};

// Adds what changed to a history: rounds by number, marks by id, steps behind those that were not repeated, and everything
// else as a whole. Adding the same twice changes nothing.
function merged(history, changes) {
  const next = { ...history, ...changes };
  const together = (before, more, key, order) => {
    const all = new Map([...before, ...(more ?? [])].map((one) => [one[key], one]));
    return [...all.values()].sort((a, b) => a[order] - b[order]);
  };
  next.rounds = together(history.rounds, changes.rounds, "round", "round");
  next.marks = together(history.marks, changes.marks, "id", "time");
  next.steps = { ...history.steps };
  for (const [replica, points] of Object.entries(changes.steps ?? {}))
    next.steps[replica] = [...(next.steps[replica] ?? []).filter(([, step]) => step < points[0][1]), ...points];
  return next;
}
