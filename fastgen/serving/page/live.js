// The live view: looks at the engine once a second, as long as somebody looks at the page.

import { ApiError, askForKey, request } from "./api.js";
import { drawBlocks, drawGaps, drawSteps } from "./charts.js";
import { setServer } from "./chat.js";
import { showReplicas } from "./replicas.js";

const EVERY_MS = 1000;
const KEPT_LOOKS = 60;
const NOTES = {
  starting: "The engine is loading its model.",
  restarting: "The engine ended and is being started again. Requests that were in it have failed.",
  draining: "The server is ending: it finishes what runs, and takes no more requests.",
  failed: "The engine ended again and again, and is not started any more. The server’s log says why.",
  stopped: "The server has ended.",
  unreachable: "The server does not answer. What you see here is from before.",
  "needs a key": "The server shows this to those who have a key.",
};

const byId = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en");
let timer = null;
let wasRefused = false;
let before = null;
let view = null;
let looks = [];
let replica = null; // the id of the chosen replica

async function look() {
  timer = null;
  try {
    const path = replica === null ? "live" : `live?replica=${encodeURIComponent(replica)}`;
    const response = await request(path, { mayAsk: !wasRefused });
    wasRefused = false;
    show(await response.json());
  } catch (error) {
    wasRefused = error instanceof ApiError && error.status === 401;
    showState(wasRefused ? "needs a key" : "unreachable");
  }
  if (!wasRefused) lookAgain(EVERY_MS);
}

function lookAgain(afterMs) {
  clearTimeout(timer);
  timer = document.hidden ? null : setTimeout(look, afterMs);
}

function show(live) {
  byId("model").textContent = live.model;
  document.title = `${live.model} · fastgen`;
  setServer(live.model, live.has_chat_template ?? true); // what is not loaded yet is taken for a chat's
  showState(live.state);
  const { replicas = [], replica: shown = null } = live;
  showReplicas(replicas, shown, choose);
  const its = replicas.find((each) => each.id === shown);
  byId("restarts").textContent = its ? its.restarts : live.restarts;
  if (replica !== null && replica !== shown) choose(shown); // it is gone
  if (!live.engine) return;
  view = live.engine;
  showFigures();
  showSequences();
  draw();
  before = view;
}

function choose(id) {
  replica = id;
  before = null;
  looks = [];
  lookAgain(0);
}

function showState(state) {
  const shown = byId("state");
  if (shown.textContent !== state) shown.textContent = state; // it is read out where it changes
  shown.dataset.state = state;
  const note = byId("engine-note");
  note.hidden = !(state in NOTES);
  note.textContent = NOTES[state] ?? "";
  if (state === "needs a key") note.append(" ", keyButton());
}

function keyButton() {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Enter key";
  button.addEventListener("click", async () => {
    if (!(await askForKey())) return;
    wasRefused = false;
    lookAgain(0);
  });
  return button;
}

function showFigures() {
  const { blocks, gaps } = view;
  const held = sum(blocks.held);
  const cached = sum(blocks.cached);
  byId("running").textContent = numbers.format(view.num_running);
  byId("running-of").textContent = `of ${numbers.format(view.max_num_seqs)}`;
  byId("waiting").textContent = numbers.format(view.num_waiting);
  byId("rate").textContent = numbers.format(Math.round(tokensPerSecond()));
  byId("kv-use").textContent = percent(held, blocks.num_blocks);
  byId("prefix-hits").textContent = percent(view.prefix_hit_tokens, view.prefix_lookup_tokens);
  byId("preemptions").textContent = numbers.format(view.num_preemptions);
  byId("requests").textContent = numbers.format(view.num_requests);
  byId("budget").textContent = numbers.format(view.token_budget);
  byId("steps-note").textContent = view.steps.length ? `last ${view.steps.length}` : "none yet";
  byId("gaps-note").textContent = gaps ? `last ${numbers.format(gaps.count)}` : "none yet";
  for (const name of ["p50", "p95", "p99"]) byId(`gap-${name}`).textContent = gaps ? inMs(gaps[`${name}_s`]) : "–";
  byId("blocks-note").textContent = `${numbers.format(blocks.num_blocks)}, ${blocks.block_size} tokens each${
    blocks.blocks_per_cell > 1 ? `, ${blocks.blocks_per_cell} a cell` : ""
  }`;
  byId("blocks-held").textContent = numbers.format(held);
  byId("blocks-cached").textContent = numbers.format(cached);
  byId("blocks-free").textContent = numbers.format(blocks.num_blocks - held - cached);
  if (before && view.num_generated_tokens < before.num_generated_tokens) looks = []; // another engine
  looks = [...looks, { clock_s: view.clock_s, gaps }].slice(-KEPT_LOOKS);
  byId("gaps-span").textContent = `ms, over ${Math.round(view.clock_s - looks[0].clock_s)} s`;
}

function tokensPerSecond() {
  if (!before || view.clock_s <= before.clock_s) return 0;
  return Math.max(0, (view.num_generated_tokens - before.num_generated_tokens) / (view.clock_s - before.clock_s));
}

function showSequences() {
  const total = view.num_running + view.num_waiting;
  byId("sequences-note").textContent =
    total > view.sequences.length ? `${view.sequences.length} of ${numbers.format(total)}` : total ? "" : "none now";
  byId("sequences").replaceChildren(...view.sequences.map(sequenceRow));
}

function sequenceRow([request, index, isRunning, numPrompt, numCached, numComputed, numNew, maxNew]) {
  const row = document.createElement("li");
  const isReading = numComputed < numPrompt;
  const name = document.createElement("span");
  name.textContent = index ? `${request}.${index}` : `${request}`;
  const bar = document.createElement("progress");
  bar.max = isReading ? numPrompt : maxNew;
  bar.value = isReading ? numComputed : numNew;
  bar.className = isReading ? "prompt" : "answer";
  const words = document.createElement("small");
  const cached = numCached ? `, ${numCached} cached` : "";
  if (!isRunning) words.textContent = `waits, ${numPrompt} prompt tokens`;
  else if (isReading) words.textContent = `${numComputed} of ${numPrompt} prompt tokens${cached}`;
  else words.textContent = `${numNew} of ${maxNew} tokens`;
  bar.setAttribute("aria-label", `Sequence ${name.textContent}: ${words.textContent}`);
  row.append(name, bar, words);
  return row;
}

function draw() {
  if (!view || !byId("engine").clientWidth) return; // nothing known, or out of sight
  drawSteps(view.steps, view.token_budget);
  drawGaps(looks.map((each) => each.gaps), KEPT_LOOKS);
  drawBlocks(view.blocks);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 10 ? share.toFixed(1) : Math.round(share)} %`;
}

function inMs(seconds) {
  const ms = 1000 * seconds;
  return `${ms < 10 ? ms.toFixed(1) : numbers.format(Math.round(ms))} ms`;
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : lookAgain(0)));
document.addEventListener("themechange", draw);
document.addEventListener("keyforgotten", () => lookAgain(0));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(byId("engine"));
look();
