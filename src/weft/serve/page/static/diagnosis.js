// The diagnosis: asks the server which phase hurts, and shows its findings in words.

import { ApiError, askJson } from "./api.js";
import { byId, count, element, milliseconds } from "./dom.js";

export class Diagnosis {
  constructor() {
    byId("diagnose").addEventListener("click", () => this._ask());
  }

  async _ask() {
    const button = byId("diagnose");
    button.disabled = true;
    this._say("Looking at the last minute. This takes a few seconds.");
    try {
      this._show(await askJson("page/diagnosis", { method: "POST" }));
    } catch (error) {
      this._say(error instanceof ApiError ? `No diagnosis: ${error.message}` : "The connection was lost.");
    } finally {
      button.disabled = false;
    }
  }

  _show(found) {
    const list = byId("d-findings");
    list.replaceChildren();
    if (found.findings === undefined) {
      this._say("No request ran in the last minute.");
      return;
    }
    this._say(found.findings.length ? `${count(found.findings.length)} findings, the worst first.`
      : "Healthy: first tokens and gaps are within their targets, and nothing is wasted.");
    for (const finding of found.findings) {
      const box = element("div", "finding");
      const evidence = element("ul");
      evidence.append(...finding.evidence.map((line) => element("li", "", line)));
      box.append(element("h3", "", `${finding.symptom}: the phase that hurts is ${finding.phase}`), evidence,
        element("p", "", `Inspect first: ${finding.inspect}`), element("p", "", `Change: ${finding.setting}`));
      list.append(box);
    }
    for (const [index, one] of (found.replay ?? []).entries()) {
      const name = index === 1 ? `simulated ${one.name}` : one.name;
      const ttft = milliseconds((one.ttft?.p99 ?? NaN) * 1000);
      const gap = milliseconds((one.gap?.p99 ?? NaN) * 1000);
      list.append(element("p", "about", `Replay, ${name}: first token p99 ${ttft}, gap p99 ${gap}, `
        + `${(one.kept * 100).toFixed(1)}% of the requests keep their targets.`));
    }
    if (found.replay_note) list.append(element("p", "note", found.replay_note));
  }

  _say(text) {
    byId("d-status").textContent = text;
  }
}
