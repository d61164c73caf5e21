// The page: wires its parts.

import { askJson, hasKey, onUnauthorized, setKey } from "./api.js";
import { Animation } from "./animation.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Diagnosis } from "./diagnosis.js";
import { byId, forgetColours } from "./dom.js";
import { Feed } from "./feed.js";
import { Model } from "./model.js";
import { Timeline } from "./timeline.js";
import { WhatIf } from "./what_if.js";

const THEME = "weft-theme";
const MOST_INJECTED = 8000; // tokens of the long prompt that a button sends

const model = new Model();
const timeline = new Timeline(model);
const charts = new Charts(model);
new Diagnosis();
const animation = new Animation();
const whatIf = new WhatIf((answer, question) => animation.show(answer, question));
const chat = new Chat((sent, maxTokens) =>
  model.newest === -Infinity ? null : model.progress(model.serverTime(sent / 1000), maxTokens));
let state = "";
let contextLength = 2048;

const feed = new Feed(model, (found) => {
  timeline.schedule();
  if (found === state) return;
  const wasLost = state === "lost";
  state = found;
  const line = byId("connection");
  line.hidden = found === "live" || found === "locked";
  line.textContent = { lost: "The connection to the server is lost. This page tries again every second.",
    absent: "This server keeps no frames, so the timeline and the charts stay empty." }[found] ?? "";
  if (found === "live" && wasLost) readServer();
  if (found === "live") charts.draw();
});

// The head of the page: which model runs here, and the targets.
async function readServer() {
  try {
    const models = await askJson("v1/models");
    chat.model = models.data[0].id;
    contextLength = models.data[0].max_model_len ?? contextLength;
    const info = await askJson("server_info");
    const engine = info.engine;
    const parts = [chat.model];
    if (engine) {
      parts.push(`on ${engine.device}`, `policy ${engine.policy}`);
      if (engine.gap_target !== null) {
        parts.push(`${engine.gap_source ? "promises" : "aims at"} gaps of ${(engine.gap_target * 1000).toFixed(0)} ms`);
      }
    }
    byId("server-line").textContent = parts.join(" · ");
    byId("version").textContent = `weft ${info.version}`;
    document.title = `${chat.model} · weft`;
  } catch (error) {
    if (error.status !== 401) byId("server-line").textContent = "The server does not answer.";
  }
}

// A prompt of random words, so that the prefix cache has none of it.
async function injectLongPrompt() {
  const button = byId("inject");
  button.disabled = true;
  const tokens = Math.min(MOST_INJECTED, Math.floor(contextLength * 0.8));
  const prompt = Array.from({ length: tokens }, () => 10 + Math.floor(Math.random() * 200));
  try {
    await askJson("v1/completions", { method: "POST", body: { model: chat.model, prompt, max_tokens: 4 } });
    button.textContent = "Send a long prompt";
  } catch (error) {
    button.textContent = "Long prompt: failed";
    button.title = error.message;
  } finally {
    button.disabled = false;
  }
}

function setTheme(theme, store) {
  document.documentElement.dataset.theme = theme;
  byId("theme-button").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme-button").setAttribute("aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
  if (store) localStorage.setItem(THEME, theme);
  forgetColours();
  timeline.schedule();
  charts.draw();
  animation.draw();
}

function askForKey(message) {
  byId("key-button").hidden = false;
  byId("key-error").textContent = message;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

const systemTheme = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem(THEME) ?? (systemTheme.matches ? "dark" : "light"), false);
systemTheme.addEventListener("change", () => {
  if (localStorage.getItem(THEME) === null) setTheme(systemTheme.matches ? "dark" : "light", false);
});
byId("theme-button").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true));

onUnauthorized(askForKey);
byId("key-button").hidden = !hasKey();
byId("key-button").addEventListener("click", () => askForKey(""));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-dialog").close();
  model.clear();
  readServer();
  feed.wake();
  whatIf.begin();
});
byId("inject").addEventListener("click", injectLongPrompt);

readServer().then(() => feed.wake());
