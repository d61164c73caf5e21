// Requests to the server, with the API key of this tab.

const KEY = "weft-key";
let unauthorized = () => {};

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function onUnauthorized(handler) {
  unauthorized = handler;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// The response of a path below the page. Throws ApiError for a status that is an error, and TypeError without connection.
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  let body = options.body;
  if (body !== undefined) {
    headers.set("content-type", "application/json");
    body = JSON.stringify(body);
  }
  const response = await fetch(path, { ...options, headers, body, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  let code = null;
  try {
    const error = (await response.json()).error;
    message = String(error.message);
    code = error.code;
  } catch {
    // not an error object of weft: a proxy answered
  }
  if (response.status === 401) unauthorized(key === null ? "" : message);
  throw new ApiError(response.status, message, code);
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}
