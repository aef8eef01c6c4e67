// The page: chat on one side, the engine on the other, one at a time where there is no room for both.

import "./chat.js";
import "./live.js";

const views = { chat: document.getElementById("view-chat"), engine: document.getElementById("view-engine") };

for (const [name, button] of Object.entries(views)) {
  button.addEventListener("click", () => {
    document.body.dataset.view = name;
    for (const [other, each] of Object.entries(views)) each.setAttribute("aria-pressed", String(other === name));
  });
}
