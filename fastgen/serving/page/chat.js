// The conversation: what was said, what is being answered, and how it is to be sampled.

import { inWords, stream } from "./api.js";

const byId = (id) => document.getElementById(id);
const scroll = byId("scroll");
const messages = byId("messages");
const prompt = byId("prompt");
const stopButton = byId("stop-button");
const sendButton = byId("send-button");

/** What the server is: told by the live view as soon as it is known. */
const server = { model: null, hasChatTemplate: true };
let history = [];
let answering = null;

/** The model's name, and whether it can be talked with or only goes on with a text. */
export function setServer(model, hasChatTemplate) {
  if (server.model === model && server.hasChatTemplate === hasChatTemplate) return;
  Object.assign(server, { model, hasChatTemplate });
  byId("system").disabled = !hasChatTemplate;
  prompt.placeholder = hasChatTemplate ? "Write a message" : "Begin a text";
  byId("empty-note").textContent = hasChatTemplate
    ? "Answers come word by word from this server. Nothing is sent anywhere else."
    : "This model has no chat template: it goes on with each text that it is given, and remembers none.";
}

async function send() {
  const text = prompt.value;
  if (answering || !text.trim() || !settingsAreValid()) return;
  prompt.value = "";
  fit();
  byId("empty").hidden = true;
  const question = addMessage("user", "You");
  question.text.textContent = text;
  const answer = addMessage("assistant", "Model");
  answer.item.setAttribute("aria-busy", "true");
  scrollDown();
  answering = new AbortController();
  showAnswering(true);
  const { write, flush } = writer(answer.text);
  const timing = { began: performance.now(), first: null, last: null };
  try {
    const end = await readAnswer(text, write, timing, answering.signal);
    flush();
    noteBelow(answer, [...statistics(end.usage, timing), endInWords(end.reason)]);
    announce("The answer is complete.");
  } catch (error) {
    flush();
    const stopped = error.name === "AbortError";
    noteBelow(answer, [...statistics(null, timing), stopped ? "stopped" : ""]);
    if (!stopped) addError(answer.item, inWords(error));
    announce(stopped ? "Stopped." : "");
  }
  const said = answer.text.textContent;
  if (said) history.push({ role: "user", content: text }, { role: "assistant", content: said });
  else if (!prompt.value) prompt.value = text; // it was not answered, and may be sent again
  answer.item.removeAttribute("aria-busy");
  answering = null;
  showAnswering(false);
  fit();
}

/** Write the answer to `text` as it comes. Returns why it ended and what it cost. */
async function readAnswer(text, write, timing, signal) {
  const system = byId("system").value.trim();
  const ask = { model: server.model, stream: true, stream_options: { include_usage: true }, ...sampling() };
  let path = "v1/completions";
  if (server.hasChatTemplate) {
    path = "v1/chat/completions";
    ask.messages = [...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: text }];
  } else {
    ask.prompt = text;
  }
  const end = { reason: null, usage: null };
  for await (const part of stream(path, ask, signal)) {
    end.usage = part.usage ?? end.usage;
    const choice = part.choices?.[0];
    if (!choice) continue;
    const piece = (server.hasChatTemplate ? choice.delta?.content : choice.text) ?? "";
    if (piece) {
      timing.last = performance.now();
      timing.first ??= timing.last;
      write(piece);
    }
    end.reason = choice.finish_reason ?? end.reason;
  }
  return end;
}

/** Writes pieces of text into `place`, all that have come since the last frame at once; and at once what is left. */
function writer(place) {
  const node = place.appendChild(document.createTextNode(""));
  let waiting = "";
  let frame = null;
  const flush = () => {
    cancelAnimationFrame(frame);
    frame = null;
    stayingAtEnd(() => node.appendData(waiting));
    waiting = "";
  };
  const write = (piece) => {
    waiting += piece;
    frame ??= requestAnimationFrame(flush);
  };
  return { write, flush };
}

/** The fields of the request that were set; the others are the server's to choose. */
function sampling() {
  const fields = { temperature: "temperature", max_tokens: "max-tokens", top_p: "top-p", seed: "seed" };
  const given = Object.entries(fields).map(([name, id]) => [name, byId(id).value]);
  return Object.fromEntries(given.filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
}

function statistics(usage, { began, first, last }) {
  if (first === null) return [];
  const found = [`first token after ${milliseconds(first - began)}`];
  if (usage) {
    const num = usage.completion_tokens;
    found.unshift(`${num} token${num === 1 ? "" : "s"}`);
    const rate = last > first ? (num - 1) / (last - first) : num / (last - began);
    found.push(`${rate < 0.01 ? (1000 * rate).toFixed(1) : Math.round(1000 * rate)} tokens/s`);
  }
  return found;
}

function endInWords(reason) {
  if (reason === "length") return "cut at max tokens";
  return reason === null || reason === "stop" ? "" : `ended: ${reason}`;
}

function milliseconds(value) {
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

function addMessage(role, who) {
  const item = element("li", `message ${role}`);
  const name = element("span", "unseen", `${who}: `);
  const text = element("div", "text");
  const note = element("p", "stats");
  item.append(name, text, note);
  messages.append(item);
  return { item, text, note };
}

function noteBelow({ note }, parts) {
  stayingAtEnd(() => (note.textContent = parts.filter(Boolean).join(" · ")));
}

function addError(item, words) {
  const error = element("p", "error", words);
  error.setAttribute("role", "alert");
  item.append(error);
  scrollDown();
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function settingsAreValid() {
  const wrong = [...byId("settings").querySelectorAll("input")].find((input) => !input.checkValidity());
  if (!wrong) return true;
  showSettings(true);
  wrong.reportValidity();
  return false;
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("settings-button").setAttribute("aria-expanded", String(shown));
}

function showAnswering(is) {
  stopButton.hidden = !is;
  sendButton.hidden = is;
  byId("new-button").disabled = is;
  if (is) announce("Answering.");
}

function announce(words) {
  byId("announcement").textContent = words;
}

/** Make a `change`; who saw the end of the conversation sees it still. */
function stayingAtEnd(change) {
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  change();
  if (isAtEnd) scrollDown();
}

function scrollDown() {
  scroll.scrollTop = scroll.scrollHeight;
}

/** Make the message's field as high as what is in it. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});
stopButton.addEventListener("click", () => {
  answering?.abort();
  prompt.focus();
});
byId("settings-button").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("new-button").addEventListener("click", () => {
  history = [];
  messages.replaceChildren();
  byId("empty").hidden = false;
  prompt.focus();
});
