// Parts of a page that say so are asked for again, while somebody looks; what has the focus is left alone. What is read out
// stands outside of such a part, and is changed where the words differ: put in anew it would be read out anew.
"use strict";
for (const part of document.querySelectorAll("[data-fragment]")) {
  const every = 1000 * Number(part.dataset.every);
  const again = async () => {
    const busy = part.contains(document.activeElement) && document.activeElement.tagName === "INPUT";
    if (!document.hidden && !busy) {
      try {
        const answer = await fetch(part.dataset.fragment, { headers: { accept: "text/html" }, redirect: "error" });
        if (answer.status === 401) { location.reload(); return; }
        if (answer.ok) {
          const links = [...part.querySelectorAll("a")];
          const at = links.indexOf(document.activeElement);
          part.innerHTML = await answer.text();
          const spoken = document.getElementById(part.dataset.said);
          const words = part.querySelector("[data-says]")?.textContent;
          if (spoken && words !== undefined && spoken.textContent !== words) spoken.textContent = words;
          part.removeAttribute("data-stale");
          if (at >= 0) part.querySelectorAll("a")[at]?.focus();
        }
      } catch {
        part.setAttribute("data-stale", "");
      }
    }
    setTimeout(again, every);
  };
  setTimeout(again, every);
}
