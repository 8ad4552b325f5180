// A Node program without any package: two turns of Chat Completions by fetch.
import { readFileSync } from "node:fs";

const task = JSON.parse(readFileSync(0, "utf8"));
const messages = task.messages;
const said = [];
for (const question of ["and?", ""]) {
  const reply = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: process.env.HEADRACE_MODEL, messages, max_tokens: 20 }),
  });
  if (!reply.ok) throw new Error(await reply.text());
  const { message } = (await reply.json()).choices[0];
  said.push(message.content);
  messages.push({ role: "assistant", content: message.content }, { role: "user", content: question });
}
const reward = [...said.join("")].reduce((sum, one) => sum + one.charCodeAt(0), 0) / 10_000;
console.log(JSON.stringify({ reward, answer: JSON.stringify({ calls: [], said: said[1], asked: 2 }) }));
