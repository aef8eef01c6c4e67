// The list of the server's replicas, one of which is shown in detail. A server without replicas has no list.

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact" });

/** Fills the list. `shown` is the id of the replica shown in detail; `choose` is called with the id that is clicked. */
export function showReplicas(replicas, shown, choose) {
  byId("replicas-panel").hidden = !replicas.length;
  const numReady = replicas.filter((each) => each.state === "ready").length;
  byId("replicas-note").textContent = `${numReady} of ${replicas.length} ready`;
  const body = byId("replicas");
  const ids = [...body.rows].map((row) => row.dataset.id);
  if (ids.join() !== replicas.map((each) => each.id).join()) body.replaceChildren(...replicas.map(() => newRow(choose)));
  replicas.forEach((replica, place) => fill(body.rows[place], replica, replica.id === shown));
}

function newRow(choose) {
  const row = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.append(document.createElement("b"), document.createElement("small"));
  button.addEventListener("click", () => choose(row.dataset.id));
  head.append(button);
  row.append(head, ...Array.from({ length: 5 }, () => document.createElement("td")));
  return row;
}

function fill(row, replica, isShown) {
  row.dataset.id = replica.id;
  row.dataset.state = replica.state;
  const button = row.querySelector("button");
  button.setAttribute("aria-pressed", String(isShown));
  button.title = `${replica.id} on ${replica.host}, ${replica.state}`;
  const [name, place] = button.children;
  name.textContent = replica.id;
  place.textContent = replica.state === "ready" ? replica.host : replica.state;
  const values = [
    numbers.format(replica.num_running),
    numbers.format(replica.num_waiting),
    replica.num_blocks ? `${Math.round((100 * replica.num_held_blocks) / replica.num_blocks)} %` : "–",
    short.format(replica.outstanding_tokens),
    numbers.format(replica.restarts),
  ];
  [...row.cells].slice(1).forEach((cell, place) => (cell.textContent = values[place]));
}
