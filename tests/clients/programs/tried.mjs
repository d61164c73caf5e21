// What a client program has tried: each part runs, and the last line of the output says what became of it.
export const [url, key, model] = process.argv.slice(2);
export const order = "A latte with oat milk, please.";
export const weather = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition, what) {
  if (!condition) throw new Error(what);
}

export async function run(...parts) {
  const found = {};
  for (const part of parts) {
    try {
      await part();
      found[part.name] = "";
    } catch (error) {
      console.error(error);
      found[part.name] = `${error.name}: ${error.message}`.slice(0, 500);
    }
  }
  console.log(JSON.stringify(found));
}
