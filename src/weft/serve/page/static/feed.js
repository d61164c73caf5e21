// The feed of frames: polls /observe/frames while the page is visible, and says when the connection is lost.

import { ApiError, ask } from "./api.js";
import { decode } from "./msgpack.js";

const POLL_MS = 250;
const RETRY_MS = 1000; // after a failure
const ABSENT_MS = 10_000; // where the server records nothing
const FIRST_S = 310; // how much of the past is read at first: what the charts show

// The frames of a body: each is four bytes of length, little-endian, and MessagePack.
export function unpack(buffer) {
  const view = new DataView(buffer);
  const frames = [];
  let at = 0;
  while (at + 4 <= buffer.byteLength) {
    const size = view.getUint32(at, true);
    frames.push(decode(new Uint8Array(buffer, at + 4, size)));
    at += 4 + size;
  }
  return frames;
}

export class Feed {
  // `onState` gets "live", "lost", "absent" (nothing is recorded) or "locked" (a key is needed).
  constructor(model, onState) {
    this._model = model;
    this._onState = onState;
    this._since = null;
    this._timer = null;
    this._polling = false;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  // Polls now, if the page is visible.
  wake() {
    clearTimeout(this._timer);
    this._timer = null;
    if (document.visibilityState === "visible" && !this._polling) this._poll();
  }

  async _poll() {
    this._polling = true;
    let delay = POLL_MS;
    try {
      if (await this._read()) delay = 0;
      this._onState("live");
    } catch (error) {
      delay = RETRY_MS;
      if (!(error instanceof ApiError)) {
        this._begin(); // perhaps another process answers next
        this._onState("lost");
        if (!(error instanceof TypeError)) console.error(error);
      } else if (error.status === 401) {
        this._onState("locked");
        delay = null; // until there is a key
      } else if (error.status === 404) {
        this._onState("absent");
        delay = ABSENT_MS;
      } else {
        this._onState("lost");
      }
    } finally {
      this._polling = false;
    }
    if (delay !== null && document.visibilityState === "visible") this._timer = setTimeout(() => this.wake(), delay);
  }

  // Returns whether there may be more frames already.
  async _read() {
    const response = await ask(`observe/frames?${this._since === null ? `seconds=${FIRST_S}` : `since=${this._since}`}`);
    const next = Number(response.headers.get("x-weft-next"));
    const body = await response.arrayBuffer();
    if (this._since !== null && next < this._since) {
      this._begin(); // another server process: its numbers begin anew
      return true;
    }
    this._since = next;
    this._model.add(unpack(body), performance.now() / 1000);
    return response.headers.get("x-weft-more") === "1";
  }

  _begin() {
    this._since = null;
    this._model.clear();
  }
}
