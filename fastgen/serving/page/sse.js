// Server-sent events, read from the body of a response.

/** The data of each event of `body`, a stream of bytes, as the events come. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return; // an event that no empty line ended is not whole
      text += decoder.decode(value, { stream: true });
      // A line may end in CR LF, and its halves may come apart: a CR at the end waits for what follows.
      const end = text.endsWith("\r") ? text.length - 1 : text.length;
      const whole = text.slice(0, end).replace(/\r\n?/g, "\n");
      const blocks = whole.split("\n\n");
      text = blocks.pop() + text.slice(end);
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // whoever stops reading does not want the rest
  }
}
