// Requests to this server, with a key where it asks for one, and its errors in words.

import { events } from "./sse.js";

const KEY = "fastgen-key";
const dialog = document.getElementById("key-dialog");
const form = document.getElementById("key-form");
const input = document.getElementById("key-input");
const note = document.getElementById("key-note");
const kept = document.getElementById("key-kept");
const calmNote = note.textContent;
let key = readKey();
let asking = null;

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The response to a request, once it is a good one. With `mayAsk`, a person is asked for a key where one is needed. */
export async function request(path, { body, signal, mayAsk = true } = {}) {
  for (;;) {
    const used = key;
    const headers = {};
    if (used) headers.authorization = `Bearer ${used}`;
    if (body) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
    if (response.ok) return response;
    const error = await readError(response);
    if (response.status !== 401) throw error;
    if (used !== key) continue; // another request has got a key meanwhile
    if (!mayAsk || !(await askForKey(used !== null))) throw error;
  }
}

/** The objects of a streamed answer. Ends with the server's `[DONE]`, and fails where the stream does. */
export async function* stream(path, body, signal) {
  const response = await request(path, { body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new ApiError(part.error.code ?? 500, part.error.message, null);
    yield part;
  }
  throw new ApiError(0, "The connection ended before the answer did.", null);
}

/** What went wrong, as a sentence or two. */
export function inWords(error) {
  if (!(error instanceof ApiError)) {
    return error instanceof TypeError
      ? "The server cannot be reached. It may have ended, or the network is gone."
      : `Something went wrong in this page: ${error.message}`;
  }
  if (error.status === 401) return "The server asks for a key, and was given none that it knows.";
  const message = sentence(error.message);
  if (error.status !== 429 && error.status !== 503) return message;
  const soon = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return `The server cannot take this now. ${message}${soon}`;
}

/** Ask for a key. False where none was given. */
export function askForKey(wasRefused = false) {
  asking ??= new Promise((resolve) => {
    note.textContent = wasRefused ? "That key was not accepted. Please look at it again." : calmNote;
    note.classList.toggle("wrong", wasRefused);
    input.value = "";
    const close = (given) => {
      form.onsubmit = dialog.oncancel = null;
      dialog.close();
      asking = null;
      resolve(given);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      writeKey(input.value.trim());
      input.value = "";
      close(true);
    };
    dialog.oncancel = (event) => {
      event.preventDefault();
      close(false);
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

document.getElementById("key-cancel").addEventListener("click", () => dialog.dispatchEvent(new Event("cancel")));
document.getElementById("key-button").addEventListener("click", () => {
  writeKey(null);
  document.dispatchEvent(new Event("keyforgotten"));
});

async function readError(response) {
  let message = `${response.status} ${response.statusText}`.trim();
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not one of this server's own errors: a proxy's, perhaps
  }
  return new ApiError(response.status, message, response.headers.get("retry-after"));
}

function sentence(text) {
  const trimmed = text.trim();
  const capital = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}

function readKey() {
  try {
    const found = sessionStorage.getItem(KEY);
    kept.hidden = found === null;
    return found;
  } catch {
    return null;
  }
}

function writeKey(value) {
  key = value;
  kept.hidden = value === null;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // no storage is allowed here: the key lasts as long as the page
  }
}
